"""The end of a run, from its record: the report, the exit code, what to try next."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from controllers.command_line import main
from controllers.compose.grammar import parsed_override
from controllers.run.best import BestEvaluation
from controllers.run.conclusion import Conclusion
from controllers.run.finished import finished_step, refuse_other_end, show_finished
from controllers.run.next_command import (
    failure_hint,
    next_commands,
    next_in_words,
    program_words,
)
from controllers.run.run_config import write_config
from controllers.trainers.base import task_of
from controllers.trainers.rl import ReinforcementTask
from scripts.configuration import compose
from tests.controllers.run.checkpoints import write_checkpoints
from tests.controllers.runs import Inputs
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.load import with_changes
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, Interrupted, RewardError
from verl_ray.tracking import Trackers
from verl_ray.tracking.evaluations import HeldOutScores
from verl_ray.tracking.history import begin_segment, end_segment, read_history
from verl_ray.tracking.jsonl import JsonlTracker

SUMS = "val-core/sums/acc/mean@1"
LONG = ["run.total_steps=3", "run.checkpoint_every=1"]


def recorded(config: RLConfig, right: dict[int, int], steps: int) -> Trackers:
    """The record of a run with evaluations of ten problems, of which some are right."""
    trackers = Trackers([JsonlTracker(Path(config.run.dir))])
    for step in range(steps + 1):
        metrics: dict[str, float] = {}
        if step:
            metrics = {"timing_s/step": 2.0, "timing_s/gen": 1.5, "actor/grad_norm": 0}
        if step in right:
            values = np.arange(10.0)[:, None] < right[step]
            trackers.scores(
                step,
                HeldOutScores(range(10), ["a"] * 10, [SUMS] * 10, values.astype(float)),
            )
            metrics[SUMS] = right[step] / 10
        if metrics:
            trackers.log(step, metrics)
    trackers.close(failed=False)
    return trackers


def concluding(config: RLConfig, trackers: Trackers | None) -> Conclusion:
    begun_s = time.time() - 40
    conclusion = Conclusion(config, 0, begun_s, "verl-ray train run.seed=1")
    if trackers is not None:
        conclusion.record(task_of(config), trackers, 0)
    return conclusion


def test_a_finished_run_reports_what_its_record_holds(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = inputs.config("ppo", tmp_path, *LONG)
    trackers = recorded(config, {0: 2, 2: 9, 3: 8}, steps=3)
    write_checkpoints(config, 3)
    assert concluding(config, trackers).finish() == 0

    text = capsys.readouterr().out
    assert "finished after 3 steps" in text
    cells = [line.replace("│", " ").split() for line in text.splitlines()]
    assert [SUMS, "0.2", "0.8", "+0.6"] in cells
    # 6 of 10 problems are right only after the run: the change is 0.6 in the mean, and
    # its standard error 0.15.
    intervals = re.findall(r"\[[-+.\d]+, [-+.\d]+\]", text)
    assert intervals == ["[0, 0.5]", "[0.5, 1]", "[+0.3, +0.9]"]
    assert ["generation", "11%", "4s"] in cells  # 4.5 of 40 s
    assert f"best: step 2, by {SUMS} 0.9" in text
    assert "warning: the gradient of the actor was exactly 0" in text
    assert "(3 steps, 1 to 3)" in text
    assert f"export {tmp_path}/checkpoints/step_00000003 {tmp_path}/exported" in text
    assert (
        f"evaluate --config-dir {tmp_path} --config-name config"
        f" run.resume={tmp_path}/checkpoints/step_00000003\n" in text
    )

    (segment,) = read_history(tmp_path)
    assert (
        segment.ending == "finished" and segment.command == "verl-ray train run.seed=1"
    )
    assert {"torch", "ray", "transformers"} <= segment.versions.keys()
    assert SUMS in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize(
    ("failure", "ending"), [(Interrupted("x"), "stopped"), (RewardError("y"), "failed")]
)
def test_a_run_that_was_broken_off_reports_the_same(
    inputs: Inputs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failure: Exception,
    ending: str,
) -> None:
    config = inputs.config("ppo", tmp_path, "run.total_steps=9")
    concluding(config, recorded(config, {0: 2}, steps=2)).break_off(failure)
    text = capsys.readouterr().out
    assert f"{ending} after step 2 of 9" in text and "generation" in text
    assert [segment.ending for segment in read_history(tmp_path)] == [ending]

    # Before the first line there is only the time to report.
    (tmp_path / "metrics.jsonl").unlink()
    concluding(config, None).break_off(failure)
    text = capsys.readouterr().out
    assert f"{ending} before the end of the first step" in text
    assert "starting" in text and f"logs: {tmp_path}/logs" in text


def test_a_terminal_that_is_gone_costs_no_page(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("controllers.run.conclusion.show", refuse)
    config = inputs.config("ppo", tmp_path, "run.total_steps=9")
    concluding(config, recorded(config, {0: 2}, steps=2)).break_off(RewardError("y"))
    assert (tmp_path / "report.html").exists()
    assert [segment.ending for segment in read_history(tmp_path)] == ["failed"]


def test_a_setting_that_was_refused_has_no_report(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = inputs.config("ppo", tmp_path)
    concluding(config, None).break_off(ConfigError([]))
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "report.html").exists()


def test_damage_to_the_record_costs_only_a_part_of_the_report(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = inputs.config("ppo", tmp_path, *LONG)
    trackers = recorded(config, {0: 2, 3: 8}, steps=3)
    (tmp_path / "evaluations" / "step_000003.jsonl").write_text("[")
    assert concluding(config, trackers).finish() == 0
    text = capsys.readouterr().out
    assert "step_000003.jsonl: cannot be read" in text and "+0.6" in text


def test_a_failed_run_goes_on_from_a_checkpoint_if_there_is_one(
    inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.config("ppo", tmp_path)
    arguments = ["train", "run.dir=x"]
    hint = failure_hint(config, arguments)
    assert hint.startswith("To begin again") and hint.endswith(" train run.dir=x")
    write_checkpoints(config, 1)
    assert failure_hint(config, arguments).startswith("To go on from the newest")


@pytest.mark.parametrize(
    ("after", "text"), [(0.4, "fell by 0.010"), (0.42, "rose by 0.010")]
)
def test_a_gain_that_is_missing_says_which_way_it_went(
    tmp_path: Path, after: float, text: str
) -> None:
    config = compose("quickstart", [f"run.dir={tmp_path}", "prepare.min_gain=0.2"])
    assert isinstance(config, RLConfig)
    told = ReinforcementTask(config).shortfall({SUMS: 0.41}, {SUMS: after})
    assert told is not None and f"held-out accuracy {text}" in told
    assert "prepare.min_gain = 0.2" in told

    # The mean of f1 is no accuracy.
    mean = SUMS.replace("/acc/", "/reward/")
    told = ReinforcementTask(config).shortfall({mean: 0.41}, {mean: after})
    assert told is not None and f"held-out mean reward {text}" in told


# ------------------------------------------------------------------- it is run again


def finished(config: RLConfig, ending: str = "finished") -> None:
    write_checkpoints(config, 2, 3)
    begin_segment(Path(config.run.dir), 0, 1.0)
    end_segment(Path(config.run.dir), 3, ending)  # type: ignore[arg-type]


def test_a_finished_run_says_so_before_anything_starts(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = inputs.config("ppo", tmp_path, *LONG)
    finished(config)
    (tmp_path / "report.txt").write_text("the report\n")
    assert main(["train", "--config-name", "ppo", *inputs.rl(tmp_path), *LONG]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"the report\n{tmp_path} is finished: 3 steps are done")
    assert "export " in printed and "no step uses them" not in printed
    show_finished(inputs.config("ppo", tmp_path, *LONG, "algorithm.clip_high=0.3"), 3)
    assert "uses them: algorithm.clip_high: 0.2 -> 0.3. For" in capsys.readouterr().out
    assert not (tmp_path / "logs").exists() and not (tmp_path / "lock").exists()


@pytest.mark.parametrize(
    "changes",
    [
        ["run.total_steps=4"],
        ["run.total_steps=2"],
        ["run.seed=7"],
        ["run.resume=none"],
    ],
)
def test_a_run_with_something_left_to_do_is_not_finished(
    inputs: Inputs, tmp_path: Path, changes: list[str]
) -> None:
    finished(inputs.config("ppo", tmp_path, *LONG))
    assert finished_step(inputs.config("ppo", tmp_path, *LONG)) == 3
    assert finished_step(inputs.config("ppo", tmp_path, *LONG, *changes)) is None


def test_a_run_that_stopped_early_is_finished(inputs: Inputs, tmp_path: Path) -> None:
    """Unless it is given more patience, or counts its steps by epochs."""
    longer = [*LONG, "run.total_steps=9", "run.evaluate_every=1"]
    config = inputs.config("ppo", tmp_path, *longer, "run.early_stop=2")
    finished(config)
    assert finished_step(config) is None

    best = BestEvaluation(config, None)
    for step, accuracy in ((1, 0.5), (2, 0.4), (3, 0.5)):
        best.note(step, {"val-core/sums/acc/mean@1": accuracy})
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    checkpoint = store.open(store.root / "step_00000003")
    store.replace_state(checkpoint, checkpoint.state | {"best": best.state()})
    assert finished_step(config) == 3

    for change in (
        ["run.early_stop=3"],
        ["run.total_steps=null", "run.total_epochs=1"],
    ):
        other = inputs.config("ppo", tmp_path, *longer, "run.early_stop=2", *change)
        assert finished_step(other) is None


def test_a_finished_run_that_saved_nothing_is_not_made_again(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its settings are in config.yaml, where those of an earlier version lack a key."""
    never = ["run.total_steps=3", "run.save_at_end=false"]
    config = inputs.config("ppo", tmp_path, *never)
    begin_segment(tmp_path, 0, 1.0)
    write_config(config, "auto")
    written = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(written.replace("  save_at_end: false\n", ""))
    refuse_other_end(config)  # the run goes on

    end_segment(tmp_path, 3, "finished")
    (tmp_path / "report.txt").write_text("the report\n")
    assert main(["train", "--config-name", "ppo", *inputs.rl(tmp_path), *never]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"the report\n{tmp_path} is finished: 3 steps are done")
    assert "no setting gives it more steps; another run.name trains again" in printed
    assert "no step uses them" not in printed

    changed = inputs.config("ppo", tmp_path, *never, "algorithm.clip_high=0.3")
    assert finished_step(changed) == 3
    show_finished(changed, 3)
    assert "uses them: algorithm.clip_high: 0.2 -> 0.3. It" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match="a finished run of 3 steps, and no checkpoint"
    ):
        refuse_other_end(config)

    (tmp_path / "model").mkdir()
    for change in ("run.total_steps=4", "run.seed=1"):
        assert finished_step(inputs.config("ppo", tmp_path, *never, change)) is None
        key = change.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"3 steps with other.*{key}") as caught:
            refuse_other_end(inputs.config("ppo", tmp_path, change))
        assert f"model.path={tmp_path}/model" in caught.value.problems[0].fix


