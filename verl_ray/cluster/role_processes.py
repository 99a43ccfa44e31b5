"""The processes of the workers of one role, and whether one of them is lost.

Invariant: a group that failed once refuses further calls until it is restarted.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

import ray

from verl_ray.cluster.context import (
    Status,
)
from verl_ray.cluster.members import Member
from verl_ray.cluster.processes import Processes, Restart
from verl_ray.cluster.rank_calls import died, stalled
from verl_ray.columns.batch import Int64
from verl_ray.columns.packing import Topology, balance, estimated_work
from verl_ray.errors import DeadlineExceeded, WorkerDied, WorkerError


class RoleProcesses:
    """The processes that hold the ranks of one role."""

    def __init__(self, role: str, processes: Processes) -> None:
        self.role = role
        self._processes = processes
        self._failure: WorkerError | None = None
        self._failed_incarnation = 0
        self.has_owner = False
        """Whether somebody looks at the processes while they are idle, and starts them
        again."""

    # ----------------------------------------------------------------------- properties

    @property
    def incarnation(self) -> int:
        """Number of the present incarnation: 1 at first, plus one for each restart."""
        return self._processes.incarnation

    @property
    def stall_s(self) -> float:
        """Seconds for which a process may make no progress while a call is pending."""
        return self._processes.stall_s

    @property
    def log_dir(self) -> str:
        """Directory for the output of the processes, on each node."""
        return self._processes.log_dir

    @property
    def num_ranks(self) -> int:
        """Number of processes of this role."""
        return len(self._processes.ranks)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, over which `scatter` splits rows."""
        return self.topologies[0].dp_size

    def partition(self, lengths: Int64) -> list[Int64]:
        """Row numbers of each data-parallel rank, in near equal shares of work.

        Args:
            lengths: Lengths of the rows in tokens, int64 [rows]. The workers' model
                determines how much work a row of some length is.
        """
        work = estimated_work(lengths, self.topologies[0].quadratic)
        return balance(work, self.dp_size)

    def members(self) -> list[Member]:
        """Processes of the group, by rank."""
        return [replace(member, role=self.role) for member in self._processes.members]

    @property
    def topologies(self) -> list[Topology]:
        """Topology of each rank."""
        return self._processes.topologies[self.role]

    @property
    def is_first_role(self) -> bool:
        """Whether the group is the first of those that share its processes."""
        return self._processes.roles[0].name == self.role

    @property
    def is_checked_while_idle(self) -> bool:
        """Whether the driver checks the processes also while it waits for others.

        A replica has an owner that does, and so may others. Processes that start, are
        lost or are killed are no longer idle.
        """
        has_owner = self.has_owner or self._processes.spec.replicas
        return not has_owner and self._processes.is_complete

    # ---------------------------------------------------------------- the control group

    def check_heartbeat(
        self, interval_s: float, deadline_s: float, limit: str
    ) -> Status | None:
        """Last status of a group of one process, requested at regular intervals.

        The method returns at once while the process is well.

        Args:
            interval_s: Seconds between two requests.
            deadline_s: Seconds that the process may take to reply.
            limit: Setting and value that define `deadline_s`, for the message.

        Returns:
            The last reply; None before the first.

        Raises:
            WorkerDied: The process has ended.
            DeadlineExceeded: The process has not replied for `deadline_s` seconds.
        """
        (member,) = self.members()
        try:
            if not member.heartbeat.poll(interval_s, deadline_s):
                since = time.monotonic() - member.heartbeat.unanswered_s
                raise stalled(
                    [member], "the control group", limit, since=since, mute=True
                )
        except ray.exceptions.RayError as error:
            raise died(member, "status", error) from error
        return member.heartbeat.status

    # ------------------------------------------------------------ failures and restarts

    def restart(self) -> Restart:
        """Start new processes for this group and every group that shares them.

        Each of these groups gets the next incarnation. The method returns at once; the
        group may be called once the restart is complete.
        """
        return self._processes.restart()

    def kill(self) -> None:
        """Kill the processes at once, also those of a restart that is under way."""
        self._processes.kill()

    def owns(self, error: WorkerError) -> bool:
        """Whether the error is about a process of this group."""
        return error.role == self.role and error.rank in self._processes.ranks

    @property
    def has_failed(self) -> bool:
        """Whether this incarnation refuses calls."""
        failed = self._failure is not None
        return failed and self._failed_incarnation == self.incarnation

    @property
    def shares_processes(self) -> bool:
        """Whether the processes of the group hold other roles, too."""
        return len(self._processes.roles) > 1

    def runs_in(self, sets: Collection[Processes]) -> bool:
        """Whether the processes of the group are one of these sets."""
        return self._processes in sets

    def fail(self, error: WorkerError) -> None:
        """Refuse further calls of this incarnation, with this error as the reason."""
        self._failure = error
        self._failed_incarnation = self.incarnation
        # After any other failure the processes can still close their workers.
        if isinstance(error, WorkerDied | DeadlineExceeded):
            self._processes.broken = True

    def _usable_members(self) -> list[Member]:
        """Processes of the group; raise its first failure again if it has failed."""
        failure = self._failure
        if failure is None or not self.has_failed:
            return self.members()

        message = (
            "the group failed earlier and was not restarted; first failure:"
            f" {failure.message}"
        )
        raise type(failure)(
            message,
            role=failure.role,
            rank=failure.rank,
            node=failure.node,
            detail=failure.detail,
            output=failure.output,
        ) from failure
