"""Result of scoring one response: a score, or a failure with its kind.

Invariant: a score that failed has no value (NaN), so it cannot slip into a mean as a 0.
Whatever else a function returns with a score is kept, as a number or as a text.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import SupportsFloat, TypeGuard


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
    """It is NaN, an infinity, or a number beyond 1e18."""
    NONE = 4
    """The function returned None: it declines to score this response."""
    UNAVAILABLE = 5
    """The service refused the response, or failed at it alone."""
    UNPARSED = 6
    """The service or the judge replied, but its reply has no readable score."""
    TOO_LONG = 7
    """The response and its prompt do not fit the model that scores."""
    DROPPED = 8
    """An episode that no grader sees: its end says nothing of the policy."""

    @property
    def metric(self) -> str:
        """Name of the metric that counts the scores of this health."""
        return f"reward_health/{self.name.lower()}"

    @property
    def is_failure(self) -> bool:
        """Whether a response has no score that should have one."""
        return self not in (ScoreHealth.OK, ScoreHealth.DROPPED)


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one response."""

    value: float
    """The function's number; NaN unless health is OK."""
    health: ScoreHealth
    detail: str = ""
    """Why it failed, a few lines at most; empty when health is no failure."""
    rescored: bool = False
    """Whether the first process with this response died, so that another scored it."""
    entries: str = ""
    """What the function returned beside the score, a JSON object of numbers and texts;
    empty where it returned a number alone."""


LARGEST = 1e18
"""The largest score that counts: squares and sums of it over a batch fit float32."""


def score_of_number(value: float, origin: str, entries: str = "") -> Score:
    """Return a number as a score, and one beyond `LARGEST` as a failure.

    Args:
        value: The number.
        origin: What it is, in words that it follows, such as "the function returned".
        entries: As in `Score`.
    """
    # NaN is not less than anything.
    if abs(value) <= LARGEST:
        return Score(value, ScoreHealth.OK, entries=entries)
    beyond = ", beyond 1e18" if math.isfinite(value) else ""
    detail = f"{origin} {value}{beyond}"
    return Score(math.nan, ScoreHealth.NONFINITE, detail, entries=entries)


def health_metrics(healths: Iterable[int]) -> dict[str, float]:
    """Count the scores of each health, with 0 for those that did not occur.

    Args:
        healths: Numbers of `ScoreHealth`.
    """
    counts = Counter(healths)
    return {health.metric: float(counts[health]) for health in ScoreHealth}


# ---------------------------------------------------------------- what functions return


Entries = dict[str, float | str]
"""What a function returned beside a score: numbers, and texts of everything else."""

ENVIRONMENT_PREFIX = "episode/world/"
"""Beginning of the entries that an environment has recorded about its episode. The data
source and the name follow, with a slash between them. Records of earlier runs have the
word `world`, so it stays."""

_SHOWN = 2000  # characters of a text that are kept
_SCORE = "score"


def score_of(result: object, notes: Mapping[str, object] | None = None) -> Score:
    """Return the result of a function as a score.

    Args:
        result: A number, None, or a dict with `score` and other entries.
        notes: Further entries.

    Raises:
        TypeError: The result is nothing of these.
    """
    entries = dict(notes or {})
    if isinstance(result, Mapping):
        if _SCORE not in result:
            names = ", ".join(map(repr, result)) or "nothing"
            raise TypeError(
                f"the function returned a dict with {names}, expected {_SCORE!r} in it"
            )
        entries |= {str(name): value for name, value in result.items()}
        del entries[_SCORE]
        result = result[_SCORE]

    text = entries_text(entries)
    value = _number(result)
    if value is None:
        detail = "the function returned None"
        return Score(math.nan, ScoreHealth.NONE, detail, entries=text)
    return score_of_number(value, "the function returned", text)


def entries_text(entries: Mapping[str, object]) -> str:
    """Return entries as a JSON object; empty without any.

    None is no entry. A number that is not finite is kept as a text.
    """
    plain: Entries = {}
    for name, value in entries.items():
        if value is not None:
            plain[_clean(name)] = _plain(value)
    return json.dumps(plain) if plain else ""


def entries_of(text: str) -> Entries:
    """Return the entries that `entries_text` has written."""
    entries: Entries = json.loads(text) if text else {}
    return entries


def _plain(value: object) -> float | str:
    """Return a value as a finite number or as a text."""
    if _has_float(value) and not getattr(value, "ndim", 0):
        # Not every number has a float: an integer may be too large.
        with contextlib.suppress(ArithmeticError, ValueError):
            number = float(value)
            return number if math.isfinite(number) else str(number)
    if isinstance(value, str):
        return _clean(value)
    try:
        return _clean(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return _clean(repr(value))


def _clean(text: str) -> str:
    """Return a text without surrogates, which no column can hold."""
    return text[:_SHOWN].encode("utf-8", "backslashreplace").decode()


def _number(result: object) -> float | None:
    """Return a score as a number, or None.

    Raises:
        TypeError: The result is neither.
    """
    if result is None:
        return None
    # Asking a protocol takes longer than most functions.
    if isinstance(result, float):
        return float(result)
    # A user's function may return anything, such as a number of NumPy.
    if not _has_float(result):
        raise TypeError(
            f"the function returned {type(result).__name__} {result!r:.80},"
            " expected a number, None, or a dict with 'score'"
        )
    try:
        return float(result)
    # An integer may be larger than any float.
    except OverflowError:
        is_negative = isinstance(result, numbers.Real) and result < 0
        return -math.inf if is_negative else math.inf


def _has_float(value: object) -> TypeGuard[SupportsFloat]:
    """Return whether a value is a number that a float can stand for."""
    # NumPy drops the imaginary part of a complex number.
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    return isinstance(value, SupportsFloat) and kind != "c"
