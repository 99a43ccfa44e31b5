"""Whom a wait for groups names, and whose failure ends it, whatever comes first.

Replicas and graders are scripts here; `test_producer.py` has the real ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from controllers.rollouts.producer import Producer
from controllers.rollouts.production import (
    Production,
    generation_to_evaluate,
    generation_to_learn_from,
)
from tests.controllers.rollouts.slot_machine import Scenario
from tests.data.test_buffer import piece
from verl_ray.data.buffer import RolloutBuffer
from verl_ray.errors import RewardError
from verl_ray.profiling.phases import PHASES, Timers

CONFIG = Scenario("one_step_off", 1).config


class ScriptedReplicas:
    """Each time something is waited for, the next event of the script happens."""

    def __init__(self) -> None:
        self.script: deque[Callable[[], None]] = deque()
        self.shown: list[str] = []
        """What a person who waits could read before each event."""

    def advance(self, _: float, __: object) -> None:
        if PHASES._phases:
            self.shown.append(PHASES._text())
            self.script.popleft()()

    def references(self) -> list[Any]:
        return []

    def stop_generation(self) -> None: ...


class Waits:
    """Two batches to learn from, of a group each, and one held-out problem."""

    def __init__(self) -> None:
        self.replicas = ScriptedReplicas()
        self.producer = Producer(CONFIG, cast(Any, self.replicas), {})
        self.buffer = RolloutBuffer(2, staleness=1)
        self.held_out = RolloutBuffer(2, staleness=0)
        self.batches = [self.begin(self.buffer, batch) for batch in (0, 1)]
        self.evaluation = self.begin(self.held_out, 0)

    def begin(self, buffer: RolloutBuffer, ordinal: int) -> Production:
        is_held_out = buffer is self.held_out
        kind = generation_to_evaluate if is_held_out else generation_to_learn_from
        job = SimpleNamespace(
            generation=kind(CONFIG), num_pending=2, finished=deque(), given_up=deque()
        )
        buffer.reserve(np.array([ordinal]))
        made = Production(
            np.array([ordinal]), cast(Any, job), buffer, cast(Any, None), 2, ordinal + 1, None
        )  # fmt: skip
        self.producer._productions.append(made)
        return made

    def finish(self, production: Production) -> None:
        """Generate and score both of its responses."""
        row = 2 * int(production.ordinals[0])
        production.job.num_pending = 0
        production.buffer.put(piece(row, row + 1))

    def fail(self, production: Production) -> None:
        """Generate its responses, and let too many of their scores fail."""

        def poll() -> None:
            raise RewardError(f"step {production.step}: scores failed")

        scores = cast(Any, SimpleNamespace(poll=poll))
        production.job.num_pending = 0
        production.scoring.append(scores)
        self.producer._buffer_piece(production, scores)

    def take(self, batch: int) -> list[int]:
        ordinals = self.batches[batch].ordinals
        taken = self.producer.take(ordinals, self.buffer, 4, Timers())
        return taken.rollouts.row("row_id").tolist()


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.mark.parametrize("comes_first", [True, False])
def test_scores_of_a_later_batch_end_its_own_step(
    waits: Waits, comes_first: bool
) -> None:
    """The step before has whole groups, and learns from them in either order."""
    first, second = waits.batches
    events = [lambda: waits.finish(first), lambda: waits.fail(second)]
    waits.replicas.script.extend(reversed(events) if comes_first else events[:1])
    assert waits.take(0) == [0, 1]
    if not comes_first:
        waits.fail(second)
    with pytest.raises(RewardError, match="step 2: scores failed"):
        waits.take(1)


def test_only_what_is_needed_to_fill_a_batch_ends_the_wait_for_it(waits: Waits) -> None:
    """A group is decided after all earlier ones; here it is the first, or the last."""
    first, second = waits.batches
    awaited = [0]
    is_enough = lambda: not awaited  # noqa: E731
    for production, left in ((second, [0]), (first, [])):
        act = waits.fail if production is second else waits.finish

        def event(
            act: Callable[[Production], None] = act,
            production: Production = production,
            left: list[int] = left,
        ) -> None:
            act(production)
            awaited[:] = left

        waits.replicas.script.append(event)
    waits.producer.advance_until(
        is_enough, lambda: np.array(awaited), waits.buffer, Timers()
    )
    assert not waits.replicas.script

    awaited[:] = [1]
    waits.replicas.script.append(lambda: None)
    with pytest.raises(RewardError, match="step 2: scores failed"):
        waits.producer.advance_until(
            is_enough, lambda: np.array(awaited), waits.buffer, Timers()
        )


def test_a_wait_is_named_after_what_is_waited_for(waits: Waits) -> None:
    """Not after what was begun first, nor after what has failed."""
    first, second = waits.batches
    script, shown = waits.replicas.script, waits.replicas.shown
    script.append(lambda: waits.finish(waits.evaluation))
    waits.producer.take(waits.evaluation.ordinals, waits.held_out, 4, Timers())
    assert shown == ["evaluating 0/2"]

    shown.clear()
    waits.fail(first)
    second.job.num_pending = 1
    script.append(lambda: waits.finish(second))
    waits.producer.finish()
    assert shown == ["generating 1/2 responses, scoring 0/2"]
