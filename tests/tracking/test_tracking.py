"""From the configuration to open trackers."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_ray.config.run import (
    RecoveryConfig,
    ResolvedConfig,
    RunConfig,
    TrackingConfig,
    WandbConfig,
)
from verl_ray.errors import TrackingError
from verl_ray.report.tracker import ReportTracker
from verl_ray.tracking import open_trackers
from verl_ray.tracking.jsonl import read_metrics

WANDB = WandbConfig(mode="offline", project="tests", entity=None, group=None, tags=())


def run_config(run_dir: Path) -> RunConfig:
    return RunConfig(
        trace="none",
        name="run",
        dir=str(run_dir),
        seed=0,
        total_steps=4,
        total_epochs=None,
        evaluate_every=0,
        checkpoint_every=0,
        save_at_end=False,
        checkpoint_behind=False,
        keep_checkpoints=1,
        best_metric=None,
        best_is=None,
        early_stop=None,
        resume="none",
        max_skipped_steps=3,
        threads_per_rank=1,
        stall_s=1.0,
        max_failed_checkpoints=3,
        recovery=RecoveryConfig(
            enabled=True,
            max_restarts=3,
            max_wait_s=60,
            snapshot_every=0,
            snapshot_copies=1,
        ),
        resolved=ResolvedConfig(cpu={}, gpu={}),
        paces={},
    )


@pytest.mark.processes
def test_all_trackers_record_a_run_and_its_continuation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrackingConfig(console=True, tensorboard=True, wandb=WANDB)
    trackers = open_trackers(
        config,
        run_config(tmp_path),
        {"run": {"seed": 0}},
        report=ReportTracker(tmp_path),
    )
    for step in range(4):
        trackers.log(step, {"critic/rewards/mean": 0.5})
        if step == 1:
            state = trackers.state()
    trackers.close(failed=True)
    assert (
        state.keys() == {"recorded_steps", "wandb_run_id"}
        and state["recorded_steps"] == "0-1"
    )
    outputs = {"metrics", "report", "W&B", "TensorBoard"}
    assert set(trackers.outputs()) == outputs
    assert capsys.readouterr().out.count("reward 0.5") == 4

    quiet = TrackingConfig(console=False, tensorboard=True, wandb=WANDB)
    continued = open_trackers(
        quiet,
        run_config(tmp_path),
        {},
        report=ReportTracker(tmp_path),
        committed_step=1,
        state=state,
    )
    continued.log(2, {"critic/rewards/mean": 0.75})
    continued.close(failed=False)
    assert continued.state() == {**state, "recorded_steps": "0-2"}
    assert [
        line["critic/rewards/mean"] for line in read_metrics(tmp_path / "metrics.jsonl")
    ] == [0.5, 0.5, 0.75]
    shown = capsys.readouterr()
    assert (
        shown.out
        == f"{tmp_path}/metrics.jsonl: the lines of step 2-3 are written again\n"
    )
    assert shown.err == ""


def test_what_is_off_writes_nothing(tmp_path: Path) -> None:
    off = WANDB.model_copy(update={"mode": "disabled"})
    open_trackers(
        TrackingConfig(console=False, tensorboard=False, wandb=off),
        run_config(tmp_path),
        {},
        report=ReportTracker(tmp_path),
    ).close(False)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_record_that_cannot_be_written_stops_the_run_at_its_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrackingError, match=r"metrics\.jsonl"):
        open_trackers(
            TrackingConfig(console=True, tensorboard=False, wandb=WANDB),
            run_config(tmp_path),
            {},
            report=ReportTracker(tmp_path),
        )


@pytest.mark.processes
def test_importing_the_trackers_loads_no_heavy_library() -> None:
    program = (
        "import sys, verl_ray.report.page, controllers.commands.report, controllers.commands.runs, verl_ray.tracking.console\n"
        "print({'wandb', 'torch', 'vllm', 'tensorboard', 'ray'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ended.stdout == "set()\n"
