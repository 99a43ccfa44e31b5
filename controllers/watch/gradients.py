"""Optimizer steps without finite gradients: skipped by the engine, counted here, and the end of a run that has nothing
but them.

Invariant: per role, whatever the others do; what is counted is part of a checkpoint. Deliberately not here: which
tensor was not finite (the engine says so).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_ray.errors import NonFiniteError
from workers.model_worker import UpdateReport


class GradientWatch:
    """Stops a run after `limit` (run.max_skipped_steps) skipped optimizer steps of one role in a row."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row: dict[str, int] = {}

    def see(self, role: str, updates: Sequence[Sequence[UpdateReport]]) -> None:
        """Optimizer steps, each reported by every rank. Raises NonFiniteError, with the tensor that a rank named."""
        for ranks in updates:
            reasons = [report.step.skipped for report in ranks if report.step.skipped is not None]
            self._in_a_row[role] = self._in_a_row.get(role, 0) + 1 if reasons else 0
            if self._in_a_row[role] >= self._limit:
                raise NonFiniteError(
                    f"{role}: {self._limit} optimizer steps in a row (run.max_skipped_steps) had no finite gradient: "
                    f"{reasons[0]}"
                )

    def state(self) -> dict[str, int]:
        """Skipped steps in a row by role, as JSON."""
        return dict(self._in_a_row)

    def load_state(self, state: Mapping[str, int]) -> None:
        self._in_a_row = dict(state)
