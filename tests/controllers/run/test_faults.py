"""What a run decides about failures of its processes."""

from __future__ import annotations

import errno
import json
import os
import pickle
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from controllers.run.faults import (
    FAULTS,
    Cure,
    FaultKind,
    FaultPolicy,
    ProcessFault,
)
from controllers.run.next_driver import may_pass
from verl_ray.config.run import RecoveryConfig
from verl_ray.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    HubError,
    Problem,
    StaleIncarnation,
    TrackerAway,
    TrackingError,
    VerlRayError,
    WorkerDied,
    WorkerError,
    file_problem,
)
from verl_ray.rewards.pool import start_failure


def died(rank: int = 0, method: str = "learn") -> WorkerDied:
    message = f"the process died during {method}\nand more"
    return WorkerDied(message, role="actor", rank=rank, node="a")


def raised(what: str) -> WorkerError:
    return WorkerError(f"learn raised {what}", role="actor", rank=1, node="a")


def from_worker(error: VerlRayError) -> VerlRayError:
    error.origin = raised(str(error))
    return error


TAKEN = Problem("rollout.endpoint.port", 80, "it is taken", "Free it.", may_pass=True)
AWAY = HubError("a/model", "503", "Try again.", is_away=True)


def caused(error: VerlRayError, number: int) -> VerlRayError:
    error.__cause__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize(
    ("failure", "kind", "cure"),
    [
        (died(), FaultKind.DIED, Cure.GO_BACK),
        (
            DeadlineExceeded("no progress", role="critic", rank=0, node="a"),
            FaultKind.STALLED,
            Cure.GO_BACK,
        ),
        (raised("MemoryError: "), FaultKind.EXHAUSTED, Cure.GO_BACK),
        (raised("OutOfMemoryError: CUDA"), FaultKind.EXHAUSTED, Cure.GO_BACK),
        (
            raised("_ArrayMemoryError: Unable to allocate 8.00 GiB for an array"),
            FaultKind.EXHAUSTED,
            Cure.GO_BACK,
        ),
        (
            raised(
                "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0."
                " DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
            ),
            FaultKind.EXHAUSTED,
            Cure.GO_BACK,
        ),
        (
            raised("RuntimeError: can't start new thread"),
            FaultKind.EXHAUSTED,
            Cure.GO_BACK,
        ),
        (raised("DistBackendError: NCCL"), FaultKind.EXHAUSTED, Cure.GO_BACK),
        (raised("ConnectionResetError: x"), FaultKind.EXHAUSTED, Cure.GO_BACK),
        (from_worker(EngineFailed("it stopped")), FaultKind.EXHAUSTED, Cure.GO_BACK),
        (from_worker(ClusterError("rows lost")), FaultKind.EXHAUSTED, Cure.GO_BACK),
        (ClusterError("the raylet ended"), FaultKind.CLUSTER, Cure.START_AGAIN),
        (raised("RuntimeError: NCCL error: x"), FaultKind.EXHAUSTED, Cure.GO_BACK),
        (raised("RuntimeError: mat1 and mat2 shapes"), FaultKind.DEFECT, Cure.STOP),
        (raised("ValueError: it raised MemoryError"), FaultKind.DEFECT, Cure.STOP),
        (raised("KeyError: 'x'"), FaultKind.DEFECT, Cure.STOP),
        (raised("TypeError: a mistake"), FaultKind.DEFECT, Cure.STOP),
        # What the user can mend, and what a worker raised on purpose.
        (ConfigError([]), None, Cure.STOP),
        (from_worker(CheckpointError("torn")), None, Cure.STOP),
        (StaleIncarnation("old", role="actor", rank=0, node="a"), None, Cure.STOP),
        (ValueError("of the driver"), None, Cure.STOP),
    ],
)
def test_the_table_of_failures(
    tmp_path: Path, failure: Exception, kind: FaultKind | None, cure: Cure
) -> None:
    fault = ProcessFault.of(failure, 3)
    assert (fault and fault.kind) == kind
    policy = FaultPolicy(
        RecoveryConfig(
            enabled=True,
            max_restarts=3,
            max_wait_s=60,
            snapshot_every=0,
            snapshot_copies=1,
        ),
        tmp_path,
    )
    assert policy.cure_of(failure, 3) is cure
    if fault is None:
        assert not (tmp_path / FAULTS).exists()
    else:
        (line,) = map(json.loads, (tmp_path / FAULTS).read_text().splitlines())
        assert (line["kind"], line["step"], line["cure"]) == (kind, 3, cure)
        assert (line["role"], line["rank"]) == (fault.role, fault.rank)


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (ConfigError([TAKEN]), True),
        (ConfigError([TAKEN, replace(TAKEN, may_pass=False)]), False),
        (ClusterError("no GPU is free"), True),
        (AWAY, True),
        (HubError("a/model", "there is none", "Correct it."), False),
        (TrackerAway("W&B did not start"), True),
        (TrackingError("the record is damaged"), False),
        (caused(CheckpointError("it cannot be written"), errno.ENOSPC), True),
        (caused(CheckpointError("it cannot be written"), errno.EACCES), False),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (caused(ClusterError("no name"), socket.EAI_AGAIN), True),
        (caused(ClusterError("no node"), errno.EHOSTUNREACH), True),
        (TimeoutError(), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
        (ConfigError([file_problem("actor.model.path", "a/model", AWAY)]), True),
        (start_failure("reward.functions", {}, "exited"), True),
        (died(), True),
        (DeadlineExceeded("no progress", role="actor", rank=0, node="a"), True),
        (raised("MemoryError: "), True),
        (raised("KeyError: 'x'"), False),
        (ValueError("of the driver"), False),
    ],
)
def test_what_refuses_a_start_and_may_pass(failure: Exception, expected: bool) -> None:
    assert may_pass(failure) is expected
    # It is the same in another process.
    again = pickle.loads(pickle.dumps(failure))
    if failure.__cause__ is None:
        assert may_pass(again) is expected


