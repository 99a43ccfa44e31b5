"""Agents of a user's own: a command or a function that an episode starts.

A command is a process of its own for each episode, in a folder of its own, with a guard
that leaves nothing of it (`verl_ray.processes.command_guard`). A function runs in the
event loop of the episodes, like a coroutine of `verl_ray.agents.episode`.

Invariant: a command's environment has the variables that are named here and in its
options, and no others; what it prints takes bounded memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from verl_ray.agents.contract import EpisodeTask
from verl_ray.agents.returned import number_of
from verl_ray.data.further_fields import without_answer
from verl_ray.errors import AgentFailed as AgentFailed
from verl_ray.errors import Problem
from verl_ray.paths import path_suggestion
from verl_ray.processes.command import (
    COMMAND_ID,
    CommandEnd,
    GuardedCommand,
    Printed,
)
from verl_ray.user_files import shortened

Reward = Literal["grader", "post", "stdout"]
"""Who says what an episode is worth: the run's graders, the agent by a request, or the
last line of its stdout."""

Payer = Reward | Literal["function"]
"""The same, or the function that an agent is, which returns it or leaves it to the
graders."""

Client = Literal["openai", "anthropic"]
"""The client library whose base URL a function is given."""

_PASSED = frozenset(
    [
        "PATH",
        "LANG",
        "LANGUAGE",
        "TZ",
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "OMP_NUM_THREADS",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "NODE_EXTRA_CA_CERTS",
    ]
)
"""Environment variables of the workers that a command gets, beside those of LC_*."""

_OWN = frozenset(
    [
        "OPENAI_BASE_URL",
        "OPENAI_API_KEY",
        "ANTHROPIC_BASE_URL",
        "ANTHROPIC_API_KEY",
        "VERL_RAY_TASK",
        COMMAND_ID,
    ]
)
"""Environment variables of a command that tell its episode."""

_SHELL_WORDS = frozenset(["|", "||", "&", "&&", ";", ">", ">>", "<", "2>", "2>&1"])
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

_LOOPBACK = "127.0.0.1,localhost"

_STARTED_AT_ONCE = 2
"""Commands of an agent that are being started at a time. Many would keep the processor
from the event loop."""

_SHOWN_LINES, _SHOWN_CHARACTERS = 10, 2000
"""Last lines and characters of stderr in the words about a command that failed."""


@dataclass(frozen=True)
class Door:
    """The place where an agent asks the policy.

    Attributes:
        openai_url: Base URL of OpenAI's protocols.
        anthropic_url: Base URL of Anthropic's.
        api_key: The secret of the episode, which each request carries.
        keep_output: Takes what the agent has printed, of bounded size, however it ends.
    """

    openai_url: str
    anthropic_url: str
    api_key: str
    keep_output: Callable[[str], None]


class Launch(Protocol):
    """A way to start an agent."""

    @property
    def reward(self) -> Payer:
        """The one who says what an episode is worth."""

    async def __call__(self, task: EpisodeTask, door: Door) -> float | None:
        """Run the agent to its end. Cancelling it kills the agent.

        Returns:
            The reward that the agent has named; None where it has named none.

        Raises:
            AgentFailed: A command did not end by itself with the status 0, or its last
                line is no number although it should be.
            Exception: Whatever a function raises.
        """


@dataclass(frozen=True)
class Agent:
    """An agent of a user's own, in the place of an environment."""

    launch: Launch


@dataclass(frozen=True)
class AgentFunction:
    """An agent that is a coroutine function of the user's.

    Attributes:
        run: Takes the task, a base URL and a secret, and returns a reward, or None.
        client: The client library whose base URL it is given.
        reward: A number that it returns is paid. Graders see its episodes beside that;
            it posts nothing.
    """

    run: Callable[[EpisodeTask, str, str], Awaitable[float | None]]
    client: Client = "openai"
    reward: Payer = field(default="function", init=False)

    async def __call__(self, task: EpisodeTask, door: Door) -> float | None:
        """Run the function; see `Launch`.

        Raises:
            TypeError: It returned what is no number.
            ValueError: It returned a number that is not finite, or beyond 1e18.
        """
        is_openai = self.client == "openai"
        url = door.openai_url if is_openai else door.anthropic_url
        reward = await self.run(task, url, door.api_key)
        return None if reward is None else number_of(reward, "the agent returned")


