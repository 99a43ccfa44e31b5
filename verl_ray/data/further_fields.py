"""The fields of a record that a run does not know, as JSON for its reward.

Invariant: nothing that a reward could use is lost, and nothing in it stops a run
that does not ask for it.
"""

from __future__ import annotations

from collections.abc import Collection

from verl_ray.data.fields import (
    Fields,
    excerpt,
    json_text,
    require_encodable,
)
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
