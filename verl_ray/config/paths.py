"""Types of settings that hold a path.

Invariant: every local path of a configuration is absolute, because a worker's current
folder is not the user's.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, PlainSerializer
from pydantic_core import PydanticCustomError

from verl_ray.paths import UnknownPart, expanded
from verl_ray.settings.function_specs import (
    COMMAND,
    NAME,
    PICKLE,
    command_of,
    command_spec,
    names_module,
    parts_of,
    spec_of,
)
from verl_ray.settings.hub_ids import is_hub_id
from verl_ray.suggest import closest

UNKNOWN_PART = "unknown_part"
"""Type of the error about a path or a function that has no meaning here."""

_PATH = "_path"  # ending of the name of an argument that is a path

NAMED_TEMPLATES = ("chatml", "plain")
"""Names of our own chat templates (`verl_ray/data/tokenizers.py`)."""

_BEGINS_JINJA = re.compile(r"\{[{%]")

# Values of run.resume that are no path, in any spelling; rules refuse wrong ones.
_NO_CHECKPOINT = ("auto", "none", "true", "false")


def _local(path: str) -> str:
    try:
        return expanded(path)
    except UnknownPart as error:
        context = {"rule": error.rule, "fix": error.fix}
        raise PydanticCustomError(UNKNOWN_PART, "{rule}", context) from None


def _local_or_id(path: str) -> str:
    # What is here by that name is meant, and so is a folder here by the first part.
    if is_hub_id(path) and not Path(path).parent.is_dir():
        return path
    return _local(path)


def _template(value: str) -> str:
    # A configuration that was written down holds the text.
    if value in NAMED_TEMPLATES or _BEGINS_JINJA.search(value):
        return value
    path = _local(value)
    try:
        text = Path(path).read_text(encoding="utf-8")
        fault = None if _BEGINS_JINJA.search(text) else "no Jinja template"
    except (OSError, UnicodeDecodeError) as error:
        fault = getattr(error, "strerror", None) or "not UTF-8"
    if fault is not None:
        names = ", ".join(NAMED_TEMPLATES)
        fix = f"Set it to {names} or the path of a file with a Jinja template."
        context = {"rule": f"{path}: {fault}", "fix": fix}
        raise PydanticCustomError(UNKNOWN_PART, "{rule}", context)
    return text


def _checkpoint(path: str) -> str:
    return path if path.lower() in _NO_CHECKPOINT else _local(path)


def function_path(spec: str) -> str:
    """Return the spec of a function with the path of its file, if any, absolute."""
    if spec.endswith(PICKLE):
        return _local(spec)
    path, colon, function = spec.rpartition(":")
    # A built-in function is no path, and neither is `package.module:function`.
    if not colon or names_module(spec):
        return spec
    return f"{_local(path)}:{function}"


def function_text(value: object) -> object:
    """Return a table of a function and its arguments as a text, anything else as is."""
    arguments = _table(value)
    if arguments is None:
        return value
    function = arguments.pop(NAME, None)
    if not isinstance(function, str):
        raise _unknown_table(f"the table names no {NAME}")
    return spec_of(function, arguments)


def _table(value: object) -> dict[str, object] | None:
    """Return a table, also of its text; empty for a mistake in one, None for others."""
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    elif not isinstance(value, Mapping):
        return None
    return dict(value) if isinstance(value, Mapping) else {}


def _unknown_table(rule: str, *more: str) -> PydanticCustomError:
    fix = " or ".join([f"Write {{{NAME}: NAME, ARGUMENT: VALUE}}", *more])
    context = {"rule": rule, "fix": f"{fix}."}
    return PydanticCustomError(UNKNOWN_PART, "{rule}", context)


def function_here(spec: str) -> str:
    """Return a spec whose paths, that of its file and of arguments, are absolute."""
    function, arguments = parts_of(spec)
    for name, argument in arguments.items():
        if name.endswith(_PATH) and isinstance(argument, str):
            arguments[name] = _local(argument)
    return spec_of(function_path(function), arguments)


def function_setting(spec: str) -> str | dict[str, object]:
    """Return a spec as it stands in YAML."""
    function, arguments = parts_of(spec)
    return {NAME: function, **arguments} if arguments else function


def environment_text(value: object) -> object:
    """Return a table of an environment or a command as a text, anything else as is."""
    arguments = _table(value)
    if arguments is None:
        return value
    names = [name for name in (NAME, COMMAND) if isinstance(arguments.get(name), str)]
    if len(names) != 1:
        rule = f"the table names neither a {NAME} nor a {COMMAND}"
        if names:
            rule = f"the table names a {NAME} and a {COMMAND}"
        for key in arguments if not names else ():
            if key in (NAME, COMMAND):
                rule += f": its {key} is no text"
                break
            for near in closest(key, (NAME, COMMAND), 1):
                rule += f"; did you mean {near} by {key}?"
        raise _unknown_table(rule, f"{{{COMMAND}: PROGRAM, OPTION: VALUE}}")
    name = str(arguments.pop(names[0]))
    return spec_of(name if names == [NAME] else command_spec(name), arguments)


def environment_here(spec: str) -> str:
    """Return a spec whose paths are absolute, those of files in a command included."""
    command = command_of(spec)
    if command is None:
        return function_here(spec)
    _, options = parts_of(spec)
    return spec_of(command_spec(command_here(command)), options)


def command_here(command: str) -> str:
    """Return a command in which each word that is the path of a file is absolute.

    The first word is one only with a slash, since others are programs of the PATH.
    """
    try:
        words = shlex.split(command)
    # It is refused once it is looked at.
    except ValueError:
        return command
    here = [
        word if number == 0 and "/" not in word else _file_here(word)
        for number, word in enumerate(words)
    ]
    return command if here == words else shlex.join(here)


def _file_here(word: str) -> str:
    # No shell reads a command, so what is not there is no mistake.
    with contextlib.suppress(UnknownPart, OSError, ValueError):
        path = expanded(word)
        if Path(path).is_file():
            return path
    return word


def environment_setting(spec: str) -> str | dict[str, object]:
    """Return a spec as it stands in YAML."""
    command = command_of(spec)
    if command is None:
        return function_setting(spec)
    _, options = parts_of(spec)
    return {COMMAND: command, **options}


LocalPath = Annotated[str, AfterValidator(_local)]
"""A path of this machine."""

HubPath = Annotated[str, AfterValidator(_local_or_id)]
"""A path of this machine, or the id of a model or data set on the hub."""

CheckpointPath = Annotated[str, AfterValidator(_checkpoint)]
"""The path of a checkpoint, or a word that stands for one."""

ChatTemplate = Annotated[str, AfterValidator(_template)]
"""The name of a chat template of ours, or the text of another one, which is given as
the path of its file."""

RewardFunction = Annotated[
    str,
    BeforeValidator(function_text),
    AfterValidator(function_here),
    PlainSerializer(function_setting),
]
"""The name of a reward function, with the path of its file or without, or a table of
its name and its arguments; an argument whose name ends in `_path` is a path."""

EnvironmentSpec = Annotated[
    str,
    BeforeValidator(environment_text),
    AfterValidator(environment_here),
    PlainSerializer(environment_setting),
]
"""The name of an environment or of an agent's function, or a table of it and its
options, or a table of a command and its options; paths as in `RewardFunction`."""
