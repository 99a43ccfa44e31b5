"""Suggestions of what a user probably meant: near spellings and near numbers.

Invariant: a suggestion is always a valid value, and no suggestion is better than a wild
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches

# Below this likeness two words share letters rather than a meaning.
_LEAST_LIKENESS = 0.6

# From this likeness on two short words are spellings of one.
_ALIKE = 0.8

# From this likeness on two words are the same but for a wrong letter.
_NEARLY_THE_SAME = 0.9

# Last parts of keys that say nothing about what they set.
_GENERAL = {"enabled", "enable", "name", "path", "kind", "dir", "type", "mode"}

# Longest list of choices, in characters, that still helps when it is shown in full.
_LONGEST_LIST = 100

_MOST_SIBLINGS = 5  # names of a long list that are shown


def closest(word: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` candidates that are spelt most like `word`, best first.

    The last part of a dotted key counts as much as the whole key.
    """
    ranked = _ranked(word, candidates)
    # Beside a name with a wrong letter the others are guesses.
    is_certain = bool(ranked) and ranked[0][0] >= _NEARLY_THE_SAME
    least = _NEARLY_THE_SAME if is_certain else _LEAST_LIKENESS
    return [name for likeness, name in ranked if likeness >= least][:count]


def is_alike(word: str, candidates: Iterable[str]) -> bool:
    """Return whether `word` is one of the candidates, or shares most of its letters."""
    return bool(get_close_matches(word, candidates, n=1, cutoff=_ALIKE))


def is_misspelt(word: str, candidates: Iterable[str]) -> bool:
    """Return whether `word` is one of the candidates but for a wrong letter or two."""
    return any(_likeness(word, name) >= _NEARLY_THE_SAME for name in candidates)


def _ranked(word: str, candidates: Iterable[str]) -> list[tuple[float, str]]:
    """Return the distinct candidates with their likeness, best first, then by name."""
    scored = [(_likeness(word, name), name) for name in set(candidates)]
    return sorted(scored, key=lambda pair: (-pair[0], pair[1]))


def _likeness(word: str, name: str) -> float:
    """Return how alike two spellings are, from 0 to 1."""
    whole = SequenceMatcher(None, word.lower(), name.lower()).ratio()
    last_word = _last_part(word)
    section = word.rpartition(".")[0]
    if section and last_word in _GENERAL:
        around = SequenceMatcher(None, section.lower(), name.rpartition(".")[0])
        return min(whole, around.ratio())
    last = SequenceMatcher(None, last_word, _last_part(name)).ratio()

    # A key that was typed with its section should be found in that section.
    if "." in word:
        return (whole + last) / 2
    return max(whole, last)


def _last_part(key: str) -> str:
    return key.lower().rpartition(".")[2].replace("_", "")


def did_you_mean(word: str, candidates: Sequence[str], kind: str) -> str:
    """Return a sentence that leads from `word` to a valid name.

    Args:
        word: what the user typed.
        candidates: the valid names.
        kind: what the names are, such as "algorithm" or "key".
    """
    near = closest(word, candidates)
    all_names = ", ".join(sorted(candidates))
    fits = len(all_names) <= _LONGEST_LIST

    if near:
        question = f"Did you mean {either(near)}?"
        return f"{question} There is {all_names}." if fits else question

    if not candidates:
        return f"There is no {kind} here."
    if fits:
        return f"There is {all_names}."

    # The list is too long, so the names of the same section stand in for it.
    section = word.rpartition(".")[0]
    is_flat = not any("." in name for name in candidates)
    siblings = sorted(
        name
        for name in candidates
        if is_flat or (section and name.rpartition(".")[0] == section)
    )
    if siblings:
        nearest = [name for _, name in _ranked(word, siblings)[:_MOST_SIBLINGS]]
        others = len(siblings) - len(nearest)
        more = f" and {others} more" if others else ""
        return f"There is {', '.join(nearest)}{more}."

    # Keys of groups have an @ and lie in no section.
    sections = {name.partition(".")[0] for name in candidates if "@" not in name}
    return f"Every {kind} begins with one of {', '.join(sorted(sections))}."


def either(names: Iterable[object]) -> str:
    """Return the names as a phrase: `a`, `a or b`, `a, b or c`."""
    *others, last = [str(name) for name in names]
    if not others:
        return last
    return f"{', '.join(others)} or {last}"


def first_of(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others."""
    others = len(names) - 1
    more = f" and {others} more" if others else ""
    return f"{names[0]!r}{more}"


def nearest_divisors(number: int, near: int) -> list[int]:
    """Return the divisors of `number` on either side of `near`, ascending.

    There is only one if `near` itself divides, or is beyond the largest divisor.

    >>> nearest_divisors(256, 100)
    [64, 128]
    """
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    below = [divisor for divisor in divisors if divisor <= near][-1:]
    above = [divisor for divisor in divisors if divisor >= near][:1]
    return sorted({*below, *above})
