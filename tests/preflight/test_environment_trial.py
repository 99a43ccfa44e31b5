"""Environments of a user's own, tried in two episodes before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from controllers.command_line import main
from controllers.commands.check_data import print_data
from scripts.configuration import compose
from tests.agents.chat_server import chat_server, says
from tests.agents.templates import MERGING
from tests.preflight.configs import settled
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.tokenizers import train_bpe
from verl_ray.errors import Problem
from verl_ray.preflight import environment_trial
from verl_ray.preflight.data_files import examine_data
from verl_ray.preflight.environment_trial import EnvironmentTrials, try_environments
from verl_ray.preflight.reward_trial import try_rewards

pytestmark = pytest.mark.processes

ENVIRONMENTS = """
import os, random, subprocess, time
from pathlib import Path
from verl_ray.agents.contract import Observation, Step
from verl_ray.agents.models import model

class Echo:
    async def reset(self, task, seed):
        return Observation([{"role": "user", "content": f"{task.answer} {seed}"}])
    async def step(self, action):
        right = action.text == "2"
        return Step([{"role": "user", "content": "Again."}], 0.5 * right, done=right)
    async def close(self): ...

class Forgetful(Echo):
    async def reset(self, task, seed):
        return Observation([{"role": "user", "content": str(random.random())}])

class Wordy(Echo):
    async def reset(self, task, seed):
        return Observation([{"role": "user", "content": task.extra["word"]}])

class Sized(Echo):
    def __init__(self, size: int): ...

class Brittle(Echo):
    async def step(self, action):
        return Step(reward=float(action.text), done=True)

class Fatal(Echo):
    async def step(self, action):
        sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(__file__).with_name("sleeper").write_text(str(sleeper.pid))
        os._exit(3)

class Slow(Echo):
    def __init__(self, seconds: float):
        self.seconds = seconds
    async def step(self, action):
        time.sleep(self.seconds)
        return await super().step(action)

async def asks(task, base_url, api_key):
    import openai
    # Longer than it takes to make a client.
    time.sleep(0.1)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="m", messages=task.messages)
    return 1.0

class InThread(Slow):
    def step(self, action):
        time.sleep(self.seconds)
        return Step(done=True)

class Talking(Echo):
    def __init__(self):
        self.user = model("user")
    async def reset(self, task, seed):
        said = await self.user.chat([{"role": "user", "content": "2"}])
        return Observation([{"role": "user", "content": said}])

class Stuck(Echo):
    async def step(self, action):
        time.sleep(1000)

