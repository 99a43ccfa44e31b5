"""The start of worker groups: of a whole plan, or of lost ones in place, during a run.

Invariant: of a plan, either all groups run, or no process and no reservation of any
remains.

Groups without state start again in place while the run goes on. Graders are such
groups, and a reference that is alone in its processes and on its devices. A lost one is
asked again for what was pending. A group that is starting again gets no call, and has
no process of before. One that is lost while nobody waits for it starts again, too.
Deliberately not here: rollout replicas, which need weights
(`controllers/rollouts/supervisor.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from verl_ray.cluster.calls import Call, check_progress, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.placement import Place, ProcessSet, place, release
from verl_ray.cluster.processes import (
    Processes,
    Restart,
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
from verl_ray.cluster.stalls import IdleProcesses
from verl_ray.cluster.waiting import CLUSTER_LOSS, TICK_S, Background
from verl_ray.cluster.whereabouts import REGISTRY
from verl_ray.errors import VerlRayError, WorkerError, worker_error_of
from verl_ray.profiling.memory import CallPeaks
from verl_ray.profiling.phases import PHASES
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

    def request_memory(self) -> Callable[[], list[CallPeaks]]:
        """Request the peak memory of each call since the last such request.

        Processes reply also while they are busy.

        Returns:
            Function that waits a moment and returns the replies. Replies of processes
            that are lost are left out.
        """
        rank_calls = [
            rank_call
            for processes in self._sets
            for rank_call in processes.request("memory")
        ]

        def peaks() -> list[CallPeaks]:
            return replies_within(rank_calls, _MEMORY_S)

        return peaks

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

    # `start` kills the processes of a failed start; their bundles remain.
    try:
        start(running)
    except BaseException:
        _release(places.values())
        raise
    return Groups(running, tuple(places.values()))


def _ranks_that_live_together(process_set: ProcessSet) -> list[list[int]]:
    """Ranks of a set, partitioned into those that fail and restart together."""
    ranks = list(range(process_set.num_ranks))
    if process_set.replicas:
        return [[rank] for rank in ranks]
    return [ranks]


def _release(places: Iterable[Place]) -> None:
    # All sets of a plan share one placement group, which may be removed only once.
    groups = {place.group.id: place.group for place in places}
    release(groups.values())


# ----------------------------------------------------------------- groups without state

T = TypeVar("T")

MayRestart = Callable[[VerlRayError, int], bool]
"""Decides about a failure in a step: whether its group starts again in place."""


def never(failure: VerlRayError, step: int) -> bool:
    """Let a failure end the work, as where nobody decides about failures."""
    return False


class InPlaceRestarts:
    """The groups that are starting again in place."""

    def __init__(self, may_restart: MayRestart = never) -> None:
        """Begin with none.

        Args:
            may_restart: Decides about each failure, and records it.
        """
        self._may_restart = may_restart
        self._restarts: dict[WorkerGroup[Any], tuple[Restart, int]] = {}
        """Each with the step in which its group was lost."""
        self._owned: list[WorkerGroup[Any]] = []
        self.num_started = 0
        """How many groups have started again so far."""
        self._idle = IdleProcesses(lambda: filter(self.is_available, self._owned))

    def own(self, groups: Iterable[WorkerGroup[Any]]) -> None:
        """Start these groups again where they are lost, from now on.

        Those that share processes with others are left out, and so are all of them
        where none starts again. Whoever waits has to `check` them.

        Args:
            groups: Groups that need no state.
        """
        if self._may_restart is never:
            return
        for group in groups:
            if not group.shares_processes:
                group.has_owner = True
                self._owned.append(group)

    def call(
        self, group: WorkerGroup[Any], request: Callable[[], Call[T]], step: int
    ) -> RepeatedCall[T]:
        """Make a call, which is made again where its group starts again.

        Args:
            group: The group that is called, owned or not.
            request: Makes the call.
            step: The step that the call is for.
        """
        return RepeatedCall(self, group, request, step)

    def check(self, calls: Iterable[Pending[Any]], step: int) -> None:
        """Start owned groups again that are lost or late; return at once.

        Groups that have started are asked again, and those without a call are looked
        at, too.

        Args:
            calls: Calls that have to make progress, on any groups.
            step: The step that is made.

        Raises:
            VerlRayError: A group is lost or late, and does not start again.
        """
        self.take_started()
        present = [
            call.present() if isinstance(call, RepeatedCall) else call for call in calls
        ]
        try:
            # Of processes that were killed there is nothing more to say.
            check_progress(
                [call for call in present if call is not None and not call.is_stale]
            )
            self._idle.raise_if_lost()
        except WorkerError as error:
            self.begin(error, step)

    def is_available(self, group: WorkerGroup[Any]) -> bool:
        """Return whether a group may be called: it is not starting again."""
        return group not in self._restarts

    def begin(self, error: VerlRayError, step: int) -> None:
        """Kill the owned group that an error is about, and begin to start it again.

        Nothing happens where it is starting already: the error is of the processes
        before. Its pending calls are stale from now on.

        Args:
            error: The failure of a call.
            step: The step that the call was for.

        Raises:
            VerlRayError: `error` itself. It is about none of the groups, or the failure
                is not tried again.
        """
        failure = worker_error_of(error)
        owners = [
            group
            for group in self._owned
            if failure is not None and group.owns(failure)
        ]
        if not owners:
            raise error

        (group,) = owners
        if self.is_available(group):
            self._restart(group, error, step)

    def take_started(self) -> None:
        """Advance all restarts; return at once.

        Raises:
            VerlRayError: A group failed as it started, which is not tried again.
        """
        for group, (restart, step) in list(self._restarts.items()):
            try:
                if restart.poll():
                    del self._restarts[group]
                    self.num_started += 1
            except VerlRayError as error:
                # Nothing of it runs any more.
                del self._restarts[group]
                self._restart(group, error, step)

    def close(self) -> None:
        """Kill the groups that are starting again; the others are stopped elsewhere."""
        for group in self._restarts:
            group.kill()
        self._restarts.clear()

    def _restart(self, group: WorkerGroup[Any], error: VerlRayError, step: int) -> None:
        """Begin to start a group again, or raise the error."""
        if not self._may_restart(error, step):
            raise error
        self._restarts[group] = (group.restart(), step)


class RepeatedCall(Generic[T]):
    """A call that is made again where its group starts again in place."""

    def __init__(
        self,
        restarts: InPlaceRestarts,
        group: WorkerGroup[Any],
        request: Callable[[], Call[T]],
        step: int,
    ) -> None:
        """Make the call, unless its group is starting again. See `InPlaceRestarts`."""
        self._restarts = restarts
        self._group = group
        self._request = request
        self._step = step
        self._call: Call[T] | None = None
        self.present()

    def present(self) -> Call[T] | None:
        """Return the call on the present processes, which is made if it was not yet.

        It is None while they are starting.
        """
        if self._call is not None and self._call.is_stale:
            self._call = None
        if self._call is None and self._restarts.is_available(self._group):
            self._call = self._request()
        return self._call

    def result(
        self,
        watch: Callable[[], None] | None = None,
        background: Background | None = None,
    ) -> T:
        """Wait for the result; `watch` and `background` are as in `wait_all`.

        Raises:
            VerlRayError: The call failed, and its group does not start again; or
                another failure of `watch` or `background`.
        """
        # Each round waits for the call, or a moment for the processes that are
        # starting. It ends with the result, or with a failure that is not tried again.
        while True:
            call = self.present()
            if call is None:
                self._wait_a_moment(watch, background)
                continue
            try:
                (result,) = wait_all([call], watch, background)
                return result
            except VerlRayError as error:
                # The watch or the background may have started the group again.
                if not (call.is_stale and self._is_about_group(error)):
                    self._restarts.begin(error, self._step)

    def _is_about_group(self, error: VerlRayError) -> bool:
        failure = worker_error_of(error)
        return failure is not None and self._group.owns(failure)

    def _wait_a_moment(
        self, watch: Callable[[], None] | None, background: Background | None
    ) -> None:
        """Let the group start, and all else go on."""
        with PHASES.detail(lambda: f"{self._group.role} is starting again"):
            time.sleep(TICK_S / 10)
            # This heeds signals, too.
            self._restarts.take_started()
            if watch is not None:
                watch()
            if background is not None:
                background.advance()


Pending = Call[T] | RepeatedCall[T]
"""A call whose result is waited for."""
