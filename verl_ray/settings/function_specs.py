"""Forms in which a setting names a function, told apart by their spelling.

A setting is the name of a function, or a table of its name and its arguments:
`{function: format, tags: [think, answer]}`. Where a program may stand in the place of a
function, a table may name a command: `{command: python my_agent.py, reward: post}`.
Past the configuration such a table is the same object as a text in JSON, so that a spec
is always a text. The name of a command is the table of the command alone.

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

COMMAND = "command"
"""Key of the table that names a command; all others are its options."""

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
    command = command_of(name)
    named = {NAME: name} if command is None else {COMMAND: command}
    return json.dumps({**named, **arguments}, ensure_ascii=False)


def command_spec(command: str) -> str:
    """Return the spec of a command without options."""
    return json.dumps({COMMAND: command}, ensure_ascii=False)


def command_of(spec: str) -> str | None:
    """Return the command that a spec names; None if it names a function."""
    if not spec.startswith("{"):
        return None
    table = json.loads(spec)
    # A function may have an argument of that name.
    return None if NAME in table else str(table[COMMAND])


def parts_of(spec: str) -> tuple[str, dict[str, object]]:
    """Return the name and the arguments of the function that a spec is of.

    Of a command they are its spec without options, and the options.
    """
    if not spec.startswith("{"):
        return spec, {}
    arguments = json.loads(spec)
    if NAME in arguments:
        return arguments.pop(NAME), arguments
    return command_spec(arguments.pop(COMMAND)), arguments


def in_words(spec: str) -> str:
    """Return a spec as messages show it: its name, and its arguments in brackets."""
    name, arguments = parts_of(spec)
    command = command_of(name)
    if command is not None:
        name = f'command "{command}"'
    if not arguments:
        return name
    return f"{name} ({', '.join(f'{key}={arguments[key]}' for key in arguments)})"
