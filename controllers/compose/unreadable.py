"""Problems of YAML files that cannot be read or composed.

Invariant: a problem names the file, the line and the column where they are known,
and what is expected there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from controllers.compose.trees import first_line
from verl_ray.errors import Problem
from verl_ray.suggest import did_you_mean

UNREADABLE = (
    HydraException,
    OmegaConfBaseException,
    YAMLError,
    # A defaults list that is none, and bytes that are no text.
    ValueError,
    # A config whose defaults list leads back to itself.
    RecursionError,
)
"""What Hydra and YAML raise where a file is at fault."""

_WHOLE_FILE = (
    "A root config of your own begins with `defaults: [grpo, _self_]`; sections of"
    " keys follow, such as `run: {total_steps: 7}`."
)
_MISSING_CHOICE = re.compile(r"Could not (?:find|load) '(?:(.+)/)?([^/']+)'")


def file_problem(
    error: Exception,
    config_name: str,
    config_dir: str | None,
    options_of: Callable[[str], list[str]],
) -> Problem:
    """Return what is wrong with the file that Hydra stopped at.

    Args:
        error: what Hydra raised, one of `UNREADABLE`.
        config_name: the root config.
        config_dir: the folder of the user's own, or None.
        options_of: the choices of a group, or the root configs for "".
    """
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return _syntax_problem(error)

    key = "--config-name"
    if isinstance(error, UnicodeDecodeError):
        file = _file_of(error.object, config_dir)
        rule = "this file is no text in UTF-8"
        return Problem(key, file or config_name, rule, "Save it as UTF-8.")

    if isinstance(error, RecursionError):
        rule = "its defaults list leads back to itself"
        fix = "Take the config itself, and those that begin with it, out of the list."
        return Problem(key, config_name, rule, fix)

    message = _message(error)
    choice = _MISSING_CHOICE.search(message)
    if choice is not None:
        group, name = choice.groups()
        group = group or ""
        options = [name for name in options_of(group) if group or name != config_name]
        fix = did_you_mean(name, options, group or "config")
        return Problem(key, config_name, first_line(message), fix)

    if "ListConfig" in message:
        rule = "this file is a list, and a configuration is made of sections"
        return Problem(key, config_name, rule, _WHOLE_FILE)

    if "Invalid defaults list" in message:
        return Problem(key, config_name, first_line(message), _WHOLE_FILE)

    rule = f"this file cannot be composed: {first_line(message)}"
    fix = "A value may refer to a key, as in ${model.path}; nothing else has a ${."
    return Problem(key, config_name, rule, fix)


def _syntax_problem(error: MarkedYAMLError) -> Problem:
    """Return the problem of a file that is no YAML."""
    mark = error.problem_mark
    assert mark is not None
    file = Path(mark.name)
    place = f"line {mark.line + 1}, column {mark.column + 1}"

    rule = f"{place}: {error.problem}"
    if error.context and error.context_mark is not None:
        rule += (
            f" ({error.context}, which begins in line {error.context_mark.line + 1})"
        )

    return Problem(str(file), _line(file, mark.line), rule, _repair(str(error.problem)))


def _repair(problem: str) -> str:
    """Return what YAML expects where a parser found something else."""
    if r"'\t'" in problem:
        return "Indent with blanks; YAML takes no tabs."
    if "duplicate key" in problem:
        return "A section stands in a file once: join the two."
    if "expected ',' or" in problem:
        return "Close the bracket, and separate what is inside by commas."
    if "tag" in problem:
        return "Write a plain value: a text, a number, true, false, null, or a list."
    return "Write `key: value`; what is inside of a section is indented by blanks."


def _line(file: Path, number: int) -> str:
    """Return a line of a file, counted from 0; empty after its end."""
    lines = file.read_text("utf-8", errors="replace").splitlines()
    if number >= len(lines):
        return ""
    return lines[number].strip()


def _file_of(content: bytes, config_dir: str | None) -> str | None:
    """Return the YAML file in a folder that holds some bytes; None if there is none."""
    if config_dir is None:
        return None

    for file in sorted(Path(config_dir).rglob("*.yaml")):
        if content in file.read_bytes():
            return str(file)

    return None


def _message(error: BaseException) -> str:
    """Return the message of an error, or of its cause where it has none."""
    cause: BaseException | None = error
    while cause is not None:
        if str(cause).strip():
            return str(cause)
        cause = cause.__cause__ or cause.__context__

    return type(error).__name__
