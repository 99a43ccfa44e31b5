"""A trial of the environments of a run: two episodes of a scripted policy in each.

Both episodes are about the first record of a data source, with the same seed. In the
first one the policy repeats the record's own answer. In the second one it writes what
says nothing: no words, words beside the point, and, where there are tools, a call that
cannot be read and a call of a tool that does not exist. No tool is called, since a tool
may change something. An environment of which there is no record is only imported, with
its options.

Invariant: user's code runs in a process that is killed at its deadline with all that it
started, never in this one. A score is shown and never judged: only the environment's
own failures are problems.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import socket
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from verl_ray.agents.contract import (
    Action,
    End,
    Episode,
    EpisodeTask,
    Terms,
    ToolCall,
)
from verl_ray.agents.episode import (
    run_episode,
)
from verl_ray.agents.gateway.launch import Agent, AgentCommand
from verl_ray.agents.loop_watch import (
    AGENT_REMEDY,
    LONG_S,
    METHOD_REMEDY,
    CodePlace,
    LoopWatch,
)
from verl_ray.agents.models import ChatModel, ChatSettings, provide
from verl_ray.agents.scripted import ScriptedSampler, read_words, turn_end
from verl_ray.agents.specs import KEY, load_environment, runnable
from verl_ray.agents.tasks import tasks_of
from verl_ray.agents.template import prefix_problems
from verl_ray.agents.thoughts import PARSERS_WITHOUT_MARKS, USUAL_PARSER
from verl_ray.agents.tools import ToolEnvironment, ToolSet, tools_problem
from verl_ray.agents.wire import EpisodeStart, task_fields, task_of
from verl_ray.config.agent import ENVIRONMENT, AgentConfig
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.encoding import encode
from verl_ray.data.fields import TOOLS, environment_of
from verl_ray.data.tokenizers import of_run, template_of
from verl_ray.errors import ConfigError, DataError, Problem
from verl_ray.preflight.data_files import DataFile
from verl_ray.preflight.tokenizer_trial import tried_tokenizer
from verl_ray.preflight.trials import Trials
from verl_ray.processes.trial import Tell, run_trial, try_in_child
from verl_ray.profiling.phases import blocking
from verl_ray.rewards.built_in import built_in_of
from verl_ray.settings.function_specs import DEFAULT, in_words
from verl_ray.settings.section import resolved
from verl_ray.suggest import closest, did_you_mean, is_alike
from verl_ray.user_files import last_cause

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EPISODE_S = 30.0
"""Seconds after which an episode of the trial is ended, which is no problem."""

DEADLINE_S = 180.0
"""Seconds that a process may take to import an environment and to run both episodes."""

_SLOW_S = 0.03
"""Seconds from which on it is said that an environment holds the event loop."""

_LONG_S = 4.0
"""Seconds that the episodes of a process may wait for each other without a warning."""

_LONG_CALL_S = 1.0
"""Seconds for which an agent's function may hold the loop without a warning."""

OWN_ANSWER = "the record's own answer"
NOTHING = "texts that say nothing"

_COURSE = ("end", "score", "num_turns", "detail", "output")
"""What is told of an episode."""

_OUTPUT_LINES = 10
"""Last lines of what an agent's program has printed that are shown if it fails."""

_OFF_TOPIC = "I do not know."
_UNREADABLE = '<tool_call>{"name": '
_UNKNOWN = '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>'

_TOOL_PARSERS = ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
_REASONING_PARSERS = ("reasoning", "_REASONING_PARSERS_TO_REGISTER")
"""Package and table of parsers in vLLM's source."""
_PLUGINS = "vllm.general_plugins"

_UNPAYING = {
    "tools": "functions as tools ({}) pay nothing but the reward of a ToolStop",
    "grader": "an agent with reward=grader ({}) pays nothing; post and stdout pay",
}
"""What pays nothing -> that in words, with the keys of such environments."""

_TOOL_KINDS = (ToolEnvironment, ToolSet)
"""Environments that are made of tools, which is the last of their arguments."""


@dataclass
class EnvironmentTrials(Trials):
    """The course of the episodes, and what is wrong.

    Attributes:
        openings: Key of each environment that was tried, number of tokens and text of
            the first prompt of an episode in it, as the model sees it.
    """

    openings: list[tuple[str, int, str]] = field(default_factory=list)


