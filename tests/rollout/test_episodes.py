"""Episodes in processes of their own, over a scripted engine."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from scripts.bench.scripted_engine import Script, ScriptedEngine
from tests.agents.chat_server import chat_server, settings
from tests.waiting import PATIENCE_S
from verl_ray.agents.contract import Action, End, Episode, EpisodeTask, ToolCall
from verl_ray.agents.policy import (
    Limits,
    turn_seed,
)
from verl_ray.agents.wire import EpisodeStart
from verl_ray.columns.batch import Ragged, offsets_of
from verl_ray.columns.stages import NO_EPISODE, Finish, Prompts, Rollouts
from verl_ray.config.agent import AgentConfig
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.errors import CallRefused, ConfigError, EngineFailed, RolloutError
from verl_ray.rollout import episodes as episodes_module
from verl_ray.rollout import turns
from verl_ray.rollout.episode_counts import EpisodeCounts
from verl_ray.rollout.episode_stream import EpisodeRequest
from verl_ray.rollout.episodes import EpisodePool, retry_wait_s
from verl_ray.rollout.requests import GenerationRequest, Sampling
from verl_ray.rollout.server import PauseRequest, RolloutServer
from workers.episodes import ROW_IDS
from workers.generation import Generation
from workers.rollout import (
    RolloutWorker,
)

pytestmark = pytest.mark.processes

ENVIRONMENTS = Path(__file__).with_name("environments.py")
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8)
LIMITS = Limits(max_turns=4, max_tokens=64, context_tokens=256)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 \n<|>_/"
END = 1  # of character_tokenizer
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}|{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant|{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer(folder, ALPHABET)
    return folder


def process_ids(pool: EpisodePool) -> list[int]:
    """Ids of the processes that have begun to start."""
    children = [each.process._child for each in pool._processes]
    return [child.pid for child in children if child is not None]


def letters(seed: int) -> list[int]:
    """Three letters that the seed of a turn decides about."""
    return np.random.default_rng(seed).integers(4, 20, 3).tolist()


def script(request: GenerationRequest) -> list[tuple[int, float]]:
    return [(token, -token / 8) for token in letters(request.seed)] + [(END, -0.5)]


def sampled_by_seed(number: int) -> list[int]:
    """The sampled tokens of the three turns of an episode of `requests`."""
    seeds = [turn_seed(100 + number, turn) for turn in range(3)]
    return [token for seed in seeds for token in (*letters(seed), END)]


def make_pool(
    model: Path,
    *names: str,
    options: dict[str, Any] | None = None,
    path: Path = ENVIRONMENTS,
    limits: Limits = LIMITS,
    answers: Script = script,
    start: dict[str, Any] | None = None,
    environment: str = "default",
    **changes: Any,
) -> tuple[EpisodePool, RolloutServer]:
    """Start processes; of their environments the first has a name of its own here."""
    tokenizer = load_tokenizer(model)

    def read(tokens: Sequence[int], finish: Finish, tools: Sequence[Any]) -> Action:
        text = tokenizer.decode([token for token in tokens if token != END])
        calls = [ToolCall(tools[0]["function"]["name"], {})] if tools else []
        return Action(tokens, text, calls, finish.name.lower())

    server = RolloutServer(
        lambda: ScriptedEngine(answers, initial_version=3, tokenizer=tokenizer)
    )
    arguments = {"num_processes": 1, "most_open": 16, "stall_s": 20.0} | changes
    named = {environment: names[0], **{name: name for name in names[1:]}}
    spec = EpisodeStart(
        {source: (f"{path}:{name}", options or {}) for source, name in named.items()},
        str(model),
        limits,
        **{"chat_template": TEMPLATE} | (start or {}),
    )
    try:
        return EpisodePool(server, spec, read, **arguments), server
    except BaseException:
        server.close()
        raise


@pytest.fixture
def start_pool(model: Path) -> Iterator[Callable[..., EpisodePool]]:
    pools: list[tuple[EpisodePool, RolloutServer]] = []

    def start(*names: str, **arguments: Any) -> EpisodePool:
        pools.append(make_pool(model, *names, **arguments))
        return pools[-1][0]

    yield start
    for pool, server in pools:
        pool.close()
        server.close()


@pytest.fixture(scope="module")
def usual_pool(model: Path) -> Iterator[EpisodePool]:
    """One process for tests that only run episodes in it, three at a time."""
    pool, server = make_pool(
        model, "Counting", "Cutting", environment="game", most_open=3
    )
    yield pool
    pool.close()
    server.close()


def requests(count: int, **extra: Any) -> list[EpisodeRequest]:
    return [
        EpisodeRequest(
            number,
            EpisodeTask(
                [{"role": "user", "content": "go"}], extra=extra | {"number": number}
            ),
            seed=100 + number,
            environment_seed=7,
            sampling=SAMPLING,
            session="0",
        )
        for number in range(count)
    ]


def ended(pool: EpisodePool, asked: list[EpisodeRequest]) -> dict[int, Episode]:
    stream = pool.run(asked)
    episodes: dict[int, Episode] = {}
    while not stream.has_ended:
        episodes |= dict(stream.take(60.0))
    return episodes


def sampled_tokens(episode: Episode) -> list[int]:
    (row,) = episode.rows
    return [token for token, own in zip(row.tokens, row.mask, strict=True) if own]


class Pipe:
    """What environments say, line by line; a line is waited for."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "pipe"
        os.mkfifo(self.path)
        # A pipe that is also open for writing has no end between two writers.
        self._descriptor = os.open(self.path, os.O_RDWR)

    def take(self, count: int) -> list[str]:
        data = b""
        while data.count(b"\n") < count:
            ready, _, _ = select.select([self._descriptor], [], [], PATIENCE_S)
            assert ready, f"only {data!r}"
            data += os.read(self._descriptor, 4096)
        return sorted(data.decode().splitlines())

    def close(self) -> None:
        os.close(self._descriptor)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path)
    yield pipe
    pipe.close()


