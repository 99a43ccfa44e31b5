"""The suite `agents`: what episodes cost beside a rollout engine, what a thousand
of them at once take of a machine, and what a late turn of a long one costs.

Invariant: both sides of the comparison draw the same tokens. The yardstick is a
coroutine per episode beside the engine, in the same process. It sends the turns of the
episode as they were: the same prompts and seeds, each turn once the one before it is
done, as many episodes at a time, and the prefix cache is empty at the beginning of
each. It has no environment, no template, no other process and no messages to one. With
`--tools` each turn calls a tool, which the environment writes: untrained policies call
none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import string
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import psutil

from scripts.bench.inputs import POLICIES
from scripts.bench.scripted_engine import ScriptedEngine
from scripts.bench.suite import MIB, Flags, circumstances, print_json, rounds
from scripts.configuration import compose
from verl_ray.agents.contract import (
    Action,
    Constraint,
    End,
    Episode,
    EpisodeTask,
    Listener,
    Message,
    Policy,
    Sampled,
    ToolSchema,
    message_of,
)
from verl_ray.agents.episode import (
    run_episode,
)
from verl_ray.agents.policy import (
    Limits,
    turn_seed,
)
from verl_ray.agents.template import Renderer
from verl_ray.agents.wire import EpisodeStart, token_bytes
from verl_ray.cluster.context import WorkerContext
from verl_ray.cluster.process_setup import thread_environment
from verl_ray.config.load import parse, to_tree
from verl_ray.config.rollout import RolloutConfig
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.processes.frames import frame
from verl_ray.rollout.episode_stream import EpisodeRequest
from verl_ray.rollout.episodes import EpisodePool
from verl_ray.rollout.requests import (
    GenerationProgress,
    GenerationRequest,
    Sampling,
    Tokens,
)
from verl_ray.rollout.server import RolloutServer
from verl_ray.rollout.tool_calls import ActionReader
from verl_ray.rollout.vllm_environment import environment
from workers.rollout import start_engine

T = TypeVar("T")

_ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
"""An untrained policy ends a turn once in as many tokens as it has."""

_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_GUESSING = "verl_ray.agents.environments.number_guessing:NumberGuessing"
_CALLING = "scripts.bench.calling_environment:CallingEnvironment"
_ASKING = "scripts.bench.asking_agent"
_TOOL_PARSER = "hermes"
_TURN_TOKENS = 256
_OTHERS_TOKENS = 256
"""Tokens that a turn has at most beside those of the policy."""
_POSITIONS = 2**17
"""Most tokens of a row."""
_SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=_TURN_TOKENS)
_SCRIPTED_TOKENS = 16
"""Tokens of a turn of the scripted engine."""
_STEP_S = 0.05
"""Seconds of a step of the scripted engine, which adds a token to each request."""
_SAMPLED_S = 0.05
"""Seconds from one look at files, memory and threads to the next."""

_LONG_TURNS = (10, 200)
"""Turns of a long episode that are compared; the last one is the length."""
_AROUND = 4
"""Turns before a compared one whose median counts with it."""

_PARTS = ("speed", "http", "crowd", "growth")

Spec = tuple[str, dict[str, object]]
"""An environment and its options."""


@dataclass(frozen=True)
class Cost:
    """Seconds of drawing the same tokens in one way.

    Attributes:
        wall_s: By the clock.
        cpu_s: Of all processes together, on all cores.
    """

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Round:
    """The costs of as many tokens in each way."""

    tokens: int
    turns: int
    added: int
    """Tokens of prompts behind the first turn that nobody sampled."""
    episodes: Cost
    turns_alone: Cost
    turns_without_words: Cost
    single_responses: Cost


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; return the exit code, 0."""
    options = _flags().parse_args(argv)
    # Torch reads these as it is imported, by the process that is started next.
    threads = options.threads
    os.environ.update(
        thread_environment(threads, os.environ) | environment("cpu", threads)
    )
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=_write_to_stderr
    ) as process:
        figures = process.submit(_measure, options).result()
    print_json({"model": options.model, **figures, **circumstances()})
    return 0


def _write_to_stderr() -> None:
    """Send what the engine says to where progress goes."""
    os.dup2(2, 1)


def _measure(options: argparse.Namespace) -> dict[str, object]:
    """Return the figures of each part."""
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = _make_model(folder, options.model)
        sizes = options.episodes, options.at_once, options.turns
        if "speed" in options.only:
            figures["speed"] = speed(
                model, *sizes, options.threads, options.repeats, options.tools
            )
        if "http" in options.only:
            figures["http"] = http(
                model, *sizes, options.threads, options.repeats, options.sessions
            )
        if "crowd" in options.only:
            guessing = _guessing(options.turns)
            figures["crowd"] = crowd(model, options.crowd, options.turns, guessing)
        if "growth" in options.only:
            figures["growth"] = growth(model, options.repeats)
    return figures


