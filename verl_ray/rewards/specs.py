"""Specs of reward functions: from the words of a configuration to what is called.

A spec is the name of a built-in function, `path/to/file.py:function`,
`package.module:function`, or `path/to/file.pkl`, which cloudpickle has written. What it
names may be a function, or a class, which is built once per process. With arguments a
spec is a JSON object: `{"function": NAME, "bonus": 0.5}` calls the function with
`bonus=0.5`, or builds the class with it.

Invariant: `spec_problem` runs nothing of the user's, and tells everything about a
built-in function; `load` runs it, so it belongs into a process that can be killed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import pickle
import symtable
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import path_suggestion
from verl_ray.rewards.built_in import BUILT_IN, package_problem
from verl_ray.rewards.signatures import (
    GIVEN,
    Signature,
    SignatureMistake,
    signature_of,
)
from verl_ray.settings.function_specs import PICKLE, names_module, parts_of
from verl_ray.suggest import did_you_mean, either
from verl_ray.user_files import module_path, run_file, words_of

EXPECTED = (
    "Expected the name of a built-in function, path/to/file.py:function or"
    " package.module:function."
)
_EXAMPLE = "(response, answer)"

# Frames of these files mean nothing to the author of a function.
_OUR_FRAMES = (__file__, "<frozen", importlib.__file__)


@dataclass(frozen=True)
class LoadedFunction:
    """A reward function that can be called, and what its signature names."""

    function: Callable[..., object]
    signature: Signature


# ------------------------------------------------------------- without running anything


def spec_problem(spec: str, key: str) -> Problem | None:
    """Return what is wrong with `spec`, without running what it names.

    Args:
        spec: See the module.
        key: The configuration key that the problem will name.
    """
    function, _ = parts_of(spec)
    if function in BUILT_IN:
        problem = package_problem(spec, key)
        if problem is not None:
            return problem
        try:
            _callable_of(BUILT_IN[function].target, spec)
        except SignatureMistake as mistake:
            return Problem(key, spec, mistake.rule, mistake.fix)
        return None
    return _users_problem(function, spec, key)


def _users_problem(function: str, spec: str, key: str) -> Problem | None:
    """Return what is wrong with the name of a user's function, which is not run."""
    path_text, colon, name = function.rpartition(":")
    if not colon and not function.endswith((".py", PICKLE)):
        fix = did_you_mean(function, list(BUILT_IN), "built-in reward function")
        return Problem(key, spec, "is no built-in reward function", f"{fix} {EXPECTED}")

    if names_module(function):
        module_spec = _find_module(path_text)
        if module_spec is not None:
            return _name_problem(Path(module_spec.origin or ""), name, spec, key)
        places = f"the packages of {sys.executable} or in {Path.cwd()}"
        rule = f"there is no module {path_text!r} in {places}"
        fix = f"Install it, put its folder on PYTHONPATH, or correct it. {EXPECTED}"
        return Problem(key, spec, rule, fix)

    # A file without a function is a path as a whole.
    path = Path(path_text if colon else function).expanduser()
    beside = path.with_name(f"{path.name}.py")
    if not path.is_file():
        where = "" if path.is_absolute() else f" (the current folder is {Path.cwd()})"
        rule = f"the file {path} does not exist{where}"
        if colon and beside.is_file():
            return Problem(key, spec, rule, f"Did you mean {path_text}.py:{name}?")
        return Problem(key, spec, rule, path_suggestion(path, EXPECTED))
    if path.suffix == PICKLE:
        return None
    return _name_problem(path, name if colon else None, spec, key)


def spec_problems(functions: Mapping[str, str], key: str) -> list[Problem]:
    """Return what is wrong with the specs of several functions.

    Args:
        functions: Data source -> spec.
        key: The configuration's section that they are from.
    """
    problems = [
        spec_problem(spec, f"{key}.{source}") for source, spec in functions.items()
    ]
    return [problem for problem in problems if problem is not None]


def _find_module(module: str) -> importlib.machinery.ModuleSpec | None:
    """Return where a module is, without running it; None if there is none."""
    places: list[str] | None = module_path()
    module_spec = None
    parts = module.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[: depth + 1])
        module_spec = importlib.machinery.PathFinder.find_spec(name, places)
        # Packages that are installed for editing have finders of their own.
        if module_spec is None and not depth:
            with contextlib.suppress(ValueError):
                module_spec = importlib.util.find_spec(name)
        if module_spec is None:
            return None
        places = module_spec.submodule_search_locations or []
    return module_spec


def _name_problem(path: Path, name: str | None, spec: str, key: str) -> Problem | None:
    """Return a problem if a file has no such name at its top level."""
    if path.suffix != ".py":
        return None
    # The symbol table shows the names of a file without running it.
    try:
        module = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    except (SyntaxError, ValueError, OSError) as error:
        rule = f"the file {path} cannot be read as Python: {error}"
        return Problem(key, spec, rule, "Correct the file.")

    symbols = {symbol.get_name(): symbol for symbol in module.get_symbols()}
    functions = [text for text, other in symbols.items() if other.is_namespace()]
    if name is None:
        specs = [f"{spec}:{text}" for text in functions]
        fix = f"Did you mean {either(specs)}?" if specs else EXPECTED
        return Problem(key, spec, "names a file and no function in it", fix)

    symbol = symbols.get(name)
    # A module may define its names by `import *` or `__getattr__`.
    is_open = "__getattr__" in symbols or "import *" in path.read_text("utf-8")
    if symbol is None and is_open:
        return None
    if symbol is None or not (symbol.is_assigned() or symbol.is_imported()):
        rule = f"the file {path} defines no {name!r} at its top level"
        fix = f"Define it there: def {name}{_EXAMPLE}."
        if functions:
            fix = did_you_mean(name, functions, "function")
        return Problem(key, spec, rule, fix)
    return None