def test_a_process_writes_what_the_run_and_the_record_give_its_template(
    start_pool: Callable[..., EpisodePool], model: Path
) -> None:
    begin = "{{ strftime_now('%d') }}{{ tone }}{% if calm %}calm{% endif %}/"
    start = {
        "chat_template": begin + TEMPLATE, "template_arguments": {"tone": "loud"},
        "template_day": "2026-03-01", "special_tokens": "allow",
    }  # fmt: skip
    asked = requests(2)
    given = {"calm": True, "tone": ""}
    messages = [{"role": "user", "content": "go<eos>"}]
    task = replace(asked[1].task, messages=messages, template_arguments=given)
    asked[1] = replace(asked[1], task=task)
    episodes = ended(start_pool("Counting", start=start), asked)
    tokenizer = load_tokenizer(model)
    first, second = (
        tokenizer.decode(episodes[number].rows[0].tokens) for number in range(2)
    )
    assert tokenizer.eos_token_id == END and episodes[1].rows[0].tokens.count(END) == 7
    assert first.startswith("01loud/<user|go<eos>\n")
    assert second.startswith("01calm/<user|go<eos><eos>\n")


def test_episodes_depend_on_their_seeds_alone(
    start_pool: Callable[..., EpisodePool], usual_pool: EpisodePool
) -> None:
    many = ended(start_pool("Counting", num_processes=2), requests(40))
    few = ended(usual_pool, requests(40, environment="game")[::-1])
    assert many.keys() == set(range(40))
    for number, episode in many.items():
        assert episode.end is End.COMPLETED and episode.num_turns == 3
        # One point for the second turn, and half a one for the third.
        assert episode.score == 1.5
        (row,) = episode.rows
        same = few[number].rows[0]
        assert (row.tokens, row.mask, row.log_probs) == (
            same.tokens,
            same.mask,
            same.log_probs,
        )
        assert sampled_tokens(episode) == sampled_by_seed(number)
        assert [version for _, version in row.versions] == [3, 3, 3]
        sampled = [
            token for token, own in zip(row.tokens, row.mask, strict=True) if own
        ]
        own = [value for value, own in zip(row.log_probs, row.mask, strict=True) if own]
        assert own == [-0.5 if token == END else -token / 8 for token in sampled]
    assert len({tuple(episode.rows[0].tokens) for episode in many.values()}) == 40


