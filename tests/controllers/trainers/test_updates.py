"""Which rows go into which optimizer step, and onto which rank: whole sequences."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from controllers.trainers.updates import (
    LearnerBatch,
    ModelOutputs,
    cut_mini_batches,
    shuffled_places,
)
from scripts.configuration import compose
from tests.learning.test_normalised_weights import credit_of
from tests.rows import rollouts_of
from verl_ray.columns.batch import Batch, Int64
from verl_ray.columns.packing import assignment_of_units, balance
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.config.tasks.rl import RLConfig
from workers.model_worker import MiniBatch

TRAJECTORIES = [4, 2, 4, 3, 2, 4, 1, 3]
LENGTHS = [3, 1, 2, 5, 4, 1, 2, 6]


def held(batch: Batch) -> Sharded[Any]:
    return Sharded.stored(None, Receipt.of(batch))


def steps(*changes: str, left_out: int | None = None) -> list[tuple[Int64, MiniBatch]]:
    config = compose("quickstart", ["algorithm=gspo", *changes])
    assert isinstance(config, RLConfig)
    groups = [each % 2 for each in TRAJECTORIES]
    rows = rollouts_of(LENGTHS, groups=groups)
    rows = rows.replace(trajectory_id=np.array(TRAJECTORIES))
    credit = credit_of(rows, [each != left_out for each in TRAJECTORIES])
    outputs = ModelOutputs(None, None, None)
    batch = LearnerBatch(3, held(rows), held(credit), outputs)
    return [*cut_mini_batches(config, config.actor, config.algorithm, batch)]


@pytest.mark.parametrize("judged", ["row", "trajectory"])
def test_optimizer_steps_are_cut_between_trajectories(judged: str) -> None:
    # In each of two epochs, two of the four trajectories and then the others.
    cut = steps(
        "actor.mini_batch_size=2", "actor.epochs=2", f"algorithm.sequence={judged}"
    )
    assert [mini_batch.total_trajectories for _, mini_batch in cut] == [2, 2, 2, 2]
    for epoch in (cut[:2], cut[2:]):
        in_step = [{TRAJECTORIES[row] for row in rows} for rows, _ in epoch]
        assert not in_step[0] & in_step[1]
        assert sorted(np.concatenate([rows for rows, _ in epoch])) == list(range(8))
    for rows, mini_batch in cut:
        assert mini_batch.total_tokens == sum(LENGTHS[row] for row in rows)
    assert [mini_batch.seed[2:] for _, mini_batch in cut] == [
        (0, 0), (0, 2), (1, 0), (1, 2),
    ]  # fmt: skip


def test_optimizer_steps_of_episodes_are_cut_between_groups() -> None:
    """Groups of 3, 2, 3 and 4 trajectories, in two epochs."""
    group = np.repeat([9, 4, 7, 8], [3, 2, 3, 4])
    places = shuffled_places(group, np.random.default_rng(1))
    assert sorted(places.tolist()) == list(range(12))
    for unit in (9, 4, 7, 8):
        assert np.diff(places[group == unit]).tolist() == [1] * (sum(group == unit) - 1)
    # Where each item is a unit, the order is that of a permutation of the items.
    alone = shuffled_places(np.arange(12), np.random.default_rng(1))
    order = np.random.default_rng(1).permutation(12)
    assert np.argsort(alone).tolist() == order.tolist()

    # Trajectories 1 and 3 are of one group, 2 and 4 of the other.
    episodes = "agent.environments.default=my_env.py:Game"
    changes = ("actor.mini_batch_size=2", "actor.epochs=8")
    trajectory_sets = {
        tuple(sorted({TRAJECTORIES[row] for row in rows}))
        for rows, _ in steps(*changes, episodes)
    }
    assert trajectory_sets == {(1, 3), (2, 4)}
    # Single responses are shuffled one by one.
    pairs = {
        tuple(sorted({TRAJECTORIES[row] for row in rows}))
        for rows, _ in steps(*changes)
    }
    assert len(pairs) > 2


def test_optimizer_steps_on_pairs_are_cut_between_groups() -> None:
    """Three groups of four responses; the second one has no pair."""
    config = compose(
        "quickstart",
        ["algorithm=online_dpo", "rollout.group_size=4", "actor.mini_batch_size=4"],
    )
    assert isinstance(config, RLConfig)
    rows = rollouts_of([1, 2, 3, 4] * 3, groups=[5] * 4 + [6] * 4 + [7] * 4)
    sides = np.array([0, -1, 0, 1, 0, 0, 0, 0, 1, 0, -1, 0])
    credit = credit_of(rows, (sides != 0).tolist())
    statistics = np.repeat(sides * rows.response_length, 4).reshape(-1, 4)
    credit = credit.replace(advantage_statistics=statistics.astype(np.float64))
    outputs = ModelOutputs(None, None, None)
    batch = LearnerBatch(3, held(rows), held(credit), outputs)
    assert batch.paired_rows.tolist() == [3, 1, 8, 10]

    cut = [*cut_mini_batches(config, config.actor, config.algorithm, batch)]
    groups = [set(rows.group_id[chosen].tolist()) for chosen, _ in cut]
    assert sorted(groups, key=min) == [{5}, {7}]
    for chosen, mini_batch in cut:
        assert len(chosen) == 4 and mini_batch.total_trajectories == 2


def test_what_is_not_learned_from_is_no_sequence() -> None:
    ((rows, mini_batch),) = steps(
        "actor.mini_batch_size=8", "algorithm.sequence=trajectory", left_out=4
    )
    assert len(rows) == 8 and mini_batch.total_trajectories == 3
    assert mini_batch.total_tokens == sum(LENGTHS) - 3 - 2 - 1


@pytest.mark.parametrize("unit", [TRAJECTORIES, list(range(8)), [0] * 8])
def test_units_are_on_one_rank_each(unit: list[int]) -> None:
    halves = partial(balance, parts=2)
    found = assignment_of_units(halves, np.array(LENGTHS), np.array(unit))
    assert len(found) == 2
    assert sorted(np.concatenate(found).tolist()) == list(range(8))
    sets = [{unit[row] for row in rows} for rows in found]
    assert not sets[0] & sets[1]
    for rows in found:
        assert rows.tolist() == sorted(rows.tolist())
