"""The comparison of an engine's log-probs of fixed tokens with those of the sender.

Invariant: an engine passes only if it computes with the weights what the sender
computes with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_ray.errors import NonFiniteError, WeightSyncError
from verl_ray.rollout.requests import Float32, Tokens

HIDDEN_MOVEMENT = 0.01
"""Largest movement of the trainer's log-probs that an engine may hide by rounding.

If they move further, an engine that has the trainer's weights cannot have the same
log-probs as before, to the bit.
"""


@dataclass(frozen=True, eq=False)
class Probe:
    """Fixed tokens with the log-probs that the sender's model gives them.

    An engine that holds the sender's weights computes the same log-probs.

    Attributes:
        rows: Token ids of each row.
        log_probs: The log-probs at temperature 1 of each row's tokens except the first.
        tolerance: The largest difference that two implementations of the same model may
            have.
    """

    rows: tuple[Tokens, ...]
    log_probs: tuple[Float32, ...]
    tolerance: float

    def require_finite(self, version: int) -> None:
        """Check the sender's log-probs, with which no others could agree.

        Raises:
            NonFiniteError: Some are NaN or infinite.
        """
        if all(np.isfinite(values).all() for values in self.log_probs):
            return
        raise NonFiniteError(
            f"actor: with the weights of version {version} the log-probs of fixed"
            " tokens are not finite, although every weight is: the step before made"
            " them too large to compute with. Resume from an earlier checkpoint with"
            " a lower actor.optimizer.lr"
        )


@dataclass(frozen=True, eq=False)
class _Movement:
    """The first probe for which the engine gave these log-probs."""

    version: int
    probe: Probe
    log_probs: list[Float32]


class ProbeHistory:
    """Comparison of an engine's log-probs with probes, each with those before it.

    A probe fails when the engine's log-probs differ from the sender's, and also when
    they stand still while the sender's move.
    """

    def __init__(self) -> None:
        self._last_movement: _Movement | None = None

    def verify(self, version: int, probe: Probe, log_probs: list[Float32]) -> float:
        """Return the largest difference of a log-prob.

        Args:
            version: The policy version whose weights the engine received.
            probe: The tokens, and what the sender's model gives them.
            log_probs: The log-probs that the engine gives the same tokens.

        Raises:
            WeightSyncError: The difference is above the tolerance, or the engine's
                log-probs stand still while the sender's move.
        """
        differences = [
            _largest_difference(ours, theirs)
            for ours, theirs in zip(log_probs, probe.log_probs, strict=True)
        ]
        worst = int(np.argmax(differences))

        # A comparison with a NaN is false, so the test must be for what is accepted.
        if not differences[worst] <= probe.tolerance:
            raise WeightSyncError(
                f"version {version}: every weight arrived as it was sent, but the"
                " engine computes with others: of fixed tokens"
                f" {probe.rows[worst].tolist()} its log-probs differ from the trainer's"
                f" by {differences[worst]:.3g}, more than {probe.tolerance:.3g}"
            )

        self._require_movement(version, probe, log_probs)
        return float(differences[worst])

    def _require_movement(
        self, version: int, probe: Probe, log_probs: list[Float32]
    ) -> None:
        """Raise `WeightSyncError` if only the trainer's log-probs have moved.

        Where rounding is larger than a training step, old weights are within the
        tolerance of new ones. Log-probs that stay the same to the bit give them away.
        """
        last = self._last_movement
        if last is None or not _repeats(last, probe, log_probs):
            self._last_movement = _Movement(version, probe, log_probs)
            return

        pairs = zip(probe.log_probs, last.probe.log_probs, strict=True)
        movement = max(_largest_difference(now, earlier) for now, earlier in pairs)
        if movement > HIDDEN_MOVEMENT:
            raise WeightSyncError(
                f"version {version}: every weight arrived as it was sent, but"
                " the engine computes with older ones: its log-probs of fixed"
                f" tokens are to the bit those of version {last.version}, since when"
                f" the trainer's have moved by {movement:.3g}"
            )


def _largest_difference(ours: Float32, theirs: Float32) -> np.float32:
    difference: np.float32 = np.abs(ours - theirs).max(initial=0.0)
    return difference


def _repeats(last: _Movement, probe: Probe, log_probs: list[Float32]) -> bool:
    """Whether the engine gives the same tokens the same log-probs, to the bit."""
    if len(log_probs) != len(last.log_probs):
        return False
    if not all(map(np.array_equal, log_probs, last.log_probs)):
        return False
    return all(map(np.array_equal, probe.rows, last.probe.rows))
