"""The contract of a rollout engine, and the rules of its states, which are the same for every engine.

Invariant: no token is ever delivered that was not sampled from a completely loaded policy whose version is known; every
chunk says which. Weights change in a transaction (`begin_update`, `receive`..., `commit`, and `prove` where it was
announced) while no request is in flight, or all of them are paused; those that give way are ended for it. All methods
are for one thread (`server.py` is for many). Deliberately not here: values (`requests.py`), what is due to whom
(`delivery.py`), what a version must prove (`update.py`), which engine a request goes to, scoring, and text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from verl_ray.errors import CannotGenerate, EngineFailed, RolloutError, WeightSyncError
from verl_ray.rollout.delivery import InFlight
from verl_ray.rollout.requests import Chunk, Float32, Progress, Request, Tokens
from verl_ray.rollout.update import Probe, Proofs, WeightUpdate, aborting_on_error
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Fingerprint, Prints
from verl_ray.weight_sync.manifest import Manifest
from verl_ray.weight_sync.transport import Address, Route

Part = Literal["weights", "kv_cache"]


class RolloutEngine(ABC):
    """States: parts of the memory are resident or asleep; a policy version is committed or none is; an update is open
    or not; the engine has failed or not. What a state does not allow raises `RolloutError` and says what to do."""

    def __init__(self, initial_version: int | None) -> None:
        self._version = initial_version
        self._has_model = initial_version is not None  # else an adapter alone would have nothing to stand beside
        self._update: WeightUpdate | None = None
        self._proofs = Proofs()
        self._asleep: frozenset[Part] = frozenset()
        self._failure: str | None = None
        self._closed = False
        self._in_flight = InFlight()
        self._paused = False
        self.steps = 0  # that drew tokens so far

    # ------------------------------------------------------------------------------------------------- generation

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they begin with the next step.

        Raises:
            CannotGenerate: not now.
            RolloutError: an id is in flight already, or a request cannot be served.
        """
        self._require_generating()
        self._in_flight.require_new(requests)
        self._add(requests)
        self._in_flight.add(requests)

    def step(self) -> list[Chunk]:
        """One step of every request that fits the batch: new tokens of streamed requests, and what ended.

        While paused it only delivers what was aborted.

        Raises:
            CannotGenerate: not now.
            EngineFailed: the step failed; the engine is of no more use but `close`, and nothing is in flight.
        """
        self._require_alive()
        self._end(self._in_flight.take_aborted())
        if self._in_flight.is_due and (self._version is None or self._asleep):
            return self._in_flight.take()  # what ended may go out whatever the engine's state
        self._require_generating()
        if self._in_flight and not self._paused:
            try:
                self._in_flight.note(self._advance(), self._version)
                self.steps += 1
            except Exception as error:
                self.fail(f"a step failed: {error!r}")
                raise EngineFailed(f"rollout engine: {self._failure}") from error
        return self._in_flight.take()

    def fail(self, reason: str) -> None:
        """The engine is of no more use but `close`, for this reason or an earlier one; nothing is in flight."""
        self._failure = self._failure or reason
        self._in_flight.clear()

    @property
    def unfinished(self) -> int:
        """Requests in flight, or ended and not delivered yet."""
        return self._in_flight.unfinished

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self._in_flight.is_due or (len(self._in_flight) > 0 and not self._paused)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a response where its sampling names none."""
        return ()

    @property
    def failure(self) -> str | None:
        """Why the engine is of no more use; None = it is."""
        self._failure = self._failure or self._find_failure()
        return self._failure

    def abort(self, request_ids: Iterable[int] | None = None) -> None:
        """End requests (None: all in flight) early; the next step delivers what they have, as `Finish.ABORTED`.

        Ids that are not in flight are ignored: they may just have ended.
        """
        self._in_flight.abort(request_ids)

    def give_way(self) -> None:
        """End the requests that give way; the next step delivers what they have, as `Finish.ABORTED`."""
        self._end(self._in_flight.giving_way)

    def pause(self) -> None:
        """Stop drawing tokens; requests in flight keep what they have, also over a weight update."""
        self._require_alive()
        self._paused = True
        # what was under way is of the present version, also where it is delivered after an update
        self._in_flight.note(self._hold(), self._version)

    def resume(self) -> None:
        """Go on; tokens from here on are of the version that is committed now.

        Raises:
            CannotGenerate: there are requests to go on with, and none is.
        """
        if self._in_flight and self._paused:
            self._require_generating()
        self._paused = False
        self._let_go()

    # ---------------------------------------------------------------------------------------------------- memory

    def sleep(self, part: Part) -> None:
        """Free memory: the KV cache, or ("weights") the KV cache and the weights. Again is no error.

        After "weights" a complete update must be committed before the engine generates again.
        """
        self._require_alive()
        self._require_no_update("sleep")
        self._require_none_in_flight("sleep", "let them end, or abort them,")
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
        with aborting_on_error(self.abort_update):
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
        self._update = WeightUpdate(version, {parameter.name for parameter in manifest.sent})
        with aborting_on_error(self.abort_update):
            self._begin_update(manifest)

    def receive(self, bucket: Bucket) -> None:
        """Load the parameters of one bucket from the wire that is connected.

        When it returns, the bucket's place on the wire may be used again.

        Raises:
            WeightSyncError: no wire or no update is open, or a parameter is not in its manifest or came before. The
                update is then aborted.
        """
        update = self._require_update("receive")
        with aborting_on_error(self.abort_update):
            update.require_awaited(bucket)
            self._receive(bucket)
            update.missing.difference_update(bucket.names)

    def commit(self, sent: Mapping[str, Fingerprint], *, proof_follows: bool = False) -> Prints:
        """Close the update: from here on the engine generates with the new version, and from an empty prefix cache.

        Args:
            sent: the sender's fingerprints, by parameter; compared with those of what was received.
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
        with aborting_on_error(self.abort_update):
            update.require_complete()
            arrived = self._arrived()
            update.require_equal(sent, arrived)
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
        with aborting_on_error(self.abort_update):
            found, drawn = self._probe(probe.rows)
            try:
                difference = self._proofs.judge(update.version, probe, found)
            except WeightSyncError as error:
                self.abort()
                raise WeightSyncError(f"{error}. {self._suspects()}") from None
        self._update = None
        self._version = update.version
        self._in_flight.note(drawn, update.version)
        return difference

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
            self._in_flight.clear()
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

    def _require_no_update(self, verb: str) -> None:
        if self._update is not None:
            raise RolloutError(f"{verb}: the update to version {self._update.version} is open; commit or abort it")

    def _require_none_in_flight(self, verb: str, remedy: str) -> None:
        staying = len(self._in_flight) - len(self._in_flight.giving_way)
        if staying:
            raise RolloutError(f"{verb}: {staying} requests are in flight; {remedy} first")
        self.give_way()

    def _require_update(self, verb: str) -> WeightUpdate:
        self._require_alive()
        if self._update is None:
            raise WeightSyncError(f"{verb}: no weight update is open; call begin_update first")
        return self._update

    def _end(self, request_ids: Sequence[int]) -> None:
        if request_ids:
            self._drop(request_ids)
            self._in_flight.end(request_ids)
