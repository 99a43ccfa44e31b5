"""Failures of processes, and the decision of a run about them: one table, and a limit.

Invariant: the same failure at the same step is not tried again, and neither is a
mistake of the user.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import ray

from verl_ray.config.run import RecoveryConfig
from verl_ray.errors import (
    ClusterError,
    DeadlineExceeded,
    EngineFailed,
    StaleIncarnation,
    VerlRayError,
    WorkerDied,
    WorkerError,
)
from verl_ray.tracking.history import FAULTS


class FaultKind(StrEnum):
    """The ways in which a process fails."""

    DIED = "died"
    """It ended, or cannot be reached."""

    STALLED = "stalled"
    """It made no progress for run.stall_s."""

    EXHAUSTED = "exhausted"
    """A resource of its machine ran out or broke: memory, a device, a connection."""

    CLUSTER = "cluster"
    """Ray itself failed, so that no process of the run can be reached."""

    DEFECT = "defect"
    """Anything else that was raised, by the program or by code of the user."""


class Cure(StrEnum):
    """The answer of a run to a fault."""

    RESTART = "restart"
    """Start the process again in place, and send its pending requests again."""

    GO_BACK = "go back"
    """Start the lost processes again, load the last state, and replay from there."""

    START_AGAIN = "start again"
    """End this driver; its supervisor starts another one, with a cluster of its own."""

    STOP = "stop"
    """End the run."""


CURES = {
    FaultKind.DIED: Cure.GO_BACK,
    FaultKind.STALLED: Cure.GO_BACK,
    FaultKind.EXHAUSTED: Cure.GO_BACK,
    FaultKind.CLUSTER: Cure.START_AGAIN,
    FaultKind.DEFECT: Cure.STOP,
}
"""What follows from a fault, if it is the first of its kind at its step."""

WITHOUT_STATE = {
    FaultKind.DIED: Cure.RESTART,
    FaultKind.STALLED: Cure.RESTART,
    FaultKind.EXHAUSTED: Cure.RESTART,
}
"""What follows instead where a process needs no state, as a grader or a reference, and
whoever asked it can ask again."""

_WHAT_FOLLOWS = {
    Cure.RESTART: "its pending requests are sent again",
    Cure.GO_BACK: "the run goes back to its last state",
}

# Exceptions, by name, that a process raises where its machine or its peers fail. Those
# of torch's collectives, devices and allocator may be RuntimeErrors, as are mistakes in
# shapes. NumPy's MemoryError has a name of its own.
_EXHAUSTION = re.compile(
    r"\S+ raised (MemoryError|_ArrayMemoryError|OutOfMemoryError|OSError|TimeoutError"
    r"|BrokenPipeError|Connection\w*Error|Dist\w+Error|AcceleratorError"
    r"|RuntimeError:.*(NCCL|gloo|CUDA error|cuDNN|[Cc]onnection|[Tt]imed out"
    r"|[Oo]ut of memory|can't allocate memory|can't start new thread))\b"
)
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class ProcessFault:
    """A failure of a process, as a value."""

    role: str
    rank: int
    node: str
    kind: FaultKind
    step: int
    """The step that was made, or the last finished one between two steps and in an
    evaluation."""
    cause: str
    """The first line of what was found."""

    @classmethod
    def of(cls, failure: BaseException, step: int) -> Self | None:
        """Return the fault behind a failure of the run; None if it is about no process.

        An error that a process raised on purpose explains a mistake, so it is none,
        unless it is that of a broken engine, or of rows that did not arrive.
        """
        error = failure
        if isinstance(failure, EngineFailed | ClusterError):
            error = failure.origin or failure
        if isinstance(error, ray.exceptions.RayError | ClusterError):
            cause = str(error).partition("\n")[0]
            return cls("ray", 0, "this machine", FaultKind.CLUSTER, step, cause)
        if not isinstance(error, WorkerError) or isinstance(error, StaleIncarnation):
            return None

        if isinstance(error, WorkerDied):
            kind = FaultKind.DIED
        elif isinstance(error, DeadlineExceeded):
            kind = FaultKind.STALLED
        elif error is not failure or _EXHAUSTION.match(error.message):
            kind = FaultKind.EXHAUSTED
        else:
            kind = FaultKind.DEFECT
        cause = error.message.partition("\n")[0]
        return cls(error.role, error.rank, error.node, kind, step, cause)

    def is_like(self, other: ProcessFault) -> bool:
        """Whether both have the same cause, whatever was measured.

        Two ranks, or two nodes, that are lost in one long step have two causes.
        """
        return self._signature == other._signature

    @property
    def _signature(self) -> tuple[object, ...]:
        cause = _NUMBER.sub("N", self.cause)
        return self.role, self.rank, self.node, self.kind, self.step, cause

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} on {self.node}: {self.cause}"


class FaultPolicy:
    """Decides about each fault, and records it."""

    def __init__(self, config: RecoveryConfig, folder: Path) -> None:
        """Begin without faults.

        Args:
            config: The settings.
            folder: Folder of the run, which gets the record of faults.
        """
        self._config = config
        self._record = folder / FAULTS
        self._newest_step = 0
        self._since_newest: list[ProcessFault] = []
        """Faults since the newest step was finished for the first time."""

    def note_finished(self, step: int) -> None:
        """Note that a step is finished, for the first time or again."""
        if step > self._newest_step:
            self._newest_step = step
            self._since_newest.clear()

    def may_restart(self, failure: VerlRayError, step: int) -> bool:
        """Return whether a process without state starts again in place; say so.

        That is recorded. Any other failure goes on to `cure_of`, and is not recorded.

        Args:
            failure: The failure of a call that can be made again.
            step: The step that the call was for.
        """
        # Rows that did not arrive at a process are lost, whoever asks for them.
        if isinstance(failure, ClusterError):
            return False
        fault = ProcessFault.of(failure, step)
        if fault is None or fault.kind not in WITHOUT_STATE:
            return False
        if self._refusal(fault) is not None:
            return False

        self._note(fault, WITHOUT_STATE[fault.kind])
        return True

    def cure_of(self, failure: BaseException, step: int) -> Cure:
        """Return what the run does about a failure; say so, and record it.

        Args:
            failure: The failure. Why it is not tried again is added to it as a note.
            step: The step in which it came.
        """
        fault = ProcessFault.of(failure, step)
        if fault is None:
            return Cure.STOP

        refusal = self._refusal(fault)
        cure = CURES[fault.kind] if refusal is None else Cure.STOP
        if refusal is not None and isinstance(failure, VerlRayError):
            failure.add_note(refusal)
        self._note(fault, cure)
        return cure

    def _note(self, fault: ProcessFault, cure: Cure) -> None:
        """Count a fault, record it, and say what happens next if the run goes on."""
        self._since_newest.append(fault)
        self._write(fault, cure)
        if cure in _WHAT_FOLLOWS:
            self._report(fault, _WHAT_FOLLOWS[cure])

    def _refusal(self, fault: ProcessFault) -> str | None:
        """Return why a fault ends the run although its kind need not; else None."""
        if CURES[fault.kind] is Cure.STOP:
            return None
        if not self._config.enabled:
            return "run.recovery.enabled = false: the run does not go on by itself"

        if any(fault.is_like(earlier) for earlier in self._since_newest):
            return (
                f"this is the second time at step {fault.step}, so the run does not try"
                " it again"
            )
        limit = self._config.max_restarts
        if len(self._since_newest) >= limit:
            return (
                f"{len(self._since_newest)} failures before this one brought no new"
                f" step (run.recovery.max_restarts = {limit})"
            )
        return None

    def _report(self, fault: ProcessFault, what_follows: str) -> None:
        """Print what happens next."""
        number, limit = len(self._since_newest), self._config.max_restarts
        print(
            f"warning: {fault}. It starts again, and {what_follows} (failure {number}"
            f" of at most {limit} without a new step)",
            file=sys.stderr,
            flush=True,
        )

    def _write(self, fault: ProcessFault, cure: Cure) -> None:
        """Append the fault to the record, which a full disk may prevent."""
        line = {"time": time.time(), **asdict(fault), "cure": cure}
        with contextlib.suppress(OSError), self._record.open("a") as record:
            record.write(json.dumps(line) + "\n")
