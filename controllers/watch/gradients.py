"""Gradients and weights that are not finite: a limit on skipped steps, or the end.

Invariant: weights that are not finite are neither published nor saved. Skipped steps
are counted per role, whatever the other roles do, and the counts are part of a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_ray.errors import NonFiniteError
from workers.model_worker import UpdateReport


class GradientWatch:
    """Stops a run whose role breaks its weights, or skips too many steps in a row."""

    def __init__(self, limit: int) -> None:
        """Create a watch without skipped steps.

        Args:
            limit: run.max_skipped_steps, the number of steps in a row that stops a run.
        """
        self._limit = limit
        self._in_a_row: dict[str, int] = {}

    def observe(
        self, role: str, number: int, updates: Sequence[Sequence[UpdateReport]]
    ) -> None:
        """Count the skipped optimizer steps of a role, and look at what others left.

        Args:
            role: Name of the role.
            number: Number of the training step.
            updates: Report of every rank for each optimizer step, [steps][ranks].

        Raises:
            NonFiniteError: The limit is reached, or a step has left weights that are
                not finite. The message has the tensor that a rank named.
        """
        for ranks in updates:
            _require_finite_weights(role, number, ranks)
            # Every rank reports the same step, and not every rank knows the tensor.
            reasons = [
                report.step.skipped
                for report in ranks
                if report.step.skipped is not None
            ]

            # One healthy step is enough to begin counting again.
            if not reasons:
                self._in_a_row[role] = 0
            else:
                self._in_a_row[role] = self._in_a_row.get(role, 0) + 1

            if self._in_a_row[role] >= self._limit:
                raise NonFiniteError(
                    f"{role}: {self._limit} optimizer steps in a row"
                    f" (run.max_skipped_steps) had no finite gradient: {reasons[0]}"
                )

    def state(self) -> dict[str, int]:
        """Return the number of skipped steps in a row by role, as JSON."""
        return dict(self._in_a_row)

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue counting from the state of a checkpoint."""
        self._in_a_row = dict(state)


def _require_finite_weights(
    role: str, number: int, ranks: Sequence[UpdateReport]
) -> None:
    """Raise NonFiniteError if an optimizer step has left weights not finite."""
    # Ranks may hold parts of the same tensor; the order is that of the model.
    names = list(dict.fromkeys(name for rank in ranks for name in rank.step.broken))
    if not names:
        return
    step = ranks[0].step
    raise NonFiniteError(
        f"{role}: the update of training step {number} left {len(names)}"
        f" {'tensors' if len(names) > 1 else 'tensor'} of its weights with NaN or"
        f" infinities, first {names[0]}, although the gradients were finite (norm"
        f" {step.grad_norm:.3g}, learning rate {step.lr:.3g}). They are neither"
        " published nor saved. Resume from the last checkpoint with a lower"
        f" {role}.optimizer.lr; if this was the first step behind a checkpoint, its"
        " optimizer state is damaged: resume from an earlier one (run.resume)"
    )