# -------------------------------------------------------------------------- with vLLM


def speed(
    model: str,
    count: int,
    at_once: int,
    turns: int,
    threads: int,
    repeats: int,
    tools: bool,
) -> dict[str, object]:
    """Return tokens per second of episodes, and of as many tokens without them.

    Args:
        model: The model directory.
        count: Number of episodes.
        at_once: Episodes at a time.
        turns: Turns of an episode.
        threads: Threads of the engine.
        repeats: Rounds that count; all sides take turns in each.
        tools: Whether each turn calls a tool.
    """
    spec: Spec = (_CALLING, {}) if tools else _guessing(turns)
    measured: list[Round] = []
    with _pools(
        lambda: _with_vllm(model, turns, threads),
        model, turns, at_once, spec, tools=tools,
    ) as (server, (pool,)):  # fmt: skip
        for number in rounds(repeats, "agents"):
            measured.append(_round(server, pool, _requests(count, number), at_once))

    # The first round only warms up.
    return {
        "episodes": count,
        "at_once": at_once,
        "turns": turns,
        "tools": tools,
        "engine_threads": threads,
        **_figures(measured[1:]),
        "repeats": repeats,
    }


def http(
    model: str,
    count: int,
    at_once: int,
    turns: int,
    threads: int,
    repeats: int,
    sessions: int,
) -> dict[str, object]:
    """Return what an agent over HTTP costs beside the same turns by a coroutine.

    Args:
        model: The model directory.
        count: Number of episodes.
        at_once: Episodes at a time.
        turns: Turns of an episode.
        threads: Threads of the engine.
        repeats: Rounds that count; both sides take turns in each.
        sessions: Agents at once beside the scripted engine.
    """
    own: Spec = (f"{_ASKING}:converse", {"turns": turns})
    asking: Spec = (f"{_ASKING}:ask", {"turns": turns})
    speeds: list[list[float]] = []
    with _pools(
        lambda: _with_vllm(model, turns, threads), model, turns, at_once, own, asking
    ) as (server, pools):
        for number in rounds(repeats, "agents"):
            speeds.append([])
            for pool in pools:
                work = functools.partial(_run, pool, _requests(count, number))
                episodes, cost = _timed(server, work)
                rows = [row for each in episodes.values() for row in each.rows]
                assert sum(len(row.turns) for row in rows) == count * turns
                speeds[-1].append(sum(sum(row.mask) for row in rows) / cost.wall_s)

    # The first round only warms up.
    measured = speeds[1:]
    return {
        "coroutine_tokens_per_s": round(median(each[0] for each in measured)),
        "http_tokens_per_s": round(median(each[1] for each in measured)),
        "ratio": round(median(each[1] / each[0] for each in measured), 3),
        "repeats": repeats,
        "sessions": crowd(model, sessions, turns, asking),
    }


def _guessing(turns: int) -> Spec:
    """Return an environment of so many turns."""
    return _GUESSING, {"low": 1, "high": 10**6, "max_guesses": turns}


def _with_vllm(model: str, turns: int, threads: int) -> RolloutServer:
    """Start vLLM for rows of so many turns."""
    config = _engine_config()
    context = WorkerContext(
        "rollout", 0, 1, "cpu", process_group=False, threads=threads,
        log_path=Path(os.devnull), incarnation=1,
    )  # fmt: skip
    return RolloutServer(
        lambda: start_engine(
            context, model, config,
            max_model_len=_row_tokens(turns), seed=0, initial_version=0,
        )
    )  # fmt: skip


def _figures(measured: Sequence[Round]) -> dict[str, object]:
    """Return speeds, and the ratios of episodes to the same turns without them."""
    figures: dict[str, object] = {}
    ways = ("episodes", "turns_alone", "turns_without_words", "single_responses")
    for name in ways:
        speeds = [each.tokens / getattr(each, name).wall_s for each in measured]
        figures[f"{name}_tokens_per_s"] = round(median(speeds))
    pairs = [(each.turns_alone, each.episodes) for each in measured]
    best = [
        max(
            each.tokens / cost.wall_s for each, cost in zip(measured, side, strict=True)
        )
        for side in zip(*pairs, strict=True)
    ]
    turns = sum(each.turns for each in measured)
    return figures | {
        "tokens_per_turn": round(sum(each.tokens for each in measured) / turns, 1),
        "added_per_turn": round(sum(each.added for each in measured) / turns, 1),
        "ratio": round(median(alone.wall_s / own.wall_s for alone, own in pairs), 3),
        "best_ratio": round(best[1] / best[0], 3),
        "cpu_ratio": round(median(alone.cpu_s / own.cpu_s for alone, own in pairs), 3),
    }


