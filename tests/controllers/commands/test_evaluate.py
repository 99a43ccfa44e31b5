"""What the command `evaluate` writes, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from controllers.commands.evaluate import _folder_name, _write, only_candidate
from controllers.system.plan import resolve_on
from controllers.watch.held_out_measures import Evaluation
from tests.controllers.run.checkpoints import write_checkpoints
from tests.controllers.runs import SHAPE, Inputs
from verl_ray.preflight.data_files import examine_data
from verl_ray.tracking.held_out_responses import HeldOutResponse


def responses(fails: bool) -> Iterator[HeldOutResponse]:
    yield HeldOutResponse(0, "sums", "1+1=", "2", "2", 1.0, "stop")
    if fails:
        raise KeyboardInterrupt


def test_an_evaluation_that_is_broken_off_leaves_nothing(
    inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.config("ppo", tmp_path)
    write_checkpoints(config, 3)
    candidate = only_candidate(config)

    def write(fails: bool) -> Path:
        metrics = {"val-core/sums/acc/mean@1": 1.0}
        evaluation = Evaluation(metrics, responses=responses(fails))
        return _write(config, candidate, evaluation, "step_000003").folder

    with pytest.raises(KeyboardInterrupt):
        write(fails=True)
    assert list((tmp_path / "evaluated").iterdir()) == []

    folder = write(fails=False)
    assert folder == tmp_path / "evaluated" / "step_000003"
    assert json.loads((folder / "metrics.json").read_text())["step"] == 3
    # An older one is renamed, also where the new one fails.
    with pytest.raises(KeyboardInterrupt):
        write(fails=True)
    assert list((tmp_path / "evaluated").iterdir()) == [folder]
    assert write(fails=False) == folder
    assert len(list((tmp_path / "evaluated").iterdir())) == 2


def test_checkpoints_of_the_same_step_have_folders_of_their_own() -> None:
    used: set[str] = set()
    names = [_folder_name(step, used) for step in (0, 10, 10, 10)]
    assert names == ["step_000000", "step_000010", "step_000010_2", "step_000010_3"]


def test_an_evaluation_has_no_training_steps_to_warn_about(
    inputs: Inputs, tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text(inputs.train.read_text().splitlines(keepends=True)[0])
    config = inputs.config("ppo", tmp_path, f"data.train_path={few}")
    config = resolve_on(config, SHAPE)
    (warning,) = examine_data(config).warnings
    assert "every step uses some of them more than once" in warning
    assert examine_data(config, evaluates=True).warnings == []