def test_a_run_of_epochs_of_its_own_data_is_finished(tmp_path: Path) -> None:
    def config(*changes: str) -> Config:
        return compose("quickstart", [f"run.dir={tmp_path}", *changes])

    by_epochs = ["run.total_steps=null", "run.save_at_end=false"]
    once = config(*by_epochs, "run.total_epochs=1")
    begin_segment(tmp_path, 0, 1.0)
    write_config(with_changes(once, {"run.total_steps": 3}), "auto")
    end_segment(tmp_path, 3, "finished")
    assert finished_step(once) == 3
    assert finished_step(config(*by_epochs, "run.total_epochs=2")) is None


def _damage_checkpoint(config: RLConfig) -> None:
    shard = "checkpoints/step_00000003/actor/shard"
    (Path(config.run.dir) / shard).write_bytes(b"")


def _stop(config: RLConfig) -> None:
    end_segment(Path(config.run.dir), 3, "stopped")


def _forget(config: RLConfig) -> None:
    (Path(config.run.dir) / "history.jsonl").unlink()


@pytest.mark.parametrize("change", [_damage_checkpoint, _stop, _forget])
def test_only_a_whole_run_that_said_so_is_finished(
    inputs: Inputs, tmp_path: Path, change: Callable[[RLConfig], None]
) -> None:
    config = inputs.config("ppo", tmp_path, *LONG)
    finished(config)
    change(config)
    assert finished_step(config) is None


