"""Results of reward functions: from what one returns to a score and its entries.

Invariant: a result is a score or a typed failure; whatever else a function returns with
it is kept, as a number or as a text. Deliberately not here: what a run makes of the
entries (`controllers/watch`).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import SupportsFloat

from verl_ray.rewards.health import Score, ScoreHealth

Entries = dict[str, float | str]
"""What a function returned beside a score: numbers, and texts of everything else."""

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
    if not math.isfinite(value):
        detail = f"the function returned {value}"
        return Score(math.nan, ScoreHealth.NONFINITE, detail, entries=text)
    return Score(value, ScoreHealth.OK, entries=text)


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
    if isinstance(value, SupportsFloat) and not getattr(value, "ndim", 0):
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
    if isinstance(result, float | int):
        return float(result)
    # A user's function may return anything, such as a number of NumPy.
    if not isinstance(result, SupportsFloat):
        raise TypeError(
            f"the function returned {type(result).__name__} {result!r:.80},"
            " expected a number, None, or a dict with 'score'"
        )
    return float(result)
