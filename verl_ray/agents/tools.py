"""Plain Python functions as tools, and the environment in which the policy calls them.

A tool is a function with type hints and a docstring in Google's style. Its schema is
what `transformers` makes of both, which models have learned to read.

Invariant: what the policy does wrong comes back to it as a message, and what a tool
does wrong ends the episode. Tools of one step run one after the other.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import sys
import threading
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
from verl_ray.config.suggest import did_you_mean
from verl_ray.data.fields import json_text
from verl_ray.errors import ConfigError, Problem

_THREADS = 64  # synchronous tools that run at a time in a process

_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

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
        function: The function, which may be asynchronous.
        schema: Its schema, as chat templates take it.
    """

    function: Callable[..., Any]
    schema: ToolSchema

    @property
    def name(self) -> str:
        """The name by which the policy calls it."""
        name: str = self.schema["function"]["name"]
        return name

    def refusal(self, arguments: Mapping[str, object]) -> str | None:
        """Return what is wrong with the arguments of a call; None if nothing is."""
        parameters = inspect.signature(self.function).parameters
        for name in arguments:
            if name not in parameters:
                fix = did_you_mean(name, list(parameters), "argument")
                return f"{self.name} has no argument {name!r}. {fix}"
        for name, parameter in parameters.items():
            if name not in arguments and parameter.default is inspect.Parameter.empty:
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
                values[name] = self._adapters[name].validate_python(value)
            except ValidationError as error:
                reason = error.errors()[0]
                place = ".".join(map(str, (name, *reason["loc"])))
                raise ValueError(f"{place}: {reason['msg']}.") from None
        return values

    @cached_property
    def _adapters(self) -> dict[str, Any]:
        """Checks of the arguments, by their names."""
        from pydantic import TypeAdapter

        hints = typing.get_type_hints(self.function)
        hints.pop("return", None)
        return {name: TypeAdapter(hint) for name, hint in hints.items()}


def as_tool(function: Callable[..., Any], key: str, value: object) -> Tool:
    """Return a function as a tool.

    Args:
        key: The setting that names it, for errors.
        value: The value of that setting.

    Raises:
        ConfigError: It lacks a docstring, a type hint or the description of an
            argument.
    """
    name = getattr(function, "__name__", str(function))

    def refused(rule: str, fix: str) -> ConfigError:
        return ConfigError([Problem(key, value, f"the tool {name} {rule}", fix)])

    if not callable(function):
        raise refused("is no function", "Name a function.")
    if not inspect.getdoc(function):
        fix = f"Give it one, {_EXAMPLE}."
        raise refused("has no docstring, from which the policy learns its use", fix)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in _STARRED or parameter.kind is parameter.POSITIONAL_ONLY:
            rule = f"has the parameter {parameter.name}, which no call can name"
            raise refused(rule, "Name each argument.")
        if parameter.annotation is inspect.Parameter.empty:
            fix = f"Add one, such as {parameter.name}: str."
            raise refused(f"has no type hint for {parameter.name}", fix)

    from transformers.utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        with _without_torch():
            tool = Tool(function, get_json_schema(function))
        # They are made here, so that a hint they cannot check is refused here.
        _ = tool._adapters
    except DocstringParsingException as error:
        fix = f"Add it under Args:, {_EXAMPLE}."
        raise refused(f"is not described: {error}", fix) from error
    except (TypeHintParsingException, TypeError, NameError) as error:
        fix = "Use int, float, str, bool, list, dict, Literal or unions of them."
        raise refused(f"has a type hint that JSON has not: {error}", fix) from error
    return tool


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
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            rule = f"two tools have the name {twice}"
            raise ConfigError(
                [Problem("agent.environments", names, rule, "Rename one of them.")]
            )
        self._num_parse_errors = 0
        self._max_parse_errors = max_parse_errors

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Begin with the messages of the task."""
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
            if inspect.iscoroutinefunction(tool.function):
                return await tool.function(**values)
            return await _in_thread(tool.function, values)
        except ToolError as error:
            return f"Error: {error}"


def _message(call: ToolCall, result: object) -> Message:
    if isinstance(result, bytes | bytearray):
        result = result.decode(errors="replace")
    text = result if isinstance(result, str) else json_text(result)
    return {"role": "tool", "name": call.name, "content": text}


_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
_slots = weakref.WeakKeyDictionary()


async def _in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> object:
    """Return what a function returns, which runs in a thread of its own meanwhile.

    A thread cannot be stopped. One whose caller has given up gives its place to another
    and ends with the process, which does not wait for it.
    """
    loop = asyncio.get_running_loop()
    slots = _slots.setdefault(loop, asyncio.Semaphore(_THREADS))
    outcome: asyncio.Future[object] = loop.create_future()

    def settle(result: object, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def work() -> None:
        result: object = None
        failure: BaseException | None = None
        try:
            result = context.run(function, **arguments)
        # A future has no way to hold it.
        except StopIteration as error:
            failure = RuntimeError(f"the tool raised {error!r}")
        except BaseException as error:
            failure = error
        # The loop may be over.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    async with slots:
        context = contextvars.copy_context()
        threading.Thread(target=work, daemon=True).start()
        return await outcome
