"""The contract of a rollout engine, and the rules of its states, which are the same for every engine.

Invariant: a token is only ever sampled from a completely loaded policy whose version is known; every chunk says which.
Weights change in a transaction (`begin_update`, `receive`..., `commit`) while no request is in flight. All methods are
for one thread; only `abort`, `pause`, `resume`, `policy_version` and `unfinished` may be called from others.
Deliberately not here: which engine a request goes to, scoring, and text.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from verl_ray.data.stages import Finish
from verl_ray.errors import RolloutError, VerlRayError, WeightSyncError
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import Address

Part = Literal["weights", "kv_cache"]

_PAUSE_POLL_S = 0.05


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Log-probs are those of the distribution drawn from: after temperature, top_p and top_k."""

    temperature: float  # 0 = greedy; the log-probs are then those at temperature 1
    top_p: float  # 1 = all tokens
    top_k: int  # -1 = all tokens
    max_tokens: int
    stop_token_ids: tuple[int, ...] | None = None  # None = the model's end-of-sequence tokens; () = run to max_tokens


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to continue. The same seed and prompt give the same tokens, whatever runs beside them."""

    request_id: int
    tokens: npt.NDArray[np.int32]
    sampling: Sampling
    seed: int
    stream: bool = False  # chunks as tokens are sampled, instead of one at the end
    session: str | None = None  # requests of one session share a prefix: a hint
    adapter: str | None = None


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens of one request that have not been delivered before: all of them, unless it streams."""

    request_id: int
    tokens: npt.NDArray[np.int32]  # a stop token is included
    log_probs: npt.NDArray[np.float32]  # of each token
    finish: Finish | None  # None = more to come
    policy_version: int
    first_token: int  # index of tokens[0] in the response


class Progress(NamedTuple):
    """What one step of an engine added to one request."""

    request_id: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish: Finish | None


@dataclass(slots=True)
class _Open:
    """A request in flight: what it has so far, and how much of that was delivered."""

    stream: bool
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    delivered: int = 0


@dataclass
class _Update:
    """An open weight update: the names still to come, and the fingerprints of those that came."""

    version: int
    missing: set[str]
    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)


