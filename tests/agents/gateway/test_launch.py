"""Agents as commands and functions: what they are given, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.waiting import until
from verl_ray.agents.contract import EpisodeTask
from verl_ray.agents.gateway.launch import AgentCommand, AgentFunction, Door
from verl_ray.errors import AgentFailed
from verl_ray.processes.command_guard import MOST_OUTPUT_BYTES

TASK = EpisodeTask([{"role": "user", "content": "1 + 1"}], "2", {"level": 3}, "sums")

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 100)
        os.execve("/bin/sleep", ["sleep", "MARK"], {})
time.sleep(0.1)
"""
BOMB = """
import os, time
for _ in range(8):
    os.fork()
    if os.getpgrp() != os.getpid():
        os.setsid()
time.sleep(1000)
"""
DEEP = """
import os
for _ in range(1100):
    os.mkdir("deep"); os.chdir("deep")
os.chmod(".", 0)
"""


def command(*words: str) -> str:
    return shlex.join(words)


def python(code: str, mark: str = "") -> str:
    return command(sys.executable, "-S", "-c", code.replace("MARK", mark))


def shell(code: str) -> str:
    return command("sh", "-c", code)


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> str:
    """Seconds that no other process sleeps."""
    return f"{os.getpid()}.{abs(hash(request.node.name)) % 10**9}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders of episodes are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def remaining(mark: str) -> list[int]:
    """The processes that have a mark in their environment or arguments."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in text and int(entry.name) != os.getpid():
            pids.append(int(entry.name))
    return pids


def door(outputs: list[str]) -> Door:
    urls = "http://127.0.0.1:1/v1", "http://127.0.0.1:1"
    return Door(*urls, "the-secret", outputs.append)


def outcome(agent: AgentCommand, task: EpisodeTask = TASK) -> tuple[float | None, str]:
    """The reward that an agent names, and its output."""
    outputs: list[str] = []
    reward = asyncio.run(agent(task, door(outputs)))
    (output,) = outputs
    return reward, output


def failure(agent: AgentCommand) -> tuple[str, str]:
    """The words about an agent that fails, and its output."""
    outputs: list[str] = []
    with pytest.raises(AgentFailed) as caught:
        asyncio.run(agent(TASK, door(outputs)))
    (output,) = outputs
    return str(caught.value), output


@pytest.mark.processes
def test_a_command_gets_its_task_and_nothing_of_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "RAY_ADDRESS", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "ours")
    monkeypatch.setenv("LC_TIME", "C")
    monkeypatch.setenv("JUDGE_TOKEN", "passed")
    code = (
        "import json, os, resource, sys\n"
        "task = sys.stdin.read()\n"
        "same = open(os.environ['VERL_RAY_TASK']).read() == task\n"
        "first_to_go = int(open('/proc/self/oom_score_adj').read())\n"
        "limits = [resource.getrlimit(resource.RLIMIT_NOFILE),\n"
        "    resource.getrlimit(resource.RLIMIT_CORE), first_to_go,\n"
        "    os.sched_getscheduler(os.getppid())]\n"
        "print(json.dumps([dict(os.environ), os.getcwd(), json.loads(task), same,\n"
        "    limits]))"
    )
    more = {"NO_PROXY": "intern", "SIZE": "4"}
    agent = AgentCommand(python(code), env=more, pass_env=["JUDGE_TOKEN"])
    reward, output = outcome(agent)
    assert reward is None
    variables, here, task, is_same, limits = json.loads(
        output.removeprefix("--- stdout\n")
    )
    # Files, core files, what memory is taken from first; the guard has no priority.
    assert limits == [[1024, 1024], [0, 0], 1000, os.SCHED_OTHER]
    assert "ours" not in variables.values()
    expected = {
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "the-secret",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:1", "ANTHROPIC_API_KEY": "the-secret",
        "HOME": here, "TMPDIR": here, "PWD": here, "VERL_RAY_TASK": f"{here}/task.json",
        "NO_PROXY": "intern,127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
        "LC_TIME": "C", "PATH": os.environ["PATH"], "SIZE": "4", "JUDGE_TOKEN": "passed",
    }  # fmt: skip
    assert expected.items() <= variables.items()
    assert {"WANDB_API_KEY", "HF_TOKEN", "RAY_ADDRESS"}.isdisjoint(variables)
    assert is_same
    assert task == {
        "messages": TASK.messages,
        "data_source": "sums",
        "extra": {"level": 3},
    }
    # It had a folder of its own, of which nothing stays.
    assert Path(here).parent == folder and not list(folder.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize(
    "words, cause",
    [
        (shell("echo why >&2; exit 3"), "the command exited with status 3; its stderr ends with: why"),
        (shell("kill -9 $$"), "the command was killed by signal 9 (Killed); it wrote nothing to stderr"),
        ("no_such_program", "exited with status 127; its stderr ends with: no_such_program: No such file"),
        (python("import sys\nsys.stderr.write('first\\n')\n1 / 0"), "status 1; its stderr ends with:\nTraceback (most"),
        (shell("seq 12 >&2; exit 3"), "its stderr ends with: ... 3 4 5 6 7 8 9 10 11 12"),
        (python(BOMB), "the command had more than 40 processes, and was killed"),
        # The first of its processes dies with it, and the other has to be looked for.
        (shell("setsid sleep MARK & sleep 0.1; kill -9 $PPID; sleep MARK"), "the command lost its guard, which was killed"),
    ],
    ids=["status", "signal", "missing", "traceback", "long", "bomb", "guard"],
)  # fmt: skip
def test_a_command_that_fails_says_how(
    words: str, cause: str, mark: str, folder: Path
) -> None:
    agent = AgentCommand(
        words.replace("MARK", mark), env={"MARK": mark}, max_processes=40
    )
    detail, _ = failure(agent)
    assert cause in detail
    assert not remaining(mark)
    assert not list(folder.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize(
    "code",
    [
        shell("sleep MARK & setsid sleep MARK & nohup sleep MARK & exit 0"),
        python(DAEMON, "MARK"),
        python(DEEP),
        shell("echo > file; chmod 0 . "),
    ],
    ids=["background", "daemon", "deep", "modes"],
)
def test_nothing_outlives_a_command(code: str, mark: str, folder: Path) -> None:
    agent = AgentCommand(code.replace("MARK", mark), env={"MARK": mark})
    assert outcome(agent) == (None, "")
    assert not remaining(mark)
    assert not list(folder.iterdir())


@pytest.mark.processes
def test_output_is_bounded_and_stdin_need_not_be_read() -> None:
    large = EpisodeTask([{"role": "user", "content": "x" * 10_000_000}])
    words = shell("yes | head -c 30000000; echo; echo 0.25; yes no | head -c 99999 >&2")
    begin = time.monotonic()
    reward, output = outcome(AgentCommand(words, reward="stdout"), large)
    # Its guard takes 64 KiB, the size of a pipe, at a time and rests for 2 ms.
    assert time.monotonic() - begin > 30_000_000 / 65_536 * 0.002
    assert reward == 0.25
    stdout, stderr = output.split("--- stderr\n")
    # Beside the numbers of bytes that are left out: 30,000,006 and 99,999.
    assert stdout.startswith(
        "--- stdout\n[29,983,622 bytes before this are left out]\n"
    )
    assert stdout.endswith("y\n\n0.25\n")
    assert stderr.startswith("[83,615 bytes before this are left out]\n")
    assert len(output) < 2 * MOST_OUTPUT_BYTES + 200


@pytest.mark.processes
@pytest.mark.parametrize("last", ["done", "nan", ""])
def test_a_reward_on_stdout_is_a_number(last: str) -> None:
    words = command("printf", f"0.5\n{last}\n\n") if last else command("true")
    detail, _ = failure(AgentCommand(words, reward="stdout"))
    assert f"the last line of its stdout is {last!r}" in detail


@pytest.mark.processes
@pytest.mark.parametrize("number", ["TERM", "STOP"])
def test_a_cancelled_command_is_killed_whatever_it_ignores(
    number: str, mark: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    # Stopping the guard does not help either.
    act = "trap '' TERM HUP INT" if number == "TERM" else "kill -STOP $PPID"
    words = shell(
        f"echo so far; {act}; setsid sleep {mark} & : > {begun}; sleep {mark}"
    )
    outputs: list[str] = []

    async def cancelled() -> None:
        agent = AgentCommand(words, env={"MARK": mark})
        task = asyncio.create_task(agent(TASK, door(outputs)))
        await asyncio.to_thread(until, begun.exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not remaining(mark)
    assert outputs == ["--- stdout\nso far"]
    begun.unlink()
    assert not list(tmp_path.iterdir())


HOST = """
import asyncio, sys
from verl_ray.agents.contract import EpisodeTask
from verl_ray.agents.gateway.launch import AgentCommand, Door
door = Door("", "", "", print)
asyncio.run(AgentCommand(sys.argv[1])(EpisodeTask([]), door))
"""


@pytest.mark.processes
def test_a_command_ends_with_the_process_of_its_episode(
    mark: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    words = shell(f"setsid sleep {mark} & : > {begun}; sleep {mark}")
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    host = subprocess.Popen([sys.executable, "-c", HOST, words], env=variables)
    try:
        until(begun.exists)
    finally:
        host.kill()
        host.wait()
    until(lambda: not remaining(mark))
    begun.unlink()
    until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.processes
def test_two_hundred_at_once_do_not_hold_the_loop(folder: Path) -> None:
    lags = []

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - before)

    async def crowd() -> float:
        beating = asyncio.create_task(beat())
        agent = AgentCommand("cat", reward="stdout")
        outputs: list[str] = []
        begin = time.monotonic()
        ends = (agent(TASK, door(outputs)) for _ in range(200))
        results = await asyncio.gather(*ends, return_exceptions=True)
        beating.cancel()
        # The task that `cat` repeats is no number.
        assert all(isinstance(each, AgentFailed) for each in results)
        assert len(outputs) == 200 and all('"1 + 1"' in each for each in outputs)
        return time.monotonic() - begin

    seconds = asyncio.run(crowd())
    assert max(lags) < seconds / 3
    assert not list(folder.iterdir())


def test_a_function_names_its_reward_or_none() -> None:
    async def run(task: EpisodeTask, base_url: str, api_key: str) -> float | None:
        assert task is TASK and api_key == "the-secret"
        return {"http://127.0.0.1:1/v1": 1, "http://127.0.0.1:1": None}[base_url]

    async def wordy(task: EpisodeTask, base_url: str, api_key: str) -> str:
        return "well done"

    assert asyncio.run(AgentFunction(run)(TASK, door([]))) == 1.0
    assert asyncio.run(AgentFunction(run, "anthropic")(TASK, door([]))) is None
    with pytest.raises(TypeError, match="the agent returned 'well done', which is no"):
        asyncio.run(AgentFunction(wordy)(TASK, door([])))  # type: ignore[arg-type]


def test_mistakes_of_a_command_are_named_without_running_it(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.touch(0o644)
    cases = {
        "": "k.command = '': it is empty",
        "python 'x": "it cannot be split into words: no closing quotation",
        "no_such_program x": "there is no program 'no_such_program'",
        f"{script} x": "is not executable. Make it executable, or write its interpreter",
        "python no_such_agent.py": "the file no_such_agent.py does not exist",
        "true | cat": "no shell reads it, and | would be a word",
        "A=1 true": "no shell reads it, and A=1 would be a word",
    }
    for words, text in cases.items():
        (problem,) = AgentCommand(words).problems("k")
        assert text in str(problem)

    agent = AgentCommand(
        "true",
        env={"OPENAI_API_KEY": "x", "A=B": "x"},
        pass_env=["NO_SUCH"],
        max_processes=0,
    )
    problems = {(each.key, each.value) for each in agent.problems("k")}
    assert problems == {
        ("k.env", "OPENAI_API_KEY"),
        ("k.env", "A=B"),
        ("k.pass_env", "NO_SUCH"),
        ("k.max_processes", 0),
    }
