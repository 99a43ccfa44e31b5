"""Specs of environments: from the words of a configuration to what makes episodes.

A spec is `path/to/file.py:name` or `package.module:name`. What it names is

- a class with `reset`, `step` and `close`: an `Environment`, built for each episode,
  whose methods may be plain, or an environment of Gymnasium;
- a class without `step`: its public methods are the tools of a `ToolSet`, with an
  object for each episode;
- a coroutine function `run(task, policy)`, which returns the score;
- a coroutine function `run(task, base_url, api_key)`, an agent that asks by HTTP;
- a function, or a list of functions: the tools of a `ToolEnvironment`.

The spec of a command, `{"command": "python my_agent.py"}`, names an agent as well.

Invariant: `spec_problem` runs nothing of the user's. `load_environment` runs the file,
so it belongs into a process that can be killed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import symtable
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ray.agents.contract import Environment
from verl_ray.agents.episode import (
    EnvironmentFactory,
    Run,
)
from verl_ray.agents.gateway.launch import Agent, AgentCommand, AgentFunction, Client
from verl_ray.agents.plain_environments import METHODS, environment_factory
from verl_ray.agents.tools import (
    ToolEnvironment,
    ToolSet,
    as_tool,
    method_names,
    methods_of,
    require_distinct,
)
from verl_ray.errors import ConfigError, Problem
from verl_ray.paths import path_suggestion
from verl_ray.settings.function_specs import (
    command_of,
    in_words,
    names_module,
    spec_of,
)
from verl_ray.suggest import did_you_mean
from verl_ray.user_files import run_file, words_of

KEY = "agent.environments"
"""The section of the configuration: data source -> spec."""

EXPECTED = (
    "Expected path/to/file.py:name, package.module:name or {command: PROGRAM ...}."
)

_RUN = ("task", "policy")
_AGENT = ("task", "base_url", "api_key")
_CLIENT = "client"
_KINDS = (
    "Name a class with methods reset, step and close, a coroutine function"
    " run(task, policy) or run(task, base_url, api_key), or functions or a class of"
    " methods with type hints and docstrings as tools."
)
_OUR_FRAMES = (__file__, "<frozen", importlib.__file__)


def spec_problem(
    spec: str, key: str, options: Mapping[str, Any] | None = None
) -> Problem | None:
    """Return what is wrong with a spec, without running what it names.

    Args:
        key: The configuration key that the problem will name.
        options: Options beside it. Those of a command are looked at, since no code of
            the user's takes them.
    """
    if command_of(spec) is not None:
        try:
            _command(spec, options or {}, key)
        except ConfigError as error:
            return error.problems[0]
        return None
    place, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier():
        return Problem(key, spec, "names no environment", EXPECTED)
    if names_module(spec):
        package = place.partition(".")[0]
        if importlib.util.find_spec(package) is not None:
            return None
        fix = f"Install it, put its folder on PYTHONPATH, or correct it. {EXPECTED}"
        return Problem(key, spec, f"there is no package {package!r}", fix)

    path = Path(place).expanduser()
    if not path.is_file():
        rule = f"the file {path} does not exist"
        if not path.is_absolute():
            rule += f" (the current folder is {Path.cwd()})"
        return Problem(key, spec, rule, path_suggestion(path, EXPECTED))
    if path.suffix != ".py":
        return Problem(key, spec, f"{path.name} does not end in .py", EXPECTED)
    return _name_problem(path, name, spec, key)


def _name_problem(path: Path, name: str, spec: str, key: str) -> Problem | None:
    """Return a problem if a file does not define a name at its top level."""
    try:
        text = path.read_text(encoding="utf-8")
        module = symtable.symtable(text, str(path), "exec")
    except (SyntaxError, ValueError, OSError) as error:
        rule = f"the file {path} cannot be read as Python: {error}"
        return Problem(key, spec, rule, "Correct the file.")

    names = {symbol.get_name(): symbol for symbol in module.get_symbols()}
    # A module may define its names in ways that nobody sees without running it.
    if "__getattr__" in names or "import *" in text:
        return None
    symbol = names.get(name)
    if symbol is not None and (symbol.is_assigned() or symbol.is_imported()):
        return None
    rule = f"the file {path} defines no {name!r} at its top level"
    return Problem(key, spec, rule, _nearest(name, text))


def _nearest(name: str, text: str) -> str:
    """Return what of a file would do in the place of a name that it does not define."""
    names = [each for each in _usable(ast.parse(text).body) if each[0] != "_"]
    return did_you_mean(name, names, "environment or tool") if names else _KINDS


def _usable(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield what a file defines that may be environments: see `_KINDS`."""
    classes = {each.name: each for each in statements if isinstance(each, ast.ClassDef)}
    for each in statements:
        match each:
            case ast.ClassDef(name=name) if _has_methods(each, classes):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.List(elts=parts) | ast.Tuple(elts=parts),
            ) if all(isinstance(part, ast.Name) for part in parts):
                yield name


