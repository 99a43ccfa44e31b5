"""Python functions as tools, and the environments in which the policy calls them.

A tool is a function with type hints and a docstring in Google's style. Its schema is
what `transformers` makes of both, which models have learned to read. It knows the types
that JSON has; the schemas of all others, such as enumerations, dataclasses and models
of pydantic, are pydantic's, which makes the values as well.

Invariant: what the policy does wrong comes back to it as a message, and what a tool
does wrong ends the episode. Tools of one step run one after the other.
"""

from __future__ import annotations

import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, NoneType, UnionType
from typing import TYPE_CHECKING, Any

from verl_ray.agents.contract import (
    Action,
    End,
    EpisodeTask,
    Message,
    Observation,
    Step,
    ToolCall,
    ToolSchema,
)
from verl_ray.agents.threads import OneAtATime, result_of, unbound
from verl_ray.data.fields import TOOLS, json_text
from verl_ray.errors import ConfigError, Problem
from verl_ray.suggest import did_you_mean

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_PLAIN = (int, float, str, bool, list, tuple, dict, NoneType, Any)
"""Types of which transformers writes the schema."""

_EXAMPLE = (
    "as in: def add(a: int, b: int) -> int, with the docstring 'Add two numbers.', an"
    " empty line, 'Args:', and a line 'a: The first number.' for each parameter"
)


class ToolStop(Exception):
    """A tool's way to end the episode, with a reward if it likes."""

    def __init__(self, result: object = "", reward: float = 0.0) -> None:
        """Take the last result, for the record, and the reward of the last action."""
        super().__init__(result, reward)
        self.result = result
        self.reward = reward


class ToolError(Exception):
    """A tool's way to refuse a call: the policy reads the text, and goes on."""


def call_text(call: ToolCall) -> str:
    """Return a call as models write it that vLLM's parser hermes reads."""
    written = {"name": call.name, "arguments": dict(call.arguments)}
    return f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>"


# ------------------------------------------------------------------------------ schemas


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call.

    Attributes:
        function: The function. It may be asynchronous, or return an awaitable.
        schema: Its schema, as chat templates take it.
        needed: Names of the arguments that have no default.
        types: The types of its arguments, by their names.
    """

    function: Callable[..., Any]
    schema: ToolSchema
    needed: Sequence[str]
    types: Mapping[str, TypeAdapter[Any]]

    @property
    def name(self) -> str:
        """The name by which the policy calls it."""
        name: str = self.schema["function"]["name"]
        return name

    def refusal(self, arguments: Mapping[str, object]) -> str | None:
        """Return what is wrong with the arguments of a call; None if nothing is."""
        for name in arguments:
            if name not in self.types:
                fix = did_you_mean(name, list(self.types), "argument")
                return f"{self.name} has no argument {name!r}. {fix}"
        for name in self.needed:
            if name not in arguments:
                return f"{self.name} needs the argument {name!r}."
        return None

    def values(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Return the arguments of a call as the types that the function declares.

        Raises:
            ValueError: One has another type.
        """
        from pydantic import ValidationError

        values = {}
        for name, value in arguments.items():
            try:
                values[name] = self.types[name].validate_python(value)
            except ValidationError as error:
                reason = error.errors()[0]
                place = ".".join(map(str, (name, *reason["loc"])))
                raise ValueError(f"{place}: {reason['msg']}.") from None
        return values


