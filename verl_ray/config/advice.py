"""Advice for a key that does not exist: where its setting is.

The key may be one of an earlier version, of another system, or misspelt. Invariant: the
advice names keys that exist. Deliberately not here: the tables (`renamed.py`,
`foreign.py`), and how alike two spellings are (`suggest.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from verl_ray.config.foreign import FOREIGN
from verl_ray.config.renamed import new_name
from verl_ray.config.suggest import did_you_mean, is_alike, is_misspelt

_NOT_IN_THIS_TASK = "A run of this task has nothing to set for it; leave it out."

_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")

# Not in each choice of a backend, and known to whoever chooses one.
_OF_BACKENDS = re.compile(r"(\w+\.)?backend\..+")


def advice_on(key: str, known: Sequence[str]) -> str:
    """Return a sentence that leads from a key that does not exist to one that does.

    Args:
        key: what the user typed; a flag with its dashes, too.
        known: the keys that this task has.
    """
    renamed = new_name(key)
    if renamed is not None:
        return renamed

    # A wrong letter in a key of our own says more than what others call its last part.
    foreign = None
    if not (_has_own_section(key, known) and is_misspelt(key, known)):
        foreign = foreign_answer(key, known)
    return foreign or did_you_mean(key, known, "key")


def _has_own_section(key: str, known: Sequence[str]) -> bool:
    """Return whether a key begins with a section of our own, or nearly so."""
    section, point, _ = key.partition(".")
    own = {name.partition(".")[0] for name in known}
    return bool(point) and is_alike(section, own)


def foreign_answer(key: str, known: Collection[str]) -> str | None:
    """Return a sentence that leads from a key of another system to the one here.

    None if the key is of no such system.

    Args:
        key: what the user typed; a flag with its dashes, too.
        known: the keys that this task has.
    """
    words = key.lstrip("-+~").replace("-", "_").lower().split(".")

    # The longest end of the key that is known says most.
    for start in range(len(words)):
        name = ".".join(words[start:])
        if name in FOREIGN:
            role = _role(key, known)
            sentences = [_sentence(answer, role) for answer in FOREIGN[name]]
            possible = (text for text in sentences if _is_possible(text, known))
            return next(possible, _NOT_IN_THIS_TASK)

        # Other systems nest the sections that are called the same here.
        if start and "." in name and name in known:
            return _sentence(name, "")

    # Inside of such a table the names are the user's own.
    if len(words) > 1 and words[-2].endswith("kwargs"):
        return foreign_answer(".".join(words[:-1]), known)
    return None


def keys_in(sentence: str) -> Iterator[str]:
    """Yield the keys that a sentence names."""
    for key in _KEY.findall(sentence):
        if key != "metrics.jsonl":
            yield key


def _sentence(answer: str, role: str) -> str:
    filled = answer.format(role=role)
    return filled if " " in filled else f"Here it is {filled}."


def _role(key: str, known: Collection[str]) -> str:
    """Return the role that a key of another system is about."""
    named = "actor"
    if "critic" in key:
        named = "critic"
    elif re.search(r"\bref(_|\b)", key):
        named = "reference"

    for role in (named, "actor", "reward"):
        if any(existing.startswith(f"{role}.") for existing in known):
            return role
    return named


def _is_possible(sentence: str, known: Collection[str]) -> bool:
    """Return whether a task has every key that a sentence names."""
    for key in keys_in(sentence):
        is_known = any(
            # What is inside is not known of a free section, or of one that is null.
            existing == key
            or existing.startswith(f"{key}.")
            or key.startswith(f"{existing}.")
            for existing in known
        )
        if not is_known and not _OF_BACKENDS.fullmatch(key):
            return False

    return True
