"""The number of responses at a time follows the cache, within its bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.rollouts.concurrency import LEAST, AdaptiveConcurrency, Concurrency
from scripts.configuration import compose
from tests.preflight.configs import settled
from verl_ray.config.rollout import RolloutConfig
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.rollout.requests import EngineLoad

OVERLAPPING = ("schedule=asynchronous", "placement=separate")


def rollout(*changes: str) -> RolloutConfig:
    config = compose("quickstart", changes)
    assert isinstance(config, RLConfig)
    return settled(config).rollout


def test_it_grows_by_a_quarter_up_to_the_bound() -> None:
    concurrency = Concurrency(most=64, limit=16)
    limits = []
    for _ in range(8):
        concurrency.observe(EngineLoad(0.3, 16), pending=concurrency.limit)
        limits.append(concurrency.limit)
    assert limits == [21, 27, 34, 43, 54, 64, 64, 64]


@pytest.mark.parametrize(
    ("use", "pending", "limit"),
    [
        (0.59, 16, 21),
        (0.60, 16, 16),  # busy enough
        (0.90, 16, 16),
        (0.59, 12, 16),  # the limit is not in the way: 16 / 1.25 = 12.8
        (0.59, 13, 21),
        (0.91, 16, 12),  # 0.8 * 16
    ],
)
def test_it_follows_the_use_of_the_cache(use: float, pending: int, limit: int) -> None:
    concurrency = Concurrency(most=64, limit=16)
    concurrency.observe(EngineLoad(use, 16), pending)
    assert concurrency.limit == limit


def test_a_preemption_shrinks_it_to_less_than_what_runs() -> None:
    concurrency = Concurrency(most=256, limit=200)
    # 40 run at once; the others wait for the cache.
    concurrency.observe(EngineLoad(0.7, 40, 160, preemptions=3), pending=200)
    assert concurrency.limit == 32
    # The same preemptions do not count again.
    concurrency.observe(EngineLoad(0.7, 32, 0, preemptions=3), pending=32)
    assert concurrency.limit == 32
    concurrency.observe(EngineLoad(0.5, 32, 0, preemptions=3), pending=32)
    assert concurrency.limit == 41
    # A preemption outweighs a cache that is empty by now.
    concurrency.observe(EngineLoad(0.1, 30, 0, preemptions=4), pending=41)
    assert concurrency.limit == 24


def test_it_never_falls_below_the_least() -> None:
    concurrency = Concurrency(most=64, limit=9)
    for preemptions in range(1, 4):
        concurrency.observe(EngineLoad(1.0, 1, 8, preemptions), pending=9)
    assert concurrency.limit == LEAST == 8
    # An engine that runs fewer at once has a smaller bound.
    small = Concurrency(most=4, limit=4)
    small.observe(EngineLoad(1.0, 4, 0, 1), pending=4)
    assert small.limit == 4


_LOADS = st.builds(
    EngineLoad, st.floats(0, 1), st.integers(0, 99), st.integers(0, 99), st.integers(0)
)


@given(st.lists(st.tuples(_LOADS, st.integers(0, 999))), st.integers(1, 512))
def test_it_stays_within_its_bounds(
    loads: list[tuple[EngineLoad, int]], most: int
) -> None:
    concurrency = Concurrency(most, limit=most)
    for load, pending in loads:
        concurrency.observe(load, pending)
        assert min(LEAST, most) <= concurrency.limit <= most


def replica() -> Any:
    """A replica, which is only compared here."""
    return object()


FULL = EngineLoad(1.0, 100, 0, preemptions=1)
IDLE = EngineLoad(0.1, 100, 0, preemptions=1)


def test_each_replica_has_its_own() -> None:
    numbers = AdaptiveConcurrency(rollout(*OVERLAPPING))
    first, second = (replica(), 0), (replica(), 0)
    assert numbers.first == 256
    assert numbers.metrics() == {"perf/rollout_concurrency": 256}
    assert numbers.observe(first, FULL, 256) == 80
    assert numbers.observe(second, EngineLoad(0.1, 256), 256) == 321
    assert numbers.metrics() == {"perf/rollout_concurrency": (80 + 321) / 2}


def test_a_process_that_starts_again_begins_anew() -> None:
    """The preemptions of the earlier process are gone with it."""
    numbers = AdaptiveConcurrency(rollout(*OVERLAPPING))
    member = replica()
    assert numbers.observe((member, 0), FULL, 256) == 80
    assert numbers.observe((member, 1), EngineLoad(0.7, 100), 256) == 256
    assert numbers.metrics() == {"perf/rollout_concurrency": 256.0}


def test_a_number_that_was_given_stays() -> None:
    fixed = AdaptiveConcurrency(rollout(*OVERLAPPING, "rollout.concurrency=12"))
    assert fixed.first == 12
    assert fixed.observe((replica(), 0), FULL, 12) is None
    assert fixed.metrics() == {}
    # auto is 512 in a synchronous run, twice what vLLM runs at once.
    assert AdaptiveConcurrency(rollout()).first == 512


def test_what_vllm_runs_at_once_is_the_first_number() -> None:
    numbers = AdaptiveConcurrency(
        rollout(*OVERLAPPING, "rollout.vllm_args.max_num_seqs=32")
    )
    assert numbers.first == 32
    member = (replica(), 0)
    for _ in range(9):
        limit = numbers.observe(member, EngineLoad(0.1, 32), 99)
    assert limit == 64
