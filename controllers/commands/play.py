"""The command `play`: one episode of an environment or an agent, in the terminal.

A person takes the turns of the policy, or watches a model take them. What is shown is
what training would see: the tokens of the model's template, those that are sampled
marked, tool calls as they are read, rewards, the end, and the rows of the trajectory.

Invariant: the episode is run by what runs those of training, so nothing is shown that
training would see otherwise. The environment runs in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml
from pydantic import ValidationError

from controllers.commands.person import Person
from controllers.commands.usage import EXIT_CODES
from verl_ray.agents.contract import (
    Action,
    Constraint,
    End,
    Environment,
    Episode,
    EpisodeRow,
    EpisodeTask,
    Listener,
    Observation,
    Sampled,
    Sampler,
    Step,
    ToolSchema,
)
from verl_ray.agents.episode import (
    EnvironmentFactory,
    Run,
    run_episode,
)
from verl_ray.agents.gateway.launch import Agent, Door, Launch, Payer
from verl_ray.agents.loop_watch import CodePlace, LoopWatch
from verl_ray.agents.models import KEY as MODELS_KEY
from verl_ray.agents.models import ChatSettings, provide
from verl_ray.agents.policy import (
    CONTEXT_KEYS,
    Limits,
)
from verl_ray.agents.scripted import turn_end
from verl_ray.agents.specs import EXPECTED, load_environment, runnable
from verl_ray.agents.tasks import as_messages
from verl_ray.agents.template import Renderer
from verl_ray.config.agent import ModelService
from verl_ray.config.load import field_problems
from verl_ray.config.paths import environment_here
from verl_ray.config.rollout import RolloutEngineConfig
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.records import read_prompts
from verl_ray.data.tokenizers import load_tokenizer, train_bpe
from verl_ray.errors import ConfigError, InputError, Problem
from verl_ray.preflight.machine import Machine
from verl_ray.rewards.client import url_problem
from verl_ray.rollout.requests import GenerationRequest, Sampling
from verl_ray.rollout.vllm_environment import environment as engine_variables
from verl_ray.settings.function_specs import command_spec
from verl_ray.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_ray.rollout.server import RolloutServer
    from verl_ray.rollout.turns import ReadAction

SHIPPED = {
    "calculator": "calculator:Calculator",
    "frozen_lake": "frozen_lake:FrozenLake",
    "key_value_memory": "key_value_memory:run",
    "number_guessing": "number_guessing:NumberGuessing",
    "reasoning_gym": "reasoning_gym:ReasoningGym",
}
"""Short name of an environment that ships -> its module and its name."""

_KV_CACHE_GIB = 1.0
"""Memory for the key-value cache of a model that plays one episode."""

_OWN_FRAME = re.compile(rf'^  File "{re.escape(__file__)}", .*\n(?:    .*\n)*', re.M)
"""A frame of this file in a traceback, with its lines of code."""

_SLOW_S = 1.0
"""Seconds for which code may hold the event loop before it is named, as in a run."""

_LIMITS = {
    End.CONTEXT_OVERFLOW: "--context",
    End.MAX_TOKENS: "--context",
    End.MAX_TURNS: "--max-turns",
}
"""End of an episode -> the option that has brought it about."""

_MODELS = f"{MODELS_KEY}."

_MARK, _UNMARK = "\x1b[1;32m", "\x1b[0m"

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template without a model: ChatML, with tool calls as Hermes writes them."""


