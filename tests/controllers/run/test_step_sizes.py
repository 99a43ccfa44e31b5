"""The learning rate of a run whose steps get another number of updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from controllers.run.step_sizes import with_paces
from controllers.system.plan import engine_spec
from tests.controllers.run.checkpoints import write_checkpoints
from tests.controllers.runs import Inputs
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.load import parse, to_tree
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.engine.optimizer import learning_rate

STEPS = [
    "run.total_steps=10", "actor.optimizer.lr=1.0", "actor.optimizer.warmup_steps=0",
    "actor.optimizer.schedule=linear", "rollout.staleness=0",
]  # fmt: skip


def rate(config: RLConfig, updates: int) -> float:
    """Return the actor's learning rate after so many updates."""
    spec = engine_spec("actor", config.actor, config)
    assert spec.optimizer is not None
    position = updates if spec.pace is None else spec.pace.position(updates)
    return learning_rate(spec.optimizer, position, spec.schedule_steps)


def test_a_step_has_the_rate_that_it_was_to_have(
    inputs: Inputs, tmp_path: Path
) -> None:
    """4 updates in each of 2 steps, then 1 in each of 3, then 2 in each of 5."""

    def config(updates: int) -> RLConfig:
        size = inputs.config("ppo", tmp_path).rows_per_step // updates
        return inputs.config("ppo", tmp_path, *STEPS, f"actor.mini_batch_size={size}")

    first, second, third = config(4), config(1), config(2)
    write_checkpoints(first, 2)
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    checkpoint = store.open(store.root / "step_00000002")
    assert with_paces(first, checkpoint) == with_paces(first, None) == first
    assert rate(first, 8) == 0.8 and rate(first, 40) == 0.0

    one = with_paces(second, checkpoint)
    rates = [rate(one, updates) for updates in (8, 9, 15, 16)]
    assert rates == pytest.approx([0.8, 0.7, 0.1, 0.0])
    assert parse(to_tree(one), RLConfig) == one

    later = replace(checkpoint, step=5, config=to_tree(one))
    assert with_paces(second, later) == one
    two = with_paces(third, later)
    rates = [rate(two, updates) for updates in (11, 12, 13, 20, 21)]
    assert rates == pytest.approx([0.5, 0.45, 0.4, 0.05, 0.0])

    # A new run with these settings has no such past.
    assert with_paces(two, None) == third
