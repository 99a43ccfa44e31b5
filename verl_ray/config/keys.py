"""The dotted keys of a configuration's type.

Invariant: the keys follow from the fields, over every choice of a union. Deliberately
not here: values (`load.py`), and which key a misspelt one may mean (`suggest.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def known_keys(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key that `kind` can hold.

    Keys of all choices are included, such as `actor.backend.shard_size`.
    """
    for key, _ in known_fields(kind, prefix):
        yield key


def known_fields(
    kind: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key that `kind` can hold, with its field."""
    for name, field in kind.model_fields.items():
        # The key of a section comes first: a message may be about the whole of it.
        key = f"{prefix}{name}"
        yield key, field

        for section in _sections(field.annotation):
            yield from known_fields(section, f"{key}.")


def value_keys(kind: type[BaseModel]) -> list[str]:
    """Return the keys that hold a value, without those that only group others."""
    keys = list(known_keys(kind))
    groups = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in groups]


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the section types inside an annotation, such as the choices of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return

    # The arguments of unions and of annotated types may be sections.
    for argument in get_args(annotation):
        yield from _sections(argument)
