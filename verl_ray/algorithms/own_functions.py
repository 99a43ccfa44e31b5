"""Functions of a user's own: `path/to/file.py:function` in place of a name.

A function reads settings like the built-in ones: keyword arguments that the package
knows are keys of its section. Its other ones stand beside its name: `{function:
path/to/file.py:function, beta: 0.1}`.

Invariant: nothing of the user's runs in the process that reads the configuration; the
file is only parsed there.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import numpy as np

from verl_ray.algorithms.declaration import D, Setting
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Bool, Float32
from verl_ray.errors import DataError
from verl_ray.settings.function_specs import NAME, in_words, parts_of
from verl_ray.suggest import closest, did_you_mean
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
        spec: `path/to/file.py:function`, or a table of it and its arguments as text.
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
        words = in_words(self.spec)
        function, arguments = parts_of(self.spec)
        path, _, name = function.rpartition(":")
        # A setting that is null leaves the default of the function.
        arguments |= {key: value for key, value in kwargs.items() if value is not None}
        try:
            returned = getattr(run_file(Path(path)), name)(*args, **arguments)
        except (Exception, SystemExit) as error:
            reason = words_of(error, (__file__, *_OUR_FILES))
            raise DataError(f"{words} failed: {reason}") from error
        try:
            return self.as_result(returned, *args)
        except ValueError as error:
            raise DataError(f"{words} returned {error}") from error


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
    *,
    section: str = "algorithm",
) -> tuple[dict[Setting, object], set[str]]:
    """Return what a user's function takes as keyword arguments, without running it.

    Args:
        spec: `path/to/file.py:function`, or a table of it and its arguments as text.
        positional: The names of its positional arguments.
        settings: The settings that it may read, with their usual values.
        others: Further keyword arguments that it may take.
        section: The section of the settings.

    Returns:
        The settings, each with its usual value or None if it has a default; and those
        of `others`.

    Raises:
        OwnFunctionMistake: There is no such function, or it takes other arguments.
    """
    name, own_arguments = parts_of(spec)
    function = _definition(name)
    arguments = function.args
    takes = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if takes != list(positional):
        raise OwnFunctionMistake(
            f"{function.name} takes ({', '.join(takes)})",
            f"Expected {_example(function.name, positional)}, where settings"
            f"{''.join(f', {other}' for other in others)} may come behind the *.",
        )

    by_name = {setting.name: setting for setting in settings}
    known = (*others, *by_name)
    own = [each.arg for each in arguments.kwonlyargs if each.arg not in known]
    for argument_name in own_arguments:
        _require_own(function.name, argument_name, own, by_name, section)

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
        elif default is None and argument.arg not in own_arguments:
            raise _missing(name, own_arguments, argument.arg, known)
    return reads, also


def _missing(
    name: str, values: Mapping[str, object], argument: str, known: Sequence[str]
) -> OwnFunctionMistake:
    """Return the refusal of a function with an argument that has no value."""
    similar = closest(argument, known, count=1)
    meant = f"Did you mean {similar[0]}? " if similar else ""
    table = {NAME: name, **values, argument: 1}
    example = ", ".join(f"{key}: {value}" for key, value in table.items())
    return OwnFunctionMistake(
        f"{name.rpartition(':')[2]} takes {argument}, which is no setting and has no"
        " value",
        f"{meant}If it is the function's own, give it one: {{{example}}}.",
    )


def _require_own(
    function: str,
    argument: str,
    own: Sequence[str],
    settings: Mapping[str, Setting],
    section: str,
) -> None:
    """Refuse an argument that the function does not take, or that is a setting.

    Raises:
        OwnFunctionMistake: It is one.
    """
    if argument in own:
        return
    if argument in settings:
        raise OwnFunctionMistake(
            f"{argument} is given to {function}, and is a setting",
            f"Set {section}.{argument} instead.",
        )
    raise OwnFunctionMistake(
        f"{argument} is given to {function}, which does not take it",
        did_you_mean(argument, own, "argument")
        if own
        else f"Leave it out, or let {function} take it behind a *.",
    )


def _definition(name: str) -> ast.FunctionDef:
    """Return the definition of a function at the top level of a file.

    Raises:
        OwnFunctionMistake: There is none.
    """
    path_text, _, function = name.rpartition(":")
    path = Path(path_text)
    if path.suffix != ".py":
        rule = f"{path_text or name} does not end in .py"
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
    if function not in functions:
        rule = f"the file {path} defines no function {function!r} at its top level"
        fix = did_you_mean(function, list(functions), "function")
        raise OwnFunctionMistake(rule, fix if functions else f"Define {function}.")
    return functions[function]


def _example(name: str, positional: Sequence[str]) -> str:
    return f"def {name}({', '.join(positional)}, *, ...)"