def as_tool(
    function: Callable[..., Any], key: str, value: object, name: str | None = None
) -> Tool:
    """Return a function, or another object that is called like one, as a tool.

    Args:
        function: Its docstring and type hints are read; of a `functools.partial` those
            of its function, and of an object those of `__call__`.
        key: The setting that names it, for errors.
        value: The value of that setting.
        name: Name of the tool; None is the function's own, or that of the object's
            class.

    Raises:
        ConfigError: It lacks a docstring, a type hint or the description of an
            argument.
    """
    called = unbound(function)
    object_name = type(called).__name__ if callable(called) else str(called)
    name = str(name or getattr(called, "__name__", object_name))

    def refused(rule: str, fix: str) -> ConfigError:
        return ConfigError([Problem(key, value, f"the tool {name} {rule}", fix)])

    if not callable(function) or inspect.isclass(called):
        raise refused("is no function", "Name a function.")
    routine, doc = _routine_and_doc(called)
    if not doc:
        fix = f"Give it one, {_EXAMPLE}."
        raise refused("has no docstring, from which the policy learns its use", fix)
    parameters = _parameters_of(function)
    for parameter in parameters:
        if parameter.kind in _STARRED or parameter.kind is parameter.POSITIONAL_ONLY:
            rule = f"has the parameter {parameter.name}, which no call can name"
            raise refused(rule, "Name each argument.")
        if parameter.annotation is inspect.Parameter.empty:
            fix = f"Add one, such as {parameter.name}: str."
            raise refused(f"has no type hint for {parameter.name}", fix)

    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError
    from transformers.utils import DocstringParsingException

    try:
        hints = typing.get_type_hints(routine, include_extras=True)
        types = {each.name: TypeAdapter(hints[each.name]) for each in parameters}
        schema = _schema(name, doc, parameters, hints, types)
    except DocstringParsingException as error:
        fix = f"Add it under Args:, {_EXAMPLE}."
        raise refused(f"is not described: {error}", fix) from error
    except (PydanticUserError, TypeError, NameError) as error:
        fix = (
            "Use int, float, str, bool, list, dict, Literal, an Enum, a dataclass, a"
            " model of pydantic, or unions of them."
        )
        # Pydantic adds the address of a page.
        reason = str(error).partition("\n")[0]
        raise refused(f"has a type hint that JSON has not: {reason}", fix) from error
    needed = [each.name for each in parameters if each.default is each.empty]
    return Tool(function, schema, needed, types)


def _routine_and_doc(called: Any) -> tuple[Any, str | None]:
    """Return what has the type hints of something that is called, and its docstring."""
    if inspect.isroutine(called):
        return called, inspect.getdoc(called)
    # An object has both in its class.
    routine = type(called).__call__
    return routine, inspect.getdoc(routine) or inspect.getdoc(called)


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function of which the policy says the values."""
    bound = function.keywords if isinstance(function, partial) else ()
    parameters = inspect.signature(function).parameters.values()
    return [each for each in parameters if each.name not in bound]


def _schema(
    name: str,
    doc: str,
    parameters: Sequence[inspect.Parameter],
    hints: Mapping[str, Any],
    types: Mapping[str, TypeAdapter[Any]],
) -> ToolSchema:
    """Return the schema of a tool, as chat templates take it.

    Raises:
        DocstringParsingException: An argument is not described.
        TypeError: A type refers to itself.
        PydanticUserError: Pydantic does not know a type.
    """
    from transformers.utils import TypeHintParsingException, get_json_schema
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    others = {
        each.name: _without_references(types[each.name].json_schema())
        for each in parameters
        if not _is_plain(hints[each.name])
    }
    _, described, _ = parse_google_format_docstring(doc)
    self_described = {
        each for each, type_schema in others.items() if "description" in type_schema
    } - set(described or {})

    # What transformers reads: it needs no more of a function than this.
    def stub() -> None: ...

    stub.__name__, stub.__doc__ = name, doc
    stub.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    stub.__annotations__ = {
        each: Any if each in others else hint
        for each, hint in hints.items()
        if each == "return" or (each in types and each not in self_described)
    }
    with _without_torch():
        try:
            schema: ToolSchema = get_json_schema(stub)
        # No argument has a type that it cannot write, so it is that of the result.
        except TypeHintParsingException:
            del stub.__annotations__["return"]
            schema = get_json_schema(stub)

    argument_schema = schema["function"]["parameters"]
    written = argument_schema["properties"]
    argument_schema["properties"] = {
        each: {**others.get(each, {}), **written.get(each, {})} for each in types
    }
    return schema


def _is_plain(hint: Any) -> bool:
    """Return whether transformers writes the schema of a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return hint in _PLAIN
    if origin is typing.Literal:
        return all(type(each) in _PLAIN for each in arguments)
    if origin is tuple and (len(arguments) == 1 or ... in arguments):
        return False
    is_known = origin in (list, tuple, dict, typing.Union, UnionType)
    return is_known and all(map(_is_plain, arguments))


