"""The processes of this driver: which there are, where each is, and the run's status.

A group is listed from the end of its start to the beginning of its close. A poll asks
each process where it is. A thread of the driver keeps the answers in the status of the
run (`verl_ray/profiling/process_table.py`), with a call per process each time. The
pause between two rounds grows with the number of processes. A call was measured to take
0.08 ms, so 512 processes take about a thousandth of the driver's time.

Invariant: a process that has not answered is not asked again, and nothing here waits
longer than it was told to. Any thread may ask, since nothing heeds signals. The thread
needs nothing from the main thread, which may be stuck. A failure of the thread is
reported and ends nothing but the status.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.core.generated.gcs_pb2 import ActorTableData

from verl_ray.cluster.context import CONTROL, ProcessInfo, Whereabouts
from verl_ray.cluster.members import Member
from verl_ray.cluster.rank_calls import amount
from verl_ray.cluster.waiting import CLUSTER_LOSS
from verl_ray.errors import WorkerError
from verl_ray.ownership import Owner
from verl_ray.profiling.output_lines import WARNINGS
from verl_ray.profiling.phases import PHASES
from verl_ray.profiling.process_table import (
    IDLE,
    Located,
    ProcessRow,
    RunStatus,
    merged,
    numbers,
    uptime_s,
    write_status,
)
from verl_ray.profiling.progress import innermost_own_line

_PAUSE_S = 3.0
_PAUSE_PER_PROCESS_S = 0.1
_ANSWERS_S = 1.0
_END_S = 3.0


class ListedGroup(Protocol):
    """A group of the registry, as who looks at all processes sees it."""

    role: str

    @property
    def stall_s(self) -> float:
        """Seconds for which a process may make no progress."""
        ...

    @property
    def log_dir(self) -> str:
        """Directory for the output of the processes, on each node."""
        ...

    @property
    def is_first_role(self) -> bool:
        """Whether the group is the first of those that share its processes."""
        ...

    @property
    def is_checked_while_idle(self) -> bool:
        """Whether the driver checks the processes also while it waits for others."""
        ...

    def members(self) -> list[Member]:
        """Processes of the group, by rank."""
        ...

    def fail(self, error: WorkerError) -> None:
        """Refuse further calls, because a process is lost."""
        ...


class ProcessRegistry:
    """The groups of one driver, in the order of their starts."""

    def __init__(self) -> None:
        self._groups: tuple[ListedGroup, ...] = ()

    @property
    def groups(self) -> tuple[ListedGroup, ...]:
        """The groups, one per role, which may share processes; any thread may ask."""
        return self._groups

    @property
    def hosts(self) -> list[ListedGroup]:
        """One group for each set of processes that live and die together."""
        return [group for group in self._groups if group.is_first_role]

    def add(self, groups: Iterable[ListedGroup]) -> None:
        """List groups that have started."""
        self._groups = (*self._groups, *groups)

    def remove(self, groups: Iterable[ListedGroup]) -> None:
        """Forget groups that close; those that are not listed have no effect."""
        closing = set(groups)
        self._groups = tuple(group for group in self._groups if group not in closing)


REGISTRY = ProcessRegistry()


_Answer = Whereabouts | str
"""What a process says, or why it says nothing."""


@dataclass(frozen=True)
class Present:
    """The processes of a driver at a moment.

    Attributes:
        rows: A row for each process.
        processes: (role, rank, location) of each process that has started.
    """

    rows: list[ProcessRow]
    processes: list[tuple[str, int, ProcessInfo]]


class ProcessPoll:
    """Asks every process of the registry where it is, again and again."""

    def __init__(self) -> None:
        # Questions without an answer, by the identity of the handle, and their times.
        self._pending: dict[int, tuple[Any, float]] = {}

    def take(self, timeout_s: float, starting: Sequence[Member] = ()) -> Present:
        """Ask all processes; give them so many seconds to answer.

        Args:
            timeout_s: Limit in seconds for all of them together.
            starting: Further processes, which may be in the registry already.
        """
        sets = [(group.role, group.members()) for group in REGISTRY.hosts]
        listed = {id(member.actor) for _, group in sets for member in group}
        by_role: dict[str, list[Member]] = {}
        for member in starting:
            if id(member.actor) not in listed:
                by_role.setdefault(member.role, []).append(member)
        sets += by_role.items()
        members = [member for _, group in sets for member in group]
        answers = self._ask(members, timeout_s)

        rows: list[ProcessRow] = []
        processes = []
        for role, group in sets:
            by_rank = {member.rank: answers[id(member.actor)] for member in group}
            for member in group:
                rows.append(_row(role, member, by_rank))
                if member.process_info is not None:
                    processes.append((role, member.rank, member.process_info))
        return Present(rows, processes)

    def _ask(self, members: list[Member], timeout_s: float) -> dict[int, _Answer]:
        # Without a session Ray would start a cluster for the first request.
        if not ray.is_initialized():
            return {id(member.actor): "cannot be asked any more" for member in members}
        now = time.monotonic()
        present = {id(member.actor): member for member in members}
        self._pending = {
            key: question for key, question in self._pending.items() if key in present
        }
        for key, member in present.items():
            if key not in self._pending:
                control = member.actor.whereabouts.options(concurrency_group=CONTROL)
                self._pending[key] = control.remote(), now

        questions = [question for question, _ in self._pending.values()]
        available: set[Any] = set()
        if questions:
            ready, _ = ray.wait(
                questions, num_returns=len(questions), timeout=timeout_s
            )
            available = set(ready)
        return {
            key: self._answer(key, member, available) for key, member in present.items()
        }

    def _answer(self, key: int, member: Member, available: set[Any]) -> _Answer:
        question, requested_at = self._pending[key]
        if question not in available:
            if member.actor._get_local_state() == ActorTableData.DEAD:
                return "has ended"
            return f"no reply for {time.monotonic() - requested_at:.0f} s"
        del self._pending[key]
        try:
            answer: Whereabouts = ray.get(question)
            return answer
        except ray.exceptions.RayActorError:
            return "has ended"
        except ray.exceptions.RayError as error:
            return f"cannot say: {type(error).__name__}"


def _row(role: str, member: Member, by_rank: Mapping[int, _Answer]) -> ProcessRow:
    answer = by_rank[member.rank]
    node = member.node
    if isinstance(answer, str):
        return ProcessRow(
            role, (member.rank,), (node,), "", answer, None, waits_for="", line=""
        )

    verb, seconds = "", None
    phase = IDLE
    if answer.running is not None:
        role, verb, seconds = answer.running
        phase = amount(answer.progress)
    return ProcessRow(
        role,
        (member.rank,),
        (node,),
        verb,
        phase,
        seconds,
        _waits_for(answer, by_rank),
        answer.line,
    )


def _waits_for(answer: Whereabouts, by_rank: Mapping[int, _Answer]) -> str:
    """The cause of a wait: a collective, with the ranks that are not in it."""
    collective = answer.collective
    if collective is None and answer.progress.waits_for:
        return answer.progress.waits_for
    if collective is None:
        return "another process" if answer.progress.waits_for_others else ""

    missing = []
    unknown = []
    for rank in collective.ranks:
        other = by_rank.get(rank)
        if not isinstance(other, Whereabouts):
            unknown.append(rank)
        elif other.entered.get(collective.group, 0) < collective.sequence:
            missing.append(rank)

    operation = f"{collective.operation} {collective.sequence}"
    others = []
    if missing:
        others.append(f"not entered by {_ranks(missing)}")
    if unknown:
        others.append(f"no reply of {_ranks(unknown)}")
    return f"{operation}: {', '.join(others) or 'all ranks have entered'}"


def _ranks(ranks: list[int]) -> str:
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {numbers(ranks)}"


# ---------------------------------------------------------------- the status of the run


@contextlib.contextmanager
def keeping_status(folder: Path, supervisor: str = "") -> Iterator[None]:
    """Keep the status of a run in its folder during the block, and then say its end.

    Args:
        folder: Folder of the run.
        supervisor: The driver's supervisor as an owner; empty without one.
    """
    thread = _StatusThread(folder, supervisor)
    thread.start()
    ended = "ended"
    try:
        with WARNINGS.kept():
            yield
    except BaseException as failure:
        ended = f"ended: {type(failure).__name__}"
        raise
    finally:
        thread.end(ended)


class _StatusThread(threading.Thread):
    """Writes the status again and again, until it is told to end."""

    def __init__(self, folder: Path, supervisor: str) -> None:
        super().__init__(name="status", daemon=True)
        self._folder = folder
        self._supervisor = supervisor
        self._poll = ProcessPoll()
        self._told_to_end = threading.Event()
        self._rows: tuple[ProcessRow, ...] = ()
        self._processes: tuple[Located, ...] = ()

    def run(self) -> None:
        # Ends when the block does. A round waits a second for answers at most.
        pause_s = _PAUSE_S
        while not self._told_to_end.is_set():
            try:
                pause_s = _PAUSE_S + _PAUSE_PER_PROCESS_S * self._poll_processes()
                # What `end` writes is the last word.
                if self._told_to_end.is_set():
                    return
                write_status(self._folder, self._status("", pause_s))
            except ray.exceptions.RayError:
                # The cluster is about to end, or has ended; the main thread says so.
                pass
            except Exception:
                print("warning: the status of the run is not kept:", file=sys.stderr)
                traceback.print_exc()
                return
            self._told_to_end.wait(pause_s)

    def end(self, ended: str) -> None:
        """End the thread, and write how the run has ended."""
        self._told_to_end.set()
        # A question to a cluster that is lost may take longer.
        self.join(_END_S)
        self._rows = ()
        self._processes = ()
        write_status(self._folder, self._status(ended, 0.0))

    def _poll_processes(self) -> int:
        """Ask all processes; return how many there are."""
        if CLUSTER_LOSS.has_happened:
            return 0
        if not REGISTRY.groups:
            # What was there has ended, as the processes of a warm start do.
            self._rows = ()
            self._processes = ()
            return 0
        present = self._poll.take(_ANSWERS_S)
        host = socket.gethostname()
        self._rows = tuple(merged(present.rows))
        self._processes = tuple(
            Located(role, rank, str(info.owner))
            for role, rank, info in present.processes
            if info.host_name == host
        )
        return len(present.rows)

    def _status(self, ended: str, interval_s: float) -> RunStatus:
        doing = PHASES.glance()
        driver = ProcessRow(
            "driver",
            (0,),
            (socket.gethostname(),),
            verb="",
            phase=doing.text,
            seconds=doing.seconds,
            waits_for="",
            line=innermost_own_line(threading.main_thread().ident),
        )
        return RunStatus(
            driver=str(Owner.here()),
            pid=os.getpid(),
            host=socket.gethostname(),
            written=time.time(),
            uptime_s=uptime_s(),
            interval_s=interval_s,
            ended=ended,
            phase=doing.text,
            rows=() if ended else (driver, *self._rows),
            processes=self._processes,
            count=doing.count,
            warnings=WARNINGS.last,
            supervisor=self._supervisor,
        )
