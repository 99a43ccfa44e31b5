"""The groups of a step that are kept for people to read."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from controllers.watch.rollout_record import (
    MOST_TOKENS,
    RolloutRecord,
    failures_of_rows,
)
from scripts.configuration import compose
from tests.rows import rollouts_of
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import Interrupted
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.tracking.evaluations import digest
from workers.reward import scores_of

INPUTS = ("model.path=/m", "data.train_path=t", "data.validation_path=v")


def record(folder: Path, rollouts: str) -> RolloutRecord:
    """A record of rollouts in groups of two."""
    changes = [f"tracking.rollouts={rollouts}", f"run.dir={folder}"]
    config = compose("grpo", [*INPUTS, "rollout.group_size=2", *changes])
    assert isinstance(config, RLConfig)
    return RolloutRecord(config, PreTrainedTokenizerBase())


def test_a_prompt_that_was_chosen_is_chosen_again_whatever_was_finished_first(
    tmp_path: Path,
) -> None:
    digests = {name: digest(name.encode()) for name in "abcdefgh"}
    by_digest = sorted("abcdefgh", key=digests.__getitem__)
    sampled = record(tmp_path, "sampled")

    def chosen(prompts: str, first_ordinal: int) -> str:
        ordinals = first_ordinal + np.arange(len(prompts))
        digests_by_ordinal = {
            int(ordinal): digests[prompt]
            for ordinal, prompt in zip(ordinals, prompts, strict=True)
        }
        group_id = np.repeat(ordinals, 2)
        lengths = np.full(len(group_id), 9)
        members = np.arange(len(group_id))
        rows = sampled.chosen(1, group_id, members, lengths, digests_by_ordinal)
        groups = group_id[rows]
        # Both members of a group, or none.
        np.testing.assert_array_equal(groups[::2], groups[1::2])
        return "".join(sorted(prompts[group - first_ordinal] for group in groups[::2]))

    assert chosen("abcdefgh", 0) == "".join(sorted(by_digest[:2]))
    assert chosen("hgfedcba", 8) == "".join(sorted(by_digest[:2]))
    # The first prompt of all is kept in whatever step it comes.
    assert by_digest[0] in chosen(by_digest[0] + "".join(by_digest[5:]), 16)
    # Groups of earlier steps have no digest any more.
    columns = np.array([3, 3, 9, 9]), np.array([6, 7, 18, 19]), np.array([5, 5, 5, 5])
    assert list(sampled.chosen(1, *columns, {9: "0"})) == [2, 3]
    assert list(sampled.chosen(1, *columns, {})) == []
    every_row = record(tmp_path, "all").chosen(1, *columns, {})
    assert list(every_row) == [0, 1, 2, 3]


def test_rows_of_a_step_are_bounded_in_tokens_but_for_a_single_trajectory(
    tmp_path: Path,
) -> None:
    sampled = record(tmp_path, "sampled")

    def chosen(second_length: int, *first_lengths: int) -> list[int]:
        # The first prompt's first trajectory has two rows, and its second one has one.
        groups, trajectories = np.array([3, 9, 9, 9]), np.array([6, 18, 18, 19])
        lengths = np.array([second_length, *first_lengths])
        digests = {3: "b", 9: "a"}
        return sampled.chosen(1, groups, trajectories, lengths, digests).tolist()

    assert chosen(8, MOST_TOKENS - 10, 1, 1) == [0, 1, 2, 3]
    assert chosen(9, MOST_TOKENS - 10, 1, 1) == [1, 2, 3]
    # The first prompt's second trajectory is too long, and then both are.
    assert chosen(9, MOST_TOKENS - 1, 1, 1) == [1, 2]
    assert chosen(9, 2 * MOST_TOKENS, 1, 1) == [1, 2]


def test_what_a_component_left_to_others_has_not_failed() -> None:
    rows = rollouts_of([1, 1])
    ok = Score(1.0, ScoreHealth.OK)
    none = Score(math.nan, ScoreHealth.NONE, "the function returned None")
    scores = {
        "reward.components.math": Sharded.stored(None, Receipt.of(scores_of([none, ok]))),
        "reward.components.code": Sharded.stored(None, Receipt.of(scores_of([ok, none]))),
    }  # fmt: skip
    assert failures_of_rows(rows, scores, np.arange(2), 60) == ["", ""]


def test_rollouts_that_cannot_be_recorded_end_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One row, of which nothing can be read.
    broken = cast(Any, SimpleNamespace(experience=SimpleNamespace(rollouts=[0])))
    sampled = record(tmp_path, "sampled")
    for step in (1, 2):
        sampled.write(step, broken, lambda: None)
        assert sampled.metrics["rollouts/recorded_rows"] == 0
    assert capsys.readouterr().err.count("the rollouts of step") == 1

    # A stop, or a store that is lost, is no fault of the record.
    def stopped(*_: object) -> None:
        raise Interrupted("SIGTERM")

    monkeypatch.setattr(sampled, "_table", stopped)
    with pytest.raises(Interrupted):
        sampled.write(3, broken, lambda: None)
