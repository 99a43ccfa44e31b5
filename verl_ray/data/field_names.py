"""Names of the fields of a record, and what to do about one that is missing.

Invariant: a hint only names fields that the record has. Deliberately not here: what the
fields hold (`records.py`).
"""

from __future__ import annotations

import difflib
import functools

from verl_ray.data.file_formats import Fields
from verl_ray.errors import DataError


def missing_field(name: str, fields: Fields, where: str) -> DataError:
    """Return the error about a field that is missing or null.

    Args:
        name: The field, or the path of one in an object.
        fields: The record.
        where: The place of the record.
    """
    section, _, inner = name.rpartition(".")
    outer = fields.get(section)
    if name in fields or (isinstance(outer, dict) and inner in outer):
        return DataError(
            f"{name} is null", fix="expected a value, or no such record", place=where
        )

    present = ", ".join(repr(other) for other in fields) or "none"
    similar = difflib.get_close_matches(name, fields, n=1)
    hint = f"add {name!r} to every record"
    if similar:
        hint = f"rename {similar[0]!r} to {name!r}"
    rule = f"no field {name!r}; the fields found are {present}"
    return DataError(rule, fix=hint, place=where)


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
            f"found field {misspelt!r}",
            expected=f"{intended!r}",
            fix="rename it, or it would be ignored",
            place=where,
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