def _round(
    server: RolloutServer,
    pool: EpisodePool,
    requests: Sequence[EpisodeRequest],
    at_once: int,
) -> Round:
    """Draw the same number of tokens in four ways."""
    episodes, episodes_cost = _timed(server, lambda: _run(pool, requests))
    ends = {episode.end for episode in episodes.values()}
    assert End.ENVIRONMENT_FAILED not in ends, "an environment failed"
    chains = [turns_of(episodes[request.number], request.seed) for request in requests]
    responses = [[as_one_response(chain)] for chain in chains]
    turns = list(itertools.chain(*chains))
    tokens = sum(turn.sampling.max_tokens for turn in turns)
    sampled = tokens - sum(chain[-1].sampling.max_tokens for chain in chains)
    grown = sum(len(chain[-1].tokens) - len(chain[0].tokens) for chain in chains)

    costs = []
    for drawn, joined in ((chains, False), (chains, True), (responses, False)):
        work = functools.partial(_draw, server, drawn, at_once, joined)
        count, cost = _timed(server, work)
        assert count == tokens, f"{count} tokens and {tokens} are compared"
        costs.append(cost)
    return Round(tokens, len(turns), grown - sampled, episodes_cost, *costs)


def _timed(server: RolloutServer, work: Callable[[], T]) -> tuple[T, Cost]:
    """Return what work returns, and its cost from an empty prefix cache on."""
    server.pause("recompute")
    server.resume()
    processes = [psutil.Process(), *_processes_of_episodes()]
    before_s = _cpu_s(processes)
    start = time.perf_counter()
    result = work()
    wall_s = time.perf_counter() - start
    return result, Cost(wall_s, _cpu_s(processes) - before_s)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(each.user + each.system for each in times))


def _processes_of_episodes() -> list[psutil.Process]:
    """Return the processes that run episodes, each a child of its guard."""
    children = psutil.Process().children()
    guards = [
        child for child in children if "verl_ray.agents.process" in child.cmdline()[-1]
    ]
    return [process for guard in guards for process in guard.children()]


def turns_of(episode: Episode, seed: int) -> list[GenerationRequest]:
    """Return the requests of the turns of an episode, each of its exact length."""
    turns: list[GenerationRequest] = []
    for row in episode.rows:
        edges = np.flatnonzero(np.diff(row.mask, prepend=False, append=False))
        for first, end in edges.reshape(-1, 2).tolist():
            turns.append(
                _request(row.tokens[:first], end - first, turn_seed(seed, len(turns)))
            )
    return turns


def as_one_response(turns: Sequence[GenerationRequest]) -> GenerationRequest:
    """Return a request that draws as many tokens as all turns, behind their prompt."""
    length = sum(turn.sampling.max_tokens for turn in turns)
    return _request(turns[0].tokens, length, turns[0].seed)


def _request(
    tokens: Sequence[int] | Tokens, length: int, seed: int
) -> GenerationRequest:
    sampling = replace(_SAMPLING, max_tokens=length, stop_token_ids=())
    return GenerationRequest(0, np.asarray(tokens, np.int32), sampling, seed)


def _draw(
    server: RolloutServer,
    chains: Sequence[Sequence[GenerationRequest]],
    at_once: int,
    joined: bool,
) -> int:
    """Serve the requests of each chain in turn; return the number of their tokens.

    Args:
        joined: Whether a request continues the response before it, without words that
            nobody sampled between them.
    """

    async def serve(
        chain: Sequence[GenerationRequest], places: asyncio.Semaphore
    ) -> int:
        count = 0
        words = chain[0].tokens
        async with places:
            for request in chain:
                if joined:
                    request = replace(request, tokens=words)
                async for chunks in server.respond_async([request]):
                    for chunk in chunks:
                        count += len(chunk.tokens)
                        words = np.concatenate([words, chunk.tokens])
        return count

    async def serve_all() -> int:
        places = asyncio.Semaphore(at_once)
        return sum(await asyncio.gather(*(serve(chain, places) for chain in chains)))

    return asyncio.run(serve_all())


# --------------------------------------------------------------- with a scripted engine


