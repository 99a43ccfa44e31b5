"""The models that `evaluate --checkpoints` compares, found before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.command_line import main
from controllers.commands.evaluate import candidates, only_candidate
from controllers.run.resumption import Resumption
from tests.controllers.run.checkpoints import write_checkpoints
from tests.controllers.runs import Inputs
from verl_ray.config.load import with_changes
from verl_ray.errors import ConfigError


def test_the_base_model_comes_first_and_checkpoints_by_their_steps(
    inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.config("ppo", tmp_path / "first")
    store = write_checkpoints(config, 2, 10)
    paths = [str(store.root / f"step_{step:08d}") for step in (2, 10)]

    chosen = candidates(config, ["all", "base", paths[0]])
    assert [candidate.name for candidate in chosen] == [
        "base",
        "first/step_2",
        "first/step_10",
    ]
    assert [candidate.model for candidate in chosen] == [
        inputs.model.as_posix(),
        *paths,
    ]
    assert [candidate.step for candidate in chosen] == [0, 2, 10]
    # The folder of a run stands for its newest checkpoint, as in run.resume.
    assert [one.step for one in candidates(config, [str(tmp_path / "first")])] == [10]
    assert only_candidate(config).step == 10
    fresh = with_changes(config, {"run.dir": str(tmp_path / "other")})
    assert [one.step for one in candidates(fresh, paths[::-1])] == [10, 2]


def test_runs_that_differ_in_all_but_the_model_are_compared(
    inputs: Inputs, tmp_path: Path
) -> None:
    """Another estimator without critic, seed, data, group and mini-batch."""
    ppo = inputs.config("ppo", tmp_path / "ppo")
    grpo = inputs.config(
        "grpo", tmp_path / "grpo", "run.seed=7", "rollout.group_size=2",
        f"data.train_path={inputs.validation}", "data.prompts_per_step=4", "run.total_steps=2",
        "actor.mini_batch_size=4",
    )  # fmt: skip
    # The second run has drawn other rows than eight for each step.
    first = write_checkpoints(ppo, 1).root / "step_00000001"
    second = write_checkpoints(grpo, 2, examples_per_step=4).root / "step_00000002"
    third = write_checkpoints(grpo, 9, examples_per_step=5).root / "step_00000009"

    fresh = with_changes(ppo, {"run.dir": str(tmp_path / "compared")})
    chosen = candidates(fresh, [str(first), str(second), str(third)])
    assert [one.name for one in chosen] == ["ppo/step_1", "grpo/step_2", "grpo/step_9"]
    # A single one is measured by the same rule.
    named = with_changes(fresh, {"run.resume": str(second)})
    assert only_candidate(named).step == 2
    # A run that would continue from it is refused.
    with pytest.raises(ConfigError, match=r"run\.seed"):
        Resumption(named)


def test_all_problems_come_together(inputs: Inputs, tmp_path: Path) -> None:
    config = inputs.config("ppo", tmp_path / "first")
    store = write_checkpoints(config, 1)
    changes: dict[str, object] = {"actor.lora.rank": 2}
    other = with_changes(config, {"run.dir": str(tmp_path / "other"), **changes})
    missing = tmp_path / "step_00000003"
    with pytest.raises(ConfigError) as caught:
        candidates(
            with_changes(other, {"run.resume": "none"}),
            ["all", str(missing), str(store.root / "step_00000001")],
        )
    problems = {problem.key: problem for problem in caught.value.problems}
    option_problems = [
        each for each in caught.value.problems if each.key == "--checkpoints"
    ]
    assert [each.value for each in option_problems] == ["all", str(missing)]
    assert "has no checkpoints" in option_problems[0].rule
    # It holds no adapter.
    assert problems["actor.lora.rank"].rule.startswith("step_00000001: was 0")
    assert "names one checkpoint" in problems["run.resume"].rule
    assert len(caught.value.problems) == 4


def test_a_sweep_compares_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", "--config-name", "grpo", "--checkpoints", "base", "-m"]
    assert main(command) == 2
    assert "--multirun starts several" in capsys.readouterr().err


def test_an_override_is_no_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["evaluate", "--config-name", "grpo", "--checkpoints", "run.seed=1"]) == 2
    )
    assert "names no checkpoint" in capsys.readouterr().err


def test_overrides_may_follow_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", "--cfg", "job", "--checkpoints", "all", "run.total_steps=77"]
    assert main([*command, "--config-name", "quickstart"]) == 0
    assert "total_steps: 77" in capsys.readouterr().out
