"""State of a rollout engine, and the calls that each state allows.

Invariant: a call that the state does not allow raises an error that names the call to
make first. Deliberately not here: the calls themselves (`base.py`), and the
requests in flight (`delivery.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_ray.errors import CannotGenerate, RolloutError, WeightSyncError
from verl_ray.rollout.update import WeightUpdate

EngineMemoryPart = Literal["weights", "kv_cache"]


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
        paused: Whether requests in flight are kept without being continued.
    """

    version: int | None
    has_model: bool
    update: WeightUpdate | None = None
    asleep: frozenset[EngineMemoryPart] = frozenset()
    failure: str | None = None
    closed: bool = False
    paused: bool = False

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
