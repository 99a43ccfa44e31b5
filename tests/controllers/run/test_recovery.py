"""A run that is stopped, killed or misconfigured in between ends where one that was never touched ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from controllers.run.recovery import Recovery, claim
from tests.cluster.crew import Echo, SlowWriter, processes
from tests.controllers.runs import Inputs, lasting
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
from verl_ray.config.load import to_tree
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import CheckpointError, ConfigError, WorkerDied
from verl_ray.tracking import Trackers
from verl_ray.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[3]
PATIENCE_S = 240
STEPS = 7


# What a checkpoint must hold: sharded states, a controller that learns, moments of scores, the id of a W&B run.
RICH = [
    "run.checkpoint_every=1", "actor.mini_batch_size=16", "actor.num_ranks=2", "backend=fsdp",
    "backend@critic.backend=engine", "critic.num_ranks=1", "tracking.wandb.mode=offline",
    "algorithm.kl.controller=adaptive", "algorithm.kl.target=0.01", "algorithm.kl.horizon=100",
    "reward.normalise=running",
]  # fmt: skip


def start(inputs: Inputs, run_dir: Path, *changes: str) -> subprocess.Popen[str]:
    settings = [*RICH, *changes]
    return given(sys.executable, "-m", "controllers", "train", "--config-name", "ppo", *inputs.rl(run_dir), *settings)


def given(*command: str) -> subprocess.Popen[str]:
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
    recorded = lines(broken)[-1]["training/global_step"]
    run = start(inputs, broken, f"run.total_steps={STEPS}", behind, "run.checkpoint_every=100")
    wait_for_step(run, broken, int(recorded) + 1)
    run.send_signal(signal.SIGINT)
    code, output = finish(run)
    assert code == 130, output
    assert f"continuing after step {newest.step}" in output and f"run.total_steps: {STEPS - 1} -> {STEPS}" in output
    saved = lines(broken)[-1]["training/global_step"]  # whatever the signal met
    assert f"\nstep {saved} is saved in {broken / 'checkpoints'}\n" in output
    *_, before, to_go_on = output.splitlines()
    assert before == "stopped by SIGINT. To go on:"

    run = given(*shlex.split(to_go_on), "run.checkpoint_every=1")
    wait_for_step(run, broken, STEPS - 1)
    os.kill(run.pid, signal.SIGKILL)
    output, _ = run.communicate(timeout=60)
    assert f"continuing after step {saved}" in output

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
    assert len(sessions) == 4 and len(set(sessions)) == 1  # four sessions of one W&B run
    kept = sorted(path.name for path in (broken / "checkpoints").glob("step_*"))
    assert kept == ["step_00000006", "step_00000007"]  # run.keep_checkpoints = 2


# ---------------------------------------------------------------------------------- a checkpoint written behind


@dataclass
class Learner:
    """What a trainer tells of itself: one role, and the rows drawn so far."""

    group: WorkerGroup[Any]
    drawn: int

    @property
    def groups(self) -> dict[str, WorkerGroup[Any]]:
        return {"actor": self.group}

    def state(self) -> dict[str, Any]:
        return {"cursor": cursor(self.drawn)}

    def load_state(self, state: dict[str, Any]) -> None: ...


def until(there: Path) -> None:
    while not there.exists():
        time.sleep(0.01)


@pytest.mark.cluster
def test_what_is_written_behind_counts_if_it_is_whole(
    cluster: Session, inputs: Inputs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir, gates = tmp_path / "run", tmp_path / "gates"
    gates.mkdir()
    recovery = Recovery(inputs.config("ppo", run_dir, "run.checkpoint_behind=true", "run.checkpoint_every=1"))
    trackers = Trackers([])
    roles = [Role(name, name, SlowWriter, (str(gates),)) for name in ("first", "second")]
    sets = [processes(name, 1, cpus=0.1) for name in ("first", "second")]
    with start_groups(sets, roles, stall_s=120, log_dir=tmp_path) as groups:
        first, second = (groups[role] for role in roles)
        newest = CheckpointStore(run_dir / "checkpoints", keep=9).latest

        # Another role fails in the next step while this one still writes.
        learner = Learner(first, drawn=8)
        recovery.commit(1, learner)
        recovery.save(learner, trackers)
        assert newest().checkpoint is None
        (gates / "step_00000001").touch()
        recovery.rescue_save()
        assert "the checkpoint of step 1, which was being written, is whole and counts" in capfd.readouterr().err
        found = newest().checkpoint
        assert found is not None and found.step == recovery.saved == 1

        # The role itself dies in the next step, after it has written its part.
        (gates / "step_00000002").touch()
        learner.drawn = 16
        recovery.commit(2, learner)
        recovery.save(learner, trackers)
        until(gates / "step_00000002.told")
        first.rank_zero(Echo.pid).result()  # its earlier answer has arrived as well
        with pytest.raises(WorkerDied):
            first.rank_zero(Echo.die, 0).result()
        recovery.rescue_save()
        found = newest().checkpoint
        assert found is not None and found.step == recovery.saved == 2

        # It dies before.
        capfd.readouterr()
        learner = Learner(second, drawn=24)
        recovery.commit(3, learner)
        recovery.save(learner, trackers)
        with pytest.raises(WorkerDied):
            second.rank_zero(Echo.die, 0).result()
        recovery.rescue_save()
        assert "warning: the checkpoint of step 3 is not whole and was removed: " in capfd.readouterr().err
        found = newest().checkpoint
        assert found is not None and found.step == recovery.saved == 2


# ------------------------------------------------------------------------------------ what is found before a start


def cursor(drawn: int, rows: int = 10) -> dict[str, int]:
    return {"rows": rows, "drawn": drawn, "epoch": drawn // rows, "position": drawn % rows}


def written(config: RLConfig, *steps: int, drawn_per_step: int = 8) -> CheckpointStore:
    store = CheckpointStore(Path(config.run.dir) / "checkpoints", keep=5)
    for step in steps:
        state = {
            "trainer": {"cursor": cursor(step * drawn_per_step)},
            "trackers": {"wandb_run_id": "abc", "recorded_steps": f"1-{step}"},
            "unrecorded": None,
        }
        with store.writing(step, state, to_tree(config), ["actor"]) as folder:
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
    assert recovery.step == 1 and recovery.tracker_state == {"wandb_run_id": "abc", "recorded_steps": "1-1"}
    assert "actor/shard has 99 bytes instead of 100" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_torn_does_not_start_anew(inputs: Inputs, tmp_path: Path) -> None:
    config = inputs.config("ppo", tmp_path)
    store = written(config, 1)
    (store.root / "step_00000001" / "actor" / "shard").unlink()
    with pytest.raises(CheckpointError, match=r"no usable checkpoint.*actor/shard is missing"):
        Recovery(config)


@pytest.mark.parametrize("drawn_per_step", [7, 9])
def test_rows_that_the_steps_did_not_use_are_refused(inputs: Inputs, tmp_path: Path, drawn_per_step: int) -> None:
    config = inputs.config("ppo", tmp_path)
    written(config, 3, drawn_per_step=drawn_per_step)
    expected = f"after step 3 has drawn {3 * drawn_per_step} rows of the data; expected 24, 8 for each step"
    with pytest.raises(CheckpointError, match=expected):
        Recovery(config)


class Ahead:
    """A trainer that has drawn the rows of a step that is not done."""

    groups: ClassVar[dict[str, Any]] = {}

    def state(self) -> dict[str, Any]:
        return {"cursor": cursor(32)}

    def load_state(self, state: dict[str, Any]) -> None: ...


def test_a_state_ahead_of_its_step_is_not_saved(inputs: Inputs, tmp_path: Path) -> None:
    store = written(inputs.config("ppo", tmp_path), 2)
    recovery = Recovery(inputs.config("ppo", tmp_path))
    recovery.commit(3, Ahead())
    with pytest.raises(CheckpointError, match="after step 3 has drawn 32 rows of the data; expected 24"):
        recovery.save(Ahead(), Trackers([]))
    found = store.latest()
    assert found.checkpoint is not None and (found.checkpoint.step, found.skipped) == (2, [])


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


def test_a_damaged_record_without_a_checkpoint_is_kept(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = b'{"training/global_step": 1}\nnot JSON\n' + bytes(20)
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    recovery = Recovery(inputs.config("ppo", tmp_path))
    recovery.set_aside()
    assert "records 1 steps but holds no checkpoint" in capsys.readouterr().err
    (aside,) = tmp_path.glob("metrics.*.jsonl")
    assert aside.read_bytes() == damaged


HOLD = """
import sys
from controllers.run.recovery import claim
with claim(sys.argv[1]):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.mark.processes
def test_one_run_at_a_time_writes_to_a_folder_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == "mine\n"
        with pytest.raises(ConfigError, match=f"another run is writing to it .process {other.pid} on "):
            claim(str(tmp_path)).__enter__()
        other.kill()
    with claim(str(tmp_path)):
        pass


