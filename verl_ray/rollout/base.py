"""The contract of a rollout engine, and the rules of its states, which are the same for every engine.

Invariant: no token is ever delivered that was not sampled from a completely loaded policy whose version is known; every
chunk says which. Weights change in a transaction (`begin_update`, `receive`..., `commit`, and `prove` where it was
announced) while no request is in flight, or all of them are paused; those that give way are ended for it. All methods
are for one thread (`server` is for many). Deliberately not here: which engine a request goes to, scoring, and text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from verl_ray.data.stages import Finish
from verl_ray.errors import CannotGenerate, EngineFailed, RolloutError, VerlRayError, WeightSyncError
from verl_ray.profiling.progress import advance
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Fingerprint, Prints
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import Address, Route

Part = Literal["weights", "kv_cache"]
Tokens = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


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
    tokens: Tokens
    sampling: Sampling
    seed: int
    stream: bool = False  # chunks as tokens are sampled, instead of one at the end
    session: str | None = None  # requests of one session share a prefix: a hint
    adapter: str | None = None
    gives_way: bool = False  # ended where it is when sleep or a weight update needs an engine without requests


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens of one request that have not been delivered before: all of them, unless it streams."""

    request_id: int
    tokens: Tokens  # a stop token is included
    log_probs: Float32  # of each token
    finish: Finish | None  # None = more to come
    first_token: int  # index of tokens[0] in the response
    version_spans: tuple[tuple[int, int], ...]  # (index in the response of the span's first token, policy version)


class Progress(NamedTuple):
    """What one step of an engine added to one request."""

    request_id: int
    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish: Finish | None


@dataclass(frozen=True, eq=False)
class Probe:
    """Fixed tokens, and what the sender's model says of them: what an engine that holds its weights says too."""

    rows: tuple[Tokens, ...]
    log_probs: tuple[Float32, ...]  # of each token but a row's first, at temperature 1
    tolerance: float  # the largest difference that two implementations of one model may have


@dataclass(slots=True)
class _Open:
    """A request in flight: what it has so far, under which versions, and how much of that was delivered."""

    stream: bool
    gives_way: bool
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    delivered: int = 0


@dataclass
class _Update:
    """An open weight update: the names still to come, and whether it is committed and only the proof is missing."""

    version: int
    missing: set[str]
    committed: bool = False


STALE = 0.01
"""By how much log-probs of the trainer move, at the most, while those of an engine that has its weights do not."""


