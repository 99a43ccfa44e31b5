"""Checks of what an environment returns: rewards, objects, and messages.

Invariant: what passes can be paid, and can be written down as JSON.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Sequence

from verl_ray.agents.contract import End
from verl_ray.rewards.health import LARGEST


def number_of(value: object, what: str) -> float:
    """Return a reward as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is not finite, or beyond 1e18.
    """
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} {value!r}, which is no number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, which is not finite")
    if abs(number) > LARGEST:
        raise ValueError(f"{what} {number}, beyond 1e18")
    return number


def require_json(
    values: Sequence[object], origin: str, known: Sequence[object] = ()
) -> None:
    """Raise TypeError if a message or a tool is none that a record can hold.

    Args:
        origin: Where it comes from, in words that its number follows.
        known: Some that were looked at before.
    """
    ids = set(map(id, known))
    for number, value in enumerate(values, start=1):
        if id(value) in ids:
            continue
        try:
            if not isinstance(value, dict):
                raise TypeError(f"it is {type(value).__name__}, expected dict")
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            text = f"{origin} {number}, which cannot be written as JSON: {error}"
            raise TypeError(f"{text}. It begins with {str(value)[:80]!r}") from error


def end_named(value: str) -> End:
    """Return the end that an environment names.

    Raises:
        ValueError: There is none of this name.
    """
    if value not in list(End):
        names = ", ".join(End)
        raise ValueError(f"step returned end={value!r}, expected one of {names}")
    return End(value)


def require_kind(value: object, kind: type, method: str) -> None:
    """Raise TypeError if a method of an environment returned something else."""
    if not isinstance(value, kind):
        name = type(value).__name__
        raise TypeError(f"{method} returned {name}, expected {kind.__name__}")


def require_sampling(stop: Sequence[str], max_tokens: int | None) -> None:
    """Raise TypeError or ValueError if a turn cannot be sampled like this."""
    is_list = isinstance(stop, Sequence) and not isinstance(stop, str)
    if not is_list or not all(isinstance(text, str) for text in stop):
        raise TypeError(f"stop = {stop!r}, expected a list of texts")
    if not all(stop):
        raise ValueError("stop has an empty text, at which every turn would end")
    if max_tokens is None:
        return
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool):
        raise TypeError(f"max_tokens = {max_tokens!r}, expected an integer or None")
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}, expected at least 1")
