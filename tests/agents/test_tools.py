"""Functions as tools: their schemas, and what comes of a call, right or wrong."""

from __future__ import annotations

import asyncio
import datetime
import enum
import functools
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field
from transformers.utils import get_json_schema
from typing_extensions import TypedDict

from tests.agents.templates import PRESERVING, tokenizer_with
from verl_ray.agents.contract import (
    Action,
    End,
    Environment,
    Episode,
    EpisodeTask,
    Message,
    Step,
    ToolCall,
)
from verl_ray.agents.episode import (
    run_episode,
)
from verl_ray.agents.policy import (
    Limits,
)
from verl_ray.agents.scripted import ScriptedSampler
from verl_ray.agents.template import Renderer
from verl_ray.agents.threads import hanging_calls
from verl_ray.agents.tools import ToolEnvironment, ToolError, ToolStop, as_tool
from verl_ray.errors import ConfigError

TASK = EpisodeTask([{"role": "user", "content": "1 + 2 = ?"}])
WIDE = Limits(max_turns=10, max_tokens=1000, context_tokens=4000, close_s=0.2)


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def lookup(words: list[str], language: Literal["de", "en"] | None = None) -> Any:
    """Look words up.

    Args:
        words: The words.
        language: Their language.

    Returns:
        What they mean.
    """
    await asyncio.sleep(0)
    return {"words": words, "language": language, "ünï": None}