def main(argv: list[str]) -> int:
    """Play an episode.

    Raises:
        ConfigError: There is no such environment or record, or the model has no chat
            template.
        InputError: The file or the model cannot be read.
    """
    # Options may stand between those of the environment.
    arguments = _parser().parse_intermixed_args(argv)
    # An agent's options begin where an environment would be.
    if arguments.agent is not None and "=" in (arguments.env or ""):
        arguments.options.insert(0, arguments.env)
        arguments.env = None
    options = dict(map(_option, arguments.options))
    model_options = {
        key: options.pop(key) for key in [*options] if key.startswith(_MODELS)
    }
    models, service_options = _models(model_options)
    problems = [*_problems(arguments), *service_options]
    if problems:
        raise ConfigError(problems)
    provide(models)
    loaded = _environment(arguments, options)
    launch = None
    if isinstance(loaded, Agent):
        launch = NotedLaunch(loaded.launch)
        loaded = Agent(launch)
    task = _task(arguments)

    option = "--tokenizer" if arguments.model is None else "--model"
    with _tokenizer(option, arguments.model or arguments.tokenizer) as tokenizer:
        screen = Screen(tokenizer, is_coloured=sys.stdout.isatty())
        context = arguments.context
        limits = Limits(
            max_turns=arguments.max_turns, context_tokens=context, max_tokens=context
        )
        renderer = Renderer(tokenizer)
        with _sampler(arguments, tokenizer, renderer) as sampler:
            course = run_episode(
                shown(runnable(loaded)),
                task,
                arguments.seed,
                ShownSampler(sampler, screen),
                renderer,
                limits,
            )
            episode = asyncio.run(_watched(course))
        is_graded = launch is not None and launch.leaves_score
        screen.show_end(episode, is_graded=is_graded)
        if episode.end is End.ENVIRONMENT_FAILED and not episode.num_turns:
            screen.show(_what_it_has(task))
    return 1 if episode.end is End.ENVIRONMENT_FAILED else 0


async def _watched(course: Coroutine[Any, Any, Episode]) -> Episode:
    """Run an episode, and print which code of the environment holds its event loop."""

    def name(place: CodePlace, seconds: float | None = None) -> None:
        # What waits for whoever types is no code of the environment.
        if Path(place.path).parent == Path(__file__).parent:
            return
        if seconds is None:
            held = f"holds the event loop, and nothing goes on. {place.remedy}"
        else:
            held = f"held the event loop for {seconds:.1f} s"
        print(f"--- {place} {held}", flush=True)

    LoopWatch(_SLOW_S, name, while_held=name)
    return await asyncio.create_task(course)


