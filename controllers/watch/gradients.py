"""The limit on optimizer steps that are skipped for gradients that are not finite.

Invariant: skipped steps are counted per role, whatever the other roles do, and the
counts are part of a checkpoint.

Deliberately not here: skipping a step and naming the tensor that was not finite, which
the engine does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_ray.errors import NonFiniteError
from workers.model_worker import UpdateReport


class GradientWatch:
    """Stops a run in which a role skips too many optimizer steps in a row."""

    def __init__(self, limit: int) -> None:
        """Create a watch without skipped steps.

        Args:
            limit: run.max_skipped_steps, the number of steps in a row that stops a run.
        """
        self._limit = limit
        self._in_a_row: dict[str, int] = {}

    def observe(self, role: str, updates: Sequence[Sequence[UpdateReport]]) -> None:
        """Count the skipped optimizer steps of a role.

        Args:
            role: Name of the role.
            updates: Report of every rank for each optimizer step, [steps][ranks].

        Raises:
            NonFiniteError: The limit is reached. The message has the tensor that a rank
                named.
        """
        for ranks in updates:
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