# ----------------------------------------------------------------------- what is next


def test_the_next_commands_are_those_that_can_work(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["controllers"])
    config = inputs.config("ppo", tmp_path / "my run")
    assert next_commands(config) == {}
    assert next_in_words(config).startswith("next: nothing was saved")

    write_checkpoints(config, 1)
    export, evaluate = next_commands(config).values()
    checkpoint = "'my run/checkpoints/step_00000001'"
    assert export.endswith(f" export {checkpoint} 'my run/exported'")
    assert evaluate.endswith(
        " evaluate --config-dir 'my run' --config-name config"
        " \"run.resume='my run/checkpoints/step_00000001'\""
    )

    run = config.run.model_copy(update={"dir": str(tmp_path / "größe=1")})
    odd = config.model_copy(update={"run": run})
    write_checkpoints(odd, 1)
    _, typed = next_commands(odd).values()
    *_, resume = shlex.split(typed)
    assert parsed_override(resume).value() == "größe=1/checkpoints/step_00000001"

    # A run that has written its model needs no export.
    (tmp_path / "my run" / "model").mkdir()
    assert list(next_commands(config).values()) == [evaluate]
    data = config.data.model_copy(update={"validation_path": None})
    alone = config.model_copy(update={"data": data})
    assert next_in_words(alone) == "next: the model is in my run/model"