def _without_references(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of pydantic with each part where it is used, and without titles.

    Chat templates write the arguments of a tool one by one, and repeat no definitions.

    Raises:
        TypeError: A part contains itself.
    """
    definitions = schema.pop("$defs", {})

    def written(part: Any, outer: tuple[str, ...] = ()) -> Any:
        if isinstance(part, list):
            return [written(each, outer) for each in part]
        if not isinstance(part, dict):
            return part
        fields = {
            each: written(inner, outer)
            for each, inner in part.items()
            # A field of that name has a schema.
            if each != "$ref" and not (each == "title" and isinstance(inner, str))
        }
        if "$ref" not in part:
            return fields
        name = part["$ref"].rpartition("/")[2]
        if name in outer:
            raise TypeError(f"{name} contains itself")
        return {**written(definitions[name], (*outer, name)), **fields}

    inlined: dict[str, Any] = written(schema)
    return inlined


@contextmanager
def _without_torch() -> Iterator[None]:
    """Keep `get_json_schema` from importing torch.

    It does so to know a tensor if it sees one, at 3 s of CPU time in each process.
    """
    from transformers.utils import chat_template_utils

    name = "is_torch_available"
    original = getattr(chat_template_utils, name, None)
    if original is None or "torch" in sys.modules:
        yield
        return
    setattr(chat_template_utils, name, lambda: False)
    try:
        yield
    finally:
        setattr(chat_template_utils, name, original)


# -------------------------------------------------------------------------- environment


class ToolEnvironment:
    """A conversation in which the policy calls functions, until it calls none.

    It pays nothing but what a `ToolStop` says, so the last answer is for the reward
    functions of the run.

    A tool call that cannot be parsed is answered by a message of the user, since every
    chat template writes those, wherever they stand. After `max_parse_errors` of them
    the next one ends the episode. No call of such a turn is executed.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any] | Tool],
        *,
        max_parse_errors: int = 1,
    ) -> None:
        """Take the functions.

        Args:
            max_parse_errors: Turns with calls that cannot be parsed, which the episode
                survives.

        Raises:
            ConfigError: A function cannot be a tool, or two have the same name.
        """
        tools = [
            function
            if isinstance(function, Tool)
            else as_tool(function, "agent.environments", str(function))
            for function in functions
        ]
        require_distinct(tools, "agent.environments", [tool.name for tool in tools])
        self._tools = {tool.name: tool for tool in tools}
        self._num_parse_errors = 0
        self._max_parse_errors = max_parse_errors

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Begin with the messages of the task, and the tools that its record names.

        A record without a field `tools` has all of them.

        Raises:
            ValueError: There is no tool of a name.
        """
        names = task.extra.get(TOOLS)
        if names is not None:
            problem = tools_problem(names, list(self._tools))
            if problem is not None:
                raise ValueError(problem)
            self._tools = {name: self._tools[name] for name in names}
        schemas = [tool.schema for tool in self._tools.values()]
        return Observation(list(task.messages), schemas)

    async def step(self, action: Action) -> Step:
        """Execute the tool calls of an action, in their order.

        Raises:
            Exception: Whatever a tool raises, but `ToolStop` and `ToolError`.
        """
        # A call may be cut in the middle, or one may be missing.
        if action.finish == "length":
            return Step(done=True, end=End.MAX_TOKENS)
        if action.parse_error is not None:
            return self._unparsed(action.parse_error)
        if not action.tool_calls:
            return Step(done=True)

        messages: list[Message] = []
        for call in action.tool_calls:
            try:
                result = await self._execute(call)
            except ToolStop as stop:
                messages.append(_message(call, stop.result))
                return Step(messages, stop.reward, done=True, end=End.TOOL_STOPPED)
            messages.append(_message(call, result))
        return Step(messages)

    async def close(self) -> None:
        """Do nothing: functions hold nothing."""

    def _unparsed(self, reason: str) -> Step:
        self._num_parse_errors += 1
        if self._num_parse_errors > self._max_parse_errors:
            return Step(done=True, end=End.PARSE_ERROR)
        content = f"The tool call could not be read: {reason}"
        return Step([{"role": "user", "content": content}])

    async def _execute(self, call: ToolCall) -> object:
        """Return the result of a call, or the text that refuses it."""
        tool = self._tools.get(call.name)
        if tool is None:
            fix = did_you_mean(call.name, list(self._tools), "tool")
            return f"Error: there is no tool {call.name!r}. {fix}"

        refusal = tool.refusal(call.arguments)
        if refusal is not None:
            return f"Error: {refusal}"
        try:
            values = tool.values(call.arguments)
        except ValueError as error:
            return f"Error: {error}"

        try:
            return await self._call(tool.function, values)
        except ToolError as error:
            return f"Error: {error}"

    async def _call(
        self, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> object:
        return await result_of(function, **arguments)


def _message(call: ToolCall, result: object) -> Message:
    if isinstance(result, bytes | bytearray):
        result = result.decode(errors="replace")
    text = result if isinstance(result, str) else json_text(result)
    return {"role": "tool", "name": call.name, "content": text}


class ToolSet(ToolEnvironment):
    """A conversation in which the policy calls the methods of an object of its own.

    No two methods run at the same time: one that is late is waited for, by `close` as
    well.
    """

    def __init__(
        self, make: Callable[[], Any], methods: Sequence[Tool], **options: Any
    ) -> None:
        """Make the object.

        Args:
            make: Makes it. Where it has a method `reset(task, seed)` or `close()`, each
                is called once.
            methods: Its methods as tools, as `methods_of` returns them.
            options: Those of `ToolEnvironment`.
        """
        self._owner = make()
        self._calls = OneAtATime()
        bound = [
            replace(tool, function=getattr(self._owner, tool.name)) for tool in methods
        ]
        super().__init__(bound, **options)

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Prepare the object, and begin with the messages of the task."""
        if hasattr(self._owner, "reset"):
            await self._call(self._owner.reset, {"task": task, "seed": seed})
        return await super().reset(task, seed)

    async def close(self) -> None:
        """Close the object."""
        if hasattr(self._owner, "close"):
            await self._call(self._owner.close, {})

    async def _call(
        self, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> object:
        return await self._calls.result_of(function, **arguments)


def method_names(owner: type) -> list[str]:
    """Return the public methods of a class but `reset` and `close`, in their order."""
    kinds = (FunctionType, staticmethod, classmethod)
    methods = {
        name: method
        for base in reversed(owner.__mro__)
        for name, method in vars(base).items()
        if not name.startswith("_") and name not in ("reset", "close")
    }
    return [name for name, method in methods.items() if isinstance(method, kinds)]


def methods_of(owner: type, key: str, value: object) -> list[Tool]:
    """Return the public methods of a class as tools, without making an object of it.

    Args:
        key: The setting that names it, for errors.
        value: The value of that setting.

    Raises:
        ConfigError: One cannot be a tool.
    """
    # Without its first parameter, a method is read like a function.
    unmade: object = object.__new__(owner)
    return [
        as_tool(getattr(unmade, name), key, value, name) for name in method_names(owner)
    ]


def require_distinct(tools: Sequence[Tool], key: str, value: object) -> None:
    """Raise ConfigError if two tools of a list have the same name.

    Args:
        tools: The tools, in the order of the list.
        key: The setting that names them, for errors.
        value: The value of that setting.
    """
    numbers: dict[str, int] = {}
    for number, tool in enumerate(tools, start=1):
        first = numbers.setdefault(tool.name, number)
        if first != number:
            rule = f"two tools have the name {tool.name}: numbers {first} and {number}"
            raise ConfigError([Problem(key, value, rule, "Rename one of them.")])


def tools_problem(names: object, known: Sequence[str]) -> str | None:
    """Return what is wrong with the tools that a record names; None if nothing is."""
    is_list = isinstance(names, list) and all(isinstance(each, str) for each in names)
    if not is_list:
        return f"{TOOLS} is {names!r}, expected a list of names of tools"
    assert isinstance(names, list)
    for name in names:
        if name not in known:
            return f"there is no tool {name!r}. {did_you_mean(name, known, 'tool')}"
    return None