# -------------------------------------------------------------------------- running it


def load(spec: str, key: str = "reward.functions") -> LoadedFunction:
    """Return the function that `spec` names.

    A user's file is run, once per process, with its folder importable; a class is
    built.

    Raises:
        ConfigError: there is no such function, its file cannot be run (the cause is in
            the message), or it cannot be called as a reward function.
    """
    problem = spec_problem(spec, key)
    if problem is not None:
        raise ConfigError([problem])

    name, _ = parts_of(spec)
    target = BUILT_IN[name].target if name in BUILT_IN else _import(name, spec, key)
    try:
        function = _callable_of(target, spec)
        return LoadedFunction(function, signature_of(function))
    except SignatureMistake as mistake:
        problem = Problem(key, spec, mistake.rule, mistake.fix, mistake.may_pass)
        raise ConfigError([problem]) from mistake


def _import(function: str, spec: str, key: str) -> object:
    """Return the object that the name of a user's function stands for.

    Raises:
        ConfigError: It cannot be imported or unpickled.
    """
    path_text, _, name = function.rpartition(":")
    path = Path(path_text or function).expanduser().resolve()
    is_module = names_module(function)
    try:
        if is_module:
            return getattr(importlib.import_module(path_text), name)
        if path.suffix == PICKLE:
            with path.open("rb") as file:
                return pickle.load(file)
        return getattr(run_file(path), name)
    # SystemExit at import is a failure like any other.
    except BaseException as error:
        cause = words_of(error, _OUR_FRAMES)
        subject = f"the module {path_text}" if is_module else f"the file {path}"
        rule = f"{subject} cannot be imported: {cause}"
        fix = "Correct it."
        if path.suffix == PICKLE:
            rule = f"{subject} cannot be unpickled: {cause}"
            fix = "Write it with cloudpickle, in the same environment."
        problem = Problem(key, spec, rule, fix, _may_pass(error))
        raise ConfigError([problem]) from error


def _may_pass(error: BaseException) -> bool:
    """Return whether code of the user's that raised this may succeed later.

    A database that it connects to may be away. A module that is not there, or a file
    that is no Python or no pickle, is a mistake.
    """
    mistakes = (ModuleNotFoundError, SyntaxError, pickle.UnpicklingError)
    return not isinstance(error, mistakes)


def _callable_of(target: object, spec: str) -> Callable[..., object]:
    """Return what is called: a function, with the arguments of its spec if it has any,
    or an instance of a class, which is built with them.

    Raises:
        SignatureMistake: The arguments do not fit, or building the class fails.
    """
    _, arguments = parts_of(spec)
    if arguments:
        _refuse_arguments(target, arguments)
    if inspect.isclass(target):
        target = _build(target, arguments)
    elif arguments and callable(target):
        target = functools.partial(target, **arguments)
    return target  # type: ignore[return-value]  # `signature_of` refuses the others


def _refuse_arguments(target: object, arguments: Mapping[str, object]) -> None:
    """Refuse arguments that are not a parameter's, or that a reward gets anyway.

    Raises:
        SignatureMistake: See above.
    """
    try:
        parameters = inspect.signature(target).parameters  # type: ignore[arg-type]
    # Something that cannot be called, or that was written in C.
    except (TypeError, ValueError):
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    given_names = frozenset() if inspect.isclass(target) else GIVEN
    free = [name for name in parameters if name not in given_names]

    for name in arguments:
        if name in given_names:
            rule = f"its argument {name} is a value that every response brings"
            raise SignatureMistake(rule, "Leave it out.")
        if name not in parameters and not takes_any:
            rule = f"it takes no argument {name}"
            fix = did_you_mean(name, free, "argument")
            raise SignatureMistake(
                rule, fix if free else "It takes none: leave it out."
            )


def _build(target: type, arguments: Mapping[str, object]) -> object:
    """Return an instance of a class, which is built with the arguments of its spec.

    Raises:
        SignatureMistake: It needs others, or building it fails.
    """
    needed = [name for name in _needed(target) if name not in arguments]
    if needed:
        rule = f"is a class that is built with {', '.join(needed)}"
        table = f"{{function: ..., {needed[0]}: ...}}"
        fix = f"Give each a value, as in {table}, or a default; or name a function."
        raise SignatureMistake(rule, fix)
    try:
        return target(**arguments)
    except SignatureMistake:
        raise
    except BaseException as error:
        cause = words_of(error, _OUR_FRAMES)
        rule = f"is a class that cannot be built: {cause}"
        raise SignatureMistake(rule, "Correct it.", _may_pass(error)) from error


def _needed(target: type) -> list[str]:
    """Return the parameters without which a class cannot be built."""
    try:
        parameters = inspect.signature(target).parameters.values()
    # Some classes written in C have no signature to look at.
    except ValueError:
        return []
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in starred
    ]
