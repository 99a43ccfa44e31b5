"""Forms in which a setting names a function, told apart by their spelling.

A setting is the name of a function, or a table of its name and its arguments:
`{function: format, tags: [think, answer]}`. Past the configuration such a table is the
same object as a text in JSON, so that a spec is always a text.

Invariant: nothing is looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

DEFAULT = "default"
"""The data source that stands for all without a function of their own."""

NAME = "function"
"""Key of the table that names the function; all others are arguments."""

PICKLE = ".pkl"
"""Ending of the path of a function that cloudpickle has written."""

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def names_module(spec: str) -> bool:
    """Return whether a spec is of the form `package.module:function`."""
    module, colon, _ = spec.rpartition(":")
    is_dotted = _MODULE.fullmatch(module) is not None
    return bool(colon) and is_dotted and not module.endswith(".py")


def spec_of(name: str, arguments: Mapping[str, object]) -> str:
    """Return the spec of a function with these arguments, which are plain values."""
    if not arguments:
        return name
    return json.dumps({NAME: name, **arguments}, ensure_ascii=False)


def parts_of(spec: str) -> tuple[str, dict[str, object]]:
    """Return the name and the arguments of the function that a spec is of."""
    if not spec.startswith("{"):
        return spec, {}
    arguments = json.loads(spec)
    name: str = arguments.pop(NAME)
    return name, arguments


def in_words(spec: str) -> str:
    """Return a spec as messages show it: its name, and its arguments in brackets."""
    name, arguments = parts_of(spec)
    if not arguments:
        return name
    return f"{name} ({', '.join(f'{key}={arguments[key]}' for key in arguments)})"