def crowd(model: str, count: int, turns: int, spec: Spec) -> dict[str, object]:
    """Return what many episodes at once take, in one process of episodes.

    Args:
        model: The model directory, for its tokenizer.
        count: Number of episodes, all at once.
        turns: Turns of an episode.
        spec: The environment.
    """
    tokenizer = load_tokenizer(model)
    words = tokenizer("My guess is 123"[: _SCRIPTED_TOKENS - 1])["input_ids"]
    script = [(token, -1.0) for token in [*words, tokenizer.eos_token_id]]
    with _pools(
        lambda: RolloutServer(
            lambda: _PacedEngine(lambda _: script, initial_version=0)
        ),
        model, turns, count, spec,
    ) as (server, (pool,)):  # fmt: skip
        pool.take_counts()
        (process,) = _processes_of_episodes()
        with _watched(server, process) as peaks:
            start = time.perf_counter()
            episodes = _run(pool, _requests(count, 0))
            seconds = time.perf_counter() - start
        lag_s = pool.take_counts().lag_s

    num_turns = sum(episode.num_turns for episode in episodes.values())
    return {
        "episodes": count,
        "turns": turns,
        "seconds": round(seconds, 2),
        "turns_per_s": round(num_turns / seconds),
        "loop_lag_s": round(lag_s, 3),
        **peaks,
    }


class _PacedEngine(ScriptedEngine):
    """A scripted engine that takes its time, so that all episodes wait for it."""

    def _step(self) -> Iterator[GenerationProgress]:
        time.sleep(_STEP_S)
        return super()._step()


@contextlib.contextmanager
def _watched(
    server: RolloutServer, process: psutil.Process
) -> Iterator[dict[str, object]]:
    """Yield a dict that holds the most of everything once the block has ended."""
    own = psutil.Process()
    before = _holdings(own), _holdings(process)
    looks = [before]
    in_flight = [0]
    ended = threading.Event()

    def watch() -> None:
        # Ends with the block.
        while not ended.wait(_SAMPLED_S):
            looks.append((_holdings(own), _holdings(process)))
            in_flight.append(server.health().in_flight)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    peaks: dict[str, object] = {}
    try:
        yield peaks
    finally:
        ended.set()
        watcher.join()
    peaks["requests_at_most"] = max(in_flight)
    for place, side in enumerate(("engine_process", "episodes_process")):
        peaks[side] = {
            name: {"before": value, "most": max(look[place][name] for look in looks)}
            for name, value in before[place].items()
        }


def _holdings(process: psutil.Process) -> dict[str, int]:
    """Return open files, threads and resident memory of a process."""
    with process.oneshot():
        return {
            "files": process.num_fds(),
            "threads": process.num_threads(),
            "resident_mib": round(process.memory_info().rss / MIB),
        }


# -------------------------------------------------------------------- without an engine


def growth(model: str, repeats: int) -> dict[str, object]:
    """Return milliseconds that early and late turns of an episode take its process.

    They are those between a sampled turn and the request for the next one.

    Args:
        model: The model directory, for its tokenizer.
        repeats: Episodes that count.
    """
    tokenizer = load_tokenizer(model, _TEMPLATE)
    renderer = Renderer(tokenizer)
    limits = Limits(max_turns=_LONG_TURNS[-1], context_tokens=10**6)
    engine = _TimedSampler(
        tokenizer("My guess is 123")["input_ids"], min(renderer.end_tokens)
    )
    for number in rounds(repeats, "agents"):
        course = run_episode(_ask_on, EpisodeTask([]), number, engine, renderer, limits)
        episode = asyncio.run(course)
        assert len(episode.rows) == 1, f"an episode of {len(episode.rows)} rows"

    # The first round only warms up.
    seconds = np.array(engine.seconds).reshape(-1, _LONG_TURNS[-1])[1:]
    costs = [
        round(1e3 * float(np.median(seconds[:, turn - _AROUND - 1 : turn])), 3)
        for turn in _LONG_TURNS
    ]
    names = [f"ms_at_turn_{turn}" for turn in _LONG_TURNS]
    ratio = round(costs[-1] / costs[0], 2)
    figures = dict(zip(names, costs, strict=True))
    return {**figures, "ratio": ratio, "repeats": repeats}


async def _ask_on(task: EpisodeTask, policy: Policy) -> float:
    """Talk with the policy until a limit ends the episode."""
    messages: list[Message] = [{"role": "user", "content": "Guess a number."}]
    # Ends with the episode.
    while True:
        action = await policy.respond(messages)
        answer = {"role": "user", "content": "Higher than that. Guess again."}
        messages = [*messages, message_of(action), answer]


