"""Errors about a file, in the form of a problem of the setting that names the file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from verl_ray.config.data import DataSet, in_words
from verl_ray.errors import (
    CheckpointError,
    DataError,
    HubError,
    ModelError,
    OverlongRows,
    Problem,
)

_START_OF_FIX = re.compile(
    r"; (?=set|expected|rename|correct|point|put|add|use|take|choose|write)"
    r"|, (?=expected)|\. (?=Set|Expected|Restore)"
)

_BRACKETS = re.compile(r"\([^()]*\)")


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
    if isinstance(error, HubError):
        return Problem(key, value, error.rule, error.fix)
    message = str(error).removeprefix(value).lstrip(":, ")
    if isinstance(error, OverlongRows):
        return _problem(error.key, error.limit, message)
    return _problem(key, value, message)


def data_problem(key: str, data_sets: Sequence[DataSet], error: DataError) -> Problem:
    """Return an error about one of several data sets as a problem of their setting."""
    # An error begins with the path of its file.
    paths = [
        data_set.path for data_set in data_sets if str(error).startswith(data_set.path)
    ]
    return problem_of(key, paths[0] if paths else in_words(data_sets), error)


def _problem(key: str, value: object, message: str) -> Problem:
    """Return a problem whose fix is the end of a message."""
    start = re.search(_START_OF_FIX, _own_words(message))
    if start is None:
        return Problem(key, value, message, "Correct it there, or name another one.")
    rule = message[: start.start()]
    fix = message[start.end() :].rstrip(".")
    return Problem(key, value, rule, f"{fix[0].upper()}{fix[1:]}.")


def _own_words(message: str) -> str:
    """Return a message in which what stands in brackets is blotted out.

    Brackets hold the words of a library, which may read like a fix.
    """
    count = 1
    # Each round blots out the innermost brackets; ends when there are none.
    while count:
        message, count = _BRACKETS.subn(lambda match: "_" * len(match[0]), message)
    return message
