"""`verl-ray play`: an episode in the terminal, here with what is typed in a pipe."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from controllers.commands.person import typed_action
from controllers.commands.play import SHIPPED, TEMPLATE, agent_spec, main
from tests.kills import ROOT
from verl_ray.agents.contract import ToolCall
from verl_ray.agents.template import prefix_problems
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import train_bpe
from verl_ray.errors import ConfigError, DataError, ModelError
from verl_ray.models.tiny import make_tiny
from verl_ray.settings.function_specs import command_spec


def play(*arguments: str, typed: str = "", code: int = 0) -> str:
    """What `verl-ray play` prints."""
    ended = subprocess.run(
        [sys.executable, "-m", "controllers", "play", *arguments],
        cwd=ROOT, input=typed, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout if code == 0 else ended.stderr


@pytest.mark.processes
def test_a_person_uses_a_tool_and_is_paid(tmp_path: Path) -> None:
    records = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{n} * 3 = ?", "answer": str(3 * n)} for n in (2, 12)]
    records.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = play(
        "calculator", "--data", str(records), "--record", "1",
        typed='calculate(expression="12 * 3")\ncalculate(12)\nIt is 36\x1b[m\n',
    )  # fmt: skip
    shown = out.splitlines()
    assert "--- tools: calculate(expression=...)" in shown
    assert "12 * 3 = ?<|im_end|>" in shown and "36<|im_end|>" in shown
    assert "--- calls calculate(expression='12 * 3')" in shown
    assert [line for line in shown if line.startswith("--- no call")] == [
        "--- no call can be read: each argument needs its name: NAME(argument=value)"
    ]
    # Nothing that is typed is obeyed by the terminal.
    last = r"[I|t| |i|s| |3|6|\x1b|[|m|<|im_end|>]  <- 12 tokens of the policy"
    assert last in shown
    # A call as Hermes writes it, what could not be read, and the answer.
    assert shown[-4:-1] == [
        "--- reward 1.0",
        "--- completed, score 1",
        "turns 3, tool calls 1, rows 1",
    ]
    number, paid = shown[-1].split("; ", 1)
    assert number.startswith("row 1: ")
    assert number.endswith(f" tokens, {86 + 14 + 12} under the mask")
    assert [each.partition(" at ")[0] for each in paid.split("; ")] == ["0", "0", "1"]


@pytest.mark.processes
def test_the_end_of_the_input_ends_the_episode() -> None:
    # The environment of seed 1 thinks of 3, and the second guess of 10 is worth 0.9.
    arguments = ("number_guessing", "high=10", "--seed", "1")
    out = play(*arguments, typed="5\n")
    assert "My number is lower. Guesses that remain: 9.<|im_end|>" in out
    assert "--- aborted, score 0\nturns 1, tool calls 0, rows 1\n" in out
    assert "takes no option hihg" in play(*arguments, "hihg=3", code=2)


@pytest.mark.processes
def test_a_text_of_the_environment_ends_what_is_typed(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(
        "async def run(task, policy):\n"
        "    action = await policy.respond(task.messages, stop=['</a>'])\n"
        "    policy.record(letters=len(action.text))\n"
        "    return 1.0\n"
    )
    out = play(f"{file}:run", "--prompt", "go", typed="x</a> and more\n")
    assert "[x|<|/|a|>]  <- 5 tokens of the policy" in out
    assert "--- completed, score 1\nmetric letters = 5\nturns 1," in out


@pytest.mark.processes
def test_an_environment_that_blocks_or_lacks_a_column_is_named(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(
        "import time\n"
        "from verl_ray.agents.contract import Observation, Step\n"
        "from verl_ray.agents.models import model\n"
        "class Game:\n"
        "    async def reset(self, task, seed):\n"
        "        self.user = model('user')\n"
        "        return Observation([{'role': 'user', 'content': task.extra['word']}])\n"
        "    async def step(self, action):\n"
        "        time.sleep(1.5)\n"
        "        return Step(done=True)\n"
        "    async def close(self): ...\n"
    )
    records = tmp_path / "words.jsonl"
    records.write_text('{"prompt": "say", "word": "hush"}\n')
    named = "agent.models.user.url=http://127.0.0.1:9/v1"
    arguments = [f"{file}:Game", named, "--data", str(records)]
    out = play(*arguments, typed="hush\n")
    assert f"--- {file}, line 9, in Game.step held the event loop for 1." in out

    failed = subprocess.run(
        [sys.executable, "-m", "controllers", "play", *arguments[:2]],
        cwd=ROOT, capture_output=True, text=True, input="", timeout=280,
    )  # fmt: skip
    assert "KeyError: 'word'" in failed.stdout and "play.py" not in failed.stdout
    assert "nothing in extra; --answer gives an answer, and --data" in failed.stdout


@pytest.mark.slow
def test_an_agent_that_waits_for_itself_is_named_while_it_does(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import openai\n"
        "async def run(task, base_url, api_key):\n"
        "    client = openai.OpenAI(base_url=base_url, api_key=api_key)\n"
        "    client.chat.completions.create(model='m', messages=task.messages)\n"
    )
    playing = subprocess.Popen(
        [sys.executable, "-m", "controllers", "play", "--agent", f"{agent}:run", "--prompt", "3"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    late = threading.Timer(280, playing.kill)
    late.start()
    try:
        assert playing.stdout is not None
        line = playing.stdout.readline()
    finally:
        late.cancel()
        playing.kill()
        playing.communicate()
    assert line.startswith(f"--- {agent}, line 4, in run holds the event loop, and")
    assert "Ask by AsyncOpenAI" in line


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_is_watched(tmp_path: Path) -> None:
    train_bpe(tmp_path / "tokenizer", [], vocab_size=259, chat_template=TEMPLATE)
    sizes = TinyModelConfig(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_size=32, intermediate_size=64,
        tie_embeddings=True,
    )  # fmt: skip
    model = make_tiny(
        "qwen3", tmp_path / "model", tmp_path / "tokenizer", sizes, seed=0
    )
    arguments = ("number_guessing", "--model", str(model), "--context", "256")
    out = play(*arguments)
    (turn,) = [line for line in out.splitlines() if line.endswith("of the policy")]
    # An untrained model seldom ends a turn, so that the row is full.
    assert turn.startswith("[") and "--- the turn is cut by its length" in out
    assert (
        "--- context_overflow (by --context), score 0\nturns 1, tool calls 0, rows 1\n"
        in out
    )
    assert "row 1: 256 tokens, " in out


def test_what_is_wrong_with_the_command_line_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        main(["number_gessing", "--record", "2", "--max-turns", "0"])
    problems = {problem.key: problem.fix for problem in caught.value.problems}
    assert set(problems) == {"ENV", "--record", "--max-turns"}
    assert problems["ENV"].startswith("Did you mean number_guessing?")
    assert problems["--record"] == "Give --data as well, or leave it out."

    # What is read names these options, and no setting of a run.
    with pytest.raises(DataError, match="does not exist; set --data to"):
        main(["number_guessing", "--data", "no_such.jsonl"])
    with pytest.raises(ModelError, match="; set --tokenizer to a local"):
        main(["number_guessing", "--tokenizer", "no_such_model"])
    misspelt = "agent.models.user={url: http://a/v1, tokenenv: X}"
    with pytest.raises(ConfigError, match=r"mean agent\.models\.user\.token_env"):
        main(["number_guessing", misspelt])
    with pytest.raises(ConfigError, match=r"it has no config\.json") as caught:
        main(["number_guessing", "--model", "no_such_model", "--tokenizer", "other"])
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["--model", "--tokenizer"]


def test_an_agent_is_a_file_a_function_or_a_command() -> None:
    assert agent_spec("my/agent.py") == command_spec("python my/agent.py")
    assert agent_spec("my agent.py") == command_spec("my agent.py")
    assert agent_spec("my/agent.py:run") == "my/agent.py:run"
    assert agent_spec("node a.js --x 'y z'") == command_spec("node a.js --x 'y z'")

    with pytest.raises(ConfigError) as caught:
        main(["calculator", "--agent", "agent.py"])
    assert [problem.key for problem in caught.value.problems] == ["ENV"]
    with pytest.raises(ConfigError, match=r"Name one, or give --agent\."):
        main([])
    with pytest.raises(ConfigError, match=r"--agent\.command = python no_such\.py"):
        main(["--agent", "no_such.py", "reward=stdout", "--seed", "1"])
    with pytest.raises(ConfigError, match="takes no option rewrd"):
        main(["--agent", "true", "rewrd=stdout"])
    with pytest.raises(ConfigError, match=r"Write pass_env=\[HOME\]\."):
        main(["--agent", "true", "pass_env=HOME"])
    with pytest.raises(ConfigError, match=r"Did you mean stdout\?"):
        main(["--agent", "true", "reward=stdot"])


@pytest.mark.processes
def test_a_person_answers_an_agent(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import json, os, sys, urllib.request\n"
        "body = json.dumps({'model': 'm', 'messages': json.load(sys.stdin)['messages']})\n"
        "headers = {'x-api-key': os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "call = urllib.request.Request(url, body.encode(), headers)\n"
        "reply = json.load(urllib.request.urlopen(call))\n"
        "print(reply['choices'][0]['message']['content'] == '7', file=sys.stderr)\n"
        "print(0.5)\n"
    )
    arguments = ("--agent", str(agent), "reward=stdout", "--prompt", "3 + 4")
    out = play(*arguments, typed="7\n")
    assert "[7|<|im_end|>]  <- 2 tokens of the policy" in out
    assert (
        "--- completed, score 0.5\n--- printed\n--- stdout\n0.5\n--- stderr\nTrue\n"
        in out
    )
    # Without the option a grader of a run would score it.
    shown = play("--agent", str(agent), "--prompt", "3 + 4", typed="7\n").splitlines()
    end = "--- completed, without a score: the agent names none, and a grader of a run"
    place = shown.index(f"{end} would")
    assert shown[place + 1].endswith("is a number: reward=stdout takes it")


@pytest.mark.processes
def test_a_tool_that_is_misspelt_is_named() -> None:
    out = play("calculator", "--answer", "2", typed='calculat(expression="1+1")\n')
    assert "--- a text, since no tool is calculat. Did you mean calculate?" in out


def test_a_line_is_words_or_calls() -> None:
    tools = ["add", "look"]
    action = typed_action("add(a=1, b=[2.5]), look()", tools)
    assert action.tool_calls == [
        ToolCall("add", {"a": 1, "b": [2.5]}),
        ToolCall("look", {}),
    ]
    words = typed_action("adding (a=1) is fun", tools)
    assert (words.text, words.tool_calls) == ("adding (a=1) is fun", ())
    for line in ("add(1)", "add(a={[]: 1})", "add(a=", "add(**{})", "add(a=1) + 1"):
        assert typed_action(line, tools).parse_error
    assert typed_action("add(a=blue)", tools).parse_error == (
        "a=blue is no plain value; a text has quotes: a='blue'"
    )
    # Without tools, a bracket is one.
    assert typed_action("add(a=1)", []).text == "add(a=1)"


def test_the_template_without_a_model_continues_all_turns(tmp_path: Path) -> None:
    tokenizer = train_bpe(tmp_path, [], vocab_size=259, chat_template=TEMPLATE)
    assert prefix_problems(tokenizer) == []


def test_what_ships_has_a_short_name() -> None:
    folder = ROOT / "verl_ray" / "agents" / "environments"
    others = {"__init__", "conversation"}
    assert set(SHIPPED) == {path.stem for path in folder.glob("*.py")} - others