class RolloutEngine(ABC):
    """States: parts of the memory are resident or asleep; a policy version is committed or none is; an update is open
    or not; the engine has failed or not. What a state does not allow raises `RolloutError` and says what to do."""

    def __init__(self, initial_version: int | None) -> None:
        self._version = initial_version
        self._has_model = initial_version is not None  # else an adapter alone would have nothing to stand beside
        self._update: _Update | None = None
        self._asleep: frozenset[Part] = frozenset()
        self._failure: str | None = None
        self._closed = False
        self._open: dict[int, _Open] = {}
        self._paused = False
        self._steps = 0
        self._aborts: set[int] = set()
        self._due: list[Chunk] = []  # for the next step to deliver
        self._moved: tuple[int, Probe, list[Float32]] | None = None  # when a probe last found something new

    # ------------------------------------------------------------------------------------------------- generation

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they begin with the next step.

        Raises:
            CannotGenerate: not now.
            RolloutError: an id is in flight already, or a request cannot be served.
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
        self._open.update((request.request_id, _Open(request.stream, request.gives_way)) for request in requests)

    def step(self) -> list[Chunk]:
        """One step of every request that fits the batch: new tokens of streamed requests, and what ended.

        While paused it only delivers what was aborted.

        Raises:
            CannotGenerate: not now.
            EngineFailed: the step failed; the engine is of no more use but `close`, and nothing is in flight.
        """
        self._require_alive()
        chunks, self._due = [*self._due, *self._take_aborted()], []
        if chunks and (self._version is None or self._asleep):
            return chunks  # what ended may go out whatever the engine's state
        self._require_generating()
        if self._paused or not self._open:
            return chunks
        assert self._version is not None  # it can generate
        try:
            chunks += self._deliver(self._advance(), self._version)
            self._steps += 1
        except Exception as error:
            self.fail(f"a step failed: {error!r}")
            raise EngineFailed(f"rollout engine: {self._failure}") from error
        return chunks

    def fail(self, reason: str) -> None:
        """The engine is of no more use but `close`, for this reason or an earlier one; nothing is in flight."""
        self._failure = self._failure or reason
        self._open.clear()
        self._aborts.clear()
        self._due.clear()

    @property
    def unfinished(self) -> int:
        """Requests in flight, or ended and not delivered yet."""
        return len(self._open) + sum(chunk.finish is not None for chunk in self._due)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._due or self._aborts or (self._open and not self._paused))

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response where its sampling names none."""
        return ()

    @property
    def failure(self) -> str | None:
        """Why the engine is of no more use; None = it is."""
        self._failure = self._failure or self._find_failure()
        return self._failure

    @property
    def steps(self) -> int:
        """Steps that drew tokens so far."""
        return self._steps

    def abort(self, request_ids: Iterable[int] | None = None) -> None:
        """End requests (None: all in flight) early; the next step delivers what they have, as `Finish.ABORTED`.

        Ids that are not in flight are ignored: they may just have ended.
        """
        self._aborts.update(list(self._open) if request_ids is None else self._open.keys() & set(request_ids))

    def give_way(self) -> None:
        """End the requests that give way; the next step delivers what they have, as `Finish.ABORTED`."""
        self._due += self._end([request_id for request_id, request in self._open.items() if request.gives_way])

    def pause(self) -> None:
        """Stop drawing tokens; requests in flight keep what they have, also over a weight update."""
        self._require_alive()
        self._paused = True
        # what was under way is of the present version, also where it is delivered after an update
        self._due += self._deliver(self._hold(), self._version)

    def resume(self) -> None:
        """Go on; tokens from here on are of the version that is committed now.

        Raises:
            CannotGenerate: there are requests to go on with, and none is.
        """
        if self._open and self._paused:
            self._require_generating()
        self._paused = False
        self._let_go()

    # ---------------------------------------------------------------------------------------------------- memory

    def sleep(self, part: Part) -> None:
        """Free memory: the KV cache, or ("weights") the KV cache and the weights. Again is no error.

        After "weights" a complete update must be committed before the engine generates again.
        """
        self._require_idle("sleep")
        parts: frozenset[Part] = frozenset({"kv_cache"} if part == "kv_cache" else {"kv_cache", "weights"})
        freed = parts - self._asleep
        if "weights" in freed:
            self._version, self._has_model = None, False
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

    def connect(self, address: Address, route: Route, first_receiver: int) -> None:
        """Meet the sender of weights, before the first update, and again when it or another receiver was replaced.

        Args:
            first_receiver: the number of this engine's first rank among all receivers of the route.

        Raises:
            WeightSyncError: the other ends did not come in time, or the wire does not lead here.
        """
        self._require_alive()
        with self._aborting_on_error():
            self._connect(address, route, first_receiver)

    def begin_update(self, manifest: Manifest, version: int) -> None:
        """Open a weight update to `version`. From here until `commit` (or `prove`) the engine does not generate.

        Requests that are paused stay in flight: they keep their tokens and their KV cache, and go on with the new
        version.
        """
        self._require_alive()
        self._require_no_update("begin_update")
        if not self._paused:
            self._require_none_in_flight("begin_update", "let them end, abort them, or pause")
        if "weights" in self._asleep:
            raise RolloutError('begin_update: the weights are asleep; call wake("weights") first')
        if not manifest.has_model and not self._has_model:
            raise WeightSyncError(f"version {version} is an adapter, and the engine does not hold the model; send both")
        self._version = None
        self._has_model = not manifest.has_model
        self._update = _Update(version, {parameter.name for parameter in manifest.sent})
        with self._aborting_on_error():
            self._begin_update(manifest)

    def receive(self, bucket: Bucket) -> None:
        """Load the parameters of one bucket from the wire that is connected.

        When it returns, the bucket's place on the wire may be used again.

        Raises:
            WeightSyncError: no wire or no update is open, or a parameter is not in its manifest or came before. The
                update is then aborted.
        """
        update = self._require_update("receive")
        with self._aborting_on_error():
            names = bucket.names
            if strange := sorted(name for name in names if name not in update.missing):
                raise WeightSyncError(f"bucket {bucket.index} brings what is not awaited, or came before: {strange}")
            self._receive(bucket)
            update.missing.difference_update(names)

    def commit(self, expected: Mapping[str, Fingerprint] | None = None, *, proof_follows: bool = False) -> Prints:
        """Close the update: from here on the engine generates with the new version, and from an empty prefix cache.

        Args:
            expected: what the sender sent, by parameter; compared with what was received.
            proof_follows: the engine does not generate before `prove` has succeeded as well.

        Returns:
            The fingerprints of all parameters, taken from the tensors that the loader was given.

        Raises:
            WeightSyncError: parameters of the manifest did not come, parameters of the engine were not loaded, or a
                fingerprint differs; each is named. The update is then aborted.
        """
        update = self._require_update("commit")
        if update.committed:
            raise WeightSyncError(f"commit: version {update.version} is committed already; prove it")
        with self._aborting_on_error():
            if update.missing:
                raise WeightSyncError(f"version {update.version}: not received: {sorted(update.missing)}")
            arrived = self._arrived()
            sent = arrived[0].by_name if expected is None else expected
            for rank, prints in enumerate(arrived):
                names = sorted(sent.keys() | prints.by_name.keys())
                if wrong := [name for name in names if sent.get(name) != prints.by_name.get(name)]:
                    where = f" on rank {rank} of the {len(arrived)} of the engine" if len(arrived) > 1 else ""
                    raise WeightSyncError(f"version {update.version}: sent and received differ in {wrong}{where}")
            self._commit(update.version)
        self._has_model = True
        if proof_follows:
            update.committed = True
        else:
            self._update = None
            self._version = update.version
        return max(arrived, key=lambda prints: prints.seconds)

    def prove(self, probe: Probe) -> float:
        """Accept the committed version if the engine's log-probs of fixed tokens are those of the sender.

        It sees what fingerprints cannot: what an engine makes of the weights after it received them. Needs the memory
        of the KV cache.

        Returns:
            The largest difference of a log-prob.

        Raises:
            WeightSyncError: a difference is above the tolerance. The update is then aborted, and so are the requests in
                flight.
        """
        update = self._require_update("prove")
        if not update.committed:
            raise WeightSyncError(f"prove: version {update.version} is not committed yet")
        if self._asleep:
            raise RolloutError(f"prove: asleep; call {self._wake_calls()} first")
        with self._aborting_on_error():
            found, drawn = self._probe(probe.rows)
            differences = [
                np.abs(ours - theirs).max(initial=0.0) for ours, theirs in zip(found, probe.log_probs, strict=True)
            ]
            worst = int(np.argmax(differences))
            # A NaN compares as neither: only what is within the tolerance passes.
            if not differences[worst] <= probe.tolerance:
                self.abort()
                raise WeightSyncError(
                    f"version {update.version}: every weight arrived as it was sent, but the engine computes with "
                    f"others: of fixed tokens {probe.rows[worst].tolist()} its log-probs differ from the trainer's by "
                    f"{differences[worst]:.3g}, more than {probe.tolerance:.3g}. {self._suspects()}"
                )
            self._require_moved(probe, found, update.version)
        self._update = None
        self._version = update.version
        self._due += self._deliver(drawn, update.version)
        return float(differences[worst])

    def _require_moved(self, probe: Probe, found: list[Float32], version: int) -> None:
        """Where rounding hides small steps: log-probs that stay the same to the bit are of weights that do, too."""
        if self._moved is not None:
            since, then, before = self._moved
            same = len(found) == len(before) and all(map(np.array_equal, found, before))
            if same and all(map(np.array_equal, probe.rows, then.rows)):
                pairs = zip(probe.log_probs, then.log_probs, strict=True)
                moved = max(np.abs(now - earlier).max(initial=0.0) for now, earlier in pairs)
                if moved > STALE:
                    self.abort()
                    raise WeightSyncError(
                        f"version {version}: every weight arrived as it was sent, but the engine computes with older "
                        f"ones: its log-probs of fixed tokens are to the bit those of version {since}, since when the "
                        f"trainer's have moved by {moved:.3g}. {self._suspects()}"
                    )
                return
        self._moved = version, probe, found

    def abort_update(self) -> None:
        """Give the open update up; the engine has no version until another one is committed. No update: no effect."""
        if self._update is not None:
            committed, self._update = self._update.committed, None
            if not committed:
                self._abort_update()

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
    def _hold(self) -> list[Progress]:
        """Nothing is being computed when this returns; what was in the making."""

    @abstractmethod
    def _let_go(self) -> None: ...

    @abstractmethod
    def _probe(self, rows: Sequence[Tokens]) -> tuple[list[Float32], list[Progress]]:
        """The log-probs of each row's tokens but the first, and what requests in flight drew meanwhile."""

    def _suspects(self) -> str:
        """What of the engine could explain a failed proof."""
        return ""

    @abstractmethod
    def _free(self, parts: frozenset[Part]) -> None: ...

    @abstractmethod
    def _restore(self, part: Part) -> None: ...

    @abstractmethod
    def _connect(self, address: Address, route: Route, first_receiver: int) -> None: ...

    @abstractmethod
    def _begin_update(self, manifest: Manifest) -> None: ...

    @abstractmethod
    def _receive(self, bucket: Bucket) -> None: ...

    @abstractmethod
    def _arrived(self) -> list[Prints]:
        """The fingerprints of every tensor that the loader was given in this update, by rank of the engine."""

    @abstractmethod
    def _commit(self, version: int) -> None: ...

    @abstractmethod
    def _abort_update(self) -> None: ...

    # ---------------------------------------------------------------------------------------------------- the rules

    def _find_failure(self) -> str | None:
        """What has befallen the engine beside its calls, if anything has: a process of it that ended."""
        return None

    def _require_alive(self) -> None:
        if self.failure is not None:
            raise EngineFailed(f"the rollout engine is of no more use, start another: {self.failure}")

    def _require_generating(self) -> None:
        self._require_alive()
        if self._update is not None:
            missing = "prove it" if self._update.committed else "commit it"
            raise CannotGenerate(f"cannot generate: the update to version {self._update.version} is open; {missing}")
        if self._asleep:
            raise CannotGenerate(f"cannot generate: asleep; call {self._wake_calls()} first")
        if self._version is None:
            raise CannotGenerate("cannot generate: no policy version is committed; send the weights and commit them")

    def _wake_calls(self) -> str:
        return " and ".join(f'wake("{part}")' for part in sorted(self._asleep, reverse=True))

    def _require_idle(self, verb: str) -> None:
        self._require_alive()
        self._require_no_update(verb)
        self._require_none_in_flight(verb, "let them end, or abort them,")

    def _require_no_update(self, verb: str) -> None:
        if self._update is not None:
            raise RolloutError(f"{verb}: the update to version {self._update.version} is open; commit or abort it")

    def _require_none_in_flight(self, verb: str, remedy: str) -> None:
        staying = sum(not request.gives_way for request in self._open.values())
        if staying:
            raise RolloutError(f"{verb}: {staying} requests are in flight; {remedy} first")
        self.give_way()

    def _require_update(self, verb: str) -> _Update:
        self._require_alive()
        if self._update is None:
            raise WeightSyncError(f"{verb}: no weight update is open; call begin_update first")
        return self._update

    def _aborting_on_error(self) -> _AbortingOnError:
        return _AbortingOnError(self)

    # --------------------------------------------------------------------------------------------------- delivery

    def _take_aborted(self) -> list[Chunk]:
        ids = [request_id for request_id in self._open if request_id in self._aborts]
        self._aborts.clear()
        return self._end(ids)

    def _end(self, ids: Sequence[int]) -> list[Chunk]:
        if not ids:
            return []
        self._drop(ids)
        return self._deliver((Progress(request_id, (), (), Finish.ABORTED) for request_id in ids), None)

    def _deliver(self, progress: Iterable[Progress], version: int | None) -> list[Chunk]:
        """Note what requests have drawn under `version` (None: nothing); the chunks that are due."""
        due, drawn = [], 0
        for one in progress:
            drawn += len(one.tokens)
            chunk = self._note(one, version)
            if chunk is not None:
                due.append(chunk)
        if drawn:
            advance(drawn, "tokens")  # steps that draw nothing are none: an engine may make them for ever
        return due

    def _note(self, progress: Progress, version: int | None) -> Chunk | None:
        request = self._open[progress.request_id]
        if progress.tokens and version is not None and (not request.spans or request.spans[-1][1] != version):
            request.spans.append((len(request.tokens), version))
        request.tokens += progress.tokens
        request.log_probs += progress.log_probs
        if progress.finish is None and not request.stream:
            return None
        first = request.delivered
        request.delivered = len(request.tokens)
        if progress.finish is not None:
            del self._open[progress.request_id]
        return Chunk(
            request_id=progress.request_id,
            tokens=np.array(request.tokens[first:], np.int32),
            log_probs=np.array(request.log_probs[first:], np.float32),
            finish=progress.finish,
            first_token=first,
            version_spans=_spans_from(request.spans, first),
        )


def _spans_from(spans: Sequence[tuple[int, int]], first: int) -> tuple[tuple[int, int], ...]:
    """The part of version spans that begins at token `first`."""
    kept = [max(i for i, (start, _) in enumerate(spans) if start <= first)] if spans else []
    later = spans[kept[0] + 1 :] if kept else []
    return tuple((max(start, first), version) for start, version in [*(spans[i] for i in kept), *later])


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
