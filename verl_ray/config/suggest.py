"""What a user probably meant: near spellings and near numbers.

Invariant: a suggestion is always a value that is valid; no suggestion is better than a wild one. Deliberately not
here: which values are valid, which the caller knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

_ALIKE = 0.6  # below this two words share letters rather than a meaning
_LIST_UP_TO = 100  # letters; a longer list of choices is no help


def closest(word: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The candidates spelt most like `word`, best first; for dotted keys the last part counts as much as the whole."""
    return [name for score, name in _ranked(word, candidates) if score >= _ALIKE][:count]


def _ranked(word: str, candidates: Iterable[str]) -> list[tuple[float, str]]:
    def likeness(name: str) -> float:
        whole = SequenceMatcher(None, word.lower(), name.lower()).ratio()
        last = SequenceMatcher(None, _last(word), _last(name)).ratio()
        return (whole + last) / 2 if "." in word else max(whole, last)

    return sorted(((likeness(name), name) for name in set(candidates)), key=lambda pair: (-pair[0], pair[1]))


def _last(key: str) -> str:
    return key.lower().rpartition(".")[2].replace("_", "")


def did_you_mean(word: str, candidates: Sequence[str], kind: str) -> str:
    """One sentence that leads from `word` to a valid name; `kind` says what the names are ("algorithm", "key")."""
    near = closest(word, candidates)
    listed = ", ".join(sorted(candidates))
    if near and len(listed) > _LIST_UP_TO:
        return f"Did you mean {either(near)}?"
    if near:
        return f"Did you mean {either(near)}? There is {listed}."
    if not candidates:
        return f"There is no {kind} here."
    section = word.rpartition(".")[0]
    beside = sorted(name for name in candidates if section and name.rpartition(".")[0] == section)
    if beside and len(listed) > _LIST_UP_TO:
        return f"There is {', '.join(beside)}."
    if len(listed) > _LIST_UP_TO:
        heads = {name.partition(".")[0] for name in candidates if "@" not in name}
        return f"Every {kind} begins with one of {', '.join(sorted(heads))}."
    return f"There is {listed}."


def either(names: Iterable[object]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *head, last = [str(name) for name in names]
    return f"{', '.join(head)} or {last}" if head else last


def nearest_divisors(number: int, near: int) -> list[int]:
    """The divisors of `number` on either side of `near`, ascending; one when `near` is past an end or divides.

    >>> nearest_divisors(256, 100)
    [64, 128]
    """
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d <= near][-1:]
    above = [d for d in divisors if d >= near][:1]
    return sorted({*below, *above})