class _TimedSampler:
    """A sampler of the same turn, which notes what happens between its calls."""

    def __init__(self, words: Sequence[int], end: int) -> None:
        self.seconds: list[float] = []
        self._action = Action([*words, end], "My guess is 123")
        self._since = time.perf_counter()

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
        """Return the turn; see `Sampler`."""
        frame("sample", {"seed": seed, "max_tokens": max_tokens}, token_bytes(tokens))
        self.seconds.append(time.perf_counter() - self._since)
        count = len(self._action.tokens)
        sampled = Sampled(self._action.tokens, [-1.0] * count, [(0, 0)], self._action)
        self._since = time.perf_counter()
        return sampled


# ------------------------------------------------------------------------- both of them


@contextlib.contextmanager
def _pools(
    start: Callable[[], RolloutServer],
    model: str,
    turns: int,
    at_once: int,
    *specs: Spec,
    tools: bool = False,
) -> Iterator[tuple[RolloutServer, list[EpisodePool]]]:
    """Start an engine with a process for each environment, and end all afterwards."""
    limits = Limits(
        max_turns=turns,
        max_tokens=turns * _TURN_TOKENS,
        context_tokens=_row_tokens(turns),
        max_turn_tokens=_TURN_TOKENS,
    )
    server = start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        parser = _TOOL_PARSER if tools else None
        reader = ActionReader(load_tokenizer(model, _TEMPLATE), parser)
        pools = []
        for spec in specs:
            episodes = EpisodeStart({"default": spec}, model, limits, _TEMPLATE)
            pool = EpisodePool(
                server, episodes, reader,
                num_processes=1, most_open=at_once, stall_s=120.0,
            )  # fmt: skip
            stack.callback(pool.close)
            pools.append(pool)
        yield server, pools


def _row_tokens(turns: int) -> int:
    """Return how many tokens a row of so many turns has at most."""
    return turns * (_TURN_TOKENS + _OTHERS_TOKENS)


def _requests(count: int, number: int) -> list[EpisodeRequest]:
    """Return the episodes of a round, which no other round has."""
    first = number * count
    return [
        EpisodeRequest(
            episode, EpisodeTask([]), seed, seed, _SAMPLING, session=str(episode)
        )
        for episode, seed in enumerate(range(first, first + count))
    ]


def _run(pool: EpisodePool, requests: Sequence[EpisodeRequest]) -> dict[int, Episode]:
    """Run episodes to their ends, by their numbers."""
    stream = pool.run(requests)
    episodes: dict[int, Episode] = {}
    while not stream.has_ended:
        taken = stream.take()
        episodes |= {row: each for row, each in taken if isinstance(each, Episode)}
    return episodes


def _make_model(folder: str, name: str) -> str:
    """Write a model with random parameters; return its directory."""
    from verl_ray.models.tiny import make_tiny_qwen3

    tokenizer = f"{folder}/tokenizer"
    character_tokenizer(tokenizer, _ALPHABET)
    model = make_tiny_qwen3(f"{folder}/model", tokenizer, POLICIES[name], 0)
    config = model / "config.json"
    positions = {"max_position_embeddings": _POSITIONS}
    config.write_text(json.dumps(json.loads(config.read_text()) | positions))
    return str(model)


def _engine_config() -> RolloutConfig:
    overrides = (
        "algorithm=grpo", "rollout.dtype=float32", "rollout.kv_cache_gib=1.0",
    )  # fmt: skip
    return parse(to_tree(compose("quickstart", overrides)), RLConfig).rollout


def _flags() -> Flags:
    cores = len(os.sched_getaffinity(0))
    flags = Flags(
        "agents",
        "Measure tokens per second of episodes of several turns, compared with the"
        " same turns drawn without an environment and with as many tokens in one"
        " response each (speed); those of an agent over HTTP, compared with the same"
        " words of a coroutine (http); what many episodes at once take with a scripted"
        " engine: lag, files, memory and threads (crowd); and the time of the event"
        " loop for turn 200 of an episode beside that for turn 10 (growth).",
    )
    flags.only(_PARTS, "parts")
    flags.choice("--model", POLICIES, "parameters of the policy")
    flags.number("--episodes", 128, "episodes that are compared")
    flags.number("--at-once", 64, "episodes at a time that are compared")
    flags.number("--turns", 4, "turns of an episode")
    flags.add_argument("--tools", action="store_true", help="each turn calls a tool")
    flags.number("--threads", cores, "threads of the engine")
    flags.number("--sessions", 512, "agents at once with the scripted engine")
    flags.number("--crowd", 1000, "episodes at once with the scripted engine")
    flags.number("--repeats", 5, "rounds that count")
    flags.set_defaults(only=_PARTS)
    return flags
