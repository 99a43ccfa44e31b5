"""One response to score, as every kind of scorer receives it.

Invariant: a request holds plain values alone, so that it can be pickled and sent as
JSON. Deliberately not here: the score (`health.py`).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to score; the arguments of a `RewardFunction`."""

    response: str
    answer: str
    prompt: str
    data_source: str
    extra: dict[str, object]
    """Plain values.

    They are pickled: the class of any other value would have to be importable in the
    scoring process.
    """