def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    '''
    raise AssertionError("the trial calls no tool")

class Shop:
    def buy(self, thing: str) -> str:
        '''Buy a thing.

        Args:
            thing: The thing.
        '''
    def sell(self, thing: str) -> str:
        '''Sell a thing.

        Args:
            thing: The thing.
        '''
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(folder, ["0 + 1 = 1"], vocab_size=259, chat_template=MERGING)
    return folder


def tried(
    folder: Path,
    model: Path,
    environments: dict[str, str],
    *overrides: str,
    more: Sequence[dict[str, object]] = (),
) -> EnvironmentTrials:
    """The trial of classes of `ENVIRONMENTS`, one for each of the data sources.

    Args:
        more: Columns of further records.
    """
    config = configured(folder, model, environments, {}, *overrides, more=more)
    return try_environments(config, examine_data(config).files)


def configured(
    folder: Path,
    model: Path,
    environments: dict[str, str],
    fields: dict[str, dict[str, object]],
    *overrides: str,
    more: Sequence[dict[str, object]] = (),
) -> RLConfig:
    """A run in these environments; records of some data sources have further fields."""
    file = folder / "environments.py"
    file.write_text(ENVIRONMENTS)
    record = {"prompt": "1 + 1 = ", "answer": "2"}
    path = folder / "records.jsonl"
    rows = [
        {**record, "data_source": source, **fields.get(source, {})}
        for source in environments
    ]
    rows += [{**record, **columns} for columns in more]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = [
        f"agent.environments.{source}={file}:{name}"
        for source, name in environments.items()
    ]
    config = settled(
        compose(
            "grpo",
            [
                f"model.path={model}", f"data.train_path={path}", f"data.validation_path={path}",
                "reward.functions.default=environment", "agent.max_turns=3", *named, *overrides,
            ],
        )
    )  # fmt: skip
    assert isinstance(config, RLConfig)
    return config


def test_models_of_environments_are_asked_first(tmp_path: Path, model: Path) -> None:
    with chat_server() as server:
        server.behave = lambda call: says("0 1")
        named = f"agent.models.user={{url: {server.url}, model: big}}"
        trials = tried(tmp_path, model, {"default": "Talking"}, named)
        assert not trials.problems
        assert "completed after 1 turn, score 0.5" in trials.lines[1]
        first, *others = server.calls
        assert (first["max_tokens"], first["model"]) == (1, "big")
        assert others and all(call["model"] == "big" for call in others)
    trials = tried(tmp_path, model, {"default": "Talking"}, named)
    (problem,) = trials.problems
    assert (problem.key, problem.value) == ("agent.models.user.url", server.url)
    tried_at = f"POST {server.url}/chat/completions: no reply: ConnectError"
    assert problem.rule.startswith(tried_at) and problem.may_pass
    assert "url, model or token_env" in problem.fix and len(server.calls) == len(others) + 1  # fmt: skip
    assert "/v1" not in problem.fix

    named = f"agent.models.user.url={server.url.removesuffix('/v1')}"
    (problem,) = tried(tmp_path, model, {"default": "Talking"}, named).problems
    assert problem.fix.endswith("The url usually ends with /v1.")


def by_key(problems: list[Problem]) -> dict[str, str]:
    return {problem.key: problem.rule for problem in problems}


def test_what_became_of_two_episodes_is_told(tmp_path: Path, model: Path) -> None:
    environments = {
        "default": "Echo",
        "lost": "Forgetful",
        "brittle": "Brittle",
        "sum": "add",
    }
    trials = tried(tmp_path, model, environments)
    file = tmp_path / "environments.py"
    assert trials.lines[:3] == [
        f"agent.environments.default={file}:Echo, on a record of 'default':",
        "  the record's own answer: completed after 1 turn, score 0.5",
        "  texts that say nothing: max_turns after 3 turns, score 0",
    ]
    assert trials.lines[9:12] == [
        f"agent.environments.sum={file}:add, on a record of 'sum', with the tools add:",
        "  the record's own answer: completed after 1 turn, score 0",
        # What cannot be read, a tool that does not exist, and no words.
        "  texts that say nothing: completed after 3 turns, score 0",
    ]
    # The template is told of as far as it matters; `MERGING` keeps all turns.
    assert trials.lines[12:] == [
        "chat template: the turns of a conversation continue one row"
    ]
    differing, unpaid = trials.warnings
    assert differing.startswith(
        f"agent.environments.lost={file}:Forgetful: the same task"
    )
    assert unpaid.startswith("reward.functions.default=environment takes what")
    problems = by_key(trials.problems)
    assert set(problems) == {"agent.environments.brittle", "agent.tool_parser"}
    line = 1 + ENVIRONMENTS.partition("reward=float")[0].count("\n")
    assert problems["agent.environments.brittle"] == (
        "it fails on texts that say nothing: ValueError: could not convert string to"
        f" float: '' ({file}, line {line})"
    )
    assert "tools (add)" in problems["agent.tool_parser"]


def test_the_first_prompt_of_an_episode_is_shown(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the environment's texts and tools, and what the record gives the template."""
    template = tmp_path / "template.jinja"
    switch = "{% if enable_thinking is false %}<think></think>{% endif %}"
    template.write_text(MERGING + switch)
    config = configured(
        tmp_path,
        model,
        {"default": "Echo", "b": "add", "c": "Echo"},
        {"default": {"enable_thinking": False}, "c": {"enable_thinking": False}},
        f"data.chat_template={template}", "agent.tool_parser=hermes", "run.seed=3",
    )  # fmt: skip
    files = examine_data(config).files
    trials = try_environments(config, files)
    print_data(config, files, [], trials.openings)
    output = capsys.readouterr().out
    start = "<|im_start|>user\n"
    end = "<|im_end|>\n<|im_start|>assistant\n"
    (first, count, text), (other, longer, with_tools), same = trials.openings
    keys = [f"agent.environments.{name}" for name in ("default", "b", "c")]
    assert [first, other] == keys[:2] and same == (keys[2], count, text)
    assert text == f"{start}2 3{end}<think></think>"
    named = f"in {keys[0]}, {keys[2]}, as the model sees it ({count} tokens):"
    # What two environments begin with stands there once.
    assert f"episode {named}" in output and output.count("first prompt of") == 2
    assert f"  | {start}" in output and "prompt 1 of" not in output
    (row,) = (line for line in output.splitlines() if line.startswith(f"│ {keys[1]} "))
    cells = [cell.strip() for cell in row.split("│")]
    assert cells[2:-1] == ["first 1", "-", *[str(longer)] * 4]
    assert '{"type": "function", "function": {"name": "add"' in with_tools
    assert with_tools.endswith(f"{start}1 + 1 = {end}")


def test_a_reward_beside_what_the_environment_pays_is_warned_of(
    tmp_path: Path, model: Path
) -> None:
    rewarded = "reward.functions.default=exact_match"
    environments = {"default": "Echo", "sum": "add"}
    assert tried(tmp_path, model, environments, rewarded).warnings == [
        "reward.functions.default=exact_match does not look at what the environment pays"
        " (agent.environments.default); environment does"
    ]
    environments = {"sum": "add", "more": "Shop"}
    (warning,) = tried(tmp_path, model, environments).warnings
    assert "(agent.environments.sum, agent.environments.more) pay nothing" in warning


def test_records_without_an_environment_are_counted(
    tmp_path: Path, model: Path
) -> None:
    more = [{"data_source": "sums"}, {"data_source": "sums", "environment": "game"}]
    scored = "reward.functions={default: environment, sums: exact_match}"
    trials = tried(tmp_path, model, {"game": "Echo"}, scored, more=more)
    assert not trials.problems
    assert [line for line in trials.lines if "single response" in line] == [
        f"data.{name}_path: 1 of 3 records have no environment, so each of their"
        " rollouts is a single response"
        for name in ("train", "validation")
    ]
    assert not any("every rollout" in warning for warning in trials.warnings)

    config = configured(tmp_path, model, {"game": "Echo"}, {}, more=more)
    files = examine_data(config).files
    (problem,) = try_rewards(config, files).problems
    assert not try_environments(config, files).problems
    assert problem.value == "environment"
    assert problem.rule == (
        "records of 'sums' have no environment, whose score it would be"
    )
    assert problem.key == "reward.functions.default"
    assert "Set reward.functions.sums to another function" in problem.fix
    assert "or agent.environments.sums to an environment" in problem.fix


def test_a_run_whose_records_name_no_environment_is_warned_of(
    tmp_path: Path, model: Path
) -> None:
    environment = f"agent.environments.game={tmp_path}/environments.py:Echo"
    scored = "reward.functions.default=exact_match"
    more = [{"data_source": "sums"}]
    warnings = tried(tmp_path, model, {}, environment, scored, more=more).warnings
    assert warnings == [
        "agent.environments: no record that was read has one, so every rollout is a"
        " single response"
    ]


def test_the_tools_that_records_name_are_tried(tmp_path: Path, model: Path) -> None:
    parser = "agent.tool_parser=hermes"
    scored = "reward.functions.default=exact_match"
    offering = [{"data_source": "shop", "tools": ["sell"]}]
    trials = tried(tmp_path, model, {"shop": "Shop"}, parser, scored, more=offering)
    assert not trials.problems
    assert "with the tools buy, sell" in trials.lines[0]

    wrong = [*offering, {"data_source": "shop", "tools": ["buy", "sel"]}]
    problems = tried(
        tmp_path, model, {"shop": "Shop"}, parser, scored, more=wrong
    ).problems
    problem = problems[0]
    assert {each.key for each in problems} == {
        "data.train_path",
        "data.validation_path",
    }
    assert problem.rule == (
        "record 3 cannot act in agent.environments.shop: there is no tool 'sel'"
    )
    assert problem.fix == "Did you mean sell? There is buy, sell."


def test_a_parser_that_vllm_has_not_is_a_problem(tmp_path: Path, model: Path) -> None:
    parser = "agent.tool_parser=hermess"
    (problem,) = tried(tmp_path, model, {"default": "add"}, parser).problems
    assert (problem.key, problem.value) == ("agent.tool_parser", "hermess")
    assert problem.fix.startswith("Did you mean hermes?")
    hermes = "agent.tool_parser=hermes"
    thoughts = "agent.reasoning_parser=granite"
    (problem,) = tried(tmp_path, model, {"default": "add"}, hermes, thoughts).problems
    assert (problem.key, problem.value) == ("agent.reasoning_parser", "granite")
    assert problem.rule == "this parser of vLLM has no marks around thoughts"


def test_what_has_no_effect_is_warned_of(tmp_path: Path, model: Path) -> None:
    parser = "agent.tool_parser=hermes"
    spec = f"{tmp_path}/environments.py:Echo"
    misspelt = f"agent.environments.defualt={spec}"
    trials = tried(tmp_path, model, {"default": "Echo"}, parser, misspelt)
    assert not trials.problems
    assert trials.warnings == [
        "agent.environments.defualt: no record has this environment, so far as read."
        " Did you mean agent.environments.default?",
        "agent.tool_parser=hermes reads no call: no environment that was tried begins"
        " with tools",
    ]


def test_an_environment_without_a_record_is_imported(
    tmp_path: Path, model: Path
) -> None:
    sized = f"agent.environments.other={{function: {tmp_path}/environments.py:Sized, size: maybe}}"
    trials = tried(tmp_path, model, {"default": "Echo"}, sized)
    (problem,) = trials.problems
    assert problem.key == "agent.environments.other"
    assert "does not take the option size='maybe'" in problem.rule


def test_how_long_an_environment_holds_its_loop_is_measured(
    tmp_path: Path, model: Path
) -> None:
    file = tmp_path / "environments.py"
    other = f"agent.environments.other={{function: {file}:InThread, seconds: 0.1}}"
    default = f"agent.environments.default={{function: {file}:Slow, seconds: 0.1}}"
    named = {"other": "Slow", "default": "Slow", "asks": "asks"}
    trials = tried(tmp_path, model, named, other, default)
    assert not trials.problems
    slow, _ = (line for line in trials.lines if "held" in line)
    assert slow.startswith("  it held the event loop for 0.1")
    assert slow.endswith(f" s at most, in Slow.step ({file})")
    (warning,) = trials.warnings
    assert "Slow.step" in warning and "128 episodes of a process at once" in warning
    assert "would wait 1" in warning


def test_an_environment_that_cannot_begin_is_told_what_the_record_has(
    tmp_path: Path, model: Path
) -> None:
    (problem,) = tried(tmp_path, model, {"default": "Wordy"}).problems
    assert problem.rule.startswith("it fails on the record's own answer: KeyError")
    assert "This record has messages and answer" in problem.fix


def test_nothing_of_an_environment_that_ends_its_process_remains(
    tmp_path: Path, model: Path
) -> None:
    (problem,) = tried(tmp_path, model, {"default": "Fatal"}).problems
    assert problem.key == "agent.environments.default"
    assert problem.rule == (
        "its process exited with status 3, in the episode of the record's own answer"
    )
    assert not psutil.pid_exists(int((tmp_path / "sleeper").read_text()))


def test_an_environment_that_is_stuck_is_killed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_trial, "DEADLINE_S", 1.0)
    (problem,) = tried(tmp_path, model, {"default": "Stuck"}).problems
    assert problem.rule.startswith("its process took longer than 1 s, in ")


@pytest.mark.slow
@pytest.mark.parametrize("lets_go", [False, True])
def test_an_agent_is_named_while_it_holds_the_loop(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *,
    lets_go: bool,
) -> None:
    """It waits for itself, or imports for long, and is stuck elsewhere then."""
    monkeypatch.setattr(environment_trial, "DEADLINE_S", 30.0)
    agent = tmp_path / "agent.py"
    text = (
        "import asyncio, openai, sys\n"
        "async def run(task, base_url, api_key):\n"
        "    client = openai.OpenAI(base_url=base_url, api_key=api_key)\n"
        "    client.chat.completions.create(model='m', messages=task.messages)\n"
    )
    if lets_go:
        (tmp_path / "long_import.py").write_text("import time\ntime.sleep(8)\n")
        own = f"sys.path.insert(0, {str(tmp_path)!r}); import long_import"
        lines = text.splitlines()
        text = "\n".join([*lines[:2], f"    {own}", "    await asyncio.sleep(1000)"])
    agent.write_text(text)
    named = f"agent.environments.default={agent}:run"
    (problem,) = tried(tmp_path, model, {"default": "Echo"}, named).problems
    place = f"{agent}, line 4, in run"
    where = f"an episode in which {place} holds the event loop"
    remedy = "Ask by AsyncOpenAI"
    if lets_go:
        place = f"{tmp_path}/long_import.py, line 2, in <module>"
        where = "the episode of the record's own answer"
        remedy = "Import at the top of the file"
    assert problem.rule == f"its process took longer than 30 s, in {where}"
    warning = f"warning: {place} holds the event loop, and nothing goes on. {remedy}"
    assert warning in capfd.readouterr().err


def test_check_names_an_environment_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "environments.py").write_text(ENVIRONMENTS)
    spec = f"{tmp_path}/environments.py:Echoo"
    arguments = [
        "check", "--data", "off", f"agent.environments.default={spec}", f"run.dir={tmp_path}/run",
        "reward.functions.default=environment",
    ]  # fmt: skip
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert f"agent.environments.default = {spec}\n" in err
    assert "Did you mean Echo?" in err


AGENT = """
import json, os, sys, urllib.request
body = json.dumps({"model": "policy", "messages": json.load(sys.stdin)["messages"]})
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)) as reply:
    text = json.load(reply)["choices"][0]["message"]["content"]
print("the policy says", text)
if sys.argv[1:] == ["strict"] and text != "2":
    sys.exit("no such answer")
print(0.5 if text == "2" else 0)
"""


def test_an_agent_is_started_and_what_it_pays_is_compared(
    tmp_path: Path, model: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)

    def trial(table: str, *more: str) -> EnvironmentTrials:
        named = f"agent.environments.default={{command: {table}}}"
        single = [{"data_source": "sums"}]
        return tried(tmp_path, model, {}, named, *more, more=single)

    words = f"python {agent}"
    trials = trial(f"{words}, reward: stdout")
    assert not trials.problems and not trials.warnings
    about = f'agent.environments.default=command "{words}" (reward=stdout), on a record'
    assert trials.lines[0] == f"{about} of 'sums':"
    assert (
        "the record's own answer: completed after 1 turn, score 0.5" in trials.lines[1]
    )
    assert "texts that say nothing: completed after 1 turn, score 0" in trials.lines[2]

    # Neither pays the other, and one of them does not fail by the other.
    (warning,) = trial(words).warnings
    assert (
        "an agent with reward=grader (agent.environments.default) pays nothing"
        in warning
    )
    scored = "reward.functions.default=exact_match"
    (warning,) = trial(f"{words}, reward: stdout", scored).warnings
    assert "does not look at what the environment pays" in warning

    trials = trial(f"{words} strict, reward: stdout")
    (problem,) = trials.problems
    assert problem.key == "agent.environments.default"
    assert "it fails on texts that say nothing: " in problem.rule
    assert "exited with status 1; its stderr ends with: no such answer" in problem.rule
    assert (
        "    | the policy says " in trials.lines
        and "    | no such answer" in trials.lines
    )


def test_an_agent_that_no_run_could_learn_from_is_told_so(
    tmp_path: Path, model: Path
) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import openai\n"
        "async def run(task, base_url, api_key):\n"
        "    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)\n"
        "    form = {'type': 'json_object'}\n"
        "    try:\n"
        "        await client.chat.completions.create(\n"
        "            model='m', messages=task.messages, response_format=form)\n"
        "    except openai.BadRequestError:\n"
        "        return 1.0\n"
    )
    named = f"agent.environments.default={agent}:run"
    single = [{"data_source": "sums"}]
    (problem,) = tried(tmp_path, model, {}, named, more=single).problems
    assert "it ended as completed before the policy had a turn" in problem.rule
    assert "is served in evaluations only" in problem.rule
    assert "An agent asks OPENAI_BASE_URL" in problem.fix


def test_check_names_a_command_whose_program_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "check", "--data", "off", "agent.environments.default={command: no_such_program x}",
        f"run.dir={tmp_path}/run", "reward.functions.default=exact_match",
    ]  # fmt: skip
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "agent.environments.default.command = no_such_program x\n" in err
    assert "there is no program 'no_such_program'" in err
