"""What the path of a checkpoint or of a run stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.commands.export import named_checkpoint
from tests.controllers.run.checkpoints import write_checkpoints
from tests.controllers.runs import Inputs
from verl_ray.checkpoint.manifest import TornCheckpoint
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.errors import CheckpointError, ConfigError


@pytest.fixture
def store(inputs: Inputs, tmp_path: Path) -> CheckpointStore:
    return write_checkpoints(inputs.config("ppo", tmp_path / "run"), 1, 2, 4)


def note_best(store: CheckpointStore, step: int) -> None:
    """Write into every checkpoint that this step is the best."""
    best = {"name": "val-core/*", "step": step, "value": 0.5}
    for path in store.root.glob("step_*"):
        checkpoint = store.open(path)
        store.replace_state(checkpoint, checkpoint.state | {"best": best})


def test_a_run_is_its_newest_whole_checkpoint_and_a_path_is_itself(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    run = store.root.parent
    for path in (run, store.root, store.root / "step_00000004"):
        assert named_checkpoint(str(path), best=False).step == 4
    second = store.root / "step_00000002"
    assert named_checkpoint(f"{second}/", best=False).step == 2

    monkeypatch.chdir(run.parent)
    assert named_checkpoint("run/checkpoints/step_00000002", best=False).path == second

    (store.root / "step_00000004" / "actor" / "shard").unlink()
    assert named_checkpoint("run", best=False).step == 2
    assert "actor/shard is missing" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"missing\. Give another") as caught:
        named_checkpoint("run/checkpoints/step_00000004", best=False)
    assert not isinstance(caught.value, TornCheckpoint)


def test_the_best_is_the_one_that_the_newest_knows(
    inputs: Inputs, store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(store.root.parent)
    with pytest.raises(ConfigError, match="no evaluation up to step_00000004"):
        named_checkpoint(run, best=True)
    note_best(store, 1)
    assert named_checkpoint(run, best=True).step == 1
    assert capsys.readouterr().out == "the best step is 1: val-core/* = 0.5\n"
    note_best(store, 3)
    with pytest.raises(ConfigError, match=r"is 3 \(.* and its checkpoint is not here"):
        named_checkpoint(run, best=True)
    note_best(store, 0)
    with pytest.raises(ConfigError, match="the training did not improve it") as caught:
        named_checkpoint(run, best=True)
    assert f"Use the model that the run began with, {inputs.model}," in str(
        caught.value
    )
    with pytest.raises(ConfigError, match=rf"the folder of the run \({run}\)"):
        named_checkpoint(str(store.root / "step_00000001"), best=True)


def test_another_path_is_answered_with_what_is_there(
    store: CheckpointStore, tmp_path: Path
) -> None:
    def said(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            named_checkpoint(str(path), best=False)
        (problem,) = caught.value.problems
        assert (problem.key, problem.value) == ("CHECKPOINT", str(path))
        return f"{problem.rule}. {problem.fix}"

    run = store.root.parent
    assert said(tmp_path / "runn") == f"there is no such folder. Did you mean {run}?"
    shard = store.root / "step_00000001" / "actor"
    assert "holds no checkpoint; found shard. Give the folder of a run" in said(shard)
    assert said(shard / "shard").startswith("this is a file. Give the folder")
    (tmp_path / "empty").mkdir()
    assert "found nothing" in said(tmp_path / "empty")
