"""Names of the fields of a record, and what to do about one that is missing.

Invariant: a hint only names fields that the record has. Deliberately not here: what the
fields hold (`records.py`).
"""

from __future__ import annotations

import difflib
import functools

from verl_ray.data.files import Fields
from verl_ray.errors import DataError

_SYNONYMS = {
    "prompt": ("question", "problem", "instruction", "query", "input"),
    "answer": (
        "solution", "ground_truth", "target", "label", "final_answer", "completion",
        "output", "response", "reward_model.ground_truth",
    ),
    "response": (
        "completion", "output", "answer", "solution", "target", "chosen",
        "extra_info.answer",
    ),
    "messages": ("conversation", "conversations"),
    "chosen": ("chosen_response", "preferred", "winner", "response_chosen"),
    "rejected": ("rejected_response", "dispreferred", "loser", "response_rejected"),
    "role": ("from",),
    "content": ("value", "text"),
}  # fmt: skip
"""Field -> what other systems and data sets call it, the usual names first.

A name with a point is a field of an object, as in the records of verl.
"""


def missing_field(names: tuple[str, ...], fields: Fields) -> str:
    """Return a text about a field that is missing or null, with what to do about it.

    Args:
        names: The fields, of which one is enough.
        fields: The record.
    """
    nulls = [name for name in names if name in fields]
    if nulls:
        return f"{nulls[0]} is null; expected a value, or no such record"

    expected = " or ".join(repr(name) for name in names)
    present = ", ".join(repr(name) for name in fields) or "none"
    hints = (hint for name in names if (hint := _hint(name, fields)) is not None)
    hint = next(hints, f"add {expected} to every record")
    return f"no field {expected}; the fields found are {present}; {hint}"


def _hint(name: str, fields: Fields) -> str | None:
    """Return what to do with the field that stands for a missing one, if there is."""
    similar = difflib.get_close_matches(name, fields, n=1)
    for other in (*similar, *_SYNONYMS.get(name, ())):
        section, _, inner = other.rpartition(".")
        if not section and fields.get(other) is not None:
            return f"rename {other!r} to {name!r}"

        # Parquet has every object of verl's records, and JSON may have something else.
        outer = fields.get(section)
        if isinstance(outer, dict) and outer.get(inner) is not None:
            return f"put {other} into {name!r}: these are verl's fields"
    return None


def refuse_misspelt(
    where: str, present: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    """Raise DataError if a field looks like a misspelt optional one.

    Nobody would notice otherwise: the record is complete without it.
    """
    pair = _similar_field(present, optional)
    if pair is not None:
        misspelt, intended = pair
        raise DataError(
            f"{where}: found field {misspelt!r}, expected {intended!r}; rename it, or"
            " it would be ignored"
        )


# Cached, because a file has few distinct sets of fields, and many rows.
@functools.lru_cache(maxsize=256)
def _similar_field(
    present: tuple[str, ...], optional: tuple[str, ...]
) -> tuple[str, str] | None:
    """Return (field of the record, optional field that it resembles), if any."""
    for name in optional:
        if name in present:
            continue
        similar = difflib.get_close_matches(name, present, n=1, cutoff=0.85)
        if similar:
            return similar[0], name
    return None
