"""Environments by their specs: the four kinds, their options, and mistakes."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from verl_ray.agents.contract import (
    Action,
    End,
    Environment,
    EpisodeTask,
    Observation,
    Step,
    ToolCall,
)
from verl_ray.agents.gateway.launch import Agent, AgentCommand, AgentFunction
from verl_ray.agents.specs import load_environment, spec_problem
from verl_ray.agents.threads import hanging_calls
from verl_ray.agents.tools import ToolEnvironment
from verl_ray.errors import ConfigError
from verl_ray.settings.function_specs import command_spec

KEY = "agent.environments.maths"

SOURCE = '''
import asyncio
import threading
from pathlib import Path
from verl_ray.agents.contract import Observation, Step

class Game:
    def __init__(self, size, noise=0.0):
        self.size, self.noise = size, noise
    async def reset(self, task, seed):
        return Observation(task.messages)
    async def step(self, action):
        return Step(done=True, reward=self.size)
    async def close(self):
        pass

class Free(Game):
    def __init__(self, **options):
        self.options = options

class Typed(Game):
    def __init__(
        self, size: int = 4, slippery: bool = False, noise: float = 0.0,
        path: "Path | None" = None, sides: tuple[int, ...] = (), other: asyncio.Event = None,
    ):
        self.options = size, slippery, noise, path, sides, other

class Half:
    async def reset(self, task, seed): ...

class Plain:
    def __init__(self, log, gate):
        self.log, self.gate = log, gate
        log.append(("made", threading.current_thread()))
    def note(self, name):
        self.log.append((name, threading.current_thread()))
    def reset(self, task, seed):
        self.note(f"reset {seed}")
        return Observation(task.messages)
    def step(self, action):
        self.note("step")
        self.gate.wait(60)
        self.note("stepped")
        return Step(reward=0.5, done=True)
    def finish(self, end):
        return 2.0
    def close(self):
        self.note("close")

class Mixed(Plain):
    async def close(self):
        self.note("close")

class Field(Game):
    step = 3

class Maze:
    def reset(self, *, seed=None, options=None):
        self.options = options
        self.room = f"{seed} {options['room']}"
        return self.room, {}
    def step(self, action):
        rewards = {"on": 0.25, "out": 1, "wait": 0}
        return f"{self.room} {action}", rewards[action], action == "out", action == "wait", {}
    def close(self):
        self.room = None

class Valued(Maze):
    def finish(self, end):
        return {"max_turns": 0.5}[end]

class Shapes(Maze):
    def reset(self, seed=None, options=None):
        return [0.0, 1.0], {}

class Letters(Maze):
    def reset(self, seed=None, options=None):
        return "ab"

class OldGym(Maze):
    def step(self, action):
        return "hall", 0.5, True, {}

class Unpaid(Maze):
    def step(self, action):
        return "hall", None, True, False, {}

class Store:
    """Things in places."""
    limit = 3
    opened = []

    def __init__(self, first: str, max_characters: int = 9):
        self.things, self.max_characters = [first], max_characters
    async def reset(self, task, seed):
        self.things += [task.answer, seed]
    def put(self, thing: str) -> str:
        """Put a thing in.

        Args:
            thing: The thing.
        """
        self.things.append(thing)
        return " ".join(map(str, self.things))
    @staticmethod
    async def count(things: list[str]) -> int:
        """Count things.

        Args:
            things: The things.
        """
        return len(things)
    keep = put
    def _hidden(self): ...
    def close(self):
        self.opened.append(self)

class Shelf(Store):
    def bare(self, thing): ...

async def run(task, policy, bonus=0.5):
    return bonus

async def turned(policy, task):
    return 0.0

async def fetch(url: str) -> str:
    """Fetch a page.

    Args:
        url: Its address.
    """
    return url

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

def bare(a): return a

TOOLS = [add, fetch]
TWICE = (add, add)
NUMBER = 3
'''


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a file makes its folder importable, which is for this test alone."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_env.py"
    path.write_text(SOURCE)
    return path


def test_a_class_is_built_for_each_episode(file: Path) -> None:
    make: Any = load_environment(f"{file}:Game", {"size": 3}, KEY)
    first, second = make(), make()
    assert isinstance(first, Environment)
    assert first is not second
    assert (first.size, first.noise) == (3, 0.0)
    other: Any = load_environment(f"{file}:Free", {"anything": 1}, KEY)
    assert other().options == {"anything": 1}


@pytest.mark.parametrize("name", ["Plain", "Mixed"])
def test_plain_methods_run_in_threads_one_after_the_other(
    file: Path, name: str
) -> None:
    """A step whose caller has given up goes on, and `close` waits for it.

    So it does when its own caller has given up as well.
    """
    log: list[tuple[str, threading.Thread]] = []
    gate = threading.Event()

    make: Any = load_environment(f"{file}:{name}", {"log": log, "gate": gate}, KEY)

    async def main() -> None:
        environment = make()
        assert await environment.reset(EpisodeTask([]), 7) == Observation([])
        step = asyncio.create_task(environment.step(Action([], "")))
        # Until the thread of the step waits for the gate.
        while log[-1][0] != "step":
            await asyncio.sleep(0.001)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert any("Plain.step" in call for call in hanging_calls())
        close = asyncio.create_task(environment.close())
        await asyncio.sleep(0.05)
        assert [what for what, _ in log] == ["made", "reset 7", "step"]
        close.cancel()
        with pytest.raises(asyncio.CancelledError):
            await close
        gate.set()
        while log[-1][0] != "close":
            await asyncio.sleep(0.001)
        assert await environment.finish(End.MAX_TURNS) == 2.0

    asyncio.run(main())
    assert [what for what, _ in log] == ["made", "reset 7", "step", "stepped", "close"]
    threads = [thread for _, thread in log]
    assert threading.main_thread() not in threads[:4]
    assert (threads[4] is threading.main_thread()) == (name == "Mixed")


def test_an_environment_of_gymnasium_is_named_as_it_is(file: Path) -> None:
    make: Any = load_environment(f"{file}:Maze", {}, KEY)
    task = EpisodeTask(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}],
        extra={
            "room": "hall", "environment": "maze", "enable_thinking": False,
            "chat_template_kwargs": {"enable_thinking": False}, "tools": [],
        },
    )  # fmt: skip

    async def main() -> list[Any]:
        environment = make()
        first = await environment.reset(task, 2**32 + 5)
        acts = [
            await environment.step(Action([], text)) for text in ("on", "out", "wait")
        ]
        # What says how the record is trained is no option.
        assert environment._environment._environment.options == {
            "room": "hall",
            "tools": [],
        }
        assert not hasattr(environment, "finish")
        await environment.close()
        return [first, *acts]

    first, on, out, wait = asyncio.run(main())
    # The seed is one of NumPy, and what is no message is an option.
    room = {"role": "user", "content": "5 hall"}
    assert first == Observation([task.messages[0], room])
    assert on == Step([{"role": "user", "content": "5 hall on"}], 0.25)
    assert out == Step((), 1.0, True, End.COMPLETED)
    assert wait == Step((), 0.0, True, End.MAX_TURNS)

    valued: Any = load_environment(f"{file}:Valued", {}, KEY)

    async def cut() -> float:
        environment = valued()
        await environment.reset(task, 0)
        reward: float = await environment.finish(End.MAX_TURNS)
        return reward

    assert asyncio.run(cut()) == 0.5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Shapes", "the observation is a list, and the policy"),
        ("Letters", r"Letters.reset returned str 'ab', expected \(observation, info\)"),
        ("OldGym", r"OldGym.step returned 4 values, tuple .*, expected \(observation, reward, terminated,"),
        ("Unpaid", "step returned the reward None, which is no number"),
    ],
)  # fmt: skip
def test_a_mistake_of_an_environment_of_gymnasium_is_said_in_words(
    file: Path, name: str, words: str
) -> None:
    make: Any = load_environment(f"{file}:{name}", {}, KEY)

    async def main() -> None:
        environment = make()
        await environment.reset(EpisodeTask([], extra={"room": "hall"}), 0)
        await environment.step(Action([], "on"))

    with pytest.raises(TypeError, match=words):
        asyncio.run(main())


def test_options_become_the_types_of_their_hints(file: Path) -> None:
    options = {"slippery": True, "noise": 1, "path": "a/b", "sides": [1, 2], "other": 5}
    make: Any = load_environment(f"{file}:Typed", options, KEY)
    # Nobody knows how to make the last one, so it stays as it is.
    assert make().options == (4, True, 1.0, Path("a/b"), (1, 2), 5)


def test_a_coroutine_function_is_told_from_a_tool(file: Path) -> None:
    run: Any = load_environment(f"{file}:run", {"bonus": 0.75}, KEY)
    assert inspect.iscoroutinefunction(run)
    assert asyncio.run(run(EpisodeTask([]), None)) == 0.75

    for name, tools in {"fetch": ["fetch"], "add": ["add"], "TOOLS": ["add", "fetch"]}.items():  # fmt: skip
        make: Any = load_environment(f"{file}:{name}", {"max_parse_errors": 2}, KEY)
        assert not inspect.iscoroutinefunction(make)
        environment = make()
        assert isinstance(environment, ToolEnvironment)
        observation = asyncio.run(environment.reset(EpisodeTask([]), 0))
        assert [each["function"]["name"] for each in observation.tools] == tools


def test_the_methods_of_a_class_without_step_are_tools(file: Path) -> None:
    options = {"first": "a", "max_parse_errors": 2}
    make: Any = load_environment(f"{file}:Store", options, KEY)

    async def play(call: ToolCall) -> tuple[list[str], str]:
        environment = make()
        observation = await environment.reset(EpisodeTask([], "b"), 7)
        step = await environment.step(Action([1], "", [call]))
        await environment.close()
        names = [each["function"]["name"] for each in observation.tools]
        return names, str(step.messages[0]["content"])

    put = ToolCall("put", {"thing": "c"})
    assert asyncio.run(play(put)) == (["put", "count", "keep"], "a b 7 c")
    # Another episode has an object of its own.
    assert asyncio.run(play(put))[1] == "a b 7 c"
    assert asyncio.run(play(ToolCall("count", {"things": ["x", "y"]})))[1] == "2"
    closed = make.args[0].func.opened
    assert len({id(each) for each in closed}) == 3


@pytest.mark.parametrize("kind", ["", "async "])
def test_an_object_of_tools_is_closed_once_its_tool_has_ended(
    file: Path, kind: str
) -> None:
    file.write_text(f'''
import asyncio
class Desk:
    def __init__(self, log, gate):
        self.log, self.gate = log, gate
    def work(self) -> str:
        """Work."""
        self.log.append("work")
        self.gate.wait(60)
        self.log.append("worked")
        return "done"
    {kind}def close(self):
        self.log.append("close")
    def __repr__(self):
        self.log.append("its text is asked for")
        return "a desk"
''')
    log: list[str] = []
    gate = threading.Event()
    make: Any = load_environment(f"{file}:Desk", {"log": log, "gate": gate}, KEY)

    async def main() -> None:
        environment = make()
        await environment.reset(EpisodeTask([]), 7)
        step = asyncio.create_task(
            environment.step(Action([1], "", [ToolCall("work", {})]))
        )
        while not log:
            await asyncio.sleep(0.001)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert any("Desk.work" in call for call in hanging_calls())
        close = asyncio.create_task(environment.close())
        await asyncio.sleep(0.05)
        gate.set()
        await close

    asyncio.run(main())
    assert log == ["work", "worked", "close"]


def test_a_module_is_named_with_points() -> None:
    spec = "verl_ray.agents.tools:ToolEnvironment"
    make: Any = load_environment(spec, {"functions": []}, KEY)
    assert isinstance(make(), ToolEnvironment)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("Game", {}, "needs the option size"),
        ("Game", {"size": 1, "nois": 2}, "takes no option nois"),
        ("Game", {"size": 1, "nois": 2}, "fix:  Did you mean noise?"),
        ("Typed", {"slippery": "maybe"}, "does not take the option slippery='maybe' (slippery: Input should be a valid boolean)"),
        ("Typed", {"slippery": 1}, "does not take the option slippery=1"),
        ("Typed", {"size": "4"}, "does not take the option size='4'"),
        ("Typed", {"sides": [1, "two"]}, "(sides.1: Input should be a valid integer)"),
        ("add", {"max_parse_errors": "few"}, "does not take the option max_parse_errors='few'"),
        ("Half", {}, "is a class without step and close"),
        ("Field", {"size": 1}, "has a step that is no method"),
        ("Field", {"size": 1}, "fix:  Write def step."),
        ("Store", {}, "needs the option first"),
        ("Store", {"first": "a", "size": 1}, "takes no option size"),
        ("Store", {"first": "a", "max_characters": "b"}, "max_characters='b'"),
        ("Shelf", {"first": "a"}, "the tool bare has no docstring"),
        ("run", {"task": 1}, "takes no option task"),
        ("add", {"size": 1}, "takes no option size"),
        ("bare", {}, "the tool bare has no docstring"),
        ("TWICE", {}, "two tools have the name add: numbers 1 and 2"),
        ("NUMBER", {}, "is a int, and no environment"),
        ("turned", {}, "is a coroutine function with other first parameters"),
        ("turned", {}, "fix:  Write async def turned(task, policy)"),
        ("Gam", {}, "defines no 'Gam' at its top level"),
        ("Gam", {}, "fix:  Did you mean Game?"),
        ("TOOL", {}, "fix:  Did you mean TOOLS?"),
        ("Zzzz", {}, " and 17 more."),
    ],
)  # fmt: skip
def test_a_mistake_names_key_and_remedy(file, name, options, words) -> None:
    with pytest.raises(ConfigError) as caught:
        load_environment(f"{file}:{name}", options, KEY)
    assert words in str(caught.value)
    assert KEY in str(caught.value)


def test_of_a_module_what_would_do_is_named(tmp_path: Path) -> None:
    sys.path.append(str(tmp_path))
    (tmp_path / "own_tools.py").write_text(
        "import os\nfrom enum import Enum\n"
        "class Colour(Enum):\n    RED = 1\n"
        "class Game:\n    def step(self, action): ...\n"
        "class Other(Game): ...\n"
        "def add(): ...\ndef _hidden(): ...\n"
        "TOOLS = [add]\nLIMITS = (1, 2)\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_environment("own_tools:Missing", {}, KEY)
    (problem,) = caught.value.problems
    assert problem.rule == "the module own_tools has no 'Missing'"
    assert problem.fix == "There is Game, Other, TOOLS, add."
    with pytest.raises(ConfigError, match=r"Did you mean TOOLS\?"):
        load_environment("own_tools:TOOL", {}, KEY)


def test_a_file_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    path = tmp_path / "broken_env.py"
    path.write_text("class Game:\n    size = 1 // 0\n")
    with pytest.raises(ConfigError, match=r"cannot be imported: ZeroDivisionError.*line 2"):  # fmt: skip
        load_environment(f"{path}:Game", {}, KEY)
    path.write_text("class Game(:\n")
    assert "cannot be read as Python" in str(spec_problem(f"{path}:Game", KEY))


@pytest.mark.parametrize(
    "spec, words",
    [
        ("Game", "names no environment. Expected path/to/file.py:name"),
        (
            "nowhere.py:Game",
            "the file nowhere.py does not exist (the current folder is",
        ),
        ("no_such_package.games:Game", "there is no package 'no_such_package'"),
        ("{file}:Game!", "names no environment"),
    ],
)
def test_a_spec_is_looked_at_without_running_anything(file, spec: str, words) -> None:
    file.write_text("raise SystemExit\nclass Game: ...\n")
    problem = spec_problem(spec.format(file=file), KEY)
    assert words in str(problem)
    assert str(problem).startswith(KEY)
    assert spec_problem(f"{file}:Game", KEY) is None


AGENTS = """
async def run(task, base_url, api_key, size: int = 4):
    return size
