"""Why a run learns nothing, from lines whose numbers are written here."""

from __future__ import annotations

import math

import pytest

from scripts.configuration import compose
from verl_ray.config.load import to_tree
from verl_ray.report.evidence import Finding
from verl_ray.report.findings import learns_nothing

HEALTHY = {
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "reward_health/ok": 32.0,
    "reward_health/timeout": 0.0,
    "frac_reward_zero_std": 0.25,
    "response_length/clip_ratio": 0.5,
    "actor/grad_norm": 0.7,
    "training/num_examples": 1000.0,
}


Tree = dict[str, object]
PATHS = ("model.path=m", "data.train_path=t", "data.validation_path=v")


@pytest.fixture(scope="module")
def config() -> Tree:
    """GRPO with 32 prompts per step."""
    return to_tree(compose("grpo", [*PATHS, "run.total_steps=100"]))


def lines(*changes: dict[str, float], first: int = 1) -> list[dict[str, float]]:
    return [
        {**HEALTHY, **change, "training/global_step": number}
        for number, change in enumerate(changes, start=first)
    ]


def causes(found: list[Finding]) -> list[tuple[str, int, int, int]]:
    return [(each.kind, each.step, each.last_step, each.num_steps) for each in found]


SAME = {"critic/score/min": 1.0, "frac_reward_zero_std": 1.0, "actor/grad_norm": 0.0}
NO_SPREAD = {"frac_reward_zero_std": 1.0, "actor/grad_norm": 0.0}
NO_GRADIENT = {"actor/grad_norm": 0.0}
CUT = {"response_length/clip_ratio": 0.9}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (SAME, "same_scores"),
        (NO_SPREAD, "no_spread"),
        (NO_GRADIENT, "zero_gradient/actor"),
        (CUT, "mostly_cut"),
    ],
)
def test_a_cause_counts_in_three_steps_in_a_row(
    config: Tree, change: dict[str, float], cause: str
) -> None:
    evaluated = {"training/global_step": 0, "val-core/sums/acc/mean@1": 0.1}
    two = [evaluated, *lines(change, change, {}, change)]
    assert learns_nothing(two, config) == []
    five = lines(change, change, {}, *[change] * 4)
    # The causes that follow from the first one are not told again.
    assert causes(learns_nothing(five, config)) == [(cause, 4, 7, 4)]


def test_a_run_of_two_steps_is_told_after_them() -> None:
    short = to_tree(compose("grpo", [*PATHS, "run.total_steps=2"]))
    assert learns_nothing(lines(SAME), short) == []
    assert causes(learns_nothing(lines(SAME, SAME), short)) == [
        ("same_scores", 1, 2, 2)
    ]


def test_the_data_are_told_from_the_first_step(config: Tree) -> None:
    three = {"training/num_examples": 3.0}
    (few,) = learns_nothing(lines(three), config)
    assert str(few) == (
        "the data hold fewer examples than a step takes: 3 of 32, so a step has the"
        " same ones several times. Use more data, or lower data.prompts_per_step = 32"
        " (step 1)"
    )
    batch = {"training/num_examples": 32.0}
    assert causes(learns_nothing(lines(batch, batch), config)) == [
        ("epoch_per_step", 1, 2, 2)
    ]


def test_failed_scores_are_counted_over_all_steps(config: Tree) -> None:
    # 3 + 1 of 4 * 32 + 4 scores: 3.0 %
    timeouts = {"reward_health/timeout": 3.0}
    error = {"reward_health/exception": 1.0}
    # A number that was not recorded counts as 0.
    unknown = {"reward_health/timeout": math.nan, "reward_health/ok": math.nan}
    (failed,) = learns_nothing(lines({}, timeouts, {}, error, unknown), config)
    assert str(failed) == (
        "3.0% of the scores failed (timeout 3, exception 1), and their responses were"
        " not learned from. The run stops above reward.max_failed_fraction = 0.1. Look"
        " at the logs and at reward (2 steps, 2 to 4)"
    )
    # The largest count of a step, as the metric has it.
    assert (failed.metric, failed.value) == ("reward_health/timeout", 3.0)


def test_values_are_those_of_the_metric_and_settings_are_named(config: Tree) -> None:
    (same,) = learns_nothing(lines(SAME, SAME, SAME), config)
    assert (same.metric, same.value, same.threshold) == ("critic/score/max", 1.0, 1.0)
    assert same.setting == "reward" and "the last ones were 1. Look at" in same.text

    mixed = {**config, "reward": {"components": {"a": {}, "b": {}}}}
    assert learns_nothing(lines(SAME, SAME, SAME), mixed)[0].setting == (
        "reward.components"
    )
    (zero,) = learns_nothing(lines(NO_GRADIENT, NO_GRADIENT, NO_GRADIENT), config)
    assert zero.setting == "algorithm.correction.form"
    assert zero.text.endswith("Look at algorithm.correction.form = none")


def test_a_run_that_learns_from_everything_has_no_cause(config: Tree) -> None:
    assert learns_nothing([], config) == []
    assert learns_nothing(lines(*[{}] * 20), config) == []


def test_a_supervised_run_has_no_scores() -> None:
    composed = compose("sft", PATHS)
    size = float(composed.examples_per_step)
    sft = to_tree(composed)
    line = {"training/num_examples": size, "actor/grad_norm": 0.0}
    steps = [{**line, "training/global_step": number} for number in (1, 2, 3)]
    assert [each.kind for each in learns_nothing(steps, sft)] == [
        "epoch_per_step",
        "zero_gradient/actor",
    ]
    epoch, zero = learns_nothing(steps, sft)
    assert f"sft.batch_size = {size:.0f}" in epoch.text
    assert (
        zero.setting == "data.train_path" and "Look at data.train_path = " in zero.text
    )
