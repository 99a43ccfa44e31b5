"""What grading one response came to: a score, or a failure with its kind.

Invariant: a score that failed has no value (NaN), so it cannot slip into a mean as a 0. Deliberately not here: how
failures happen (`process.py`), and what a run does about them.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


class Health(enum.IntEnum):
    """How grading ended. The numbers are stable: they travel between processes and in uint8 columns."""

    OK = 0
    """A finite score."""
    TIMEOUT = 1
    """The deadline passed; the process was killed."""
    EXCEPTION = 2
    """The function raised, returned something that is no number, or its process died twice."""
    NONFINITE = 3
    """The function returned NaN or an infinity."""
    NONE = 4
    """The function returned None: it declines to grade this response."""
    UNAVAILABLE = 5
    """The service did not answer, or its circuit is open."""
    UNPARSED = 6
    """The service or the judge answered, but no score can be read from what it said."""
    TOO_LONG = 7
    """The response and its prompt do not fit the model that grades."""

    @property
    def metric(self) -> str:
        """Name of its counter among the metrics of a step."""
        return f"reward_health/{self.name.lower()}"


@dataclass(frozen=True, slots=True)
class Score:
    """The grade of one response."""

    value: float
    """The function's number; NaN unless health is OK."""
    health: Health
    detail: str = ""
    """Why it failed, a few lines at most; empty when health is OK."""
    rescored: bool = False
    """The process that first had the response in hand died, so another one scored it."""


def health_metrics(healths: Iterable[int]) -> dict[str, float]:
    """How many of `healths` (numbers of `Health`) are of each kind, kinds that did not occur included."""
    counts = Counter(healths)
    return {health.metric: float(counts[health]) for health in Health}