async def swapped(task, api_key, base_url): ...
def plain(task, base_url, api_key): ...
"""


def test_an_agent_is_a_command_or_a_function(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(AGENTS)
    options: dict[str, Any] = {"client": "anthropic", "size": 7}
    loaded = load_environment(f"{file}:run", options, KEY)
    assert isinstance(loaded, Agent) and isinstance(loaded.launch, AgentFunction)
    assert (loaded.launch.client, loaded.launch.reward) == ("anthropic", "function")
    assert asyncio.run(loaded.launch.run(EpisodeTask([]), "", "")) == 7  # type: ignore[arg-type]

    words = command_spec(f"python {file} --fast")
    options = {"reward": "post", "env": {"SIZE": "4"}, "pass_env": ["PATH"]}
    loaded = load_environment(words, options, KEY)
    assert isinstance(loaded, Agent) and isinstance(loaded.launch, AgentCommand)
    assert (loaded.launch.reward, loaded.launch.max_processes) == ("post", 256)
    assert spec_problem(words, KEY, options) is None


@pytest.mark.parametrize(
    "spec, options, words",
    [
        ("{file}:run", {"client": "gemini"}, "does not take the option client='gemini'"),
        ("{file}:run", {"sise": 1}, "Did you mean size?"),
        ("{file}:swapped", {}, "Write async def swapped(task, base_url, api_key)"),
        ("{file}:plain", {}, "is a function without async, and no agent"),
        ("{command}", {"reward": "prize"}, 'maths = command "python agents.py" (reward=prize)'),
        ("{command}", {"reward": "prize"}, "does not take the option reward='prize'"),
        ("{command}", {"rewards": "post"}, "Did you mean reward?"),
        ("{command}", {"env": {"SIZE": 4}}, "env.SIZE: Input should be a valid string"),
        ("{command}", {}, "maths.command = python agents.py"),
    ],
)  # fmt: skip
def test_a_mistake_of_an_agent_names_key_and_remedy(
    tmp_path: Path, spec: str, options: dict[str, Any], words: str
) -> None:
    file = tmp_path / "agent.py"
    file.write_text(AGENTS)
    command = command_spec("python agents.py")
    with pytest.raises(ConfigError) as caught:
        load_environment(spec.replace("{file}", str(file)).replace("{command}", command), options, KEY)  # fmt: skip
    assert words in str(caught.value)
