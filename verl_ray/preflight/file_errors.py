"""Errors about a file, in the form of a problem of the setting that names the file."""

from __future__ import annotations

from collections.abc import Sequence

from verl_ray.config.data import DataSet, in_words
from verl_ray.errors import DataError, HubError, InputError, OverlongRows, Problem


def problem_of(key: str, value: str, error: InputError) -> Problem:
    """Return an error about a file as a problem of the setting that names the file.

    Args:
        key: The setting.
        value: Its value, the path of the file or of a folder around it.
        error: What is wrong with the file.
    """
    if isinstance(error, HubError):
        return Problem(key, value, error.rule, error.fix)

    rule = error.rule_in(value)
    fix = error.remedy.rstrip(".") or "correct it there, or name another one"
    fix = f"{fix[0].upper()}{fix[1:]}."
    if isinstance(error, OverlongRows):
        return Problem(error.key, error.limit, rule, fix)
    return Problem(key, value, rule, fix)


def data_problem(key: str, data_sets: Sequence[DataSet], error: DataError) -> Problem:
    """Return an error about one of several data sets as a problem of their setting."""
    paths = [data_set.path for data_set in data_sets if error.is_about(data_set.path)]
    return problem_of(key, paths[0] if paths else in_words(data_sets), error)