def test_a_turn_ends_where_its_environment_says(
    usual_pool: EpisodePool, model: Path
) -> None:
    words = [letters(turn_seed(100, turn)) for turn in range(3)]
    tokenizer = load_tokenizer(model)
    first, last = (tokenizer.decode(each) for each in (words[0][:2], words[2][:1]))
    # The run's own texts end the turns for which the environment has none.
    (request,) = requests(1, letters=[first], environment="Cutting")
    request = replace(request, sampling=replace(SAMPLING, stop=(last,)))
    (episode,) = ended(usual_pool, [request]).values()

    assert (episode.end, episode.num_turns) == (End.COMPLETED, 3)
    sampled = [
        [token for token, own in zip(row.tokens, row.mask, strict=True) if own]
        for row in episode.rows
    ]
    # What a number of tokens has cut begins a row.
    assert last not in tokenizer.decode(words[1][:2])
    assert sampled == [words[0][:2] + words[1][:2], words[2][:1]]
    assert episode.metrics == {"turns": 3.0}


class Letters:
    """A turn whose words are the ids of its tokens."""

    def add(self, tokens: Sequence[int]) -> list[tuple[str, str]]:
        return [("", str(token)) for token in tokens]


def test_a_turn_is_told_now_and_then_and_sampled_where_it_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every so often, however many chunks come; once, where that is never again."""
    server = RolloutServer(
        lambda: ScriptedEngine(lambda _: [(8, -1.0)] * 200, initial_version=0)
    )
    prompt = np.array([4], np.int32)
    request = GenerationRequest(0, prompt, replace(SAMPLING, max_tokens=200), 1)
    heard: list[str] = []
    sizes: list[int] = []
    said: list[str] = []

    class Reader(Letters):
        def __call__(self, tokens: Sequence[int], *_: Any) -> Action:
            return Action(list(tokens), "", [], "length")

        def growing(self, *_: Any) -> Letters:
            return self

        def add(self, tokens: Sequence[int]) -> list[tuple[str, str]]:
            sizes.append(len(tokens))
            return super().add(tokens)

    class Raising(Reader):
        def growing(self, *_: Any) -> Letters:
            raise LookupError("no such tool")

    def turn_of(reader: Reader) -> int:
        heard.clear()
        sizes.clear()
        turn = turns.sampled_turn(
            server, request, [], reader, None, lambda _, to: heard.append(to), said.append
        )  # fmt: skip
        return len(asyncio.run(turn).tokens)

    try:
        monkeypatch.setattr(turns, "_TELL_S", 0.0)
        assert (turn_of(Reader()), len(heard)) == (200, 199)
        monkeypatch.setattr(turns, "_TELL_S", 1e9)
        assert (turn_of(Reader()), sizes) == (200, [len(heard)])
        assert (turn_of(Raising()), heard) == (200, [])
    finally:
        server.close()
    (why,) = said
    assert why.endswith("its words cannot be read before (LookupError)")


def test_an_episode_knows_its_terms_and_what_it_printed_is_kept(
    start_pool: Callable[..., EpisodePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it fails. A constraint reaches the engine, or is refused, and a turn
    that is heard comes by parts.
    """

    def answers(request: GenerationRequest) -> list[tuple[int, float]]:
        if request.stream:
            return [(8, -1.0), (9, -0.5), (END, -0.25)]
        said = [(8, -1.0)] if request.sampling.grammar == "letters" else []
        return [*said, (END, -1.0)]

    def grammar(constraint: dict[str, Any], *_: object) -> str:
        if "tools" in constraint:
            raise CallRefused("not this one", "tool_choice")
        return "letters"

    monkeypatch.setattr(turns, "_TELL_S", 0.0)
    pool = start_pool("knowing", answers=answers, start={"policy_name": "mine"})
    pool._read.grammar = grammar
    pool._read.growing = lambda prompt, *_: Letters()
    sampling = replace(SAMPLING, temperature=0.5, top_p=0.75, top_k=4)
    asked = [replace(each, sampling=sampling) for each in requests(2)]
    asked[1] = replace(asked[1], trains=True)
    episodes = ended(pool, asked)
    first, second = (episodes[number] for number in sorted(episodes))
    said = "{{'temperature': 0.5, 'top_p': 0.75, 'top_k': 4, 'trains': {}, 'model': 'mine', 'reads_tools': True}} g tool_choice: not this one [('', '8'), ('', '9')] gh [-1.0, -0.5, -0.25]"
    assert (first.end, first.output) == (End.COMPLETED, said.format(False))
    assert (second.end, second.output) == (
        End.ENVIRONMENT_FAILED,
        said.format(True),
    )
    # Both have said it.
    assert pool.take_counts().warnings == ("somebody asked for a temperature",)
    for number in range(100):
        pool.say(f"text {number}")
    *_, last = pool.take_counts().warnings
    assert len(pool._said) == 64 and last.startswith("nothing more is said")


