"""Contract of every worker of the reward role.

Deliberately not here: functions and services (`reward.py`), judges (`judge.py`), models
(`reward_model.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from verl_ray.data.stages import Rollouts, Scores


class Grader(ABC):
    """One rank of one component of the reward role."""

    @abstractmethod
    def score(self, rows: Rollouts, step: int, is_held_out: bool = False) -> Scores:
        """Return a score for every row, or a typed failure of that row.

        It raises only where no row can be scored.

        Args:
            rows: The rows to score.
            step: The training step that is made; in an evaluation the last step of the
                policy.
            is_held_out: Whether it is an evaluation. Its scores also hold the answers
                that were read out of the responses, where the grader reads any.
        """

    def needs_groups(self) -> bool:
        """Return whether all responses to a prompt have to be scored in one call."""
        return False
