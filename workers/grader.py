"""What every worker of the reward role can do, whatever it grades with.

Deliberately not here: functions and services (`reward.py`), judges (`judge.py`), models (`reward_model.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from verl_ray.data.stages import Rollouts, Scores


class Grader(ABC):
    """One rank of one component of the reward role."""

    @abstractmethod
    def score(self, rows: Rollouts) -> Scores:
        """A score for every row, or a typed failure of that row; raises only where no row can be scored."""