def try_environments(
    config: RLConfig, files: Sequence[DataFile], *, trains: bool = True
) -> EnvironmentTrials:
    """Try the environments of a run on its records.

    One without any is only imported, with its options.

    Args:
        config: Configuration of the run, without `auto`.
        files: The data files of the run.
        trains: Whether the run learns from its episodes.
    """
    trials = EnvironmentTrials()
    agent = config.agent
    tasks = _first_tasks(files, agent)
    try:
        # A run that makes its inputs has neither records nor a model yet.
        tokenizer = _tokenizer(config) if tasks else None
    except ConfigError as error:
        trials.problems += error.problems
        return trials

    # An event loop may go on in this thread, such as a notebook's.
    with ThreadPoolExecutor(1) as other:
        trials.problems += other.submit(asyncio.run, _model_problems(agent)).result()
    if trials.problems:
        return trials

    sources = sorted({task.data_source for task in _tasks(files)})
    outcomes: dict[str, tuple[EpisodeTask, Mapping[str, Any]]] = {}
    for name in agent.environments:
        task = tasks.get(name)
        outcome = _try(trials, config, name, task, files, trains=trains)
        if task is None:
            _report_absence(trials, name, sources)
        elif outcome is not None:
            outcomes[name] = task, outcome
    offered = {tool for _, outcome in outcomes.values() for tool in outcome["tools"]}
    trials.warnings += _unpaid(config, outcomes)
    trials.lines += _single_lines(files, agent)
    if set(tasks) == {None}:
        trials.warnings.append(
            f"{KEY}: no record that was read has one, so every rollout is a single"
            " response"
        )

    trials.problems += _parser_problems(agent, offered)
    is_tried = bool(tasks) and not trials.problems
    if agent.tool_parser is not None and is_tried and not offered:
        trials.warnings.append(
            f"agent.tool_parser={agent.tool_parser} reads no call: no environment that"
            " was tried begins with tools"
        )
    if agent.max_turns > 1 and tokenizer is not None:
        trials.lines += _template_lines(config, tokenizer, has_tools=bool(offered))
    return trials