class RolloutEngine(ABC):
    """States: parts of the memory are resident or asleep; a policy version is committed or none is; an update is open
    or not; the engine has failed or not. What a state does not allow raises `RolloutError` and says what to do."""

    def __init__(self, initial_version: int | None) -> None:
        self._version = initial_version
        self._update: _Update | None = None
        self._asleep: frozenset[Part] = frozenset()
        self._failure: str | None = None
        self._closed = False
        self._open: dict[int, _Open] = {}
        self._changed = threading.Condition()  # guards the three below
        self._paused = False
        self._aborts: set[int] = set()

    # ------------------------------------------------------------------------------------------------- generation

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they begin with the next step.

        Raises:
            RolloutError: the engine cannot generate now, an id is in flight already, or a request cannot be served.
        """
        self._require_generating()
        ids = [request.request_id for request in requests]
        twice = self._open.keys() & ids
        if twice or len(set(ids)) != len(ids):
            raise RolloutError(f"request ids must be unique among those in flight, found again: {sorted(twice) or ids}")
        for request in requests:
            if request.tokens.dtype != np.int32 or request.tokens.ndim != 1 or not len(request.tokens):
                raise RolloutError(
                    f"request {request.request_id}: expected a non-empty int32 vector of token ids, found "
                    f"{request.tokens.dtype} of shape {request.tokens.shape}"
                )
        self._add(requests)
        self._open.update((request.request_id, _Open(request.stream)) for request in requests)

    def step(self) -> list[Chunk]:
        """One step of every request that fits the batch: new tokens of streamed requests, and what ended.

        While paused it only delivers what was aborted, and waits a moment for `resume` or `abort`.

        Raises:
            RolloutError: the engine cannot generate now, or the step failed; it is then of no more use but `close`.
        """
        self._require_generating()
        chunks = self._take_aborted()
        with self._changed:
            if self._paused:
                if not chunks:
                    self._changed.wait(_PAUSE_POLL_S)
                return chunks
        if not self._open:
            return chunks
        try:
            chunks += [chunk for progress in self._advance() if (chunk := self._deliver(progress)) is not None]
        except Exception as error:
            self._failure = f"a step failed: {error!r}"
            raise RolloutError(f"rollout engine: {self._failure}") from error
        return chunks

    @property
    def unfinished(self) -> int:
        """Requests in flight."""
        return len(self._open)

    def abort(self, request_ids: Iterable[int] | None = None) -> None:
        """End requests (None: all in flight) early; the next step delivers what they have, as `Finish.ABORTED`.

        Ids that are not in flight are ignored: they may just have ended.
        """
        with self._changed:
            self._aborts.update(list(self._open) if request_ids is None else request_ids)
            self._changed.notify_all()

    def pause(self) -> None:
        """Stop drawing tokens; requests in flight keep what they have."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------------- memory

    def sleep(self, part: Part) -> None:
        """Free memory: the KV cache, or ("weights") the KV cache and the weights. Again is no error.

        After "weights" a complete update must be committed before the engine generates again.
        """
        self._require_idle("sleep")
        parts: frozenset[Part] = frozenset({"kv_cache"} if part == "kv_cache" else {"kv_cache", "weights"})
        freed = parts - self._asleep
        if "weights" in freed:
            self._version = None
        if freed:
            self._free(freed)
            self._asleep |= freed

    def wake(self, part: Part) -> None:
        """Take a part's memory back: weights with undefined content, the KV cache empty. Again is no error."""
        self._require_alive()
        if part in self._asleep:
            self._restore(part)
            self._asleep -= {part}

    # --------------------------------------------------------------------------------------------------- weights

    @property
    def policy_version(self) -> int | None:
        """The version that tokens are drawn from; None while there is none to draw from."""
        return self._version

    def begin_update(self, manifest: Manifest, version: int) -> None:
        """Open a weight update to `version`. From here until `commit` the engine does not generate."""
        self._require_idle("begin_update")
        if "weights" in self._asleep:
            raise RolloutError('begin_update: the weights are asleep; call wake("weights") first')
        self._version = None
        self._update = _Update(version, {parameter.name for parameter in manifest.sent})
        with self._aborting_on_error():
            self._begin_load(manifest)

    def receive(self, bucket: Bucket, address: Address) -> None:
        """Load the parameters of one bucket from where `address` points.

        When it returns, the bucket's place on the wire may be used again.

        Raises:
            WeightSyncError: no update is open, or a parameter is not in its manifest or came before. The update is
                then aborted.
        """
        update = self._require_update("receive")
        with self._aborting_on_error():
            names = [entry.parameter.name for entry in bucket.entries]
            if strange := sorted(name for name in names if name not in update.missing):
                raise WeightSyncError(f"bucket {bucket.index} brings what is not awaited, or came before: {strange}")
            update.fingerprints.update(self._load(bucket, address))
            update.missing.difference_update(names)

    def commit(self, expected: Mapping[str, Fingerprint] | None = None) -> dict[str, Fingerprint]:
        """Close the update: from here on the engine generates with the new version, and from an empty prefix cache.

        Args:
            expected: what the sender sent, by parameter; compared with what was received.

        Returns:
            The fingerprint of every parameter, taken from the tensors that the loader was given.

        Raises:
            WeightSyncError: parameters of the manifest did not come, parameters of the engine were not loaded, or a
                fingerprint differs; each is named. The update is then aborted.
        """
        update = self._require_update("commit")
        with self._aborting_on_error():
            if update.missing:
                raise WeightSyncError(f"version {update.version}: not received: {sorted(update.missing)}")
            if expected is not None and expected != update.fingerprints:
                names = sorted(expected.keys() | update.fingerprints.keys())
                wrong = [name for name in names if expected.get(name) != update.fingerprints.get(name)]
                raise WeightSyncError(f"version {update.version}: sent and received differ in {wrong}")
            self._finish_load(update.version)
        self._update = None
        self._version = update.version
        return update.fingerprints

    def abort_update(self) -> None:
        """Give the open update up; the engine has no version until another one is committed. No update: no effect."""
        if self._update is not None:
            self._update = None
            self._abandon_load()

    def close(self, *, process_ends: bool = False) -> None:
        """Release everything; the engine is of no more use. Again is no error.

        process_ends: the caller's process ends next; what ends with it need not be released before.
        """
        if not self._closed:
            self._closed = True
            self._failure = self._failure or "it was closed"
            self._open.clear()
            self._release(process_ends)

    # ------------------------------------------------------------------------------------ what an engine implements

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """On a CPU the resident set of all processes of the engine; on GPUs what is in use on its devices."""

    @abstractmethod
    def _release(self, process_ends: bool) -> None: ...

    @abstractmethod
    def _add(self, requests: Sequence[Request]) -> None: ...

    @abstractmethod
    def _advance(self) -> Iterable[Progress]: ...

    @abstractmethod
    def _drop(self, request_ids: Sequence[int]) -> None: ...

    @abstractmethod
    def _free(self, parts: frozenset[Part]) -> None: ...

    @abstractmethod
    def _restore(self, part: Part) -> None: ...

    @abstractmethod
    def _begin_load(self, manifest: Manifest) -> None: ...

    @abstractmethod
    def _load(self, bucket: Bucket, address: Address) -> Mapping[str, Fingerprint]: ...

    @abstractmethod
    def _finish_load(self, version: int) -> None: ...

    @abstractmethod
    def _abandon_load(self) -> None: ...

    # ---------------------------------------------------------------------------------------------------- the rules

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise RolloutError(f"the rollout engine is of no more use, start another: {self._failure}")

    def _require_generating(self) -> None:
        self._require_alive()
        if self._update is not None:
            raise RolloutError(f"cannot generate: the update to version {self._update.version} is open; commit it")
        if self._asleep:
            calls = " and ".join(f'wake("{part}")' for part in sorted(self._asleep, reverse=True))
            raise RolloutError(f"cannot generate: asleep; call {calls} first")
        if self._version is None:
            raise RolloutError("cannot generate: no policy version is committed; send the weights and commit them")

    def _require_idle(self, verb: str) -> None:
        self._require_alive()
        if self._update is not None:
            raise RolloutError(f"{verb}: the update to version {self._update.version} is open; commit or abort it")
        if self._open:
            raise RolloutError(f"{verb}: {len(self._open)} requests are in flight; let them end, or abort them, first")

    def _require_update(self, verb: str) -> _Update:
        self._require_alive()
        if self._update is None:
            raise WeightSyncError(f"{verb}: no weight update is open; call begin_update first")
        return self._update

    def _aborting_on_error(self) -> _AbortingOnError:
        return _AbortingOnError(self)

    # --------------------------------------------------------------------------------------------------- delivery

    def _take_aborted(self) -> list[Chunk]:
        with self._changed:
            ids = [request_id for request_id in self._open if request_id in self._aborts]
            self._aborts.clear()
        if not ids:
            return []
        self._drop(ids)
        ended = (self._deliver(Progress(request_id, (), (), Finish.ABORTED)) for request_id in ids)
        return [chunk for chunk in ended if chunk is not None]

    def _deliver(self, progress: Progress) -> Chunk | None:
        request = self._open[progress.request_id]
        request.tokens += progress.tokens
        request.log_probs += progress.log_probs
        if progress.finish is None and not request.stream:
            return None
        first = request.delivered
        request.delivered = len(request.tokens)
        if progress.finish is not None:
            del self._open[progress.request_id]
        assert self._version is not None  # step() has checked
        return Chunk(
            request_id=progress.request_id,
            tokens=np.array(request.tokens[first:], np.int32),
            log_probs=np.array(request.log_probs[first:], np.float32),
            finish=progress.finish,
            policy_version=self._version,
            first_token=first,
        )


class _AbortingOnError:
    """Gives the open update up when its block fails, and turns foreign errors into `WeightSyncError`."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        self._engine.abort_update()
        if isinstance(error, Exception) and not isinstance(error, VerlRayError):
            raise WeightSyncError(f"the weight update failed and was aborted: {error!r}") from error


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> Iterator[list[Chunk]]:
    """Submit requests and step until the engine has none in flight; yields the chunks of each step that has any."""
    engine.submit(requests)
    while engine.unfinished:
        if chunks := engine.step():
            yield chunks
