"""Errors about a file, in the form of a problem of the setting that names the file."""

from __future__ import annotations

import re

from verl_ray.errors import CheckpointError, DataError, ModelError, Problem

_START_OF_FIX = re.compile(
    r"; (?=set|expected|rename|correct|point|put|add|use|take|choose|write)"
    r"|, (?=expected)|\. (?=Set|Expected|Restore)"
)


def problem_of(
    key: str, value: str, error: DataError | ModelError | CheckpointError
) -> Problem:
    """Return an error about a file as a problem of the setting that names the file.

    Such errors say what was found, then what was expected or what to change.

    Args:
        key: The setting.
        value: Its value, the path of the file or of a folder around it.
        error: What is wrong with the file.
    """
    message = str(error).removeprefix(value).lstrip(":, ")
    rule, *rest = re.split(_START_OF_FIX, message, maxsplit=1)
    if not rest:
        return Problem(key, value, message, "Correct it there, or name another one.")
    fix = rest[0].rstrip(".")
    return Problem(key, value, rule, f"{fix[0].upper()}{fix[1:]}.")
