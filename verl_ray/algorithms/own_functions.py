"""Functions of a user's own: `path/to/file.py:function` in place of a name.

Invariant: nothing of the user's runs before a step does; the file is only parsed. A
function reads settings like the built-in ones: its keyword arguments are keys of
`algorithm`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import numpy as np

from verl_ray.algorithms.declaration import D, Setting
from verl_ray.config.suggest import did_you_mean
from verl_ray.data.batch import Int64
from verl_ray.data.stages import Bool, Float32
from verl_ray.errors import DataError
from verl_ray.user_files import run_file, words_of


class OwnFunctionMistake(DataError):
    """A function that cannot take the place of a built-in one."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule, fix=fix)
        # An exception is rebuilt from these in another process.
        self.args = rule, fix


def is_own(name: str) -> bool:
    """Return whether a choice names a file of the user's."""
    return ":" in name


@dataclass(frozen=True)
class OwnFunction:
    """A function of a user's own, which is imported when it is first called.

    Attributes:
        spec: `path/to/file.py:function`.
        as_result: Makes the result of what it returned and its positional arguments,
            or raises a ValueError that says what is wrong.
    """

    spec: str
    as_result: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it.

        Raises:
            DataError: Its file cannot be run, it raises, or it returns something else
                than its kind of function does.
        """
        path, _, name = self.spec.rpartition(":")
        # A setting that is null leaves the default of the function.
        overrides = {key: value for key, value in kwargs.items() if value is not None}
        try:
            returned = getattr(run_file(Path(path)), name)(*args, **overrides)
        except (Exception, SystemExit) as error:
            words = words_of(error, (__file__, *_OUR_FILES))
            raise DataError(f"{self.spec} failed: {words}") from error
        try:
            return self.as_result(returned, *args)
        except ValueError as error:
            raise DataError(f"{self.spec} returned {error}") from error


def as_numbers_of_rows(
    returned: object, rewards: Float32, _group: Int64, _valid: Bool
) -> Float32:
    """Return what a function has returned, as one finite number per row.

    Raises:
        ValueError: It is something else.
    """
    numbers = _one_per_row(returned, rewards)
    _require_finite(numbers)
    return numbers


def as_numbers_of_valid_rows(
    returned: object, score: Float32, _group: Int64, valid: Bool
) -> Float32:
    """Return what a function has returned, as one number per row.

    It is finite where `valid`, bool [rows], is True, and may be anything elsewhere.

    Raises:
        ValueError: It is something else.
    """
    numbers = _one_per_row(returned, score)
    _require_finite(numbers[valid])
    return numbers


def _one_per_row(returned: object, rewards: Float32) -> Float32:
    """Return an array as float32 [rows].

    Raises:
        ValueError: It is none, or of another shape.
    """
    try:
        numbers = np.asarray(returned, np.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{type(returned).__name__}, no array: {error}") from error
    if numbers.shape != rewards.shape:
        raise ValueError(
            f"an array of shape {numbers.shape}; expected one number per row,"
            f" {rewards.shape}"
        )
    return numbers


def _require_finite(numbers: Float32) -> None:
    """Refuse infinities and NaN.

    Raises:
        ValueError: There are some.
    """
    if not np.isfinite(numbers).all():
        raise ValueError("numbers that are not finite")


_OUR_FILES = (str(Path(__file__).parent), "<frozen")


class Choices(dict[str, D], Generic[D]):
    """A table of choices by name, which also has the functions of users.

    Those are not among its items, so that lists of choices are those of the package.
    """

    def __init__(
        self,
        declared: Mapping[str, D],
        declare: Callable[[str, Mapping[Setting, object]], D],
    ) -> None:
        """Take the choices of the package.

        Args:
            declared: The choices.
            declare: Returns the choice that a spec makes, given the settings that it
                may read with their usual values.
        """
        super().__init__(declared)
        self._declare = declare
        self._own: dict[str, D] = {}

    def __missing__(self, name: str) -> D:
        """Return the choice that a spec makes.

        Raises:
            OwnFunctionMistake: Its function cannot be such a choice.
        """
        if not is_own(name):
            raise KeyError(name)
        if name not in self._own:
            settings = {
                setting: usual_value
                for choice in self.values()
                for setting, usual_value in choice.reads.items()
            }
            self._own[name] = self._declare(name, settings)
        return self._own[name]


def keywords_of(
    spec: str,
    positional: Sequence[str],
    settings: Mapping[Setting, object],
    others: Sequence[str] = (),
) -> tuple[dict[Setting, object], set[str]]:
    """Return what a user's function takes as keyword arguments, without running it.

    Args:
        spec: `path/to/file.py:function`.
        positional: The names of its positional arguments.
        settings: The settings that it may read, with their usual values.
        others: Further keyword arguments that it may take.

    Returns:
        The settings, each with its usual value or None if it has a default; and those
        of `others`.

    Raises:
        OwnFunctionMistake: There is no such function, or it takes other arguments.
    """
    function = _definition(spec)
    arguments = function.args
    takes = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if takes != list(positional):
        raise OwnFunctionMistake(
            f"{function.name} takes ({', '.join(takes)})",
            f"Expected {_example(function.name, positional)}, where settings"
            f"{''.join(f', {other}' for other in others)} may come behind the *.",
        )

    by_name = {setting.name: setting for setting in settings}
    reads: dict[Setting, object] = {}
    also: set[str] = set()
    for argument, default in zip(
        arguments.kwonlyargs, arguments.kw_defaults, strict=True
    ):
        if argument.arg in others:
            also.add(argument.arg)
        elif argument.arg in by_name:
            setting = by_name[argument.arg]
            reads[setting] = settings[setting] if default is None else None
        else:
            known = sorted([*others, *by_name])
            raise OwnFunctionMistake(
                f"{function.name} takes {argument.arg}, which is no setting",
                did_you_mean(argument.arg, known, "setting"),
            )
    return reads, also


def _definition(spec: str) -> ast.FunctionDef:
    """Return the definition of a function at the top level of a file.

    Raises:
        OwnFunctionMistake: There is none.
    """
    path_text, _, name = spec.rpartition(":")
    path = Path(path_text)
    if path.suffix != ".py":
        rule = f"{path_text} does not end in .py"
        raise OwnFunctionMistake(rule, "Expected path/to/file.py:function.")
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"the file {path} cannot be read: {error.strerror}"
        raise OwnFunctionMistake(rule, "Correct the path.") from error
    except (SyntaxError, ValueError) as error:
        rule = f"the file {path} cannot be read as Python: {error}"
        raise OwnFunctionMistake(rule, "Correct the file.") from error

    functions = {
        node.name: node for node in module.body if isinstance(node, ast.FunctionDef)
    }
    if name not in functions:
        rule = f"the file {path} defines no function {name!r} at its top level"
        fix = did_you_mean(name, list(functions), "function")
        raise OwnFunctionMistake(rule, fix if functions else f"Define {name}.")
    return functions[name]


def _example(name: str, positional: Sequence[str]) -> str:
    return f"def {name}({', '.join(positional)}, *, ...)"