def test_environments_of_all_kinds_talk_to_a_frozen_model(
    start_pool: Callable[..., EpisodePool],
) -> None:
    names = ("Asking", "asking", "ask_user", "PlainlyAsking", "ask_user_plainly")
    with chat_server() as server:
        models = {"user": settings(server.url, max_outage_s=0.1)}
        pool = start_pool("Counting", *names, start={"models": models})
        for name in names:
            for episode in ended(pool, requests(3, environment=name)).values():
                said = [message["content"] for message in episode.messages]
                assert "you said hello" in said and episode.detail == "", episode
    for name in ("asking", "PlainlyAsking"):
        # Nobody listens there any more.
        (alone,) = ended(pool, requests(1, environment=name)).values()
        assert alone.end is End.ENVIRONMENT_FAILED
        assert "ModelServiceError: agent.models.user.url=" in alone.detail
        assert "(agent.models.user.max_outage_s = 0.1)" in alone.detail
        # The environment's own line is told, however deep the error was raised.
        assert str(ENVIRONMENTS) in alone.detail and "chat" in alone.detail


def test_an_episode_that_ends_its_process_costs_no_other_one(
    start_pool: Callable[..., EpisodePool],
) -> None:
    pool = start_pool("Deadly", options={"fatal": 7}, num_processes=2)
    episodes = ended(pool, requests(20))
    assert episodes[7].end is End.ENVIRONMENT_FAILED
    assert "ended its process" in episodes[7].detail
    del episodes[7]
    for number, episode in episodes.items():
        assert episode.end is End.COMPLETED
        # Whoever was lost with it has the same tokens in another process.
        assert sampled_tokens(episode) == sampled_by_seed(number)
    # Each is said once the process is gone.
    counts = counts_once(pool, lambda counts: len(counts.warnings) == 2)
    # Once among all, and once alone: few are divided into as many parts.
    assert counts.lost_processes == 2 and counts.run_again >= 2
    assert counts.warnings[-1] == (
        "a process of episodes was lost: it was killed by signal 9 (Killed), as the"
        " system does where memory is short; 0 of its 1 episodes run again"
    )
    assert pool.take_counts().lost_processes == 0


def test_an_episode_ends_with_a_frame_however_its_task_ends(
    start_pool: Callable[..., EpisodePool],
) -> None:
    pool = start_pool("Panicking", limits=replace(LIMITS, max_turns=2))
    for where, words in (
        ("step", "it raised Panic('in step'), which is no Exception"),
        ("finish", "it raised Panic('in finish'), which is no Exception"),
        ("close", "Object of type bytes is not JSON serializable"),
        ("task", "it raised SystemExit(3), which is no Exception"),
    ):
        (episode,) = ended(pool, requests(1, where=where)).values()
        assert episode.end is End.ENVIRONMENT_FAILED
        assert words in episode.detail.splitlines()[-1]
    assert pool.take_counts().lost_processes == 0

    # What ends the event loop ends the process, but no other episode.
    beside = replace(requests(2)[1], task=requests(1, where="close")[0].task)
    episodes = ended(pool, [*requests(1, where="loop"), beside])
    assert episodes[0].detail == "it ended its process 2 times, at last alone"
    assert "Object of type bytes" in episodes[1].detail
    counts = counts_once(pool, lambda counts: len(counts.warnings) == 2)
    assert counts.lost_processes == 2
    assert "it exited with status 3; 0 of its 1" in counts.warnings[-1]