@dataclass(frozen=True)
class AgentCommand:
    """An agent that is a command, one process for each episode.

    Attributes:
        command: Program and arguments as a shell would split them; no shell reads it.
        reward: Who says what an episode is worth.
        env: Environment variables that it gets, with their values.
        pass_env: Environment variables of the workers that it gets as well.
        max_processes: Processes that it may have at a time.
    """

    command: str
    reward: Reward = "grader"
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: Sequence[str] = ()
    max_processes: int = 256
    _starts: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(_STARTED_AT_ONCE), init=False
    )

    def problems(self, key: str) -> Iterator[Problem]:
        """Yield what is wrong with it on this machine; nothing is run.

        Args:
            key: The configuration key of its table.
        """
        yield from self._program_problems(f"{key}.command")
        for name in self.env:
            if name in _OWN:
                rule = "the run sets it for each episode"
                yield Problem(f"{key}.env", name, rule, "Leave it out.")
            elif not name or "=" in name:
                rule = "is no name of an environment variable"
                yield Problem(f"{key}.env", name, rule, "Write {NAME: VALUE}.")
        for name in self.pass_env:
            if name not in os.environ:
                rule = "there is no such environment variable"
                fix = "Set it for the workers, or leave it out."
                yield Problem(f"{key}.pass_env", name, rule, fix)
        if self.max_processes < 1:
            rule = "this number is out of range"
            fix = "Use a number of at least 1."
            yield Problem(f"{key}.max_processes", self.max_processes, rule, fix)

    def _program_problems(self, key: str) -> Iterator[Problem]:
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            rule = f"it cannot be split into words: {str(error).lower()}"
            yield Problem(key, self.command, rule, "Close the quotes.")
            return
        if not words:
            fix = "Name a program and its arguments."
            yield Problem(key, self.command, "it is empty", fix)
            return

        program, *arguments = words
        for word in words:
            if word in _SHELL_WORDS or _ASSIGNMENT.match(program):
                rule = f"no shell reads it, and {word} would be a word of the program"
                fix = "Write sh -c '...', and env: {NAME: VALUE} for variables."
                yield Problem(key, self.command, rule, fix)
                return
        if shutil.which(program, path=self.env.get("PATH")) is None:
            rule = f"there is no program {program!r}"
            fix = "Install it, or write its path."
            if Path(program).is_file():
                rule = f"the file {program} is not executable"
                fix = "Make it executable, or write its interpreter before it."
            yield Problem(key, self.command, rule, fix)
        for word in arguments[:1]:
            path = Path(word)
            if path.suffix == ".py" and not path.is_file():
                rule = f"the file {path} does not exist"
                fix = path_suggestion(path, "Write the path of the program.")
                yield Problem(key, self.command, rule, fix)

    async def __call__(self, task: EpisodeTask, door: Door) -> float | None:
        """Run the command in a folder of its own; see `Launch`.

        Raises:
            OSError: It cannot be started.
        """
        await self._starts.acquire()
        try:
            command = self._begin(task, door)
        except BaseException:
            self._starts.release()
            raise
        try:
            end = await command.end()
        except asyncio.CancelledError:
            stopped = await command.stop()
            if stopped is not None:
                door.keep_output(_output(stopped))
            raise

        door.keep_output(_output(end))
        if end.cause:
            raise AgentFailed(_failure(end))
        return _last_number(end.stdout.text) if self.reward == "stdout" else None

    def _begin(self, task: EpisodeTask, door: Door) -> GuardedCommand:
        folder = Path(tempfile.mkdtemp(prefix="episode-"))
        try:
            file = folder / "task.json"
            file.write_text(task_text(task), encoding="utf-8")
            return GuardedCommand(
                shlex.split(self.command),
                folder,
                file,
                self.environment(folder, door),
                self.max_processes,
                self._starts.release,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def environment(self, folder: Path, door: Door) -> dict[str, str]:
        """Return all environment variables of an episode's command.

        Args:
            folder: Its current folder, with the file of its task.
        """
        variables = {
            name: value
            for name, value in os.environ.items()
            if name in _PASSED or name.startswith("LC_")
        }
        variables |= dict.fromkeys(("HOME", "TMPDIR", "PWD"), str(folder))
        variables |= {name: os.environ[name] for name in self.pass_env}
        # Its traces would go to OpenAI's servers, with the key of the episode.
        variables["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
        variables |= self.env
        # Nothing on the way to the endpoint may be asked for it.
        for name in ("NO_PROXY", "no_proxy"):
            others = variables.get(name)
            variables[name] = f"{others},{_LOOPBACK}" if others else _LOOPBACK
        return {
            **variables,
            "OPENAI_BASE_URL": door.openai_url,
            "OPENAI_API_KEY": door.api_key,
            "ANTHROPIC_BASE_URL": door.anthropic_url,
            "ANTHROPIC_API_KEY": door.api_key,
            "VERL_RAY_TASK": str(folder / "task.json"),
        }


def task_text(task: EpisodeTask) -> str:
    """Return what a command is told about its task, as a line of JSON.

    The answer is not part of it, in whichever column it is: what a program can read,
    the policy may see.
    """
    fields = {
        "messages": list(task.messages),
        "data_source": task.data_source,
        "extra": without_answer(task.extra, task.answer),
    }
    return json.dumps(fields) + "\n"


def _last_number(stdout: str) -> float:
    """Return the number in the last line that is not blank.

    Raises:
        AgentFailed: There is none.
    """
    lines = stdout.split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    try:
        return number_of(float(last), "it is")
    except ValueError:
        raise AgentFailed(
            f"the last line of its stdout is {last[-200:]!r}, expected a finite number,"
            " which is the reward"
        ) from None


def _output(end: CommandEnd) -> str:
    """Return what a command has printed, as a person reads it."""
    streams = {"stdout": end.stdout, "stderr": end.stderr}
    return "\n".join(
        f"--- {name}\n{_text(printed)}"
        for name, printed in streams.items()
        if printed.text
    )


def _text(printed: Printed) -> str:
    text = printed.text.rstrip("\n")
    if not printed.num_omitted_bytes:
        return text
    return f"[{printed.num_omitted_bytes:,} bytes before this are left out]\n{text}"


def _failure(end: CommandEnd) -> str:
    """Return in words how a command failed."""
    text = end.stderr.text.strip()
    if not text:
        return f"the command {end.cause}; it wrote nothing to stderr"
    cause = f"the command {end.cause}; its stderr ends with:"
    # A traceback has its lines; of anything else, readers may see the last one alone.
    _, begin, traceback = f"\n{text}".rpartition("\nTraceback ")
    if begin:
        return f"{cause}{begin}{shortened(traceback, _SHOWN_CHARACTERS)}"
    lines = text.splitlines()
    last = " ".join(lines[-_SHOWN_LINES:])
    shown = last[-_SHOWN_CHARACTERS:]
    is_cut = len(lines) > _SHOWN_LINES or len(shown) < len(last)
    return f"{cause} {'... ' * is_cut}{shown}"
