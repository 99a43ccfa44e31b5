"""The warning about a run that learns nothing, from lines whose numbers are written here."""

from __future__ import annotations

import pytest

from controllers.compose.composition import compose
from controllers.watch.learning import LearningWatch

SAME = {
    "critic/score/max": 1.0,
    "critic/score/min": 1.0,
    "reward_health/ok": 32.0,
    "frac_reward_zero_std": 1.0,
    "actor/grad_norm": 0.0,
}


def test_a_warning_is_printed_once_and_a_resumed_run_prints_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    paths = ("model.path=m", "data.train_path=t", "data.validation_path=v")
    config = compose("grpo", [*paths, "run.total_steps=100"])
    steps = [{**SAME, "training/global_step": number} for number in range(1, 6)]
    watch = LearningWatch(config, [])
    warnings = []
    for line in steps:
        watch.log(int(line["training/global_step"]), line)
        warnings.append(capsys.readouterr().err)
    assert [bool(warning) for warning in warnings] == [False, False, True, False, False]
    assert warnings[2].startswith(
        "warning: all scores are equal, so nothing sets a good"
    )
    assert warnings[2].endswith("(3 steps, 1 to 3)\n")

    # The first two lines are on the disk, and the third step runs again.
    resumed = LearningWatch(config, steps[:2])
    resumed.log(3, steps[2])
    assert capsys.readouterr().err == warnings[2]