def _what_it_has(task: EpisodeTask) -> str:
    """Return what an environment can read of a task, and where more comes from."""
    answer = "no answer" if task.answer is None else "an answer"
    extra = ", ".join(map(str, task.extra)) or "nothing"
    return (
        f"the task has {answer}, and {extra} in extra; --answer gives an answer, and"
        " --data all columns of a record"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray play",
        description=(
            "Play one episode of an environment: type the turns of the policy, a line"
            " each, or watch a model. A tool is called as in Python, add(a=1, b=2),"
            " several with commas between them. Ctrl-D ends the episode."
        ),
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_environment(parser)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the environment (0)"
    )
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="the task, as a text"
    )
    parser.add_argument("--answer", metavar="TEXT", help="the right answer to it")
    parser.add_argument("--data", metavar="PATH", help="take the task from this file")
    parser.add_argument(
        "--record", type=int, default=0, metavar="N", help="record of --data, from 0"
    )
    parser.add_argument(
        "--max-turns", type=int, default=32, metavar="N", help="turns at most (32)"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=4096,
        metavar="N",
        help="tokens of a row, and sampled tokens, at most (4096)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="tokens and chat template of this model, while you play; without it, bytes"
        " and ChatML",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="watch this model, sampled by vLLM"
    )
    parser.add_argument(
        "--tool-parser", metavar="NAME", help="vLLM's parser of the model's tool calls"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of --model (1)")
    return parser


def _add_environment(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name an environment or an agent, and its options."""
    parser.add_argument(
        "env",
        nargs="?",
        metavar="ENV",
        help="path.py:NAME, package.module:NAME, or one that ships:"
        f" {', '.join(SHIPPED)}",
    )
    parser.add_argument(
        "options",
        nargs="*",
        metavar="key=value",
        help="options of the environment, and agent.models.NAME={url: ...} for the"
        " models that it asks",
    )
    parser.add_argument(
        "--agent",
        metavar="AGENT",
        help="play with an agent of your own in the place of ENV: my_agent.py,"
        " my_agent.py:NAME of a function, or a command in quotes",
    )


def _problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield what is wrong with the options, and which would have no effect."""
    if arguments.agent is not None:
        if arguments.env is not None:
            rule = "has no effect with --agent, which stands in its place"
            yield Problem("ENV", arguments.env, rule, "Leave out one of them.")
    elif arguments.env is None:
        fix = f"Name one, or give --agent. {EXPECTED}"
        yield Problem("ENV", None, "there is no environment", fix)
    elif arguments.env not in SHIPPED and ":" not in arguments.env:
        fix = f"{did_you_mean(arguments.env, list(SHIPPED), 'environment')} {EXPECTED}"
        yield Problem("ENV", arguments.env, "names no environment", fix)

    limits = {"--max-turns": arguments.max_turns, "--context": arguments.context}
    for key, limit in limits.items():
        if limit < 1:
            rule = "this number is out of range"
            yield Problem(key, limit, rule, "Use a number of at least 1.")

    needs = [
        ("--record", arguments.record, 0, "--data", arguments.data),
        ("--tool-parser", arguments.tool_parser, None, "--model", arguments.model),
        ("--temperature", arguments.temperature, 1.0, "--model", arguments.model),
    ]
    for key, value, usual, needed, present in needs:
        if value != usual and present is None:
            fix = f"Give {needed} as well, or leave it out."
            yield Problem(key, value, f"has no effect without {needed}", fix)
    if (
        arguments.model is not None
        and not Path(arguments.model, "config.json").is_file()
    ):
        rule = "is no local model directory: it has no config.json"
        yield Problem("--model", arguments.model, rule, "Name one.")
    if arguments.model is not None and arguments.tokenizer is not None:
        rule = "has no effect with --model, whose own tokenizer is taken"
        yield Problem("--tokenizer", arguments.tokenizer, rule, "Leave it out.")
    if arguments.data is not None and (arguments.prompt or arguments.answer):
        fix = "Leave out one of them."
        rule = "the task is --prompt and --answer, or a record of --data"
        yield Problem("--data", arguments.data, rule, fix)


def _environment(
    arguments: argparse.Namespace, options: Mapping[str, Any]
) -> EnvironmentFactory | Run | Agent:
    """Return the environment, or the agent, of the command line.

    Raises:
        ConfigError: There is no such thing, or it does not take the options.
    """
    if arguments.agent is None:
        spec, key = _spec(arguments.env), "ENV"
    else:
        spec, key = environment_here(agent_spec(arguments.agent)), "--agent"
    return load_environment(spec, options, key)


def agent_spec(agent: str) -> str:
    """Return the spec of an agent as it is typed: a file, a function or a command."""
    path, _, name = agent.rpartition(":")
    is_file = agent.endswith(".py") and " " not in agent
    if path.endswith(".py") and name.isidentifier():
        return agent
    return command_spec(f"python {agent}" if is_file else agent)


def _spec(name: str) -> str:
    shipped = SHIPPED.get(name)
    return name if shipped is None else f"verl_ray.agents.environments.{shipped}"


def _option(text: str) -> tuple[str, Any]:
    """Return an option of the environment and its value, which is YAML.

    Raises:
        ConfigError: It is no pair.
    """
    name, equals, value = text.partition("=")
    try:
        if equals:
            return name, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    rule = "is no option of an environment"
    raise ConfigError([Problem("ENV", text, rule, "Write key=value, such as size=4.")])


def _models(
    options: Mapping[str, object],
) -> tuple[dict[str, ChatSettings], list[Problem]]:
    """Return the models of the options `agent.models.NAME`, and what is wrong."""
    tables: dict[str, Any] = {}
    for key, value in options.items():
        name, _, setting = key.removeprefix(_MODELS).partition(".")
        tables[name] = {**tables.get(name, {}), setting: value} if setting else value

    models, problems = {}, []
    for name, table in tables.items():
        try:
            service = ModelService.model_validate(table)
        except ValidationError as error:
            details = error.errors(include_url=False)
            for each in details:
                each["loc"] = ("agent", "models", name, *each["loc"])
            tree = {"agent": {"models": tables}}
            problems += field_problems(details, tree, RLConfig)
            continue
        models[name] = ChatSettings(**service.model_dump())
        problem = url_problem(service.url, f"{_MODELS}{name}.url")
        problems += [] if problem is None else [problem]
    return models, problems


def _task(arguments: argparse.Namespace) -> EpisodeTask:
    """Return the task that the command line names.

    Raises:
        ConfigError: The file has no such record.
        DataError: The file cannot be read.
    """
    if arguments.data is None:
        return EpisodeTask(as_messages(arguments.prompt), arguments.answer)
    with _own_options(
        {
            "data.train_path and data.validation_path": "--data",
            "data.train_path": "--data",
        }
    ):
        records = read_prompts(arguments.data, has_episodes=True)
    number = arguments.record
    if not 0 <= number < len(records):
        rule = f"{arguments.data} has {len(records)} records"
        fix = f"Give a number from 0 to {len(records) - 1}."
        raise ConfigError([Problem("--record", number, rule, fix)])
    record = records[number]
    messages = as_messages(record.prompt)
    extra = json.loads(record.extra)
    return EpisodeTask(
        messages, record.answer, extra, record.data_source, record.template_arguments
    )


@contextmanager
def _own_options(option_of: Mapping[str, str]) -> Iterator[None]:
    """Let errors of the block name options of this command, not settings of a run.

    Args:
        option_of: Words of an error -> the option that they mean here.
    """
    try:
        yield
    except InputError as error:
        for words, option in option_of.items():
            error.fix = error.fix.replace(words, option)
        raise


@contextmanager
def _tokenizer(option: str, folder: str | None) -> Iterator[PreTrainedTokenizerBase]:
    """Yield the tokenizer of a model; one of bytes if there is none.

    Args:
        option: The option that names the folder of the model.

    Raises:
        ModelError: It cannot be loaded.
        ConfigError: It has no chat template.
    """
    if folder is not None:
        with _own_options({"model.path": option}):
            tokenizer = load_tokenizer(folder)
        if not tokenizer.chat_template:
            rule = "has no chat template, by which the turns of an episode are written"
            raise ConfigError([Problem(option, folder, rule, "Name one that has.")])
        yield tokenizer
        return
    with tempfile.TemporaryDirectory() as made:
        # All bytes and the three special tokens.
        yield train_bpe(made, [], vocab_size=259, chat_template=TEMPLATE)


# ------------------------------------------------------------------------ what is shown


@dataclass
class NotedLaunch:
    """An agent of which it is noted whether it names a reward.

    Attributes:
        launch: How it is started.
        leaves_score: Whether it has ended, and leaves its score to the graders.
    """

    launch: Launch
    leaves_score: bool = False

    @property
    def reward(self) -> Payer:
        """The one who says what an episode is worth."""
        return self.launch.reward

    async def __call__(self, task: EpisodeTask, door: Door) -> float | None:
        """Run the agent; see `Launch`."""
        reward = await self.launch(task, door)
        may_leave = self.reward in ("grader", "function")
        self.leaves_score = reward is None and may_leave
        return reward


@dataclass
class Screen:
    """The terminal, on which tokens of the policy are marked."""

    tokenizer: PreTrainedTokenizerBase
    is_coloured: bool

    def show(self, text: str) -> None:
        """Print a text."""
        print(_printable(text, also="\n\t"), flush=True)

    def show_context(self, tokens: Sequence[int]) -> None:
        """Print tokens that are not sampled."""
        self.show(self._text(tokens).strip("\n"))

    def show_sampled(self, tokens: Sequence[int]) -> None:
        """Print tokens of the policy, each apart, in brackets."""
        pieces = [_printable(self._text([token])) for token in tokens]
        marked = f"[{'|'.join(pieces)}]"
        if self.is_coloured:
            marked = f"{_MARK}{marked}{_UNMARK}"
        number = f"{len(tokens)} token{'s' * (len(tokens) != 1)}"
        print(f"{marked}  <- {number} of the policy", flush=True)

    def show_end(self, episode: Episode, *, is_graded: bool) -> None:
        """Print how an episode ended, and its rows.

        Args:
            is_graded: Whether its score would be that of a grader of the run.
        """
        score = f"score {episode.score:g}"
        if is_graded:
            score = "without a score: the agent names none, and a grader of a run would"
        limit = _LIMITS.get(episode.end)
        by = f" (by {limit})" if limit else ""
        self.show(f"--- {episode.end.value}{by}, {score}")
        if is_graded and _ends_with_number(episode.output):
            self.show("the last line of its stdout is a number: reward=stdout takes it")
        if episode.output:
            self.show(f"--- printed\n{episode.output}")
        if episode.detail:
            detail = _OWN_FRAME.sub("", episode.detail)
            self.show(detail.replace(CONTEXT_KEYS, "--context"))
        for name, value in episode.metrics.items():
            self.show(f"metric {name} = {value:g}")
        turns, calls = episode.num_turns, episode.num_tool_calls
        self.show(f"turns {turns}, tool calls {calls}, rows {len(episode.rows)}")
        for number, row in enumerate(episode.rows, start=1):
            self.show(
                f"row {number}: {len(row.tokens)} tokens, {sum(row.mask)} under the"
                f" mask{''.join(_paid(row))}"
            )

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def _ends_with_number(output: str) -> bool:
    """Return whether the last line of the stdout of a command is a number."""
    _, _, printed = output.partition("--- stdout\n")
    lines = printed.partition("\n--- stderr\n")[0].split()
    try:
        return bool(lines) and isfinite(float(lines[-1]))
    except ValueError:
        return False


def _printable(text: str, also: str = "") -> str:
    """Return a text with escapes for all that a terminal might obey."""
    return "".join(
        each if each.isprintable() or each in also else repr(each)[1:-1]
        for each in text
    )


def _paid(row: EpisodeRow) -> Iterator[str]:
    """Yield the rewards of a row, each with the place of its token."""
    for place, reward in row.rewards:
        yield f"; {reward:g} at token {place}"


@dataclass
class ShownSampler:
    """A sampler whose prompts and turns are shown."""

    sampler: Sampler
    screen: Screen
    _seen: list[int] = field(default_factory=list)
    """The tokens of the last turn with all before it."""
    _tools: Sequence[ToolSchema] = ()

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        tools: Sequence[ToolSchema],
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        listener: Listener | None = None,
    ) -> Sampled:
        """Return a turn; see `Sampler`."""
        screen = self.screen
        tokens = list(tokens)
        if tools and tools != self._tools:
            screen.show(f"--- tools: {', '.join(map(_signature, tools))}")
        self._tools = tools
        known = len(self._seen)
        if tokens[:known] != self._seen:
            screen.show("--- a new row begins")
            known = 0
        screen.show_context(tokens[known:])
        if constraint is not None:
            rule = "a run that learns from it would refuse this"
            screen.show(f"--- the turn has to be {json.dumps(constraint)}; {rule}")

        sampled = await self.sampler.sample(
            tokens,
            seed=seed,
            max_tokens=max_tokens,
            tools=tools,
            stop=stop,
            constraint=constraint,
            listener=listener,
        )
        self._seen = [*tokens, *sampled.tokens]
        screen.show_sampled(sampled.tokens)
        action = sampled.action
        if action.reasoning:
            screen.show(f"--- thinks: {action.reasoning}")
        for call in action.tool_calls:
            words = ", ".join(
                f"{key}={value!r}" for key, value in call.arguments.items()
            )
            screen.show(f"--- calls {call.name}({words})")
        if action.parse_error is not None:
            screen.show(f"--- no call can be read: {action.parse_error}")
        if action.finish == "length":
            screen.show("--- the turn is cut by its length")
        return sampled


def _signature(tool: ToolSchema) -> str:
    """Return a tool as it is called."""
    function = tool["function"]
    names = function.get("parameters", {}).get("properties", {})
    return f"{function['name']}({', '.join(f'{name}=...' for name in names)})"


def shown(environment: EnvironmentFactory | Run) -> EnvironmentFactory | Run:
    """Return an environment whose rewards are shown, where it pays turn by turn."""
    if inspect.iscoroutinefunction(environment):
        return environment
    return functools.partial(ShownEnvironment, environment)  # type: ignore[arg-type]


class ShownEnvironment:
    """An environment whose rewards are shown."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        """Make the environment."""
        self._environment: Environment = factory()
        # `run_episode` asks an environment only if it has this method.
        if hasattr(self._environment, "finish"):
            self.finish = self._finish

    async def _finish(self, end: End) -> float:
        reward: float = await self._environment.finish(end)  # type: ignore[attr-defined]
        print(f"--- reward {reward} at {end.value}", flush=True)
        return reward

    async def reset(self, task: EpisodeTask, seed: int) -> Observation:
        """Begin; see `Environment`."""
        return await self._environment.reset(task, seed)

    async def step(self, action: Action) -> Step:
        """Take an action, and show its reward; see `Environment`."""
        step = await self._environment.step(action)
        if isinstance(step, Step):
            print(f"--- reward {step.reward}", flush=True)
        return step

    async def close(self) -> None:
        """Close the environment; see `Environment`."""
        await self._environment.close()


# ---------------------------------------------------------------------- a model's turns


@contextmanager
def _sampler(
    arguments: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    renderer: Renderer,
) -> Iterator[Sampler]:
    """Yield whoever takes the turns.

    Raises:
        RolloutError: vLLM cannot run the model, or has no such parser.
    """
    if arguments.model is None:
        if isinstance(sys.stdin, io.TextIOWrapper):
            # A terminal may send bytes that are no characters.
            sys.stdin.reconfigure(errors="replace")
        yield Person(tokenizer, turn_end(renderer), sys.stdin.readline)
        return

    # What follows imports torch and vLLM, which read the environment.
    machine = Machine.here()
    device = "cuda" if machine.gpus else "cpu"
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if machine.gpus else "float32"
    os.environ.update(engine_variables(device, machine.cores, dtype=dtype))
    from verl_ray.rollout.server import RolloutServer
    from verl_ray.rollout.tool_calls import ActionReader
    from verl_ray.rollout.vllm_engine import VllmEngine

    config = RolloutEngineConfig(
        num_replicas=1,
        tensor_parallel=1,
        pipeline_parallel=1,
        expert_parallel=False,
        dtype=dtype,
        quantization=None,
        kv_cache_gib=_KV_CACHE_GIB,
        vllm_args={},
    )
    read = ActionReader(tokenizer, arguments.tool_parser)
    start = functools.partial(
        VllmEngine,
        arguments.model,
        config,
        max_model_len=arguments.context,
        seed=0,
        device=device,
        initial_version=0,
        sleeps=False,
    )
    server = RolloutServer(start)
    try:
        sampling = Sampling(arguments.temperature, 1.0, -1, arguments.context)
        yield ModelPlayer(server, read, sampling)
    finally:
        server.close()


@dataclass(frozen=True)
class ModelPlayer:
    """A sampler that is an engine of this process."""

    server: RolloutServer
    read: ReadAction
    sampling: Sampling

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        tools: Sequence[ToolSchema],
        stop: Sequence[str] = (),
        constraint: Constraint | None = None,
        listener: Listener | None = None,
    ) -> Sampled:
        """Return a turn; see `Sampler`."""
        sampling = replace(self.sampling, max_tokens=max_tokens, stop=tuple(stop))
        prompt = np.asarray(tokens, np.int32)
        request = GenerationRequest(0, prompt, sampling, seed)
        # Imported here, since it imports torch, which a person does without.
        from verl_ray.rollout.turns import sampled_turn

        return await sampled_turn(
            self.server, request, tools, self.read, constraint, listener
        )