def test_fewer_steps_than_are_done_are_refused(inputs: Inputs, tmp_path: Path) -> None:
    written(inputs.config("ppo", tmp_path), 3)
    recovery = Recovery(inputs.config("ppo", tmp_path))
    with pytest.raises(ConfigError, match=r"run.total_steps = 2: 3 steps are done already"):
        recovery.refuse_fewer(2)
    recovery.refuse_fewer(3)


def test_another_runs_checkpoint_does_not_push_out_this_runs(inputs: Inputs, tmp_path: Path) -> None:
    other = written(inputs.config("ppo", tmp_path / "other"), 3)
    config = inputs.config("ppo", tmp_path / "mine", f"run.resume={other.root / 'step_00000003'}")
    written(config, 7)
    with pytest.raises(ConfigError, match=r"run\.dir holds another run"):
        Recovery(config)


def test_a_path_names_the_checkpoint(inputs: Inputs, tmp_path: Path) -> None:
    store = written(inputs.config("ppo", tmp_path / "first"), 3, 4)
    other = inputs.config("ppo", tmp_path / "second", f"run.resume={store.root / 'step_00000003'}")
    recovery = Recovery(other)
    assert recovery.step == 3
    assert recovery.tracker_state == {"wandb_run_id": "abc"}  # the record of its steps stays where they ran
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        Recovery(inputs.config("ppo", tmp_path / "second", f"run.resume={store.root / 'step_00000009'}"))