def note_best(config: RLConfig, step: int) -> None:
    store = CheckpointStore(Path(config.run.dir) / "checkpoints", keep=5)
    newest = store.latest().checkpoint
    assert newest is not None
    best = {"name": SUMS, "step": step, "value": 0.5}
    store.replace_state(newest, newest.state | {"best": best})


def test_the_best_checkpoint_is_proposed_where_it_is_on_disk(
    inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.config("ppo", tmp_path)
    write_checkpoints(config, 2, 3)
    note_best(config, 2)
    (tmp_path / "model").mkdir()
    commands = next_commands(config)
    purpose = "write the model of the best step (2) as a Hugging Face directory"
    assert f"export {tmp_path}/checkpoints/step_00000002 " in commands[purpose]
    evaluate = commands["measure it again, with every response on disk"]
    assert evaluate.endswith("step_00000002")

    note_best(config, 1)
    (evaluate,) = next_commands(config).values()
    assert evaluate.endswith("step_00000003")


def test_a_model_that_got_worse_is_not_exported(inputs: Inputs, tmp_path: Path) -> None:
    config = inputs.config("ppo", tmp_path)
    write_checkpoints(config, 2, 3)
    note_best(config, 0)
    (purpose,) = next_commands(config)
    assert purpose.startswith("measure it again")
    text = next_in_words(config)
    assert f"the training did not improve the model. {SUMS} was best before" in text
    assert f"{tmp_path}/metrics.jsonl shows" in text and "export" not in text


def test_supervised_training_names_its_model_and_no_responses(
    inputs: Inputs, tmp_path: Path
) -> None:
    config = inputs.supervised(tmp_path)
    (tmp_path / "model").mkdir()
    assert list(next_commands(config)) == [
        "measure it again, with the score of every row on disk"
    ]
    assert task_of(config).outputs() == {"model": str(tmp_path / "model")}
    assert Trackers([JsonlTracker(tmp_path)]).outputs().keys() == {"metrics"}


def test_the_program_is_called_as_the_user_can_call_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "verl-ray"
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert program_words() == [str(program)]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program_words() == ["verl-ray"]
    monkeypatch.setattr(sys, "argv", ["/a/controllers/__main__.py"])
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "controllers"])
    assert program_words() == ["python3", "-m", "controllers"]

    # A program of the user's own has called the Python functions.
    installed = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(installed))
    for own in ("my_training.py", "ipykernel_launcher.py", "-c", ""):
        monkeypatch.setattr(sys, "argv", [own])
        assert program_words() == ["verl-ray"]
    monkeypatch.setenv("VERL_RAY_SCRIPT", "../scripts/quickstart")
    assert program_words() == [str(Path(sys.executable).with_name("verl-ray"))]