def _tokenizer(config: RLConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer by which the turns of an episode are written.

    Raises:
        ConfigError: It cannot be loaded, or has no chat template.
    """
    tokenizer = tried_tokenizer(config)
    if not tokenizer.chat_template:
        rule = "the turns of an episode are messages, and the model has no template"
        fix = "Give it one, such as data.chat_template=chatml."
        raise ConfigError([Problem("data.chat_template", None, rule, fix)])
    return tokenizer


async def _model_problems(agent: AgentConfig) -> list[Problem]:
    """Ask each model that environments talk to once; return why one gives no answer."""
    models = [
        ChatModel(name, ChatSettings(**each.model_dump()))
        for name, each in agent.models.items()
    ]
    with blocking("asking agent.models"):
        problems = await asyncio.gather(*(each.problem() for each in models))
    return [problem for problem in problems if problem is not None]


def _tasks(files: Sequence[DataFile]) -> Iterator[EpisodeTask]:
    """Yield the tasks of the records, in the order of the files."""
    for file in files:
        if file.prompts is not None:
            yield from tasks_of(file.prompts)


def _first_tasks(
    files: Sequence[DataFile], agent: AgentConfig
) -> dict[str | None, EpisodeTask]:
    """Return the first task of each environment, and of those that have none."""
    tasks: dict[str | None, EpisodeTask] = {}
    for task in _tasks(files):
        tasks.setdefault(_environment(task, agent), task)
    return tasks


def _environment(task: EpisodeTask, agent: AgentConfig) -> str | None:
    return environment_of(task.extra, task.data_source, agent.environments)


def _single_lines(files: Sequence[DataFile], agent: AgentConfig) -> Iterator[str]:
    """Yield how many records of each file get single responses, if any do."""
    for file in files:
        environments = [_environment(task, agent) for task in _tasks([file])]
        count = environments.count(None)
        if count:
            yield (
                f"{file.key}: {count} of {len(environments)} records"
                f"{'' if file.is_whole else ' that were read'} have no environment, so"
                " each of their rollouts is a single response"
            )


def _unknown_tools(
    files: Sequence[DataFile], config: RLConfig, name: str, known: Sequence[str]
) -> list[Problem]:
    """Return a problem for each file with a record that names a tool that is not there.

    Args:
        name: The environment.
        known: Its tools.
    """
    problems = []
    for file in files:
        for number, task in enumerate(_tasks([file]), start=1):
            tools = task.extra.get(TOOLS)
            if tools is None or _environment(task, config.agent) != name:
                continue
            problem = tools_problem(tools, known)
            if problem is not None:
                rule, _, fix = problem.partition(". ")
                rule = f"record {number} cannot act in {KEY}.{name}: {rule}"
                fix = fix or "Correct the record."
                problems.append(Problem(file.key, file.path, rule, fix))
                break
    return problems


def _try(
    trials: EnvironmentTrials,
    config: RLConfig,
    source: str,
    task: EpisodeTask | None,
    files: Sequence[DataFile],
    *,
    trains: bool,
) -> Mapping[str, Any] | None:
    """Try an environment on a task; return the outcome, None if it has no episodes."""
    key, spec = f"{KEY}.{source}", in_words(config.agent.environments[source])
    request = {**_request(config, source, task), "trains": trains}
    try:
        with blocking(f"trying {key}"):
            messages, cause = try_in_child(__name__, request, DEADLINE_S)
    except ConfigError as error:
        trials.problems += error.problems
        return None
    if cause:
        stage = messages[-1].kind if messages else "the start"
        rule = f"its process {cause}, in {stage}"
        fix = (
            "Let it await what takes long; it may not end its process. A coroutine"
            " function that asks by a client without async waits for itself: take"
            " AsyncOpenAI or AsyncAnthropic, or a command."
        )
        trials.problems.append(Problem(key, spec, rule, fix, may_pass=True))
        return None

    outcome = messages[-1].fields
    if task is not None:
        known = outcome["known_tools"]
        unknown = [] if known is None else _unknown_tools(files, config, source, known)
        trials.problems += unknown
        if not unknown:
            _report(trials, key, spec, task, outcome)
            _report_holding(trials, key, spec, config.agent, outcome)
        return outcome
    return None


def _report_absence(
    trials: EnvironmentTrials, source: str, sources: Sequence[str]
) -> None:
    """Add that no record has an environment, and what its name may be meant to be.

    Args:
        sources: The data sources of the records.
    """
    if not sources:
        trials.lines.append(f"{KEY}.{source}: there are no records yet to try it on")
        return
    text = f"{KEY}.{source}: no record has this environment, so far as read"
    names = {DEFAULT, *sources} - {source}
    if is_alike(source, names):
        near = closest(source, names, 1)[0]
        trials.warnings.append(f"{text}. Did you mean {KEY}.{near}?")
    else:
        trials.lines.append(text)


def _parser_problems(agent: AgentConfig, offered: set[str]) -> Iterator[Problem]:
    """Yield a problem if no call of the tools that are offered would be read."""
    key, name = "agent.tool_parser", agent.tool_parser
    known = [] if name is None else _known_parsers(*_TOOL_PARSERS)
    if name is None and offered:
        names = ", ".join(sorted(offered))
        rule = f"the policy is offered tools ({names}), and no call would be read"
        fix = (
            "Set it to vLLM's parser of the model's tool calls, such as hermes, or"
            " qwen3_xml."
        )
        yield Problem(key, None, rule, fix)
    if name is not None and known and name not in known:
        fix = did_you_mean(name, known, "parser")
        yield Problem(key, name, "vLLM has no such parser of tool calls", fix)

    key, name = "agent.reasoning_parser", agent.reasoning_parser
    known = [] if name is None else _known_parsers(*_REASONING_PARSERS)
    if name is not None and known and name not in known:
        fix = did_you_mean(name, known, "parser")
        yield Problem(key, name, "vLLM has no such parser of thoughts", fix)
    elif name in PARSERS_WITHOUT_MARKS:
        rule = "this parser of vLLM has no marks around thoughts"
        fix = f"Name one that has, such as {USUAL_PARSER}, or set it to null."
        yield Problem(key, name, rule, fix)


def _known_parsers(package_name: str, table: str) -> list[str]:
    """Return the names of vLLM's parsers of a kind; none if not all are known.

    They are read without importing vLLM. A plugin may add some.
    """
    plugins = [each.value for each in entry_points(group=_PLUGINS)]
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return []
    path = Path(package.origin).with_name(package_name) / "__init__.py"
    is_all = all(each.startswith("vllm.") for each in plugins)
    if not is_all or not path.is_file():
        return []

    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.Assign):
            continue
        names = [each.id for each in statement.targets if isinstance(each, ast.Name)]
        if table in names and isinstance(statement.value, ast.Dict):
            keys = statement.value.keys
            return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return []


def _unpaid(
    config: RLConfig, outcomes: Mapping[str, tuple[EpisodeTask, Mapping[str, Any]]]
) -> Iterator[str]:
    """Yield a warning for each reward that does not fit what environments pay.

    Args:
        outcomes: The environments, each with its task and the outcome of its trial.
    """
    environments: dict[tuple[str, str, str], list[str]] = {}
    for name, (task, outcome) in outcomes.items():
        for section, grader in config.active_graders(learns=True).items():
            functions = grader.named_functions or {}
            source = task.data_source if task.data_source in functions else DEFAULT
            spec = functions.get(source)
            if spec is None:
                continue
            pays = any(episode["score"] for episode in outcome["episodes"])
            payer = outcome["payer"]
            pays = pays or payer in ("post", "stdout")
            unfit = pays and built_in_of(spec) is not None
            if spec == ENVIRONMENT:
                unfit = payer in _UNPAYING
            if unfit:
                key = f"{section}.functions.{source}"
                named = environments.setdefault((key, spec, payer), [])
                named.append(f"{KEY}.{name}")

    for (key, spec, payer), names in environments.items():
        keys = ", ".join(names)
        if spec == ENVIRONMENT:
            yield (
                f"{key}={spec} takes what the environment pays, and"
                f" {_UNPAYING[payer].format(keys)}. Name a function that scores the"
                " last answer, such as exact_match"
            )
        else:
            yield (
                f"{key}={spec} does not look at what the environment pays ({keys});"
                f" {ENVIRONMENT} does"
            )


def _request(config: RLConfig, source: str, task: EpisodeTask | None) -> dict[str, Any]:
    """Return what the process of a trial must know."""
    start = EpisodeStart.of_run(
        config.agent,
        config.model_roles[config.evaluated_role].model.folder,
        context_tokens=config.data.max_prompt_tokens
        + config.rollout.max_response_tokens,
        row_tokens=config.rollout.max_response_tokens,
        chat_template=template_of(config.data),
        template_arguments=config.data.chat_template_kwargs,
        template_day=resolved(config.data.template_day),
        special_tokens=config.data.special_tokens,
        policy_name=config.run.name,
    )
    episode_s = min(start.limits.episode_s, EPISODE_S)
    short = replace(start, limits=replace(start.limits, episode_s=episode_s))
    return {
        **asdict(short),
        "source": source,
        "task": None if task is None else task_fields(task),
        "seed": config.run.seed,
    }


def _report(
    trials: EnvironmentTrials,
    key: str,
    spec: str,
    task: EpisodeTask,
    outcome: Mapping[str, Any],
) -> None:
    """Add what became of the two episodes in an environment."""
    about = f"{key}={spec}, on a record of {task.data_source!r}"
    if outcome["tools"]:
        about += f", with the tools {', '.join(outcome['tools'])}"
    trials.lines.append(f"{about}:")
    if outcome["num_opening"]:
        opening = (key, outcome["num_opening"], outcome["opening"])
        trials.openings.append(opening)

    failure = None
    fix = "Correct it: the policy may write anything, and each text has an answer."
    for episode in outcome["episodes"]:
        end, script = End(episode["end"]), episode["script"]
        turns = f"{episode['num_turns']} turn{'s' * (episode['num_turns'] != 1)}"
        trials.lines.append(
            f"  {script}: {end.value} after {turns}, score {episode['score']:g}"
        )
        # What goes wrong in `close` is told in the detail of any end.
        if episode["detail"]:
            output = episode["output"].splitlines()[-_OUTPUT_LINES:]
            trials.lines += [f"    | {line}" for line in output]
        if failure is None and episode["detail"]:
            failure = f"it fails on {script}: {last_cause(episode['detail'])}"
            if not episode["num_turns"]:
                fix = _fix_of_a_beginning(
                    task, episode["detail"], is_agent=outcome["is_agent"]
                )
        elif failure is None and end in (End.TOOL_TIMEOUT, End.TURN_TIMEOUT):
            failure = f"it takes too long on {script}: {end.value}"
        elif end is End.EPISODE_TIMEOUT:
            trials.warnings.append(
                f"{key}={spec} did not end within {EPISODE_S:g} s on {script}. In a run"
                " agent.turn_timeout_s ends an agent that says nothing for so long, and"
                " agent.episode_timeout_s any episode"
            )
    if failure is not None:
        trials.problems.append(Problem(key, spec, failure, fix, may_pass=True))
    if not outcome["same_environment"]:
        trials.warnings.append(
            f"{key}={spec}: the same task and seed made two environments, which begin"
            " with other tokens. Members of a group would not be comparable; draw from"
            " random.Random(seed)"
        )


def _report_holding(
    trials: EnvironmentTrials,
    key: str,
    spec: str,
    agent: AgentConfig,
    outcome: Mapping[str, Any],
) -> None:
    """Add for how long the environment held the event loop of its episodes."""
    held: Mapping[str, Sequence[float]] = outcome["held"]
    if not held:
        return
    place = max(held, key=lambda each: max(held[each]))
    trials.lines.append(
        f"  it held the event loop for {max(held[place]):.2f} s at most, in {place}"
    )

    # What happens once, as an import does, is no matter of each episode.
    again = {each: sorted(times)[-2] for each, times in held.items() if times[1:]}
    place = max(again, key=lambda each: again[each], default="")
    seconds = again.get(place, 0.0) * agent.episodes_per_process
    # An agent makes a client, which takes some hundredths of a second.
    least_s = _LONG_CALL_S if outcome["is_agent"] else 0.0
    remedy = AGENT_REMEDY if outcome["is_agent"] else METHOD_REMEDY
    if seconds >= _LONG_S and again[place] >= least_s:
        trials.warnings.append(
            f"{key}={spec}: {place} holds the event loop for {again[place]:.2f} s;"
            f" {agent.episodes_per_process} episodes of a process at once would wait"
            f" {seconds:.0f} s for each other. {remedy}"
        )


def _fix_of_a_beginning(task: EpisodeTask, detail: str, *, is_agent: bool) -> str:
    """Return what to do about one that fails before the policy has a turn."""
    if detail.startswith(f"it ended as {End.CONTEXT_OVERFLOW.value}"):
        return (
            "Begin with fewer tokens, or raise data.max_prompt_tokens and"
            " rollout.max_response_tokens."
        )
    if is_agent:
        return (
            "Correct it: the policy had no turn yet. An agent asks OPENAI_BASE_URL or"
            " ANTHROPIC_BASE_URL with the key beside it, or what its function is given."
            " A command has a current folder of its own, and beside a few variables of"
            " the environment those of env and pass_env alone."
        )
    names = ["messages", *(["answer"] if task.answer is not None else [])]
    extra = ", ".join(map(str, task.extra)) or "nothing"
    return (
        "Correct it, or the data: the policy had no turn yet. This record has"
        f" {' and '.join(names)}, and {extra} in extra."
    )


def _template_lines(
    config: RLConfig, tokenizer: PreTrainedTokenizerBase, *, has_tools: bool
) -> Iterator[str]:
    """Yield where the chat template would not continue a row of several turns."""
    try:
        broken = prefix_problems(tokenizer, of_run(config.data))
    # The vocabulary of a small model may lack the words of the cases.
    except DataError as error:
        yield f"chat template: whether it continues turns cannot be tried: {error}"
        return
    problems = [
        problem
        for problem in broken
        # Cases with tools only arise where tools are offered.
        if has_tools or "tool" not in problem.partition(":")[0]
    ]
    if not problems:
        yield "chat template: the turns of a conversation continue one row"
        return
    yield "chat template: not every turn is continued as it was written"
    for problem in problems:
        yield f"  {problem}"


# -------------------------------------------------------------------- in that process


def main(connection: socket.socket) -> None:
    """Run the trial that the other end of a connection asks for."""
    run_trial(connection, _tried)


def _tried(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """Return what became of a trial; tell each stage as it begins.

    Raises:
        ConfigError: The environment cannot be imported.
    """
    start, source = EpisodeStart.of(request), request["source"]
    tell("its import", {})
    provide(start.models)
    spec, options = start.environments[source]
    loaded = load_environment(spec, options, f"{KEY}.{source}")
    if request["task"] is None:
        return {}
    environment = runnable(loaded)

    task, seed = task_of(request["task"]), request["seed"]
    renderer = start.renderer()
    tokenizer = renderer.tokenizer
    held: dict[str, list[float]] = {}
    episodes: list[dict[str, Any]] = []
    openings: list[Sequence[int]] = []
    tools: list[str] = []
    for script in (OWN_ANSWER, NOTHING):
        stage = f"the episode of {script}"
        tell(stage, {})
        texts = _texts(script, task, tokenizer, has_tools=bool(tools))
        sampler = ScriptedSampler(
            tokenizer, texts, repeats=True, end=turn_end(renderer), read=_read
        )
        terms = Terms(trains=request["trains"], model=start.policy_name)
        course = run_episode(
            environment, task, seed, sampler, renderer, start.limits, terms=terms
        )
        episode = asyncio.run(_watched(course, held, stage, tell))
        openings += [call.tokens for call in sampler.calls[:1]]
        offered = sampler.calls[0].tools if sampler.calls else ()
        tools = [tool["function"]["name"] for tool in offered]
        ended = {name: getattr(episode, name) for name in _COURSE}
        episodes.append({"script": script, **ended})

    opening = openings[0] if openings else []
    same_environment = all(tokens == openings[0] for tokens in openings)
    known_tools = None
    if isinstance(loaded, partial) and loaded.func in _TOOL_KINDS:
        known_tools = [tool.name for tool in loaded.args[-1]]
    outcome = {
        "episodes": episodes,
        "tools": tools,
        # An agent of a user's own writes what it likes, such as its folder.
        "same_environment": same_environment or isinstance(loaded, Agent),
        "is_agent": isinstance(loaded, Agent),
        "payer": "tools" if known_tools is not None else _payer(loaded),
    }
    shown = {"num_opening": len(opening), "opening": tokenizer.decode(opening)}
    return {**outcome, **shown, "known_tools": known_tools, "held": held}


def _payer(loaded: object) -> str:
    """Return who says what an agent's episodes are worth; empty if that is open."""
    if isinstance(loaded, Agent) and isinstance(loaded.launch, AgentCommand):
        return loaded.launch.reward
    return ""


async def _watched(
    course: Coroutine[Any, Any, Episode],
    held: dict[str, list[float]],
    stage: str,
    tell: Tell,
) -> Episode:
    """Run an episode; add the seconds for which functions hold its event loop.

    One that may hold it for good is named at once, and is the last that is told, unless
    it lets go: then the stage is.
    """

    def note(place: CodePlace, seconds: float) -> None:
        held.setdefault(f"{place.function} ({place.path})", []).append(seconds)
        if seconds >= LONG_S:
            tell(stage, {})

    def name(place: CodePlace) -> None:
        text = f"{place} holds the event loop, and nothing goes on. {place.remedy}"
        tell(f"an episode in which {place} holds the event loop", {})
        # The step ends no earlier than this does, and nobody may read what is printed.
        warn = partial(print, f"warning: {text}", file=sys.stderr, flush=True)
        Thread(target=warn, daemon=True).start()

    LoopWatch(_SLOW_S, note, while_held=name)
    return await asyncio.create_task(course)


def _texts(
    script: str,
    task: EpisodeTask,
    tokenizer: PreTrainedTokenizerBase,
    *,
    has_tools: bool,
) -> list[str]:
    """Return the turns of a script, of which the policy could write each."""
    texts = ["", _OFF_TOPIC]
    if script == OWN_ANSWER and task.answer is not None:
        texts = [task.answer, ""]
    elif has_tools:
        texts = [_UNREADABLE, _UNKNOWN, *texts]
    writable = [text for text in texts if _is_writable(text, tokenizer)]
    return writable[:1] if script == OWN_ANSWER else writable


def _is_writable(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    try:
        encode(tokenizer, [text], special=False, where=lambda _: "a turn")
    except DataError:
        return False
    return True


def _read(tokens: Sequence[int], text: str, finish: str) -> Action:
    """Return a turn; the two calls are known by their text."""
    if text == _UNREADABLE:
        error = f"{text} begins no call that can be read"
        return Action(tokens, text, finish=finish, parse_error=error)
    if text == _UNKNOWN:
        return Action(tokens, "", [ToolCall("no_such_tool", {})], finish)
    return read_words(tokens, text, finish)
