"""Episodes in processes of their own, over a scripted engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from verl_ray.agents.contract import Action, End, Episode, EpisodeTask, ToolCall
from verl_ray.agents.episode import Limits
from verl_ray.agents.wire import EpisodeStart
from verl_ray.data.stages import Finish
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.errors import ConfigError, EngineFailed
from verl_ray.rollout.episodes import EpisodePool, EpisodeRequest
from verl_ray.rollout.requests import GenerationRequest, Sampling
from verl_ray.rollout.scripted import ScriptedEngine
from verl_ray.rollout.server import RolloutServer

pytestmark = pytest.mark.processes

WORLDS = Path(__file__).with_name("worlds.py")
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8)
LIMITS = Limits(max_turns=4, max_tokens=64, context_tokens=256)
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 \n<|>_/"
END = 1  # of character_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer(folder, ALPHABET)
    return folder


@pytest.fixture
def start_pool(model: Path) -> Iterator[Callable[..., EpisodePool]]:
    pools: list[tuple[EpisodePool, RolloutServer]] = []
    tokenizer = load_tokenizer(model)

    def script(request: GenerationRequest) -> list[tuple[int, float]]:
        # Three letters that the seed decides about.
        letters = np.random.default_rng(request.seed).integers(4, 20, 3).tolist()
        return [(token, -token / 8) for token in letters] + [(END, -0.5)]

    def read(tokens: Sequence[int], finish: Finish, tools: Sequence[Any]) -> Action:
        text = tokenizer.decode([token for token in tokens if token != END])
        calls = [ToolCall(tools[0]["function"]["name"], {})] if tools else []
        return Action(tokens, text, calls, finish.name.lower())

    def start(
        name: str,
        *,
        options: dict[str, Any] | None = None,
        path: Path = WORLDS,
        limits: Limits = LIMITS,
        **changes: Any,
    ) -> EpisodePool:
        server = RolloutServer(lambda: ScriptedEngine(script, initial_version=3))
        arguments = {"num_processes": 2, "most_open": 16, "stall_s": 20.0} | changes
        spec = EpisodeStart(
            {"default": (f"{path}:{name}", options or {})},
            str(model),
            limits,
            chat_template="{% for m in messages %}<{{ m.role }}|{{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<assistant|{% endif %}",
        )
        try:
            pool = EpisodePool(server, spec, read, **arguments)
        except BaseException:
            server.close()
            raise
        pools.append((pool, server))
        return pool

    yield start
    for pool, server in pools:
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
            world_seed=7,
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


def test_episodes_depend_on_their_seeds_alone(
    start_pool: Callable[..., EpisodePool],
) -> None:
    many = ended(start_pool("Counting"), requests(40))
    few = ended(
        start_pool("Counting", num_processes=1, most_open=3), requests(40)[::-1]
    )
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
        assert sum(row.mask) == 12
        assert [version for _, version in row.versions] == [3, 3, 3]
        sampled = [
            token for token, own in zip(row.tokens, row.mask, strict=True) if own
        ]
        own = [value for value, own in zip(row.log_probs, row.mask, strict=True) if own]
        assert own == [-0.5 if token == END else -token / 8 for token in sampled]
    assert len({tuple(episode.rows[0].tokens) for episode in many.values()}) == 40


def test_a_pause_is_no_time_of_an_episode_and_changes_no_token(
    start_pool: Callable[..., EpisodePool],
) -> None:
    limits = replace(LIMITS, model_s=2.0, turn_s=2.0)
    pool = start_pool("Counting", num_processes=1, limits=limits)
    server = pool._server
    straight = ended(pool, requests(4))

    pool.pause()
    server.pause("keep")
    stream = pool.run(requests(4))
    # Longer than a turn may take.
    assert stream.take(2.5) == []
    episodes: dict[int, Episode] = {}
    while not stream.has_ended:
        server.resume()
        pool.resume()
        episodes |= dict(stream.take(0.001))
        pool.pause()
        server.pause("keep")
    assert {episode.end for episode in episodes.values()} == {End.COMPLETED}
    for number, episode in straight.items():
        assert episodes[number].rows == episode.rows


def test_an_episode_that_ends_its_process_costs_no_other_one(
    start_pool: Callable[..., EpisodePool],
) -> None:
    pool = start_pool("Deadly", options={"guilty": 7})
    episodes = ended(pool, requests(20))
    assert episodes[7].end is End.ENVIRONMENT_FAILED
    assert "ended its process" in episodes[7].detail
    assert all(
        episode.end is End.COMPLETED
        for number, episode in episodes.items()
        if number != 7
    )
    counts = pool.take_counts()
    # Once among all, once among few, and once alone.
    assert counts.lost_processes == 3 and counts.run_again >= 2
    assert pool.take_counts().lost_processes == 0


def test_a_process_that_is_stuck_is_lost(
    start_pool: Callable[..., EpisodePool],
) -> None:
    pool = start_pool("Stuck", num_processes=1, stall_s=2.5)
    (episode,) = ended(pool, requests(1, stuck=True)).values()
    assert episode.end is End.ENVIRONMENT_FAILED
    assert pool.take_counts().lost_processes == 2
    (episode,) = ended(pool, requests(1)).values()
    assert episode.end is End.COMPLETED


def test_a_cancelled_stream_takes_its_episodes_with_it(
    start_pool: Callable[..., EpisodePool], tmp_path: Path
) -> None:
    pool = start_pool("Endless", options={"folder": str(tmp_path)})
    stream = pool.run(requests(6))
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("begun-*"))) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    stream.close()
    # Each environment is closed.
    while len(list(tmp_path.glob("closed-*"))) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(tmp_path.glob("closed-*"))) == 6
    assert ended(pool, []) == {}


def test_nothing_outlives_the_pool(
    start_pool: Callable[..., EpisodePool], tmp_path: Path
) -> None:
    pool = start_pool("Parent", options={"folder": str(tmp_path)}, num_processes=1)
    stream = pool.run(requests(1))
    deadline = time.monotonic() + 60
    while not (tmp_path / "child").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child = psutil.Process(int((tmp_path / "child").read_text()))
    processes = [psutil.Process(pid) for pid in pool.process_ids]
    pool.close()
    gone, alive = psutil.wait_procs([child, *processes], timeout=20)
    assert not alive and not stream.has_ended
    assert os.getpid() not in {process.pid for process in gone}


def test_a_process_that_cannot_start_again_fails_the_engine(
    start_pool: Callable[..., EpisodePool], tmp_path: Path
) -> None:
    world = tmp_path / "world.py"
    world.write_text(WORLDS.read_text())
    pool = start_pool("Endless", path=world, options={"folder": str(tmp_path)})
    stream = pool.run(requests(4))
    world.unlink()
    psutil.Process(pool.process_ids[0]).kill()
    with pytest.raises(
        EngineFailed, match=r"cannot start again[^!]*world.py does not exist"
    ):
        stream.take(60.0)
    with pytest.raises(EngineFailed, match="episodes cannot be run"):
        pool.run(requests(1))


def test_a_pool_is_closed_while_it_starts_a_process_again(
    start_pool: Callable[..., EpisodePool], tmp_path: Path
) -> None:
    pool = start_pool("Endless", options={"folder": str(tmp_path)})
    before = pool.process_ids
    psutil.Process(before[0]).kill()
    while pool.process_ids == before:
        time.sleep(0.001)
    processes = [psutil.Process(pid) for pid in pool.process_ids]
    pool.close()
    assert not psutil.wait_procs(processes, timeout=20)[1]


def test_what_cannot_be_imported_is_told_at_the_start(
    start_pool: Callable[..., EpisodePool],
) -> None:
    with pytest.raises(ConfigError) as caught:
        start_pool("Counting", options={"speed": 3})
    (problem,) = caught.value.problems
    assert problem.key == "agent.environments.default"
    assert "speed" in problem.rule