def test_a_fault_is_retried_within_its_budget(
    start_pool: Callable[..., EpisodePool], tmp_path: Path
) -> None:
    options = {"folder": str(tmp_path), "hopeless": 2}
    pool = start_pool("Flaky", options=options, max_retries=1)
    episodes = ended(pool, requests(5))
    assert episodes.pop(2).end is End.ENVIRONMENT_FAILED
    for number, episode in episodes.items():
        assert episode.end is End.COMPLETED and episode.score == 1.5
        assert sampled_tokens(episode) == sampled_by_seed(number)
    counts = pool.take_counts()
    assert (counts.retries, counts.run_again, counts.lost_processes) == (5, 0, 0)
    # None is begun a third time.
    assert ended(pool, requests(3)[2:])[2].end is End.ENVIRONMENT_FAILED
    assert pool.take_counts().retries == 1
    # What has failed gets more time each time, but never longer than an episode.
    assert [retry_wait_s(retries, 1800.0) for retries in (1, 2, 3, 5, 6, 9999)] == [
        1, 2, 4, 16, 30, 30
    ]  # fmt: skip
    assert retry_wait_s(3, 2.5) == 2.5


def test_an_episode_that_waits_to_be_run_again_goes_with_its_stream(
    start_pool: Callable[..., EpisodePool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests = threading.Semaphore(0)

    def for_long(retries: int, episode_s: float) -> float:
        rests.release()
        return 3600.0

    monkeypatch.setattr(episodes_module, "retry_wait_s", for_long)
    options = {"folder": str(tmp_path), "hopeless": 9}
    pool = start_pool("Flaky", options=options, max_retries=1)
    cancelled, closed = pool.run(requests(2)), pool.run(requests(3)[2:])
    assert all(rests.acquire(timeout=PATIENCE_S) for _ in range(3))
    cancelled.close()
    with pytest.raises(RolloutError, match="abandoned"):
        cancelled.take(PATIENCE_S)
    assert len(pool._resting) == 1
    pool.close()
    with pytest.raises(RolloutError, match="were closed"):
        closed.take(PATIENCE_S)
    assert not pool._resting


def test_a_process_that_is_stuck_is_lost(
    start_pool: Callable[..., EpisodePool],
) -> None:
    pool = start_pool("Stuck", stall_s=2.5)
    (episode,) = ended(pool, requests(1, stuck=True)).values()
    assert episode.end is End.ENVIRONMENT_FAILED
    counts = counts_once(pool, lambda counts: len(counts.warnings) == 2)
    assert counts.lost_processes == 2 and counts.lag_s >= 2.5
    line = line_of("time.sleep(3600)")
    assert [text.partition("; ")[2] for text in counts.warnings] == [
        "1 of its 1 episodes run again", "0 of its 1 episodes run again"
    ]  # fmt: skip
    assert {text.partition("; ")[0] for text in counts.warnings} == {
        "a process of episodes was lost: its event loop was held for 2.5 s by"
        f" {ENVIRONMENTS}, line {line}, in Stuck.reset"
    }
    (episode,) = ended(pool, requests(1)).values()
    assert episode.end is End.COMPLETED


class Replica(RolloutWorker):
    """A replica around an engine of a test, with the processes of episodes or not."""

    def __init__(self, server: RolloutServer, episodes: EpisodePool | None) -> None:
        self.server = server
        self.episodes = episodes
        environments = {} if episodes is None else {"game": "games.py:Game"}
        self.agent = AgentConfig.model_construct(environments=environments, ends={})


def test_prompts_without_an_environment_get_the_responses_of_a_run_without_episodes(
    usual_pool: EpisodePool,
) -> None:
    extra = ['{"number": 0}', '{"number": 1, "environment": "game"}', '{"number": 2}']
    prompts = Prompts(
        offsets=offsets_of([2, 1, 3]), group_id=np.arange(3), tokens=np.arange(4, 10, dtype=np.int32),
        has_answer=np.zeros(3, np.bool_), messages=Ragged.of_texts(['"go"'] * 3),
        # The third one acts in the environment of its data source.
        data_source=Ragged.of_texts(["sums", "sums", "game"]),
        answer=Ragged.of_texts([""] * 3), extra=Ragged.of_texts(extra),
    )  # fmt: skip
    generation = Generation("train", 2, SAMPLING, run_seed=4, stream_rows=1)

    def generated(pool_or_none: EpisodePool | None) -> Rollouts:
        replica = Replica(usual_pool._server, pool_or_none)
        rows = Rollouts.concat(list(replica.generate(prompts, generation)))
        return rows.select(np.argsort(rows.row_id))

    rows, alone = generated(usual_pool), generated(None)
    assert rows.trajectory_id.tolist() == [0, 1, 2, 3, 4, 5]
    assert rows.row_id.tolist() == [number * ROW_IDS for number in range(6)]
    assert rows.end is not None and rows.num_turns is not None
    assert rows.end.tolist() == [NO_EPISODE] * 2 + [list(End).index(End.COMPLETED)] * 4
    assert rows.num_turns.tolist() == [1, 1, 3, 3, 3, 3]
    assert rows.episode_score is not None and rows.turn_rewards is not None
    assert rows.episode_score.tolist() == [0, 0, 1.5, 1.5, 1.5, 1.5]

    singles, same = rows.select(np.arange(2)), alone.select(np.arange(2))
    for name in ("tokens", "response_mask", "rollout_log_probs", "prompt_length", "finish", "oldest_version"):  # fmt: skip
        assert getattr(singles, name).tolist() == getattr(same, name).tolist()
    assert singles.version_spans.values.tolist() == [[2, 3], [2, 3]]
    # One turn each, of three letters and the end.
    assert singles.turn_rewards is not None
    assert singles.turn_rewards.values.tolist() == [[5, 0, 0], [5, 0, 0]]


def test_single_responses_end_with_their_stream_and_with_their_engine(
    start_pool: Callable[..., EpisodePool],
) -> None:
    def fragile(request: GenerationRequest) -> list[tuple[int, float]]:
        # A step in which there is nothing to sample breaks the engine.
        return [] if request.seed == 1 else script(request)

    pool = start_pool("Counting", answers=fragile)
    singles = [
        GenerationRequest(number, np.array([4], np.int32), SAMPLING, seed=number)
        for number in range(2)
    ]
    pool._server.pause("keep")
    stream = pool.run([], singles[:1])
    stream.close()
    with pytest.raises(RolloutError, match="abandoned"):
        stream.take(PATIENCE_S)
    pool._server.resume()
    assert ended(pool, []) == {}

    stream = pool.run(requests(1), singles[1:])
    with pytest.raises(EngineFailed, match="a step failed: IndexError"):
        while not stream.has_ended:
            stream.take(PATIENCE_S)
    with pytest.raises(EngineFailed, match="episodes cannot be run"):
        pool.run([], singles)


def test_calls_that_hold_the_loop_in_turn_lose_no_process(
    start_pool: Callable[..., EpisodePool],
) -> None:
    """All are ready in a few turns of the loop, which take 12 * 0.3 s together."""
    pool = start_pool("Slow", options={"seconds": 0.3}, stall_s=1.5)
    episodes = ended(pool, requests(12))
    assert {episode.end for episode in episodes.values()} == {End.COMPLETED}
    counts = pool.take_counts()
    assert (counts.lost_processes, counts.warnings) == (0, ())
    assert counts.lag_s > 0  # how many calls a turn of the loop has is up to the engine


def test_who_holds_the_loop_for_a_second_is_named_once(
    start_pool: Callable[..., EpisodePool],
) -> None:
    pool = start_pool("Slow", options={"seconds": 1.5})
    ended(pool, requests(2))
    (warning,) = pool.take_counts().warnings
    line = line_of("time.sleep(self.seconds)")
    assert warning.startswith(
        f"{ENVIRONMENTS}, line {line}, in Slow.wait held the event loop of its process for 1."
    )
    assert "Make the method synchronous" in warning


def test_an_agent_that_waits_for_itself_is_named_while_it_does(
    start_pool: Callable[..., EpisodePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its process is lost, and with what an agent can do about it."""
    monkeypatch.setattr(episodes_module, "LONG_S", 1.5)
    pool = start_pool("blocks", stall_s=60.0)
    stream = pool.run(requests(1))
    (warning,) = counts_once(pool, lambda counts: counts.warnings).warnings
    assert warning.startswith(
        f"{ENVIRONMENTS}, line {line_of('urllib.request.urlopen(url)')}, in blocks has"
        " held the event loop of its process for 1.5 s and more"
    )
    assert "Ask by AsyncOpenAI" in warning
    stream.close()


def test_a_process_in_which_calls_hang_is_replaced(
    start_pool: Callable[..., EpisodePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes_module, "_MOST_HANGING", 3)
    limits = replace(LIMITS, tool_s=0.1, close_s=0.1)
    pool = start_pool("Hanging", limits=limits)
    # Of each the step hangs, and `close`, which waits for it.
    episodes = ended(pool, requests(2))
    assert {episode.end for episode in episodes.values()} == {End.TOOL_TIMEOUT}
    counts = counts_once(pool, lambda counts: counts.renewed_processes == 1)
    (warning,) = counts.warnings
    assert warning.startswith(
        "a process of episodes is replaced once its 0 open ones have ended: calls hang"
        " in 4 of its threads, most often in Hanging."
    )
    assert counts.lost_processes == 0


def test_a_process_that_holds_too_much_is_replaced_between_episodes(
    start_pool: Callable[..., EpisodePool], pipe: Pipe
) -> None:
    pool = start_pool("Greedy", options={"pipe": str(pipe.path)}, memory_gib=0.3)
    (before,) = process_ids(pool)
    first = pool.run(requests(1))
    assert pipe.take(1) == ["begun 0"]
    counts = counts_once(pool, lambda counts: "GiB" in "".join(counts.warnings))
    # On a slow machine its call may be named before.
    warning = counts.warnings[-1]
    assert warning.startswith(
        "a process of episodes is replaced once its 1 open ones have ended: with its"
        " children it holds 0."
    )
    assert warning.endswith("(agent.process_memory_gib=0.3)")

    # The episode goes on, and none is begun beside it.
    second = pool.run(requests(2)[1:])
    assert process_ids(pool) == [before] and not counts.renewed_processes
    first.close()
    assert pipe.take(1) == ["closed 0"] and pipe.take(1) == ["begun 1"]
    assert process_ids(pool) != [before]
    counts = pool.take_counts()
    assert (counts.renewed_processes, counts.lost_processes) == (1, 0)
    second.close()


def test_a_process_that_has_run_nothing_is_not_replaced(
    start_pool: Callable[..., EpisodePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        start_pool("Counting", memory_gib=0.01)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("agent.process_memory_gib", 0.01)
    assert problem.rule.startswith("a process of episodes that has run none holds 0.")

    pool = start_pool("Counting", memory_gib=4.0)
    # As if one that is started later held more.
    pool.memory_gib = 0.01
    looks = threading.Semaphore(0)
    note = pool.note

    def look(events: EpisodeCounts) -> None:
        note(events)
        looks.release()

    monkeypatch.setattr(pool, "note", look)
    # What the first one has found is known at the second.
    assert all(looks.acquire(timeout=PATIENCE_S) for _ in range(2))
    assert pool.take_counts().warnings == ()
    ended(pool, requests(1))
    counts_once(pool, lambda counts: counts.renewed_processes == 1)


def counts_once(
    pool: EpisodePool, condition: Callable[[EpisodeCounts], bool]
) -> EpisodeCounts:
    """Return the counts of a pool once they are so."""
    counts = pool.take_counts()
    until_s = time.monotonic() + PATIENCE_S
    while not condition(counts):
        assert time.monotonic() < until_s, counts
        time.sleep(0.001)
        counts += pool.take_counts()
    return counts


def line_of(code: str) -> int:
    """The number of a line of `environments.py`."""
    before, _, _ = ENVIRONMENTS.read_text().partition(code)
    return before.count("\n") + 1


def test_a_cancelled_stream_takes_its_episodes_with_it(
    start_pool: Callable[..., EpisodePool], pipe: Pipe
) -> None:
    pool = start_pool("Endless", options={"pipe": str(pipe.path)})
    stream = pool.run(requests(6))
    assert pipe.take(6) == [f"begun {number}" for number in range(6)]
    stream.close()
    # Each environment is closed.
    assert pipe.take(6) == [f"closed {number}" for number in range(6)]
    assert ended(pool, []) == {}


@dataclass
class Things:
    """What an episode of Parent has made."""

    child: psutil.Process
    port: int
    folder: Path

    @classmethod
    def of(cls, line: str) -> Things:
        child, port, folder = line.split()
        things = cls(psutil.Process(int(child)), int(port), Path(folder))
        assert things.folder.exists()
        socket.create_connection(("127.0.0.1", things.port)).close()
        return things

    def require_gone(self, guards: Sequence[psutil.Process]) -> None:
        """Wait for the guards of the processes; nothing is there once they are gone."""
        _, alive = psutil.wait_procs([*guards], timeout=PATIENCE_S)
        assert not alive and not self.child.is_running()
        assert not self.folder.exists() and not self.folder.parent.exists()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", self.port))


def test_nothing_outlives_a_killed_process_or_the_pool(
    start_pool: Callable[..., EpisodePool], pipe: Pipe
) -> None:
    pool = start_pool("Parent", options={"pipe": str(pipe.path)})
    stream = pool.run(requests(1))
    things = Things.of(*pipe.take(1))
    (guard,) = map(psutil.Process, process_ids(pool))
    (worker,) = (each for each in guard.children() if each != things.child)
    worker.kill()
    things.require_gone([guard])

    # The episode goes on in another process.
    things = Things.of(*pipe.take(1))
    (guard,) = map(psutil.Process, process_ids(pool))
    pool.close()
    things.require_gone([guard])
    assert not stream.has_ended


def own_pool(model: str, pipe: str) -> None:
    """Run an episode, and say which processes do so, until somebody kills this one."""
    pool, _ = make_pool(Path(model), "Parent", options={"pipe": pipe})
    pool.run(requests(1))
    print(*process_ids(pool), flush=True)
    signal.pause()


def test_nothing_outlives_whoever_owns_the_pool(model: Path, pipe: Pipe) -> None:
    program = (
        f"from {__name__} import own_pool; own_pool({str(model)!r}, {str(pipe.path)!r})"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        guards = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        things = Things.of(*pipe.take(1))
        owner.kill()
    assert len(guards) == 1
    things.require_gone(guards)


def test_what_cannot_be_imported_is_told_at_the_start(
    start_pool: Callable[..., EpisodePool],
) -> None:
    with pytest.raises(ConfigError) as caught:
        start_pool("Counting", options={"speed": 3})
    (problem,) = caught.value.problems
    assert problem.key == "agent.environments.default"
    assert "speed" in problem.rule


def test_a_pause_is_no_time_of_an_episode_and_changes_no_token(
    start_pool: Callable[..., EpisodePool],
) -> None:
    pauses = threading.Semaphore(0)

    def paused_script(request: GenerationRequest) -> list[tuple[int, float]]:
        """Pause as each turn begins: what is queued comes before its first token."""
        thread = pool._server._engine_thread
        pause = PauseRequest("keep")
        thread.queue_task(lambda engine: thread.begin_pause(engine, pause))
        pool.pause()
        pauses.release()
        return script(request)

    limits = replace(LIMITS, model_s=2.0, turn_s=2.0)
    pool = start_pool("Counting", limits=limits, answers=paused_script)
    stream = pool.run(requests(4))
    assert pauses.acquire(timeout=PATIENCE_S)
    # Longer than a turn may take.
    assert stream.take(2.5) == []
    num_pauses = 1
    episodes: dict[int, Episode] = {}
    while not stream.has_ended:
        pool._server.resume()
        pool.resume()
        episodes |= dict(stream.take(0.001))
        while pauses.acquire(blocking=False):
            num_pauses += 1
    assert num_pauses == 4 * 3
    for number, episode in episodes.items():
        assert episode.end is End.COMPLETED
        assert sampled_tokens(episode) == sampled_by_seed(number)


def test_a_process_that_cannot_start_again_fails_the_engine(
    start_pool: Callable[..., EpisodePool], tmp_path: Path, pipe: Pipe
) -> None:
    file = tmp_path / "environments.py"
    file.write_text(ENVIRONMENTS.read_text())
    pool = start_pool("Endless", path=file, options={"pipe": str(pipe.path)})
    stream = pool.run(requests(4))
    file.unlink()
    psutil.Process(process_ids(pool)[0]).kill()
    with pytest.raises(
        EngineFailed, match=r"cannot start again[^!]*environments.py does not exist"
    ):
        stream.take(60.0)
    with pytest.raises(EngineFailed, match="episodes cannot be run"):
        pool.run(requests(1))


def test_a_pool_is_closed_while_it_starts_a_process_again(
    start_pool: Callable[..., EpisodePool], pipe: Pipe
) -> None:
    pool = start_pool("Endless", options={"pipe": str(pipe.path)})
    before = process_ids(pool)
    psutil.Process(before[0]).kill()
    until = time.monotonic() + PATIENCE_S
    while process_ids(pool) == before:
        assert time.monotonic() < until, "no other process is started"
        time.sleep(0.001)
    processes = [psutil.Process(pid) for pid in process_ids(pool)]
    pool.close()
    assert not psutil.wait_procs(processes, timeout=20)[1]
