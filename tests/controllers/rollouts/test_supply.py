"""What a supply hands to the next one in the same driver, beside its ledger and groups.

`test_slot_machine.py` has the ledger and the groups, in every order of events.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from controllers.rollouts.supply import Supply
from scripts.configuration import compose
from tests.controllers.rollouts.slot_machine import Scenario, ScriptedProducer
from tests.data.test_prompts import config as prompt_config
from tests.data.test_prompts import sums
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.profiling.phases import Timers

ROWS = 8


@pytest.fixture
def config(tmp_path: Path) -> RLConfig:
    """Two groups of two a step; a group is solved from a mean score of 4 on."""
    found = compose(
        "quickstart",
        ["algorithm=grpo", "data.prompts_per_step=2", "rollout.group_size=2", "actor.mini_batch_size=null",
         "algorithm.replay=3", "algorithm.replay_age=2", "algorithm.correction.form=two_policy",
         "data.curriculum.solved_from=4", f"run.dir={tmp_path}"],
    )  # fmt: skip
    assert isinstance(found, RLConfig)
    return found


@pytest.fixture
def source(tmp_path: Path) -> PromptSource:
    tokenizer: Any = character_tokenizer(tmp_path / "characters", "0123456789+= ")
    return PromptSource(
        sums(tmp_path, ROWS), tokenizer, prompt_config(shuffle=False), seed=0
    )


def supply_of(config: RLConfig, source: PromptSource, version: int) -> Supply:
    """A supply whose responses have one token, and the number of their row as score."""
    scenario = Scenario("synchronous", 0, prompts=2, length=lambda _: 1)
    return Supply(config, source, cast(Any, ScriptedProducer(scenario, version)))


def make_step(supply: Supply, number: int) -> None:
    supply.draw()
    producer = cast(ScriptedProducer, supply.producer)
    for place in producer.busy:
        producer.advance_replica(place)
    while producer.pieces:
        producer.score(0)
    taken = supply.take(number - 1, Timers())
    groups = supply.with_replayed(taken, number - 1)
    supply.note_trained(number, groups.rollouts.row("group_id"))
    producer.publish(number)


def chosen(supply: Supply, batch: int) -> list[int]:
    """Rows that may be drawn for a batch, counted from 0."""
    curriculum = supply.supply_memory.curriculum
    assert curriculum is not None
    curriculum.begin_batch(batch)
    return np.flatnonzero(curriculum.accepts(np.arange(ROWS), 0)).tolist()


def kept(supply: Supply) -> list[int]:
    groups = supply.supply_memory.replay
    assert groups is not None
    return np.unique(groups.rollouts.row("group_id")).tolist()


def test_curriculum_and_replay_are_those_of_the_state(
    config: RLConfig, source: PromptSource
) -> None:
    former = supply_of(config, source, 0)
    former.begin(0)
    make_step(former, 1)
    make_step(former, 2)
    state, supply_memory = json.dumps(former.state()), former.supply_memory
    # The mean scores of groups 0 to 3 are 0.5, 2.5, 4.5 and 6.5.
    assert (chosen(former, 2), kept(former)) == ([0, 1, 4, 5, 6, 7], [1, 2, 3])
    make_step(former, 3)
    assert (chosen(former, 3), kept(former)) == ([0, 1, 6, 7], [3, 4, 5])

    following = supply_of(config, source, 2)
    following.load_state(json.loads(state))
    following.begin(2)
    following.inherit(former, supply_memory)
    assert (chosen(following, 2), kept(following)) == ([0, 1, 4, 5, 6, 7], [1, 2, 3])
    make_step(following, 3)
    assert (chosen(following, 3), kept(following)) == ([0, 1, 6, 7], [3, 4, 5])


@pytest.mark.parametrize(("rollouts", "ordinals"), [("sampled", [0, 1]), ("none", [])])
def test_digests_are_noted_only_where_rollouts_are_sampled(
    rollouts: str, ordinals: list[int], config: RLConfig, source: PromptSource
) -> None:
    tracking = config.tracking.model_copy(update={"rollouts": rollouts})
    run_config = config.model_copy(update={"tracking": tracking})
    supply = supply_of(run_config, source, 0)
    supply.begin(0)
    supply.draw()
    assert list(supply.digests) == ordinals
