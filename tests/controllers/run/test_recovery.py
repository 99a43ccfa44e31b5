"""A run that is stopped, killed or misconfigured in between ends where one that was
never touched ends.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from controllers.run.loop import Loop, UnguardedSteps
from controllers.run.recovery import Recovery
from controllers.run.resumption import Resumption
from controllers.run.stopping import Stopping
from tests.cluster.crew import Echo, SlowWriter, Writer, processes
from tests.controllers.run.checkpoints import cursor, write_checkpoints
from tests.controllers.run.test_stopping import Cursor
from tests.controllers.runs import Inputs, command_here, lasting
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import Background, wait
from verl_ray.errors import CheckpointError, WorkerDied
from verl_ray.tracking import Trackers
from verl_ray.tracking.history import begin_segment, read_history
from verl_ray.tracking.jsonl import JsonlTracker, read_metrics

ROOT = Path(__file__).parents[3]
PATIENCE_S = 240
STEPS = 6


# What a checkpoint must hold: sharded states, a controller that learns, moments of
# scores, the id of a W&B run.
RICH = [
    "run.checkpoint_every=1", "actor.mini_batch_size=16", "actor.num_ranks=2", "backend=fsdp",
    "backend@critic.backend=engine", "critic.num_ranks=1", "tracking.wandb.mode=offline",
    "algorithm.kl.controller=adaptive", "algorithm.kl.target=0.01", "algorithm.kl.horizon=100",
    "reward.normalise=running", "run.recovery.enabled=false",
]  # fmt: skip


def rich(inputs: Inputs, run_dir: Path, *changes: str) -> list[str]:
    """The arguments of a run."""
    return ["train", "--config-name", "ppo", *inputs.rl(run_dir), *RICH, *changes]


def start(cluster: Session, *arguments: str) -> subprocess.Popen[str]:
    """The program with these arguments, in a process that can be signalled."""
    command = [sys.executable, "-m", "controllers", *arguments]
    return subprocess.Popen(
        [*command, f"ray.address={cluster.address}"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


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
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    command_here(cluster, *rich(inputs, whole, f"run.total_steps={STEPS}"))

    behind = "run.checkpoint_behind=true"
    shorter = rich(inputs, broken, f"run.total_steps={STEPS - 1}", behind)
    run = start(cluster, *shorter)
    wait_for_step(run, broken, 2)
    process_behind(broken / "logs" / "fsdp_trainer-0.log").kill()
    code, output = finish(run)
    assert code == 1
    assert "rank 0" in output and "the process died during" in output
    assert "Traceback" not in output.partition("last output")[0]

    newest = CheckpointStore(broken / "checkpoints", keep=2).latest().checkpoint
    assert newest is not None
    recorded = lines(broken)[-1]["training/global_step"]
    rarely = rich(
        inputs, broken, f"run.total_steps={STEPS}", behind, "run.checkpoint_every=100"
    )
    run = start(cluster, *rarely)
    wait_for_step(run, broken, int(recorded) + 1)
    run.send_signal(signal.SIGINT)
    code, output = finish(run)
    assert code == 130, output
    assert (
        f"continuing after step {newest.step}" in output
        and f"run.total_steps: {STEPS - 1} -> {STEPS}" in output
    )
    saved = lines(broken)[-1]["training/global_step"]  # whatever the signal met
    assert f"\nstep {saved} is saved in {broken / 'checkpoints'}\n" in output
    *_, before, to_go_on = output.splitlines()
    assert before == "stopped by SIGINT. To go on:"

    # The interpreter and the module come first.
    *_, module, typed = to_go_on.partition(" -m controllers ")
    assert module
    arguments = shlex.split(typed)
    arguments.remove(f"ray.address={cluster.address}")
    ended = command_here(cluster, *arguments, "run.checkpoint_every=1")
    assert f"continuing after step {saved}" in ended.stdout

    assert [line["training/global_step"] for line in lines(broken)] == list(
        range(1, STEPS + 1)
    )
    for left, right in zip(lines(whole), lines(broken), strict=True):
        assert lasting(left) == lasting(right)
    for role in ("actor", "critic"):
        assert_same(
            weights(whole, role, tmp_path), weights(broken, role, tmp_path), role
        )
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in lines(broken)]
    assert len(set(coefficients)) == STEPS  # it moved at every step
    sessions = [
        path.name.rpartition("-")[2]
        for path in (broken / "wandb").glob("offline-run-*")
    ]
    assert (
        len(sessions) == 3 and len(set(sessions)) == 1
    )  # three sessions of one W&B run
    kept = sorted(path.name for path in (broken / "checkpoints").glob("step_*"))
    assert kept == ["step_00000005", "step_00000006"]  # run.keep_checkpoints = 2


# ---------------------------------------------------------- a checkpoint written behind


@dataclass
class Learner:
    """What a trainer tells of itself: one role, and the rows drawn so far."""

    group: WorkerGroup[Any]
    drawn: int
    background: Background | None = None

    @property
    def groups(self) -> dict[str, WorkerGroup[Any]]:
        return {"actor": self.group}

    def state(self) -> dict[str, Any]:
        return {"cursor": cursor(self.drawn)}

    def load_state(self, state: dict[str, Any]) -> None: ...

    supply_memory = None

    def inherit(self, *_: object) -> None: ...

    def files(self, _: int) -> None: ...


class Rollouts:
    """Background work that makes a file, such as the gate of a slow writer."""

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    def references(self) -> list[Any]:
        return []

    def advance(self) -> None:
        self._gate.touch()


@pytest.mark.cluster
def test_what_is_written_behind_counts_if_it_is_whole(
    cluster: Session,
    inputs: Inputs,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, gates = tmp_path / "run", tmp_path / "gates"
    gates.mkdir()
    config = inputs.config(
        "ppo", run_dir, "run.checkpoint_behind=true", "run.checkpoint_every=1"
    )
    recovery = Recovery(Resumption(config))
    run_dir.mkdir()
    begin_segment(run_dir, 0, time.time())
    trackers = Trackers([])
    roles = [
        Role(name, name, SlowWriter, (str(gates),)) for name in ("first", "second")
    ]
    sets = [processes(name, 1, cpus=0.1) for name in ("first", "second")]
    with start_groups(sets, roles, stall_s=120, log_dir=tmp_path) as groups:
        first, second = (groups[role] for role in roles)
        newest = CheckpointStore(run_dir / "checkpoints", keep=9).latest

        calls: list[Call[Any]] = []
        broadcast = first.broadcast

        def recorded(*args: Any) -> Call[Any]:
            calls.append(broadcast(*args))
            return calls[-1]

        monkeypatch.setattr(first, "broadcast", recorded)

        # Another role fails in the next step while this one still writes.
        learner = Learner(first, drawn=8)
        recovery.commit(1, learner)
        recovery.save(learner, trackers)
        assert newest().checkpoint is None
        (gates / "step_00000001").touch()
        recovery.rescue_save()
        assert (
            "the checkpoint of step 1, which was being written, is whole and counts"
            in capfd.readouterr().err
        )
        found = newest().checkpoint
        assert found is not None and found.step == recovery.saved_step == 1

        # The writer waits for what goes on meanwhile.
        learner.background = Rollouts(gates / "begun")
        learner.drawn = 16
        recovery.commit(2, learner)
        begun_s = time.perf_counter()
        recovery.save(learner, trackers)
        assert (gates / "begun").exists()
        recovery.finish_save(Rollouts(gates / "step_00000002"))
        found = newest().checkpoint
        assert found is not None and found.step == recovery.saved_step == 2
        (process,) = read_history(run_dir)
        assert process.saved_step == 2
        assert 0 < process.saving_s <= time.perf_counter() - begun_s
        learner.background = None

        # The role itself dies in the next step, after it has written its part.
        (gates / "step_00000003").touch()
        learner.drawn = 24
        recovery.commit(3, learner)
        recovery.save(learner, trackers)
        (part,) = calls[-1].references()  # of the one that waits for the part
        assert wait([part], 1, 60)
        with pytest.raises(WorkerDied):
            first.rank_zero(Echo.die, 0).result()
        recovery.rescue_save()
        found = newest().checkpoint
        assert found is not None and found.step == recovery.saved_step == 3

        # It dies before.
        capfd.readouterr()
        learner = Learner(second, drawn=32)
        recovery.commit(4, learner)
        recovery.save(learner, trackers)
        with pytest.raises(WorkerDied):
            second.rank_zero(Echo.die, 0).result()
        recovery.rescue_save()
        assert (
            "warning: the checkpoint of step 4 is not whole and was removed: "
            in capfd.readouterr().err
        )
        found = newest().checkpoint
        assert found is not None and found.step == recovery.saved_step == 3


class Ahead:
    """A trainer that has drawn the rows of a step that is not done."""

    groups: ClassVar[dict[str, Any]] = {}

    def state(self) -> dict[str, Any]:
        return {"cursor": cursor(32)}

    def load_state(self, state: dict[str, Any]) -> None: ...

    background = None

    supply_memory = None

    def inherit(self, *_: object) -> None: ...

    def files(self, _: int) -> None: ...


def test_a_state_ahead_of_its_step_is_not_saved(inputs: Inputs, tmp_path: Path) -> None:
    store = write_checkpoints(inputs.config("ppo", tmp_path), 2)
    recovery = Recovery(Resumption(inputs.config("ppo", tmp_path)))
    recovery.commit(3, Ahead())
    with pytest.raises(
        CheckpointError, match="after step 3 has drawn 32 rows of the data; expected 24"
    ):
        recovery.save(Ahead(), Trackers([]))
    found = store.latest()
    assert found.checkpoint is not None and (found.checkpoint.step, found.skipped) == (
        2,
        [],
    )


class Obstacle(Cursor):
    """A trainer in whose steps a file takes the place of the checkpoints' folder."""

    def __init__(
        self, group: WorkerGroup[Any], place: Path, first: int, last: int
    ) -> None:
        super().__init__()
        self.groups = {"actor": group}
        self.place, self.first, self.last = place, first, last

    def step(self, number: int) -> dict[str, float]:
        if number == self.first:
            self.place.rename(self.place.with_name("aside"))
            self.place.touch()
        if number == self.last:
            self.place.unlink()
            self.place.with_name("aside").rename(self.place)
        return super().step(number)


