"""The order in which replicas get prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from controllers.rollouts.generation import MAX_CALLS, GenerationScheduler, ReplicaCall
from verl_ray.rollout.balancer import WorkItem


def test_the_oldest_prompts_come_first_again_after_a_loss() -> None:
    scheduler = GenerationScheduler(in_flight=8)
    replica: Any = "replica"
    scheduler._balancer.add_replica(replica)
    job: Any = SimpleNamespace(
        take_back=lambda rows: [WorkItem(row, 1) for row in sorted(rows)]
    )
    stream: Any = None
    for rows in ({0, 1}, {2, 3}, {4, 5}):
        scheduler._calls.append(ReplicaCall(job, replica, stream, rows))

    scheduler.set_replicas([], running=[replica])
    waiting = [item.session for item in scheduler._balancer._waiting]
    assert waiting == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("num_calls", "finished", "gets_more"),
    [(1, 4, True), (28, 56, False), (28, 64, True), (MAX_CALLS, 256, False)],
)
def test_the_more_calls_are_open_the_more_the_next_one_brings(
    num_calls: int, finished: int, gets_more: bool
) -> None:
    """With 28 of 56 calls open, a quarter of 256 responses has to end."""
    scheduler = GenerationScheduler(in_flight=256)
    replica: Any = "replica"
    scheduler._balancer.add_replica(replica)
    scheduler._balancer.add([WorkItem("prompt", 256)])
    scheduler._balancer.assign()
    scheduler._balancer.finish(replica, finished)
    waits = scheduler._waits_for_more_capacity(replica, num_calls)
    assert waits == (not gets_more)
