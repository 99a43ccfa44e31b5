"""State of a rollout engine, and of its open weight update.

Invariant: a call that the state does not allow raises an error that names the call to
make first. An update is complete only if every parameter of its manifest was received
once, and every fingerprint is the sender's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from verl_ray.errors import (
    CannotGenerate,
    RolloutError,
    VerlRayError,
    WeightSyncError,
)
from verl_ray.weight_sync.fingerprint import Fingerprint, Fingerprints
from verl_ray.weight_sync.manifest import Bucket

EngineMemoryPart = Literal["weights", "kv_cache"]

EnginePause = Literal["keep", "recompute"]
"""What becomes of the KV cache of requests in flight while an engine is paused.

keep: it stays, also over an update. recompute: it is freed, and computed again from the
tokens of each request as soon as the engine resumes.
"""


@dataclass
class EngineState:
    """Present state of an engine.

    Attributes:
        version: The policy version that tokens are sampled from; None while no version
            is accepted.
        has_model: Whether a whole model was loaded. An adapter can only be sent to an
            engine that has the model it belongs to.
        update: The weight update that is open, if any.
        asleep: The parts of the memory that were freed.
        failure: Why the engine can no longer be used; None = it can.
        closed: Whether `close` was called.
        paused: How requests in flight are held without being continued; None = they
            are not.
    """

    version: int | None
    has_model: bool
    update: WeightUpdate | None = None
    asleep: frozenset[EngineMemoryPart] = frozenset()
    failure: str | None = None
    closed: bool = False
    paused: EnginePause | None = None

    def require_generating(self) -> None:
        """Raise `CannotGenerate` unless tokens can be sampled now."""
        if self.update is not None:
            next_call = "verify it" if self.update.committed else "commit it"
            raise CannotGenerate(
                f"cannot generate: the update to version {self.update.version} is"
                f" open; {next_call}"
            )

        # After the weights slept there is no version either; waking comes first.
        if self.asleep:
            raise CannotGenerate(
                f"cannot generate: asleep; call {self.wake_calls} first"
            )

        if self.version is None:
            raise CannotGenerate(
                "cannot generate: no policy version is committed; send the weights and"
                " commit them"
            )

    def require_no_requests(
        self, verb: str, count: int, pauses: Iterable[EnginePause]
    ) -> None:
        """Raise `RolloutError` for requests in flight that no pause holds.

        Args:
            verb: The call that is refused, for the message.
            count: Number of the requests.
            pauses: The modes of a pause under which they could stay.
        """
        if count:
            modes = " or ".join(f'"{mode}"' for mode in pauses)
            raise RolloutError(
                f"{verb}: {count} requests are in flight; let them end, abort them, or"
                f" pause with {modes} first"
            )

    def require_no_update(self, verb: str) -> None:
        """Raise `RolloutError` while a weight update is open.

        Args:
            verb: The call that is refused, for the message.
        """
        if self.update is not None:
            raise RolloutError(
                f"{verb}: the update to version {self.update.version} is open; commit"
                " or abort it"
            )

    def require_update(self, verb: str) -> WeightUpdate:
        """Return the open weight update, or raise `WeightSyncError` without one."""
        if self.update is None:
            raise WeightSyncError(
                f"{verb}: no weight update is open; call begin_update first"
            )
        return self.update

    def require_committed_update(self) -> WeightUpdate:
        """Return the update that waits for its verification, or raise an error.

        Raises:
            WeightSyncError: No update is open, or it was not committed yet.
            RolloutError: A part of the memory is asleep.
        """
        update = self.require_update("verify")

        if not update.committed:
            raise WeightSyncError(
                f"verify: version {update.version} is not committed yet"
            )
        if self.asleep:
            raise RolloutError(f"verify: asleep; call {self.wake_calls} first")

        return update

    @property
    def wake_calls(self) -> str:
        """The calls that wake everything that is asleep, the weights first."""
        parts = sorted(self.asleep, reverse=True)
        return " and ".join(f'wake("{part}")' for part in parts)


# ---------------------------------------------------------------- an open weight update


@dataclass
class WeightUpdate:
    """The engine's part of a weight sync, from `begin_update` until it is accepted.

    Attributes:
        version: The policy version that the weights belong to.
        missing: Names of the parameters that were not received yet.
        first_receiver: Number of the engine's first rank among all receivers.
        committed: Whether everything was received and loaded, and only the verification
            is missing.
        receivers: For each parameter that came for some receivers alone, their numbers.
    """

    version: int
    missing: set[str]
    first_receiver: int = 0
    committed: bool = False
    receivers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def note_received(self, bucket: Bucket) -> None:
        """Note that the ranks that a bucket is for have received it."""
        self.missing.difference_update(bucket.names)
        if bucket.receivers is not None:
            self.receivers |= dict.fromkeys(bucket.names, bucket.receivers)

    def require_expected(self, bucket: Bucket) -> None:
        """Raise `WeightSyncError` unless all parameters of the bucket are missing."""
        unexpected = sorted(name for name in bucket.names if name not in self.missing)
        if unexpected:
            raise WeightSyncError(
                f"bucket {bucket.index} holds what is not expected, or came before:"
                f" {unexpected}"
            )

    def require_complete(self) -> None:
        """Raise `WeightSyncError` that names the parameters that are missing."""
        if self.missing:
            raise WeightSyncError(
                f"version {self.version}: not received: {sorted(self.missing)}"
            )

    def require_equal(
        self, sent: Mapping[str, Fingerprint], received: Sequence[Fingerprints]
    ) -> None:
        """Compare what was sent with what every rank of the engine received.

        A rank has to have what was for it and nothing else, and the ranks together
        everything.

        Args:
            sent: The sender's fingerprint of each parameter.
            received: The fingerprints of what the loader got, by rank of the engine.

        Raises:
            WeightSyncError: Fingerprints differ, or no rank got a parameter; the
                parameters are named.
        """
        for rank, fingerprints in enumerate(received):
            expected = self._sent_to(self.first_receiver + rank, sent)
            names = sorted(expected.keys() | fingerprints.by_name.keys())
            different = [
                name
                for name in names
                if expected.get(name) != fingerprints.by_name.get(name)
            ]
            if not different:
                continue

            if len(received) > 1:
                where = f" on rank {rank} of the {len(received)} of the engine"
            else:
                where = ""
            raise WeightSyncError(
                f"version {self.version}: sent and received differ in"
                f" {different}{where}"
            )

        arrived = set[str]().union(*(each.by_name for each in received))
        if sent.keys() - arrived:
            raise WeightSyncError(
                f"version {self.version}: no rank of the engine received"
                f" {sorted(sent.keys() - arrived)}"
            )

    def _sent_to(
        self, receiver: int, sent: Mapping[str, Fingerprint]
    ) -> dict[str, Fingerprint]:
        """Return the fingerprints of what was for this receiver."""
        return {
            name: fingerprint
            for name, fingerprint in sent.items()
            if receiver in self.receivers.get(name, (receiver,))
        }


@contextlib.contextmanager
def aborting_on_error(abort_update: Callable[[], None]) -> Iterator[None]:
    """Abort the open update when the block fails.

    An exception that is not one of this project becomes a `WeightSyncError`.
    """
    try:
        yield
    except BaseException as error:
        abort_update()
        if isinstance(error, Exception) and not isinstance(error, VerlRayError):
            raise WeightSyncError(
                f"the weight update failed and was aborted: {error!r}"
            ) from error
        raise