def _has_methods(owner: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> bool:
    """Return whether a class has public methods of its own, or of one of `classes`."""
    methods = (ast.FunctionDef, ast.AsyncFunctionDef)
    if any(isinstance(each, methods) and each.name[0] != "_" for each in owner.body):
        return True
    inner = {name: each for name, each in classes.items() if name != owner.name}
    bases = [each.id for each in owner.bases if isinstance(each, ast.Name)]
    return any(_has_methods(inner[base], inner) for base in bases if base in inner)


def runnable(loaded: EnvironmentFactory | Run | Agent) -> EnvironmentFactory | Run:
    """Return what `run_episode` takes, of what `load_environment` returns."""
    if not isinstance(loaded, Agent):
        return loaded
    # Imported here: only agents need an HTTP server.
    from verl_ray.agents.gateway.server import run_of

    return run_of(loaded)


def load_environment(
    spec: str, options: Mapping[str, Any] | None = None, key: str = KEY
) -> EnvironmentFactory | Run | Agent:
    """Return what `run_episode` takes, of what a spec names, or an agent.

    A user's file is run, once per process, with its folder importable.

    Args:
        options: Keyword arguments of the class or the coroutine function; for tools,
            those of `ToolEnvironment`. A class of tools has its own besides. Each is a
            value that JSON has, and becomes what its type hint names, such as a path of
            a text.
        key: The configuration key, `agent.environments.SOURCE`, for errors.

    Raises:
        ConfigError: There is no such thing, its file cannot be run, it is none of these
            kinds, or it does not take the options or their types.
    """
    arguments = dict(options or {})
    if command_of(spec) is not None:
        return Agent(_command(spec, arguments, key))
    problem = spec_problem(spec, key)
    if problem is not None:
        raise ConfigError([problem])
    target = _imported(spec, key)

    def refused(rule: str, fix: str) -> ConfigError:
        return ConfigError([Problem(key, spec, rule, fix)])

    if inspect.isclass(target) and not hasattr(target, "step") and method_names(target):
        return _tool_set(target, arguments, key, spec, refused)
    if inspect.isclass(target):
        _require_environment(target, refused)
        arguments = _options(target, 0, arguments, refused)
        return environment_factory(target, functools.partial(target, **arguments))
    coroutine = _coroutine(target, arguments, refused)
    if coroutine is not None:
        return coroutine

    functions = target if isinstance(target, list | tuple) else [target]
    if not functions or not all(map(callable, functions)):
        kind = type(target).__name__
        raise refused(f"is a {kind}, and no environment", _KINDS)
    tools = [as_tool(function, key, spec) for function in functions]
    # They are refused now, and not in each episode.
    require_distinct(tools, key, spec)
    arguments = _options(ToolEnvironment, 1, arguments, refused)
    return functools.partial(ToolEnvironment, tools, **arguments)


def _coroutine(
    target: Any, options: dict[str, Any], refused: Callable[[str, str], ConfigError]
) -> Run | Agent | None:
    """Return a coroutine function as what it is; None if it is a tool, or no function.

    Raises:
        ConfigError: It has other first parameters than it should, or does not take the
            options.
    """
    is_coroutine = inspect.iscoroutinefunction(target)
    if not is_coroutine and not inspect.isfunction(target):
        return None
    names = tuple(inspect.signature(target).parameters)
    if is_coroutine and names[: len(_RUN)] == _RUN:
        arguments = _options(target, len(_RUN), options, refused)
        run: Run = functools.partial(target, **arguments)
        return run
    if is_coroutine and names[: len(_AGENT)] == _AGENT:
        return Agent(_agent_function(target, options, refused))

    firsts = [first for first in (_RUN, _AGENT) if set(first) <= set(names)]
    if _CLIENT in options:
        firsts = [_AGENT]
    # A tool may have any parameters, and hardly those of an agent.
    if not firsts or (firsts[0] == _RUN and not is_coroutine):
        return None
    rule = "is a coroutine function with other first parameters"
    if not is_coroutine:
        rule = "is a function without async, and no agent"
    name = getattr(target, "__name__", "run")
    fix = f"Write async def {name}({', '.join(firsts[0])}), then options."
    raise refused(rule, fix)


def _command(spec: str, options: Mapping[str, object], key: str) -> AgentCommand:
    """Return the agent of a command.

    Raises:
        ConfigError: It has not these options, or their values are wrong on this
            machine.
    """

    def refused(rule: str, fix: str) -> ConfigError:
        return ConfigError([Problem(key, in_words(spec_of(spec, options)), rule, fix)])

    arguments = _options(AgentCommand, 1, options, refused)
    command = AgentCommand(command_of(spec) or "", **arguments)
    problems = list(command.problems(key))
    if problems:
        raise ConfigError(problems)
    return command


def _agent_function(
    target: Callable[..., Any],
    options: dict[str, Any],
    refused: Callable[[str, str], ConfigError],
) -> AgentFunction:
    """Return the agent of a coroutine function.

    Raises:
        ConfigError: It does not take the options, or there is no such client.
    """
    client: Any = options.pop(_CLIENT, "openai")
    client = _converted(_CLIENT, client, Client, refused)
    arguments = _options(target, len(_AGENT), options, refused)
    return AgentFunction(functools.partial(target, **arguments), client)


def _tool_set(
    owner: type,
    options: Mapping[str, object],
    key: str,
    spec: str,
    refused: Callable[[str, str], ConfigError],
) -> EnvironmentFactory:
    """Return what makes the environment of a class whose methods are tools.

    Raises:
        ConfigError: A method cannot be a tool, or an option is not one.
    """
    if inspect.isabstract(owner):
        raise refused("is an abstract class", "Name one that can be built.")
    own = inspect.signature(owner).parameters
    common = [
        name
        for name in inspect.signature(ToolEnvironment).parameters
        if name in options and name not in own
    ]
    episode_options = {name: options[name] for name in common}
    owner_options = {
        name: value for name, value in options.items() if name not in common
    }
    make = functools.partial(owner, **_options(owner, 0, owner_options, refused))
    episode_options = _options(ToolEnvironment, 1, episode_options, refused)
    return functools.partial(
        ToolSet, make, methods_of(owner, key, spec), **episode_options
    )


def _imported(spec: str, key: str) -> Any:
    """Return the object that a spec names.

    Raises:
        ConfigError: It cannot be imported.
    """
    place, _, name = spec.rpartition(":")
    path = Path(place).expanduser().resolve()
    is_module = names_module(spec)
    subject = f"the module {place}" if is_module else f"the file {path}"
    try:
        module = importlib.import_module(place) if is_module else run_file(path)
        if hasattr(module, name):
            return getattr(module, name)
    # SystemExit at import is a failure like any other.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        cause = words_of(error, _OUR_FRAMES)
        rule = f"{subject} cannot be imported: {cause}"
        raise ConfigError([Problem(key, spec, rule, "Correct it.")]) from error

    try:
        fix = _nearest(name, inspect.getsource(module))
    # Not every module has a file in Python.
    except (OSError, TypeError):
        fix = _KINDS
    raise ConfigError([Problem(key, spec, f"{subject} has no {name!r}", fix)])


def _require_environment(
    target: type, refused: Callable[[str, str], ConfigError]
) -> None:
    """Raise ConfigError if a class is no `Environment`."""
    missing = [name for name in METHODS if not hasattr(target, name)]
    if missing:
        rule = f"is a class without {' and '.join(missing)}"
        raise refused(rule, f"Add what {Environment.__module__}.Environment has.")
    for name in METHODS:
        if not inspect.isroutine(getattr(target, name)):
            raise refused(f"has a {name} that is no method", f"Write def {name}.")
    if inspect.isabstract(target):
        raise refused("is an abstract class", "Name one that can be built.")


def _options(
    target: Callable[..., object],
    num_given: int,
    options: Mapping[str, object],
    refused: Callable[[str, str], ConfigError],
) -> dict[str, Any]:
    """Return the options of a class or a function as the types of its hints.

    Args:
        num_given: Number of its first parameters that are no options.

    Raises:
        ConfigError: It does not take one of them, or needs another.
    """
    signature = inspect.signature(target)
    parameters = list(signature.parameters.values())[num_given:]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = [
        each
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    names = [each.name for each in named]

    for option in options:
        if option not in names and not takes_any:
            fix = did_you_mean(option, names, "option") if names else "Leave it out."
            raise refused(f"takes no option {option}", fix)
    needed = [each.name for each in named if each.default is each.empty]
    missing = [name for name in needed if name not in options]
    if missing:
        fix = f"Give it a value beside the spec, or a default: {missing[0]}=None."
        raise refused(f"needs the option {missing[0]}", fix)

    values = dict(options)
    hints = _type_hints(target)
    for name, value in options.items():
        if name in names and name in hints:
            values[name] = _converted(name, value, hints[name], refused)
    return values


def _type_hints(target: Callable[..., object]) -> dict[str, Any]:
    """Return the type hints of the parameters of a class or a function."""
    function: Any = target
    if inspect.isclass(target):
        function = target.__init__
    try:
        return typing.get_type_hints(function, include_extras=True)
    # Names that are only imported for type checkers are not there.
    except (NameError, AttributeError, TypeError):
        return {}


def _fix_of(name: str, value: object, hint: Any) -> str:
    """Return what to write in place of a value that is not of the type of a hint."""
    origin, names = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal and isinstance(value, str):
        return did_you_mean(value, [*map(str, names)], name)
    # Not every origin, such as that of a union, is a class.
    is_list = isinstance(origin, type) and issubclass(origin, Sequence)
    if is_list and isinstance(value, str):
        return f"Write {name}=[{value}]."
    return "Give it what its type hint says."


def _converted(
    name: str, value: object, hint: Any, refused: Callable[[str, str], ConfigError]
) -> object:
    """Return the value of an option as the type of its hint.

    Raises:
        ConfigError: It has another type.
    """
    # Imported here: most environments have no options.
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    try:
        # As in JSON: a list may be a tuple, but no text is a number or a truth value.
        text = json.dumps(value, default=str)
        return TypeAdapter(hint).validate_json(text, strict=True)
    except ValidationError as error:
        reason = error.errors()[0]
        place = ".".join(map(str, (name, *reason["loc"])))
        rule = f"does not take the option {name}={value!r} ({place}: {reason['msg']})"
        raise refused(rule, _fix_of(name, value, hint)) from None
    # A type that pydantic does not know is for the user's code to look at.
    except (PydanticUserError, NameError):
        return value
