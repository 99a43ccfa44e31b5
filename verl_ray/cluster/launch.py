"""The worker groups of a run: the start of a whole plan, and of lost processes again.

Invariant: of a plan, either all groups run, or no process and no reservation of any
remains.

Deliberately not here: groups that start again while the run goes on (`restarts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.placement import Place, ProcessSet, place, release
from verl_ray.cluster.processes import (
    Processes,
    Role,
    close,
    silent_sets,
    start,
)
from verl_ray.cluster.rank_calls import (
    RankCall,
    ready_replies,
    replies_within,
    take_ready,
)
from verl_ray.cluster.waiting import CLUSTER_LOSS
from verl_ray.cluster.whereabouts import REGISTRY
from verl_ray.profiling.machine_use import MachineUse
from verl_ray.profiling.memory import CallPeaks
from verl_ray.profiling.trace import ProcessSpans

W = TypeVar("W")

# Short, since nothing depends on the record of memory.
_MEMORY_S = 2.0


class Groups:
    """The groups of a run; `groups[role]` is the group that was started for a `Role`.

    Use it as a context manager, or call `close`.
    """

    def __init__(self, sets: Sequence[Processes], places: Sequence[Place]) -> None:
        self._sets = sets
        self._places = places
        self._groups: dict[str, list[WorkerGroup[Any]]] = {}
        for processes in sets:
            for role in processes.roles:
                group: WorkerGroup[Any] = WorkerGroup(role.name, processes)
                self._groups.setdefault(role.name, []).append(group)
        self._span_calls: list[RankCall] = []
        """Requests of spans without a reply so far."""
        REGISTRY.add(self._all())

    def __getitem__(self, role: Role[W]) -> WorkerGroup[W]:
        """The only group of a role whose processes are not replicas."""
        (group,) = self._groups[role.name]
        return cast(WorkerGroup[W], group)

    def replicas(self, role: Role[W]) -> tuple[WorkerGroup[W], ...]:
        """Groups of a role whose processes are replicas, one group per replica."""
        return self.named(role.name)

    def named(self, role: str) -> tuple[WorkerGroup[Any], ...]:
        """Groups of a role by its name, one group per replica."""
        return tuple(self._groups[role])

    def _all(self) -> list[WorkerGroup[Any]]:
        return [group for named in self._groups.values() for group in named]

    def lost(self, also: Iterable[WorkerGroup[Any]] = ()) -> list[Processes]:
        """Find the processes that failed, ended or do not reply.

        Args:
            also: Groups whose processes count as lost in any case.
        """
        given_up = [*also, *(group for group in self._all() if group.has_failed)]
        silent = silent_sets(self._sets)
        return [
            processes
            for processes in self._sets
            if processes in silent
            or any(group.runs_in([processes]) for group in given_up)
        ]

    def kill(self, groups: Sequence[WorkerGroup[Any]]) -> None:
        """Kill the processes of groups at once, so that their workers close nothing."""
        for processes in self._sets:
            if any(group.runs_in([processes]) for group in groups):
                processes.kill()

    def restart(self, lost: Sequence[Processes]) -> None:
        """Kill these processes and start them again, all at the same time.

        Raises:
            VerlRayError: A part failed or made no progress. None of them runs then.
        """
        for processes in lost:
            processes.kill()
        start(lost)
        for processes in self._sets:
            if processes.lenders is not None and processes not in lost:
                processes.check_lenders()

    def request_usage(self) -> Callable[[], list[tuple[CallPeaks, MachineUse]]]:
        """Request peak memory of each call, and machine use, since the last request.

        Processes reply also while they are busy.

        Returns:
            Function that waits a moment and returns the replies. Replies of processes
            that are lost are left out.
        """
        rank_calls = [
            rank_call
            for processes in self._sets
            for rank_call in processes.request("usage")
        ]

        def usage() -> list[tuple[CallPeaks, MachineUse]]:
            return replies_within(rank_calls, _MEMORY_S)

        return usage

    def take_spans(
        self, within_s: float, *, waits_for_late: bool = False
    ) -> list[ProcessSpans]:
        """Return what processes did since the last time, of those that reply soon.

        Processes reply also while they are busy. A process that has not replied is
        neither asked nor waited for again before it has; its reply is returned by the
        first call after it came. Replies of processes that are lost are left out.

        Args:
            within_s: Limit in seconds of the wait.
            waits_for_late: Whether to wait also for processes that were late before.
        """
        late = {id(rank_call.member.actor) for rank_call in self._span_calls}
        requested: list[RankCall] = []
        for processes in self._sets:
            requested += processes.request("spans", late)
        # A wait that is interrupted loses no reply.
        self._span_calls += requested
        ready_replies(self._span_calls if waits_for_late else requested, within_s)
        return take_ready(self._span_calls, 0.0)

    def close(self) -> None:
        """Close all workers, stop their processes and release the bundles.

        A second call has no effect.
        """
        REGISTRY.remove(self._all())
        # The bundles are released even if a process could not be stopped. Of a cluster
        # that is lost, the guard ends all processes.
        if CLUSTER_LOSS.has_happened:
            self._sets = ()
            self._places = ()
            return
        try:
            close(self._sets)
        finally:
            _release(self._places)
            self._sets = ()
            self._places = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def start_groups(
    sets: Sequence[ProcessSet],
    roles: Sequence[Role[Any]],
    *,
    stall_s: float,
    log_dir: Path,
) -> Groups:
    """Reserve bundles, start and join all processes, and build every role's workers.

    Sets that are `built_first` are built before the others. Roles of one set are built
    in the order of `roles`.

    Args:
        sets: Process sets to start.
        roles: Roles to build; each names its process set.
        stall_s: Seconds for which a process may make no progress, now and in later
            calls.
        log_dir: Directory for the output of the processes.

    Raises:
        ClusterError: The cluster cannot hold the plan.
        VerlRayError: A part failed or made no progress; the error names its set or
            role, rank and node. All other parts are stopped then.
    """
    set_names = {process_set.name for process_set in sets}
    unknown = {role.processes for role in roles} - set_names
    if unknown:
        raise ValueError(
            f"roles name process sets that are not in the plan: {sorted(unknown)}"
        )

    places = place(sets, stall_s)
    running: list[Processes] = []
    for process_set in sets:
        set_roles = [role for role in roles if role.processes == process_set.name]
        for ranks in _ranks_that_live_together(process_set):
            running.append(
                Processes(
                    spec=process_set,
                    ranks=ranks,
                    place=places[process_set.name],
                    roles=set_roles,
                    log_dir=str(log_dir.resolve()),
                    stall_s=stall_s,
                )
            )

    _join_lenders(running)
    # `start` kills the processes of a failed start; their bundles remain.
    try:
        start(running)
    except BaseException:
        _release(places.values())
        raise
    return Groups(running, tuple(places.values()))


def _join_lenders(running: Sequence[Processes]) -> None:
    """Let ranks that span bundles know the processes whose GPUs are in them."""
    for processes in running:
        if processes.spec.spans > 1:
            # The largest set has a rank in every bundle.
            processes.lenders = max(
                (
                    each
                    for each in running
                    if each.spec.spans == 1
                    and each.spec.bundle_group == processes.spec.bundle_group
                ),
                key=lambda each: each.spec.num_ranks,
            )


def _ranks_that_live_together(process_set: ProcessSet) -> list[list[int]]:
    """Ranks of a set, partitioned into those that fail and restart together."""
    ranks = list(range(process_set.num_ranks))
    if process_set.replicas:
        return [[rank] for rank in ranks]
    return [ranks]


def _release(places: Iterable[Place]) -> None:
    # Sets share placement groups, each of which may be removed only once.
    groups = {place.group.id: place.group for place in places}
    release(groups.values())