def test_a_process_without_state_starts_again_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = FaultPolicy(
        RecoveryConfig(
            enabled=True,
            max_restarts=2,
            max_wait_s=60,
            snapshot_every=0,
            snapshot_copies=1,
        ),
        tmp_path,
    )

    def recorded() -> list[tuple[object, ...]]:
        lines = map(json.loads, (tmp_path / FAULTS).read_text().splitlines())
        return [(line["kind"], line["step"], line["cure"]) for line in lines]

    assert policy.may_restart(died(), 3)
    assert "its pending requests are sent again (failure 1 of at most 2" in (
        capsys.readouterr().err
    )
    # The same at the same step goes on to the loop, which stops.
    again = died()
    assert not policy.may_restart(again, 3)
    assert recorded() == [("died", 3, "restart")]
    assert policy.cure_of(again, 3) is Cure.STOP
    assert recorded()[1:] == [("died", 3, "stop")]

    policy.note_finished(3)
    assert policy.may_restart(died(), 4)
    assert policy.may_restart(raised("MemoryError: "), 4)
    # Failures of both ways count together.
    third = DeadlineExceeded("no progress", role="reward", rank=0, node="a")
    assert not policy.may_restart(third, 4)
    assert policy.cure_of(third, 4) is Cure.STOP
    assert "2 failures before this one brought no new step" in third.__notes__[0]


@pytest.mark.parametrize(
    "failure",
    [
        raised("ValueError: a mistake"),
        # The rows are lost, and would not arrive at another process.
        from_worker(ClusterError("rows lost")),
        ClusterError("the raylet ended"),
        ConfigError([]),
        StaleIncarnation("old", role="reward", rank=0, node="a"),
    ],
)
def test_what_another_process_does_not_mend(
    tmp_path: Path, failure: VerlRayError
) -> None:
    policy = FaultPolicy(
        RecoveryConfig(
            enabled=True,
            max_restarts=2,
            max_wait_s=60,
            snapshot_every=0,
            snapshot_copies=1,
        ),
        tmp_path,
    )
    assert not policy.may_restart(failure, 3)
    assert not (tmp_path / FAULTS).exists()

    off = FaultPolicy(
        RecoveryConfig(
            enabled=False,
            max_restarts=2,
            max_wait_s=60,
            snapshot_every=0,
            snapshot_copies=1,
        ),
        tmp_path,
    )
    assert not off.may_restart(died(), 3)


def test_the_same_failure_is_not_tried_twice_at_a_step(tmp_path: Path) -> None:
    policy = FaultPolicy(
        RecoveryConfig(
            enabled=True,
            max_restarts=9,
            max_wait_s=60,
            snapshot_every=0,
            snapshot_copies=1,
        ),
        tmp_path,
    )
    policy.note_finished(2)
    assert policy.cure_of(died(), 3) is Cure.GO_BACK
    assert policy.cure_of(died(method="score"), 3) is Cure.GO_BACK
    # Another rank, as one of another lost node, is another failure.
    assert policy.cure_of(died(rank=1), 3) is Cure.GO_BACK
    # A step that is made again is no new one.
    policy.note_finished(2)
    again = died()
    assert policy.cure_of(again, 3) is Cure.STOP
    assert again.__notes__ == [
        "this is the second time at step 3, so the run does not try it again"
    ]

    policy.note_finished(3)
    assert policy.cure_of(died(), 3) is Cure.GO_BACK


def test_what_was_measured_makes_no_other_failure() -> None:
    def stalled(seconds: float, node: str = "a") -> ProcessFault | None:
        message = (
            f"learn makes no progress: nothing for {seconds} s (run.stall_s = 600)"
        )
        return ProcessFault.of(
            DeadlineExceeded(message, role="actor", rank=0, node=node), 3
        )

    first, second, elsewhere = stalled(600.3), stalled(601), stalled(601, node="b")
    assert first is not None and second is not None and first.is_like(second)
    assert elsewhere is not None and not first.is_like(elsewhere)


def test_failures_without_a_new_step_have_a_limit(tmp_path: Path) -> None:
    policy = FaultPolicy(
        RecoveryConfig(
            enabled=True,
            max_restarts=2,
            max_wait_s=60,
            snapshot_every=0,
            snapshot_copies=1,
        ),
        tmp_path,
    )
    policy.note_finished(2)
    assert policy.cure_of(died(method="learn"), 3) is Cure.GO_BACK
    # The run goes back, and finishes what it had finished before.
    policy.note_finished(1)
    policy.note_finished(2)
    assert policy.cure_of(died(method="send"), 3) is Cure.GO_BACK
    third = died(method="score")
    assert policy.cure_of(third, 3) is Cure.STOP
    assert "2 failures before this one brought no new step" in third.__notes__[0]


def test_recovery_can_be_switched_off(tmp_path: Path) -> None:
    policy = FaultPolicy(
        RecoveryConfig(
            enabled=False,
            max_restarts=2,
            max_wait_s=60,
            snapshot_every=0,
            snapshot_copies=1,
        ),
        tmp_path,
    )
    failure = died()
    assert policy.cure_of(failure, 1) is Cure.STOP
    assert failure.__notes__ == [
        "run.recovery.enabled = false: the run does not go on by itself"
    ]
