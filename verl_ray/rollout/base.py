"""The contract of a rollout engine: generation, memory, and weight updates.

Invariant: a token is delivered only if it was sampled from a completely loaded policy
whose version is known, and its chunk carries that version. A weight update is the
engine's part of a weight sync: `begin_update`, one `receive` per bucket, `commit`, and
`verify` if `commit` was called with `verification_follows=True`. During an update no
request is in flight, or all of them are paused; preemptible requests are aborted for
it. The same holds for sleep, if paused requests gave up their KV cache. The engine is
not thread-safe; `server.py` adds a thread-safe front end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from verl_ray.errors import EngineFailed, RolloutError, WeightSyncError
from verl_ray.rollout.engine_state import (
    EngineMemoryPart,
    EnginePause,
    EngineState,
    WeightUpdate,
    aborting_on_error,
)
from verl_ray.rollout.in_flight import InFlight
from verl_ray.rollout.probes import Probe, ProbeHistory
from verl_ray.rollout.requests import (
    Chunk,
    EngineLoad,
    Float32,
    GenerationProgress,
    GenerationRequest,
    Tokens,
)
from verl_ray.weight_sync.fingerprint import Fingerprint, Fingerprints
from verl_ray.weight_sync.manifest import Bucket, Experts, Manifest
from verl_ray.weight_sync.transport import Address, WireSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EngineHooks(ABC):
    """Operations that a kind of engine has to implement.

    `RolloutEngine` calls a hook only in a state that allows it, so a hook checks no
    state. The hook of a public method has its name with an underscore; the public
    properties are implemented as they are.
    """

    # ----------------------------------------------------------------------- properties

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response whose sampling names no stop tokens."""
        return ()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the model, which reads stop strings; None for none."""
        return None

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory that the engine uses.

        On a CPU this is the resident set of all its processes; on GPUs it is what is in
        use on its devices.
        """

    @property
    @abstractmethod
    def load(self) -> EngineLoad:
        """How busy the engine is; it is read after every step."""

    # ----------------------------------------------------------------------- generation

    @abstractmethod
    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, or raise `RolloutError` and queue none of them."""

    @abstractmethod
    def _step(self) -> Iterable[GenerationProgress]:
        """Sample the next tokens of every request that fits the batch."""

    @abstractmethod
    def _abort(self, request_ids: Sequence[int]) -> None:
        """Forget requests that are in flight."""

    @abstractmethod
    def _pause(self) -> list[GenerationProgress]:
        """Stop computing, keep all requests, and return what was under way."""

    @abstractmethod
    def _give_up_kv_cache(self) -> None:
        """Free the KV cache of the requests that `_pause` kept, and cached prefixes.

        Once they continue, it is computed again from their tokens.
        """

    @abstractmethod
    def _resume(self) -> None:
        """Continue the requests that `_pause` kept."""

    # --------------------------------------------------------------------------- memory

    @abstractmethod
    def _sleep(self, parts: frozenset[EngineMemoryPart]) -> None:
        """Free parts of the memory that are on the device; none of them is asleep.

        Requests in flight are paused, and hold no KV cache.
        """

    @abstractmethod
    def _wake(self, part: EngineMemoryPart) -> None:
        """Take back the memory of a part that is asleep."""

    # -------------------------------------------------------------------------- weights

    @abstractmethod
    def _connect(
        self, address: Address, wire_spec: WireSpec, first_receiver: int
    ) -> None:
        """Join the sender at `address`, with one receiver per rank of the engine."""

    @abstractmethod
    def _begin_update(self, manifest: Manifest) -> None:
        """Prepare the loader for the parameters of `manifest`."""

    @abstractmethod
    def _receive(self, bucket: Bucket) -> None:
        """Load a bucket; its place on the wire is free when this returns."""

    @abstractmethod
    def _received_fingerprints(self) -> list[Fingerprints]:
        """Return the fingerprints of all tensors that the loader got in this update.

        Returns:
            The fingerprints of each rank of the engine, in the order of the ranks.
        """

    @abstractmethod
    def _commit(self, version: int) -> None:
        """Finish loading; the next token is sampled from the new weights."""

    @abstractmethod
    def _abort_update(self) -> None:
        """Leave the loader in a state in which another update can begin."""

    @abstractmethod
    def _probe(
        self, rows: Sequence[Tokens]
    ) -> tuple[list[Float32], list[GenerationProgress]]:
        """Compute log-probs of fixed tokens with the weights that are loaded.

        Returns:
            The log-probs of each row's tokens except the first, and what requests in
            flight sampled in the meantime.
        """

    def _explain_mismatch(self) -> str:
        """Return what in this engine could explain a failed verification."""
        return ""

    # ------------------------------------------------------------------------- lifetime

    def _find_failure(self) -> str | None:
        """Return what went wrong outside of calls, such as a process that exited."""
        return None

    @abstractmethod
    def _close(self, process_exits: bool) -> None:
        """Release everything that would outlive the engine."""


class RolloutEngine(EngineHooks):
    """An engine that generates token sequences and whose weights can be updated.

    An engine has a policy version or none, parts of its memory may be asleep, a weight
    update may be open, and it may have failed. A call that the state does not allow
    raises an error that names the call to make first.

    Attributes:
        steps: Number of engine steps run so far.
        routing_shape: Hidden layers, and experts per token, of the recorded experts in
            chunks; None where none are recorded.
    """

    routing_shape: tuple[int, int] | None = None

    def __init__(self, initial_version: int | None) -> None:
        """Start with the weights of `initial_version`, or with none."""
        self._state = EngineState(initial_version, initial_version is not None)
        self._in_flight = InFlight()
        self._probe_history = ProbeHistory()
        self._first_receiver = 0
        self.steps = 0

    # ----------------------------------------------------------------------- generation

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, which begin with the next step.

        Raises:
            CannotGenerate: The engine cannot generate now.
            RolloutError: An id is in flight already, or a request cannot be served.
        """
        self._require_generating()
        self._in_flight.require_new(requests)
        if self.tokenizer is None and any(each.sampling.stop for each in requests):
            raise RolloutError("this engine has no tokenizer, which stop strings need")
        self._submit(requests)
        self._in_flight.add(requests, self.tokenizer)

    def step(self) -> list[Chunk]:
        """Run one engine step: advance every request that fits in the batch.

        A paused engine only delivers aborted responses and earlier tokens.

        Returns:
            New tokens of streamed requests, and the responses that ended.

        Raises:
            CannotGenerate: The engine cannot generate now.
            EngineFailed: The step failed. The engine can only be closed, and nothing is
                in flight any more.
        """
        self._require_usable()
        self._abort_now(self._in_flight.take_aborted())

        # Ended responses are delivered also while nothing can be sampled.
        can_sample = self._state.version is not None and not self._state.asleep
        if self._in_flight.has_chunks and not can_sample:
            return self._in_flight.take_chunks()

        self._require_generating()
        if self._in_flight and not self._state.paused:
            try:
                self._record(self._step())
                self.steps += 1
            except Exception as error:
                # What ended a rank fails its step, too, in other words.
                self.fail(self._find_failure() or f"a step failed: {error!r}")
                raise EngineFailed(f"rollout engine: {self._state.failure}") from error

        return self._in_flight.take_chunks()

    @property
    def unfinished(self) -> int:
        """Number of requests in flight, or ended and not delivered yet."""
        return self._in_flight.unfinished

    @property
    def has_work(self) -> bool:
        """Whether a step would sample or deliver something."""
        has_requests = len(self._in_flight) > 0
        return self._in_flight.has_chunks or (has_requests and not self._state.paused)

    def abort(self, request_ids: Iterable[int] | None = None) -> None:
        """End requests early; the next step delivers their tokens as `Finish.ABORTED`.

        Args:
            request_ids: The requests to end, or None for all in flight. Ids that are
                not in flight are ignored, since these requests may just have ended.
        """
        self._in_flight.mark_aborted(request_ids)

    def preempt(self) -> None:
        """Abort the preemptible requests now; the next step delivers their tokens."""
        self._abort_now(self._in_flight.preemptible_ids)

    def pause(self, mode: EnginePause = "keep") -> None:
        """Stop sampling; requests in flight keep their tokens, also over an update.

        Args:
            mode: What becomes of their KV cache.
        """
        self._require_usable()
        if self._state.paused != "recompute":
            self._state.paused = mode

        # These tokens are of the present version, also if an update comes before they
        # are delivered.
        self._record(self._pause())
        if mode == "recompute":
            self._give_up_kv_cache()

    def resume(self) -> None:
        """Continue; from here on tokens are sampled from the present policy version.

        Raises:
            CannotGenerate: Requests are paused, and the engine cannot generate now.
        """
        if self._in_flight and self._state.paused:
            self._require_generating()
        self._state.paused = None
        self._resume()

    # --------------------------------------------------------------------------- memory

    def sleep(self, part: EngineMemoryPart) -> None:
        """Free memory. Calling it again has no effect.

        Requests that are paused with "recompute" stay in flight. After the weights were
        freed, a complete update must be committed before the engine generates again.

        Args:
            part: "kv_cache" frees the KV cache, "weights" the KV cache and the weights.
        """
        self._require_usable()
        self._state.require_no_update("sleep")
        self._require_none_in_flight("sleep", "recompute")

        parts: set[EngineMemoryPart] = {"kv_cache", part}
        freed = frozenset(parts - self._state.asleep)
        if "weights" in freed:
            self._state.version = None
            self._state.has_model = False
        if freed:
            self._sleep(freed)
            self._state.asleep |= freed

    def wake(self, part: EngineMemoryPart) -> None:
        """Allocate the memory of one part again. No effect if it is awake.

        Weights are then uninitialized until a full update; the KV cache is empty.
        """
        self._require_usable()
        if part in self._state.asleep:
            self._wake(part)
            self._state.asleep -= {part}

    # -------------------------------------------------------------------------- weights

    @property
    def experts(self) -> list[Experts]:
        """The experts that each rank of the engine takes weights for, by rank."""
        return [None]

    @property
    def policy_version(self) -> int | None:
        """The version that tokens are sampled from; None while there is none."""
        return self._state.version

    def connect(
        self, address: Address, wire_spec: WireSpec, first_receiver: int
    ) -> None:
        """Open this engine's end of the wire to the sender.

        This is called before the first update, and again after the sender or another
        receiver was replaced.

        Args:
            address: Where the sender is reached.
            wire_spec: The buckets and receivers of the wire.
            first_receiver: Index of this engine's first rank among all receivers.

        Raises:
            WeightSyncError: The peers did not connect in time, or the wire does not
                reach this engine.
        """
        self._require_usable()
        self._first_receiver = first_receiver
        with aborting_on_error(self.abort_update):
            self._connect(address, wire_spec, first_receiver)

    def begin_update(self, manifest: Manifest, version: int) -> None:
        """Open a weight update to `version`.

        The engine does not generate until the version is committed and, if
        `verification_follows` is set, verified. Paused requests stay in flight with
        their tokens, and continue with the new version.
        """
        self._require_usable()
        self._state.require_no_update("begin_update")
        self._require_none_in_flight("begin_update", "keep", "recompute")

        if "weights" in self._state.asleep:
            raise RolloutError(
                'begin_update: the weights are asleep; call wake("weights") first'
            )
        if not manifest.has_model and not self._state.has_model:
            raise WeightSyncError(
                f"version {version} is an adapter, and the engine does not hold the"
                " model; send both"
            )

        # Loading overwrites the present weights, so from here on the engine has neither
        # the old version nor the new one.
        names = {parameter.name for parameter in manifest.sent}
        self._state.version = None
        self._state.has_model = not manifest.has_model
        self._state.update = WeightUpdate(version, names, self._first_receiver)
        with aborting_on_error(self.abort_update):
            self._begin_update(manifest)

    def receive(self, bucket: Bucket) -> None:
        """Load the parameters of a bucket from the connected wire.

        When this returns, the bucket's place on the wire may be used again.

        Raises:
            WeightSyncError: No wire or no update is open, or a parameter is not in the
                manifest or came before. The update is then aborted.
        """
        update = self._require_update("receive")
        with aborting_on_error(self.abort_update):
            update.require_expected(bucket)
            self._receive(bucket)
            update.note_received(bucket)

    def commit(
        self, sent: Mapping[str, Fingerprint], *, verification_follows: bool = False
    ) -> Fingerprints:
        """Finish the update. New requests reuse no cached prefix of earlier weights.

        Args:
            sent: The sender's fingerprint of each parameter, to be compared with what
                was received.
            verification_follows: Accept the version only with `verify`. Otherwise it is
                accepted here, and the engine generates with it.

        Returns:
            The fingerprints of the rank that took the longest to compute them, of the
            tensors that its loader got.

        Raises:
            WeightSyncError: Parameters of the manifest were not received, parameters of
                the engine were not loaded, or fingerprints differ. The error names the
                parameters, and the update is aborted.
        """
        update = self._require_update("commit")
        if update.committed:
            raise WeightSyncError(
                f"commit: version {update.version} is committed already; verify it"
            )

        with aborting_on_error(self.abort_update):
            update.require_complete()
            received = self._received_fingerprints()
            update.require_equal(sent, received)
            self._commit(update.version)

        self._state.has_model = True
        if verification_follows:
            update.committed = True
        else:
            self._accept(update)
        return max(received, key=lambda fingerprints: fingerprints.seconds)

    def verify(self, probe: Probe) -> float:
        """Accept the committed version if its log-probs of the probe match the
        sender's.

        Fingerprints check the tensors as received. Log-probs also catch later errors,
        such as those of packing. The KV cache must be awake.

        Returns:
            The largest absolute difference of a log-prob.

        Raises:
            WeightSyncError: A difference is above the tolerance. The update is then
                aborted, and so are the requests in flight.
        """
        self._require_usable()
        update = self._state.require_committed_update()

        with aborting_on_error(self.abort_update):
            log_probs, progress = self._probe(probe.rows)
            try:
                difference = self._probe_history.verify(
                    update.version, probe, log_probs
                )
            except WeightSyncError as error:
                self.abort()
                parts = [str(error), self._explain_mismatch()]
                raise WeightSyncError(". ".join(filter(None, parts))) from None

        # Tokens sampled during the probe are delivered only now that their version is
        # accepted.
        self._accept(update)
        self._record(progress)
        return difference

    def abort_update(self) -> None:
        """Give up the open update, if any.

        The engine has no policy version until a later update is accepted.
        """
        update = self._state.update
        if update is None:
            return

        # The loader has already left an update that was committed.
        self._state.update = None
        if not update.committed:
            self._abort_update()

    # ------------------------------------------------------------------------- lifetime

    @property
    def failure(self) -> str | None:
        """Why the engine can no longer be used, or None while it is usable."""
        self._state.failure = self._state.failure or self._find_failure()
        return self._state.failure

    def fail(self, reason: str) -> None:
        """Mark the engine as failed and drop the requests in flight.

        The reason of an earlier failure stays.
        """
        self._state.failure = self._state.failure or reason
        self._in_flight.clear()

    def close(self, *, process_exits: bool = False) -> None:
        """Release everything. Calling it again has no effect.

        Args:
            process_exits: The caller's process exits next, so what is released by that
                need not be released here.
        """
        if not self._state.closed:
            self._state.closed = True
            self.fail("it was closed")
            self._close(process_exits)

    # ---------------------------------------------------------------------------- rules

    def _require_usable(self) -> None:
        if self.failure is not None:
            raise EngineFailed(
                "the rollout engine can no longer be used; start another:"
                f" {self.failure}"
            )

    def _require_generating(self) -> None:
        self._require_usable()
        self._state.require_generating()

    def _require_update(self, verb: str) -> WeightUpdate:
        self._require_usable()
        return self._state.require_update(verb)

    def _require_none_in_flight(self, verb: str, *unless_paused: EnginePause) -> None:
        """Abort preemptible requests, or raise `RolloutError` if there are others."""
        if self._state.paused not in unless_paused:
            remaining = len(self._in_flight) - len(self._in_flight.preemptible_ids)
            self._state.require_no_requests(verb, remaining, unless_paused)
            self.preempt()

    def _accept(self, update: WeightUpdate) -> None:
        self._state.update = None
        self._state.version = update.version

    def _record(self, progress: Iterable[GenerationProgress]) -> None:
        """Keep what was sampled from the present version."""
        stopped = self._in_flight.record(progress, self._state.version)
        if stopped:
            self._abort(stopped)

    def _abort_now(self, request_ids: Sequence[int]) -> None:
        if request_ids:
            self._abort(request_ids)
            self._in_flight.finish_aborted(request_ids)