@pytest.fixture(scope="module")
def writer(
    cluster: Session, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerGroup[Any]]:
    folder = tmp_path_factory.mktemp("writer")
    role = Role("actor", "actor", Writer)
    sets = [processes("actor", 1, cpus=0.1)]
    with start_groups(sets, [role], stall_s=120, log_dir=folder) as groups:
        yield groups[role]


@pytest.mark.cluster
def test_a_failure_saves_the_last_finished_step(
    inputs: Inputs,
    writer: WorkerGroup[Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = inputs.config("ppo", tmp_path, "run.checkpoint_every=10")
    recovery = Recovery(Resumption(config))
    trainer = Cursor(groups={"actor": writer}, refused_in=4)
    stopping = Stopping(config, recovery)
    trackers = Trackers([JsonlTracker(tmp_path)])
    with pytest.raises(RuntimeError, match="nothing can be graded in step 4"):
        Loop(config.run, trainer, trackers, recovery, stopping).run()
    assert capfd.readouterr().err == f"step 3 is saved in {tmp_path / 'checkpoints'}\n"

    found = Resumption(config)
    assert (found.step, found.unrecorded) == (3, None)
    assert found.checkpoint is not None
    assert found.checkpoint.state["trainer"]["cursor"]["drawn"] == 24


def obstructed(
    inputs: Inputs,
    writer: WorkerGroup[Any],
    folder: Path,
    first: int,
    last: int,
    *changes: str,
) -> None:
    """Make a run of eight steps that saves every second one."""
    config = inputs.config(
        "ppo", folder, "run.total_steps=8", "run.checkpoint_every=2", *changes
    )
    recovery = Recovery(Resumption(config))
    trainer = Obstacle(writer, folder / "checkpoints", first, last)
    Loop(config.run, trainer, Trackers([]), recovery, UnguardedSteps()).run()


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("behind", "last", "failed", "saved"),
    [
        ("false", 6, [4, 5], [2, 6, 8]),
        # What is written behind fails a step later.
        ("true", 5, [2, 3, 4], [5, 6, 8]),
    ],
)
def test_a_checkpoint_that_the_disk_prevents_is_tried_again(
    inputs: Inputs,
    writer: WorkerGroup[Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    behind: str,
    last: int,
    failed: list[int],
    saved: list[int],
) -> None:
    changes = ("run.keep_checkpoints=9", f"run.checkpoint_behind={behind}")
    obstructed(inputs, writer, tmp_path, 3, last, *changes)
    said = capfd.readouterr().err
    without = re.findall(r"goes on without the checkpoint of step (\d+), and", said)
    assert list(map(int, without)) == failed
    assert "(2 of at most run.max_failed_checkpoints = 3 in a row)" in said
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert kept == [f"step_{step:08}" for step in saved]


@pytest.mark.cluster
@pytest.mark.parametrize(("first", "failed_after"), [(3, 7), (7, 8)])
def test_too_many_checkpoints_that_the_disk_prevents_stop_the_run(
    inputs: Inputs,
    writer: WorkerGroup[Any],
    tmp_path: Path,
    first: int,
    failed_after: int,
) -> None:
    """The last step has no other after it, so it is tried at once."""
    with pytest.raises(CheckpointError) as caught:
        obstructed(inputs, writer, tmp_path, first, 9)
    assert caught.value.__notes__ == [
        "more than run.max_failed_checkpoints = 3 were not written in a row"
    ]
    assert f"step_{failed_after:08}" in str(caught.value)
