"""The fields of a record that a run does not know, as JSON for its reward.

Invariant: nothing that a reward could use is lost, and nothing in it stops a run
that does not ask for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any

from verl_ray.data.fields import (
    Fields,
    answer_of,
    excerpt,
    json_text,
    require_encodable,
)
from verl_ray.data.schemas import ANSWER_COLUMNS
from verl_ray.errors import DataError


def extra_json(fields: Fields, hidden: Collection[str], where: str) -> str:
    """Return all columns but the hidden ones, which have fields of their own.

    The fields of the objects `extra` and verl's `extra_info` stand beside them, in the
    place of columns of the same name.

    Returns:
        A JSON object, as text.

    Raises:
        DataError: `extra` is no object, or a text cannot be encoded.
    """
    own = fields.get("extra")
    if own is not None and not isinstance(own, dict):
        raise DataError(
            f"extra is {excerpt(own)}",
            expected="an object (or no such field)",
            place=where,
        )
    opened: dict[str, Fields] = {"extra": own or {}}
    # Other systems may have something else under this name, which is a column then.
    verls = fields.get("extra_info")
    if isinstance(verls, dict):
        opened = {"extra_info": verls, **opened}

    shown = {name: value for name, value in fields.items() if name not in hidden}
    require_encodable(shown, where)

    extra = {name: value for name, value in shown.items() if name not in opened}
    for value in opened.values():
        extra |= value
    return json_text(extra)


def without_answer(extra: Mapping[str, Any], answer: str | None) -> Fields:
    """Return the fields of `extra_json` that do not tell the answer of their record.

    Columns by whose names an answer is known, or a demonstration, are left out. So is a
    field of an object that says just what the answer says, whatever its name. Lists
    stay as they are: a choice without one of its items would tell it.

    Args:
        extra: The fields of the object that `extra_json` returns.
        answer: The answer; None where the record has none.
    """
    named = {
        name: value
        for name, value in extra.items()
        if name.lower() not in ANSWER_COLUMNS
    }
    return _without_value(named, None if answer is None else answer.strip())


def _without_value(fields: Fields, answer: str | None) -> Fields:
    return {
        name: _without_value(value, answer) if isinstance(value, dict) else value
        for name, value in fields.items()
        if answer is None or not _says(value, answer)
    }


def _says(value: object, answer: str) -> bool:
    # What is neither a text nor a number, and has no text, cannot be an answer.
    with contextlib.suppress(DataError):
        return answer_of(value, "", "").strip() == answer
    return False
