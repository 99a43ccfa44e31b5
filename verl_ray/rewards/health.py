"""Result of scoring one response: a score, or a failure with its kind.

Invariant: a score that failed has no value (NaN), so it cannot slip into a mean as a 0.
Deliberately not here: how failures happen (`pool.py`, `remote.py`), and what a run does
about them.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


class ScoreHealth(enum.IntEnum):
    """How scoring a response ended.

    The numbers are stable: they travel between processes and in uint8 columns.
    """

    OK = 0
    """A finite score."""
    TIMEOUT = 1
    """The deadline passed; the coroutine was cancelled, or the process killed."""
    EXCEPTION = 2
    """The function raised or returned no number, the record lacks what it names, or its
    process died twice."""
    NONFINITE = 3
    """The function returned NaN or an infinity."""
    NONE = 4
    """The function returned None: it declines to score this response."""
    UNAVAILABLE = 5
    """The service did not reply, or its circuit is open."""
    UNPARSED = 6
    """The service or the judge replied, but its reply has no readable score."""
    TOO_LONG = 7
    """The response and its prompt do not fit the model that scores."""

    @property
    def metric(self) -> str:
        """Name of the metric that counts the scores of this health."""
        return f"reward_health/{self.name.lower()}"


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one response."""

    value: float
    """The function's number; NaN unless health is OK."""
    health: ScoreHealth
    detail: str = ""
    """Why it failed, a few lines at most; empty when health is OK."""
    rescored: bool = False
    """Whether the first process with this response died, so that another scored it."""
    entries: str = ""
    """What the function returned beside the score, a JSON object of numbers and texts;
    empty where it returned a number alone."""


def health_metrics(healths: Iterable[int]) -> dict[str, float]:
    """Count the scores of each health, with 0 for those that did not occur.

    Args:
        healths: Numbers of `ScoreHealth`.
    """
    counts = Counter(healths)
    return {health.metric: float(counts[health]) for health in ScoreHealth}