def guess(number: int) -> str:
    """Guess the number.

    Args:
        number: The guess.
    """
    if number == 42:
        raise ToolStop("right", reward=1.0)
    if number < 0:
        raise ToolError("numbers are not negative")
    return str(1 // number)


def order(
    rows: list[list[int]], table: dict[str, float], flags: tuple[bool, str],
    either: int | str | None, old: Optional[list[str]], size: str, anything: Any,  # noqa: UP045
    bare: list, several: list[int] | str = "", level: Literal[1, "b", None] = 1,  # type: ignore[type-arg]
) -> dict[str, Any]:  # fmt: skip
    """Take everything that transformers can write.

    Further words.

    Args:
        rows: Rows.
        table: A table,
            over two lines.
        flags: Flags.
        either: Either.
        old: An old style.
        size: The size (choices: ["s", "m"])
        anything: Anything.
        several: Several.
        bare: A list.
        level: A level.

    Returns:
        It again.
    """
    return locals()


class Counter:
    """Count."""

    def __init__(self) -> None:
        self.total = 10

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: What is added.
        """
        self.total += number
        return self.total

    async def __call__(self, number: int) -> int:
        """Subtract from the total.

        Args:
            number: What is subtracted.
        """
        return self.total - number

    @staticmethod
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        return 2 * number


def act(*calls: ToolCall, environment: ToolEnvironment | None = None) -> Step:
    environment = environment or ToolEnvironment([add, lookup, guess])
    return asyncio.run(environment.step(Action([1], "", calls)))


def results(step: Step) -> list[str]:
    assert {message["role"] for message in step.messages} <= {"tool"}
    return [str(message["content"]) for message in step.messages]


# ------------------------------------------------------------------------------ schemas


@pytest.mark.parametrize("function", [add, lookup, guess, order])
def test_schemas_are_those_of_transformers(function: Callable[..., Any]) -> None:
    assert as_tool(function, "key", "spec").schema == get_json_schema(function)


def test_a_schema_in_full() -> None:
    assert as_tool(add, "key", "spec").schema["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number."},
                "b": {"type": "integer", "description": "The second number."},
            },
            "required": ["a"],
        },
        "return": {"type": "integer"},
    }


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    title: str = ""


class Pair(TypedDict):
    first: Point
    second: Point


class Drawing(BaseModel):
    """What is drawn."""

    points: list[Point]
    color: Color | None = None


def draw(
    color: Color, drawing: Drawing, pair: Pair, size: Annotated[int, Field(ge=1, description="Its size.")],
    day: datetime.date | None = None, points: list[Point] | None = None, name: str = "",
) -> list[Point]:  # fmt: skip
    """Draw.

    Args:
        color: The color.
        drawing: The drawing.
        pair: A pair.
        day: The day.
        points: More points.
        name: Its name.
    """
    return [drawing, color, pair, size, day, points, name]  # type: ignore[list-item]


POINT_SCHEMA = {
    "type": "object",
    "properties": {
        "x": {"type": "integer"},
        "title": {"type": "string", "default": ""},
    },
    "required": ["x"],
}
COLOR_SCHEMA = {"type": "string", "enum": ["red", "blue"]}


def test_schemas_of_other_types_are_those_of_pydantic_without_references() -> None:
    function = as_tool(draw, "key", "spec").schema["function"]
    properties = function["parameters"]["properties"]
    assert properties == {
        "color": {**COLOR_SCHEMA, "description": "The color."},
        "drawing": {
            "type": "object",
            "properties": {
                "points": {"type": "array", "items": POINT_SCHEMA},
                "color": {"anyOf": [COLOR_SCHEMA, {"type": "null"}], "default": None},
            },
            "required": ["points"],
            "description": "The drawing.",
        },
        "pair": {
            "type": "object",
            "properties": {"first": POINT_SCHEMA, "second": POINT_SCHEMA},
            "required": ["first", "second"],
            "description": "A pair.",
        },
        "size": {"type": "integer", "minimum": 1, "description": "Its size."},
        "day": {
            "anyOf": [{"type": "string", "format": "date"}, {"type": "null"}],
            "description": "The day.",
        },
        "points": {
            "anyOf": [{"type": "array", "items": POINT_SCHEMA}, {"type": "null"}],
            "description": "More points.",
        },
        "name": {"type": "string", "description": "Its name."},
    }
    assert list(properties) == ["color", "drawing", "pair", "size", "day", "points", "name"]  # fmt: skip
    assert function["parameters"]["required"] == ["color", "drawing", "pair", "size"]


def test_values_are_what_the_hints_say() -> None:
    taken: list[Any] = []

    @functools.wraps(draw)
    def note(**values: Any) -> str:
        taken.append(values)
        return ""

    points = [{"x": 1}, {"x": "2", "title": "b"}]
    arguments = {"color": "blue", "drawing": {"points": points}, "size": 3, "pair": {"first": points[0], "second": points[1]}}  # fmt: skip
    call = ToolCall("draw", {**arguments, "day": "2025-02-01"})
    assert results(act(call, environment=ToolEnvironment([note]))) == [""]
    one, two = Point(1), Point(2, "b")
    assert taken == [
        {
            "color": Color.BLUE,
            "drawing": Drawing(points=[one, two]),
            "pair": {"first": one, "second": two},
            "size": 3,
            "day": datetime.date(2025, 2, 1),
        }
    ]

    wrong = ToolCall("draw", {**arguments, "color": "green", "size": 0})
    words = "Error: color: Input should be 'red' or 'blue'."
    assert results(act(wrong, environment=ToolEnvironment([note]))) == [words]


def bare(a: int) -> int:
    return a


def half_described(a: int, b: int) -> int:
    """Add.

    Args:
        a: The first number.
    """
    return a + b


def half_typed(a: int, b) -> int:  # type: ignore[no-untyped-def]
    """Add.

    Args:
        a: The first number.
        b: The second number.
    """
    return a


def starred(*numbers: int) -> int:
    """Add.

    Args:
        numbers: The numbers.
    """
    return sum(numbers)


def odd(a: Callable[[int], int]) -> int:
    """Call.

    Args:
        a: A function.
    """
    return a(1)


class Tree(BaseModel):
    children: list[Tree]


def grow(tree: Tree) -> None:
    """Grow.

    Args:
        tree: A tree.
    """


@pytest.mark.parametrize(
    "function, words",
    [
        (bare, "the tool bare has no docstring, from which the policy learns its use"),
        (half_described, "no description for the argument 'b'"),
        (half_described, "fix:  Add it under Args:, as in: def add(a: int, b: int)"),
        (half_typed, "the tool half_typed has no type hint for b"),
        (half_typed, "fix:  Add one, such as b: str."),
        (starred, "has the parameter numbers, which no call can name"),
        (odd, "the tool odd has a type hint that JSON has not"),
        (grow, "has a type hint that JSON has not: Tree contains itself"),
        (3, "the tool 3 is no function"),
        (Tree, "the tool Tree is no function"),
        (Counter.add, "the tool add has no type hint for self"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(function: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        as_tool(function, "agent.environments.maths", "tools.py:f")
    assert words in str(caught.value)
    assert "agent.environments.maths = tools.py:f" in str(caught.value)


def test_two_tools_of_a_name_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="two tools have the name add: numbers 1 and 3"
    ):
        ToolEnvironment([add, guess, add])


# -------------------------------------------------------------------------------- calls


def test_calls_are_executed_in_order_and_results_are_texts() -> None:
    step = act(
        ToolCall("add", {"a": 1, "b": 2}),
        ToolCall("add", {"a": 1}),
        ToolCall("lookup", {"words": ["a", "é"], "language": "de"}),
        ToolCall("guess", {"number": 1}),
    )
    assert results(step) == [
        "3",
        "2",
        '{"words": ["a", "é"], "language": "de", "ünï": null}',
        "1",
    ]
    assert [message["name"] for message in step.messages] == ["add", "add", "lookup", "guess"]  # fmt: skip
    assert (step.done, step.reward) == (False, 0.0)


@pytest.mark.parametrize(
    "name, arguments, words",
    [
        ("ad", {}, "Error: there is no tool 'ad'. Did you mean add? There is add, guess, lookup."),
        ("add", {"b": 1}, "Error: add needs the argument 'a'."),
        ("add", {"a": 1, "c": 1}, "Error: add has no argument 'c'. There is a, b."),
        ("add", {"a": "many"}, "Error: a: Input should be a valid integer"),
        ("lookup", {"words": ["a", 3]}, "Error: words.1: Input should be a valid string."),
        ("lookup", {"words": [], "language": "fr"}, "Error: language: Input should be 'de' or 'en'."),
        ("guess", {"number": -1}, "Error: numbers are not negative"),
    ],
)  # fmt: skip
def test_a_wrong_call_comes_back(name, arguments, words) -> None:
    step = act(ToolCall(name, arguments), ToolCall("add", {"a": 1}))
    assert results(step)[0].startswith(words)
    assert (results(step)[1], step.done) == ("2", False)


def test_a_number_as_text_is_a_number() -> None:
    assert results(act(ToolCall("add", {"a": "3"}))) == ["4"]


def test_what_a_tool_returns_is_awaited() -> None:
    """A usual decorator hides that a function is asynchronous."""

    @functools.wraps(lookup)
    def logged(*args: Any, **kwargs: Any) -> Any:
        return lookup(*args, **kwargs)

    call = ToolCall("lookup", {"words": ["a"]})
    step = act(call, environment=ToolEnvironment([logged]))
    assert results(step) == ['{"words": ["a"], "language": null, "ünï": null}']


def test_what_is_called_like_a_function_is_a_tool() -> None:
    counter = Counter()
    tools = [
        functools.partial(add, b=5), counter.add, counter, Counter.__dict__["double"],
        functools.partial(lookup, language="de"),
    ]  # fmt: skip
    names = ["add", "add", "Counter", "double", "lookup"]
    assert [as_tool(tool, "key", "spec").name for tool in tools] == names

    step = act(
        ToolCall("add", {"number": 1}),
        ToolCall("Counter", {"number": 1}),
        ToolCall("double", {"number": 4}),
        ToolCall("lookup", {"words": []}),
        ToolCall("lookup", {"words": [], "language": "en"}),
        environment=ToolEnvironment(tools[1:]),
    )
    assert results(step) == [
        "11",
        "10",
        "8",
        '{"words": [], "language": "de", "ünï": null}',
        # What is bound already is not the policy's to say.
        "Error: lookup has no argument 'language'. There is words.",
    ]
    assert results(act(ToolCall("add", {"a": 1}), environment=ToolEnvironment(tools[:1]))) == ["6"]  # fmt: skip


def test_a_tool_may_end_the_episode() -> None:
    step = act(ToolCall("guess", {"number": 42}), ToolCall("guess", {"number": 0}))
    # The second call would have failed.
    assert (step.done, step.end, step.reward) == (True, End.TOOL_STOPPED, 1.0)
    assert results(step) == ["right"]


def test_a_tool_that_fails_fails_the_step() -> None:
    with pytest.raises(ZeroDivisionError):
        act(ToolCall("guess", {"number": 0}))


def test_a_tool_that_panics_fails_the_episode() -> None:
    """What it raises in its thread is no `Exception`."""

    class Panic(BaseException):
        pass

    def look(text: str) -> str:
        """Look something up.

        Args:
            text: What.
        """
        raise Panic("a library panicked")

    def calls(tokens: Any, text: str, finish: str) -> Action:
        return Action(tokens, text, [ToolCall("look", {"text": text})], finish)

    renderer = Renderer(tokenizer_with(PRESERVING))
    sampler = ScriptedSampler(tokenizer_with(PRESERVING), ["what"], read=calls)
    run = run_episode(lambda: ToolEnvironment([look]), TASK, 7, sampler, renderer, WIDE)
    episode = asyncio.run(run)
    assert episode.end is End.ENVIRONMENT_FAILED
    assert "it raised Panic('a library panicked')" in episode.detail
    assert f'"{__file__}", line' in episode.detail and "in look" in episode.detail


def test_bytes_are_a_text() -> None:
    def read_file(name: str) -> bytes:
        """Read a file.

        Args:
            name: Its name.
        """
        return b"caf\xc3\xa9 \xff"

    environment = ToolEnvironment([read_file])
    step = asyncio.run(
        environment.step(Action([1], "", [ToolCall("read_file", {"name": "a"})]))
    )
    assert [message["content"] for message in step.messages] == ["café \ufffd"]


def test_synchronous_tools_do_not_block_the_loop() -> None:
    """Each of two tools waits until the other one runs."""
    barrier = threading.Barrier(2, timeout=30)

    def meet(number: int) -> int:
        """Wait for another one.

        Args:
            number: A number.
        """
        barrier.wait()
        return number

    async def main() -> list[Step]:
        steps = [
            ToolEnvironment([meet]).step(
                Action([1], "", [ToolCall("meet", {"number": n})])
            )
            for n in range(2)
        ]
        return await asyncio.gather(*steps)

    assert [results(step) for step in asyncio.run(main())] == [["0"], ["1"]]


def test_no_call_waits_for_those_of_other_episodes() -> None:
    """Its time would pass meanwhile."""
    barrier = threading.Barrier(200, timeout=30)

    def meet() -> str:
        """Wait for the others."""
        barrier.wait()
        return "met"

    async def main() -> list[Step]:
        action = Action([1], "", [ToolCall("meet", {})])
        steps = [ToolEnvironment([meet]).step(action) for _ in range(200)]
        return await asyncio.gather(*steps)

    assert [results(step) for step in asyncio.run(main())] == [["met"]] * 200


def test_a_record_names_its_tools() -> None:
    def names(tools: Any) -> list[str]:
        environment = ToolEnvironment([add, lookup, guess])
        task = EpisodeTask([], extra={"tools": tools})
        observation = asyncio.run(environment.reset(task, 0))
        return [tool["function"]["name"] for tool in observation.tools]

    assert names(["guess", "add"]) == ["guess", "add"]
    assert (names([]), names(None)) == ([], ["add", "lookup", "guess"])
    with pytest.raises(ValueError, match=r"no tool 'ad'. Did you mean add\?"):
        names(["ad"])
    with pytest.raises(ValueError, match="expected a list of names of tools"):
        names("add")

    environment = ToolEnvironment([add, lookup])
    task = EpisodeTask([], extra={"tools": ["lookup"]})
    asyncio.run(environment.reset(task, 0))
    step = act(ToolCall("add", {"a": 1}), environment=environment)
    assert results(step)[0].startswith("Error: there is no tool 'add'.")


# ----------------------------------------------------------------------------- episodes


def read(tokens: Any, text: str, finish: str) -> Action:
    """Read calls as lines of JSON behind an exclamation mark."""
    calls = []
    for line in text.splitlines():
        if line.startswith("!"):
            try:
                name, arguments = json.loads(line[1:])
            except ValueError:
                return Action(tokens, text, (), finish, "it is no JSON")
            calls.append(ToolCall(name, arguments))
    words = "\n".join(line for line in text.splitlines() if not line.startswith("!"))
    return Action(tokens, words, calls, finish)


def play(*texts: str, bounds: Limits = WIDE) -> Episode:
    tokenizer = tokenizer_with(PRESERVING)
    sampler = ScriptedSampler(tokenizer, texts, read=read)
    make: Callable[[], Environment] = lambda: ToolEnvironment([add, lookup, guess])  # noqa: E731
    renderer = Renderer(tokenizer)
    return asyncio.run(run_episode(make, TASK, 7, sampler, renderer, bounds))


def test_an_episode_with_tools_is_one_row() -> None:
    first = 'I add.\n!["add", {"a": 1, "b": 2}]\n!["add", {"a": 3}]'
    episode = play(first, "It is 3.")
    assert (episode.end, episode.num_turns, episode.num_tool_calls) == (End.COMPLETED, 2, 2)  # fmt: skip
    roles: list[Message] = episode.messages
    assert [message["role"] for message in roles] == ["user", "assistant", "tool", "tool", "assistant"]  # fmt: skip

    (row,) = episode.rows
    text = tokenizer_with(PRESERVING).decode(row.tokens)
    # What was sampled stays as it was, though the template writes calls otherwise.
    assert f"assistant\n{first}<|im_end|>\n<|im_start|>tool\n3<|im_end|>" in text
    assert '"description": "Add two numbers."' in text


def test_a_call_that_cannot_be_read_comes_back_once() -> None:
    episode = play("!add", "It is 3.")
    assert (episode.end, episode.num_turns) == (End.COMPLETED, 2)
    expected = {
        "role": "user",
        "content": "The tool call could not be read: it is no JSON",
    }
    assert episode.messages[2] == expected

    episode = play("!add", '!["add", {"a": 1}]', "!add", "It is 3.")
    assert (episode.end, episode.num_turns) == (End.PARSE_ERROR, 3)


@pytest.mark.parametrize(
    "text, end, score",
    [
        ('!["guess", {"number": 42}]', End.TOOL_STOPPED, 1.0),
        ('!["guess", {"number": 0}]', End.ENVIRONMENT_FAILED, 0.0),
        ("No.", End.COMPLETED, 0.0),
    ],
)
def test_ends_of_episodes_with_tools(text: str, end: End, score: float) -> None:
    episode = play(text)
    assert (episode.end, episode.score) == (end, score)
    assert ("ZeroDivisionError" in episode.detail) == (end is End.ENVIRONMENT_FAILED)


def test_calls_of_a_turn_that_was_cut_are_not_executed() -> None:
    bounds = Limits(max_turns=10, max_tokens=20, context_tokens=4000)
    episode = play('!["guess", {"number": 0}]\nand so on and on', bounds=bounds)
    assert (episode.end, episode.num_turns) == (End.MAX_TOKENS, 1)


def test_a_tool_that_hangs_is_left_behind() -> None:
    gate = threading.Event()

    def hang(seconds: int) -> int:
        """Hang.

        Args:
            seconds: Seconds.
        """
        gate.wait(60)
        return seconds

    tokenizer = tokenizer_with(PRESERVING)
    sampler = ScriptedSampler(tokenizer, ['!["hang", {"seconds": 1}]'], read=read)
    bounds = Limits(max_turns=2, max_tokens=100, context_tokens=4000, tool_s=0.1)
    run = run_episode(
        lambda: ToolEnvironment([hang]), TASK, 7, sampler, Renderer(tokenizer), bounds
    )
    assert asyncio.run(run).end is End.TOOL_TIMEOUT
    place = f"({__file__}, line {hang.__code__.co_firstlineno})"
    (name,) = [call for call in hanging_calls() if call.endswith(place)]
    (thread,) = [each for each in threading.enumerate() if each.name == name]
    gate.set()
    thread.join(30)
    assert name not in hanging_calls()
