"""A run that is stopped, killed or misconfigured in between ends where one that was never touched ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from controllers.recovery import Recovery, claim
from tests.controllers.runs import Inputs, lasting
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.load import to_tree
from verl_ray.config.schema import RLConfig
from verl_ray.errors import CheckpointError, ConfigError
from verl_ray.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240
STEPS = 5


# What a checkpoint must hold: sharded states, a controller that learns, moments of scores, the id of a W&B run.
RICH = [
    "run.checkpoint_every=1", "actor.mini_batch_size=16", "actor.num_ranks=2", "backend=fsdp",
    "backend@critic.backend=engine", "critic.num_ranks=1", "tracking.wandb.mode=offline",
    "algorithm.kl.controller=adaptive", "algorithm.kl.target=0.01", "algorithm.kl.horizon=100",
    "reward.normalise=running",
]  # fmt: skip


def start(inputs: Inputs, run_dir: Path, *changes: str) -> subprocess.Popen[str]:
    settings = [*RICH, *changes]
    command = [sys.executable, "-m", "controllers", "train", "--config-name", "ppo", *inputs.rl(run_dir), *settings]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(run: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = run.communicate(timeout=PATIENCE_S)
    return run.returncode, output


def wait_for_step(run: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while not any(line["training/global_step"] == step for line in lines(run_dir)):
        assert run.poll() is None and time.monotonic() < until, finish(run)
        time.sleep(0.02)


def lines(run_dir: Path) -> list[dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def process_behind(log: Path) -> psutil.Process:
    """The process whose output goes to this file."""
    for process in psutil.process_iter():
        try:
            if Path(f"/proc/{process.pid}/fd/1").readlink() == log:
                return process
        except OSError:
            continue
    raise AssertionError(f"no process writes {log}")


def weights(run_dir: Path, role: str, folder: Path) -> dict[str, object]:
    target = folder / f"{role}.pt"
    dcp_to_torch_save(run_dir / "checkpoints" / f"step_{STEPS:08}" / role, target)
    state: dict[str, object] = torch.load(target, weights_only=False)
    return state


def assert_same(left: object, right: object, where: str) -> None:
    if isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        assert torch.equal(left, right), where
    else:
        assert left == right, where


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_run_that_was_stopped_and_killed_ends_with_the_bits_of_one_that_was_not(
    inputs: Inputs, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, output = finish(start(inputs, whole, f"run.total_steps={STEPS}"))
    assert code == 0, output

    behind = "run.checkpoint_behind=true"
    run = start(inputs, broken, f"run.total_steps={STEPS - 1}", behind)
    wait_for_step(run, broken, 2)
    process_behind(broken / "logs" / "fsdp trainer-0.log").kill()
    code, output = finish(run)
    assert code == 1
    assert "rank 0" in output and "the process died during" in output
    assert "Traceback" not in output.partition("last output")[0]

    newest = CheckpointStore(broken / "checkpoints", keep=2).latest().checkpoint
    assert newest is not None
    run = start(inputs, broken, f"run.total_steps={STEPS}", behind)
    wait_for_step(run, broken, 4)
    os.kill(run.pid, signal.SIGKILL)
    output, _ = run.communicate(timeout=60)
    assert f"continuing after step {newest.step}" in output and f"run.total_steps: {STEPS - 1} -> {STEPS}" in output

    code, output = finish(start(inputs, broken, f"run.total_steps={STEPS}"))
    assert code == 0, output

    assert [line["training/global_step"] for line in lines(broken)] == list(range(1, STEPS + 1))
    for left, right in zip(lines(whole), lines(broken), strict=True):
        assert lasting(left) == lasting(right)
    for role in ("actor", "critic"):
        assert_same(weights(whole, role, tmp_path), weights(broken, role, tmp_path), role)
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in lines(broken)]
    assert len(set(coefficients)) == STEPS  # it moved at every step
    sessions = [path.name.rpartition("-")[2] for path in (broken / "wandb").glob("offline-run-*")]
    assert len(sessions) == 3 and len(set(sessions)) == 1  # three sessions of one W&B run
    kept = sorted(path.name for path in (broken / "checkpoints").glob("step_*"))
    assert kept == ["step_00000004", "step_00000005"]  # run.keep_checkpoints = 2


# ------------------------------------------------------------------------------------ what is found before a start


def written(config: RLConfig, *steps: int) -> CheckpointStore:
    store = CheckpointStore(Path(config.run.dir) / "checkpoints", keep=5)
    for step in steps:
        with store.writing(step, {"trainer": {}, "trackers": {"wandb_run_id": "abc"}}, to_tree(config)) as folder:
            (folder / "actor").mkdir()
            (folder / "actor" / "shard").write_bytes(bytes(100))
    return store


def test_a_torn_newest_checkpoint_is_named_and_the_one_before_is_taken(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = inputs.config("ppo", tmp_path)
    store = written(config, 1, 2)
    (store.root / "step_00000002" / "actor" / "shard").write_bytes(bytes(99))
    recovery = Recovery(config)
    assert recovery.step == 1 and recovery.tracker_state == {"wandb_run_id": "abc"}
    assert "actor/shard has 99 bytes instead of 100" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_torn_does_not_start_anew(inputs: Inputs, tmp_path: Path) -> None:
    config = inputs.config("ppo", tmp_path)
    store = written(config, 1)
    (store.root / "step_00000001" / "actor" / "shard").unlink()
    with pytest.raises(CheckpointError, match=r"no usable checkpoint.*actor/shard is missing"):
        Recovery(config)


def test_a_setting_that_the_state_depends_on_may_not_change(inputs: Inputs, tmp_path: Path) -> None:
    written(inputs.config("ppo", tmp_path), 1)
    with pytest.raises(ConfigError) as caught:
        Recovery(inputs.config("ppo", tmp_path, "run.seed=7", "rollout.group_size=8", "run.total_steps=9"))
    assert sorted(problem.key for problem in caught.value.problems) == ["rollout.group_size", "run.seed"]
    assert "was 0 when step_00000001 was written" in str(caught.value)


def test_what_may_change_is_shown(inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(inputs.config("ppo", tmp_path), 1)
    assert Recovery(inputs.config("ppo", tmp_path, "backend=fsdp", "run.total_steps=9")).step == 1
    shown = capsys.readouterr().out
    assert "run.total_steps: 100 -> 9" in shown and "actor.backend.kind: 'engine' -> 'fsdp'" in shown


def test_resume_none_refuses_a_folder_that_holds_a_run(inputs: Inputs, tmp_path: Path) -> None:
    written(inputs.config("ppo", tmp_path), 3)
    with pytest.raises(ConfigError, match="already holds step_00000003"):
        Recovery(inputs.config("ppo", tmp_path, "run.resume=none"))


def test_a_record_without_a_checkpoint_is_kept_aside(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1}\n')
    with pytest.raises(ConfigError, match="already holds the record of a run"):
        Recovery(inputs.config("ppo", tmp_path, "run.resume=none"))
    recovery = Recovery(inputs.config("ppo", tmp_path))
    assert recovery.step is None and (tmp_path / "metrics.jsonl").exists()  # an evaluation only looks
    recovery.set_aside()
    assert "records 1 steps but holds no checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists() and len(list(tmp_path.glob("metrics.*.jsonl"))) == 1


HOLD = """
import sys
from controllers.recovery import claim
with claim(sys.argv[1]):
    print("mine", flush=True)
    sys.stdin.read()
"""


def test_one_run_at_a_time_writes_to_a_folder_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == "mine\n"
        with pytest.raises(ConfigError, match=f"another run is writing to it .process {other.pid} on "):
            claim(str(tmp_path)).__enter__()
        other.kill()
    with claim(str(tmp_path)):
        pass


def test_another_runs_checkpoint_does_not_push_out_this_runs(inputs: Inputs, tmp_path: Path) -> None:
    other = written(inputs.config("ppo", tmp_path / "other"), 3)
    config = inputs.config("ppo", tmp_path / "mine", f"run.resume={other.root / 'step_00000003'}")
    written(config, 7)
    with pytest.raises(ConfigError, match=r"run\.dir holds another run"):
        Recovery(config)


def test_a_path_names_the_checkpoint(inputs: Inputs, tmp_path: Path) -> None:
    store = written(inputs.config("ppo", tmp_path / "first"), 3, 4)
    other = inputs.config("ppo", tmp_path / "second", f"run.resume={store.root / 'step_00000003'}")
    assert Recovery(other).step == 3
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        Recovery(inputs.config("ppo", tmp_path / "second", f"run.resume={store.root / 'step_00000009'}"))
