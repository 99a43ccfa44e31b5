"""What a run goes on from, and what it refuses to go on from, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.run.checkpoint_check import CheckpointCheck
from controllers.run.resumption import Resumption
from tests.controllers.run.checkpoints import cursor, write_checkpoints
from tests.controllers.runs import Inputs
from verl_ray.checkpoint.store import DAMAGED
from verl_ray.errors import CheckpointError, ConfigError
from verl_ray.preflight.resolve import with_total_steps


def test_a_torn_newest_checkpoint_is_named_and_the_one_before_is_taken(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = inputs.config("ppo", tmp_path)
    store = write_checkpoints(config, 1, 2)
    (store.root / "step_00000002" / "actor" / "shard").write_bytes(bytes(99))
    found = Resumption(config)
    assert found.step == 1 and found.tracker_state == {
        "wandb_run_id": "abc",
        "recorded_steps": "1-1",
    }
    assert "actor/shard has 99 bytes instead of 100" in capsys.readouterr().err


def test_contents_are_compared_while_the_run_starts_and_the_next_one_knows(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = inputs.config("ppo", tmp_path)
    store = write_checkpoints(config, 1, 2)
    shard = store.root / "step_00000002" / "actor" / "shard"
    CheckpointCheck(Resumption(config, verify=False)).finish()

    shard.write_bytes(bytes(99) + b"!")
    found = Resumption(config, verify=False)
    assert found.step == 2
    with pytest.raises(ConfigError) as caught:
        CheckpointCheck(found).finish()
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("run.dir", str(tmp_path))
    assert "step_00000002 is torn: the contents of actor/shard" in problem.rule
    assert problem.fix.startswith("Restore it, or start the run again")

    # The next driver reads it before it starts anything.
    assert Resumption(config, verify=False).step == 1
    assert "the contents of actor/shard have changed" in capsys.readouterr().err
    shard.write_bytes(bytes(100))
    assert Resumption(config, verify=False).step == 2
    (store.root / DAMAGED).write_text("{")
    shard.write_bytes(bytes(99) + b"!")
    assert Resumption(config, verify=False).step == 1


def test_what_a_driver_that_died_was_about_to_remove_is_removed(
    inputs: Inputs, tmp_path: Path
) -> None:
    changes = ("run.checkpoint_every=1", "run.keep_checkpoints=2")
    config = inputs.config("ppo", tmp_path, *changes)
    store = write_checkpoints(config, 1, 2, 3, 4)
    # One that is made again stays until it is written.
    (store.root / "step_00000004" / "actor" / "shard").unlink()
    Resumption(config, verify=False).remove_surplus()
    kept = sorted(path.name for path in store.paths())
    assert kept == ["step_00000002", "step_00000003", "step_00000004"]


def test_a_run_whose_checkpoints_are_all_torn_does_not_start_anew(
    inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.config("ppo", tmp_path)
    store = write_checkpoints(config, 1)
    (store.root / "step_00000001" / "actor" / "shard").unlink()
    with pytest.raises(ConfigError) as caught:
        Resumption(config)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("run.dir", str(tmp_path))
    assert problem.rule.startswith("checkpoints has no usable checkpoint: ")
    assert "actor/shard is missing" in problem.rule
    assert problem.fix.startswith("Restore one of them, or start anew")


@pytest.mark.parametrize("examples_per_step", [7, 9])
def test_rows_that_the_steps_did_not_use_are_refused(
    inputs: Inputs, tmp_path: Path, examples_per_step: int
) -> None:
    config = inputs.config("ppo", tmp_path)
    write_checkpoints(config, 3, examples_per_step=examples_per_step)
    expected = f"after step 3 has drawn {3 * examples_per_step} rows of the data\n *fix:  Expected 24, 8 for each step"
    with pytest.raises(ConfigError, match=expected):
        Resumption(config)


def test_a_setting_that_the_state_depends_on_may_not_change(
    inputs: Inputs, tmp_path: Path
) -> None:
    write_checkpoints(inputs.config("ppo", tmp_path), 1)
    with pytest.raises(ConfigError) as caught:
        Resumption(
            inputs.config(
                "ppo",
                tmp_path,
                "run.seed=7",
                "rollout.group_size=8",
                "run.total_steps=9",
            )
        )
    (problem,) = caught.value.problems
    assert problem.key == "run.seed"
    assert "was 0 when step_00000001 was written" in problem.rule
    way_out = f"verl-ray export {tmp_path}/checkpoints/step_00000001 FOLDER"
    assert way_out in problem.fix and "model.path=FOLDER" in problem.fix


def test_what_may_change_is_shown(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoints(inputs.config("ppo", tmp_path), 1)
    assert (
        Resumption(
            inputs.config(
                "ppo",
                tmp_path,
                "backend=fsdp",
                "run.total_steps=9",
                "actor.optimizer.schedule=linear",
                "critic.optimizer.schedule=wsd",
                "rollout.group_size=8",
            )
        ).step
        == 1
    )
    shown, warned = capsys.readouterr()
    # The decay of wsd would begin after 8.1 steps.
    assert "warning: linear schedules now end at another step" in warned
    assert (
        "run.total_steps: 100 -> 9" in shown
        and "actor.backend.kind: 'engine' -> 'fsdp'" in shown
        and "rollout.group_size: 4 -> 8, from step 2 on" in shown
    )


def test_resume_none_refuses_a_folder_that_holds_a_run(
    inputs: Inputs, tmp_path: Path
) -> None:
    write_checkpoints(inputs.config("ppo", tmp_path), 3)
    with pytest.raises(ConfigError, match="already holds step_00000003"):
        Resumption(inputs.config("ppo", tmp_path, "run.resume=none"))


def test_a_record_without_a_checkpoint_is_kept_aside(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1}\n')
    with pytest.raises(ConfigError, match="already holds the record of a run"):
        Resumption(inputs.config("ppo", tmp_path, "run.resume=none"))
    found = Resumption(inputs.config("ppo", tmp_path))
    assert (
        found.step is None and (tmp_path / "metrics.jsonl").exists()
    )  # an evaluation only looks
    found.set_aside_old_record()
    assert "records 1 steps but holds no checkpoint" in capsys.readouterr().err
    assert (
        not (tmp_path / "metrics.jsonl").exists()
        and len(list(tmp_path.glob("metrics.*.jsonl"))) == 1
    )


def test_a_damaged_record_without_a_checkpoint_is_kept(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = b'{"training/global_step": 1}\nnot JSON\n' + bytes(20)
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    found = Resumption(inputs.config("ppo", tmp_path))
    found.set_aside_old_record()
    assert "records 1 steps but holds no checkpoint" in capsys.readouterr().err
    (aside,) = tmp_path.glob("metrics.*.jsonl")
    assert aside.read_bytes() == damaged


def test_fewer_steps_than_are_done_are_refused(inputs: Inputs, tmp_path: Path) -> None:
    write_checkpoints(inputs.config("ppo", tmp_path), 3)
    found = Resumption(inputs.config("ppo", tmp_path))
    with pytest.raises(
        ConfigError, match=r"run.total_steps = 2\n.*rule: 3 steps are done already"
    ):
        found.refuse_fewer_steps(2)
    found.refuse_fewer_steps(3)


def test_counted_epochs_are_compared_with_the_steps_that_are_done(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoints(inputs.config("ppo", tmp_path), 3)
    asked = inputs.config("ppo", tmp_path, "run.total_steps=null", "run.total_epochs=1")
    found = Resumption(asked)
    found.settle(asked)
    assert "run.total_" not in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match=r"run.total_steps = 2\n.*rule: 3 steps are done"
    ):
        found.settle(with_total_steps(asked, num_examples=16))

    found = Resumption(asked)
    capsys.readouterr()
    found.settle(with_total_steps(asked, num_examples=64))
    said = capsys.readouterr().out
    assert said == "changed since step_00000003: run.total_steps: 100 -> 8\n"


def test_another_runs_checkpoint_does_not_push_out_this_runs(
    inputs: Inputs, tmp_path: Path
) -> None:
    other = write_checkpoints(inputs.config("ppo", tmp_path / "other"), 3)
    config = inputs.config(
        "ppo", tmp_path / "mine", f"run.resume={other.root / 'step_00000003'}"
    )
    write_checkpoints(config, 7)
    with pytest.raises(ConfigError, match=r"run\.dir holds another run"):
        Resumption(config)


def test_a_path_names_the_checkpoint(inputs: Inputs, tmp_path: Path) -> None:
    store = write_checkpoints(inputs.config("ppo", tmp_path / "first"), 3, 4)
    other = inputs.config(
        "ppo", tmp_path / "second", f"run.resume={store.root / 'step_00000003'}"
    )
    found = Resumption(other)
    assert found.step == 3
    assert found.tracker_state == {
        "wandb_run_id": "abc"
    }  # the record of its steps stays where they ran
    with pytest.raises(ConfigError, match="there is no such checkpoint"):
        Resumption(
            inputs.config(
                "ppo", tmp_path / "second", f"run.resume={store.root / 'step_00000009'}"
            )
        )


def test_the_folder_of_a_run_stands_for_its_newest_checkpoint(
    inputs: Inputs, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_checkpoints(inputs.config("ppo", first), 3, 4)
    own = Resumption(inputs.config("ppo", first, f"run.resume={first}"))
    other = Resumption(inputs.config("ppo", second, f"run.resume={first}"))
    assert own.step == other.step == 4
    assert own.is_in_run_dir and not other.is_in_run_dir

    write_checkpoints(inputs.config("ppo", second), 1)
    with pytest.raises(ConfigError, match=r"run\.dir holds another run"):
        Resumption(inputs.config("ppo", second, f"run.resume={first}"))
    (tmp_path / "third" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        Resumption(inputs.config("ppo", tmp_path / "x", f"run.resume={tmp_path}/third"))


def test_a_place_behind_rejected_prompts_is_that_of_the_ledger(
    inputs: Inputs, tmp_path: Path
) -> None:
    """Three steps of 8 prompts; three others were drawn and rejected."""
    resumption = Resumption(inputs.config("ppo", tmp_path))
    state = {
        "cursor": cursor(27),
        "trained": 3,
        "ledger": {"frontier": 27, "holes": []},
    }
    resumption.check_cursor(3, state)
    # Without a count of trained batches there are no rejected prompts.
    for change in (
        {"trained": 2},
        {"ledger": {"frontier": 26, "holes": []}},
        {"cursor": cursor(28)},
    ):
        with pytest.raises(
            CheckpointError, match="Rows would be used twice or left out"
        ):
            resumption.check_cursor(3, state | change)
