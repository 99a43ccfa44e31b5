"""Operations that a kind of rollout engine has to implement.

Invariant: `RolloutEngine` calls a hook only in a state that allows it, so a hook checks
no state. The hook of a public method has its name with an underscore; the public
properties are implemented as they are. Deliberately not here: which state allows which
call (`engine_state.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from verl_ray.rollout.engine_load import EngineLoad
from verl_ray.rollout.engine_state import EngineMemoryPart
from verl_ray.rollout.requests import (
    Float32,
    GenerationProgress,
    GenerationRequest,
    Tokens,
)
from verl_ray.weight_sync.fingerprint import Fingerprints
from verl_ray.weight_sync.manifest import Bucket, Manifest
from verl_ray.weight_sync.transport import Address, WireSpec


class EngineHooks(ABC):
    """Work of an engine, without the rules for when it may be done."""

    # ----------------------------------------------------------------------- properties

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a response whose sampling names no stop tokens."""
        return ()

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
        """How busy the engine is, which is asked after every step."""

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
