"""Running process sets: actors in their bundles, joined, with their workers built.

Invariant: a start is all or nothing. If any process of any set fails or makes no
progress, all of them are killed. A restart replaces every process of a set, and with
them every role that shares them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import ray

from verl_ray.cluster import process_control
from verl_ray.cluster.calls import (
    collect,
    replies_if_complete,
    reporting_failures_to,
)
from verl_ray.cluster.context import (
    COLLECTIVE,
    CONCURRENCY_GROUPS,
    CONTROL,
    RankSpec,
)
from verl_ray.cluster.host import WorkerHost
from verl_ray.cluster.members import Heartbeat, Member
from verl_ray.cluster.placement import Place, ProcessSet
from verl_ray.cluster.rank_calls import START, RankCall
from verl_ray.cluster.waiting import RAY_CALLS, TICK_S, wait, wait_while_closing
from verl_ray.columns.packing import Topology
from verl_ray.errors import ClusterError
from verl_ray.profiling.trace import SPANS

W = TypeVar("W")

_CLOSE_S = 5.0

# A process replies within a tenth of a second, also on a busy machine within seconds.
_REPLY_S = 10.0

COLLECTIVE_TIMEOUT_FACTOR = 4
"""Timeout of a collective, as a multiple of `run.stall_s`.

The driver reports a rank that makes no progress long before that, and ranks that wait
for one that does make progress are not late.
"""


@dataclass(frozen=True)
class Role(Generic[W]):
    """One role to start.

    Attributes:
        name: Name of the role.
        processes: Name of the process set whose ranks hold the role's workers.
        factory: Function that builds a worker with `factory(context, *args)`.
        args: Further arguments of the factory.
    """

    name: str
    processes: str
    factory: Callable[..., W]
    args: tuple[object, ...] = ()


class Processes:
    """Processes that live and die together: all of a set, or one of its replicas.

    Args:
        spec: Process set that the processes belong to.
        ranks: Ranks of the set that live and die together.
        place: Bundles of the set.
        roles: Roles whose workers the processes hold, in the order of their build.
        log_dir: Directory for the output of the processes.
        stall_s: Seconds for which a process may make no progress.
    """

    def __init__(
        self,
        spec: ProcessSet,
        ranks: Sequence[int],
        place: Place,
        roles: Sequence[Role[Any]],
        log_dir: str,
        stall_s: float,
    ) -> None:
        self.spec = spec
        self.ranks = tuple(ranks)
        self.roles = tuple(roles)
        self.stall_s = stall_s
        self.incarnation = 0
        self.members: list[Member] = []
        self.topologies: dict[str, list[Topology]] = {}
        self.broken = False
        """True once a process died or is stuck, so that the others cannot close."""
        self._place = place
        self.log_dir = log_dir
        self.lenders: Processes | None = None
        """The processes whose GPUs these ones compute on, where they span bundles."""
        self._borrowed: dict[int, tuple[str, ...]] = {}
        """The GPUs of others that each rank was built on, by rank."""

    # ---------------------------------------------------------------------------- start

    def start_steps(self) -> Generator[list[RankCall], list[Any], None]:
        """Start a new incarnation in steps.

        The generator yields the calls of each step, and is sent their replies.
        """
        spawn_replies = yield self.spawn()
        self.note_spawned(spawn_replies)
        build_replies = yield self.build(spawn_replies)
        self.settle(build_replies)

    def spawn(self) -> list[RankCall]:
        """Create the actors of a new incarnation.

        Returns:
            Calls for the location of each process, followed by the call that opens the
            rendezvous of the process group, if there is one.
        """
        self.incarnation += 1
        self.broken = False

        # Ray must not restart or retry anything by itself: a restart replaces all
        # processes of the set.
        remote = ray.remote(
            concurrency_groups=CONCURRENCY_GROUPS, max_restarts=0, max_task_retries=0
        )
        host = remote(WorkerHost)
        self.members = []
        for rank in self.ranks:
            placed = host.options(**self._place.options(rank))
            actor = RAY_CALLS.make(placed.remote, self._rank_spec(rank))
            status = actor.status.options(concurrency_group=CONTROL)
            heartbeat = Heartbeat(status.remote)
            self.members.append(Member(self.spec.name, rank, actor, None, heartbeat))

        rank_calls = [
            self._send(member, "process_info", CONTROL) for member in self.members
        ]
        if self.spec.process_group:
            rank_calls.append(self._send(self.members[0], "listen", CONTROL))
        return rank_calls

    def _rank_spec(self, rank: int) -> RankSpec:
        device = "cpu"
        if self.spec.gpus_per_rank:
            # Ray shows each process its own devices only. One without, which computes
            # on those of others, is told of them as it is built.
            device = "cuda:0"
        return RankSpec(
            processes=self.spec.name,
            rank=rank,
            num_ranks=len(self.ranks),
            device=device,
            threads=self.spec.threads_per_rank,
            process_group=self.spec.process_group,
            log_dir=self.log_dir,
            incarnation=self.incarnation,
            notes_spans=SPANS.is_on,
        )

    def note_spawned(self, spawn_replies: Sequence[Any]) -> None:
        """Store where the processes are.

        Args:
            spawn_replies: Replies to the calls of `spawn`.
        """
        infos = spawn_replies[: len(self.ranks)]
        self.members = [
            replace(member, process_info=info)
            for member, info in zip(self.members, infos, strict=True)
        ]

    def build(self, spawn_replies: Sequence[Any]) -> list[RankCall]:
        """Join the ranks and build the workers of every role, in the order of `roles`.

        Args:
            spawn_replies: Replies to the calls of `spawn`.

        Raises:
            ClusterError: The ranks whose GPUs these ones compute on do not run, or are
                on other nodes.
        """
        num_ranks = len(self.ranks)
        rank_calls = []
        if self.spec.process_group:
            rendezvous = spawn_replies[num_ranks]
            timeout_s = COLLECTIVE_TIMEOUT_FACTOR * self.stall_s
            for member in self.members:
                rank_calls.append(
                    self._send(member, "join", COLLECTIVE, rendezvous, timeout_s)
                )

        self._borrowed = {
            each.rank: self._gpus_of_lenders(each) for each in self.members
        }
        for role in self.roles:
            for member in self.members:
                # An error then names the role whose worker could not be built.
                as_role = replace(member, role=role.name)
                gpus = self._borrowed[member.rank]
                build_args = (role.name, role.factory, role.args, gpus)
                rank_calls.append(self._send(as_role, "build", COLLECTIVE, *build_args))
        return rank_calls

    def _gpus_of_lenders(self, member: Member) -> tuple[str, ...]:
        """Return the GPUs of the ranks in the bundles that a rank spans.

        It is empty where the rank has GPUs of its own.

        Raises:
            ClusterError: These ranks do not run, or are on other nodes.
        """
        if self.lenders is None:
            return ()
        span = self.spec.spans
        first = member.rank * span
        infos = [
            each.process_info
            for each in self.lenders.members
            if first <= each.rank < first + span and each.process_info is not None
        ]
        who = (
            f"{self.spec.name} rank {member.rank} computes on the GPUs of"
            f" {self.lenders.spec.name} ranks {first} to {first + span - 1}"
        )
        if len(infos) < span:
            raise ClusterError(f"{who}, of which {span - len(infos)} do not run")

        assert member.process_info is not None, "it has started"
        nodes = {info.node_id for info in infos}
        if nodes != {member.process_info.node_id}:
            names = sorted({info.node for info in infos})
            raise ClusterError(
                f"{who}, which are on {', '.join(names)}, and itself runs on"
                f" {member.process_info.node}: the GPUs of an engine are on one node"
            )
        return tuple(gpu for info in infos for gpu in info.gpus)

    def check_lenders(self) -> None:
        """Raise ClusterError if ranks that started again compute on other GPUs now."""
        for member in self.members:
            before = self._borrowed[member.rank]
            after = self._gpus_of_lenders(member)
            if before != after:
                raise ClusterError(
                    f"{self.spec.name} rank {member.rank} computes on the GPUs"
                    f" {', '.join(before)}, and Ray has given {', '.join(after)} to the"
                    " ranks that share them since they started again"
                )

    def settle(self, build_replies: Sequence[Any]) -> None:
        """Store the topologies of every role.

        Args:
            build_replies: Replies to the calls of `build`.

        Raises:
            ClusterError: The topologies of a role contradict each other.
        """
        num_ranks = len(self.ranks)
        topology_replies = list(build_replies)
        if self.spec.process_group:
            # The first reply of each rank is the one to `join`.
            topology_replies = topology_replies[num_ranks:]

        for index, role in enumerate(self.roles):
            first = index * num_ranks
            topologies = topology_replies[first : first + num_ranks]
            check_topologies(role.name, topologies)
            self.topologies[role.name] = topologies

    def _send(
        self, member: Member, method: str, concurrency_group: str, *args: object
    ) -> RankCall:
        actor_method = getattr(member.actor, method)
        in_group = actor_method.options(concurrency_group=concurrency_group)
        reply = RAY_CALLS.make(in_group.remote, *args)
        return RankCall(member, f"{START}{method})", None, reply, self.stall_s)

    # ------------------------------------------------------------------- while they run

    @property
    def is_complete(self) -> bool:
        """Whether every process has started and none is known to be stuck."""
        started = [member for member in self.members if member.process_info is not None]
        return len(started) == len(self.ranks) and not self.broken

    def request(self, method: str, but: Collection[int] = ()) -> list[RankCall]:
        """Call a control method of every rank, which replies while it is busy too.

        Args:
            method: Name of the method.
            but: Identities of the handles of processes that are not called.
        """
        started = [
            member
            for member in self.members
            if member.process_info is not None and id(member.actor) not in but
        ]
        rank_calls = [self._send(member, method, CONTROL) for member in started]
        # `_send` names its calls as parts of a start, which this one is not.
        return [replace(rank_call, method=method) for rank_call in rank_calls]

    def restart(self) -> Restart:
        """Kill all processes, then begin to start the next incarnation."""
        self.kill()
        return Restart(self)

    def close(self) -> list[Any]:
        """Request every process to close its workers; return references to wait for."""
        references = []
        for member in self.members:
            in_group = member.actor.close.options(concurrency_group=COLLECTIVE)
            references.append(in_group.remote())
        return references

    def kill(self) -> None:
        """Kill the processes at once."""
        process_control.kill(self.members)
        self.members = []


class Restart:
    """A restart under way. Its owner polls it and does other work meanwhile."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._steps = processes.start_steps()
        self._pending = next(self._steps)

    def poll(self) -> bool:
        """Whether the restart is complete; returns at once.

        Raises:
            VerlRayError: A process failed or makes no progress. All are killed then.
        """
        try:
            # No group may be called yet, so none has to refuse calls after a failure.
            with reporting_failures_to(()):
                replies = replies_if_complete(self._pending)
            if replies is None:
                return False
            # The generator returns after the last step, which raises StopIteration.
            self._pending = self._steps.send(replies)
        except StopIteration:
            return True
        except BaseException:
            self._processes.kill()
            raise
        return False

    def wait(self) -> None:
        """Wait until the restart is complete; raises as `poll` does."""
        while not self.poll():
            references = [rank_call.reply for rank_call in self._pending]
            wait(references, len(references), TICK_S)


def start(sets: Sequence[Processes]) -> None:
    """Start all sets at the same time, in two waves of builds.

    Sets that are `built_first` are built before the others. If any part fails or makes
    no progress, every process is killed and its error raised.
    """
    try:
        spawn_calls = [processes.spawn() for processes in sets]
        spawn_replies = _collect_by_set(spawn_calls)
        spawned = list(zip(sets, spawn_replies, strict=True))
        for processes, replies in spawned:
            processes.note_spawned(replies)

        for built_first in (True, False):
            wave = [
                (processes, replies)
                for processes, replies in spawned
                if processes.spec.built_first is built_first
            ]
            build_calls = [processes.build(replies) for processes, replies in wave]
            build_replies = _collect_by_set(build_calls)
            for (processes, _), replies in zip(wave, build_replies, strict=True):
                processes.settle(replies)
    except BaseException:
        for processes in sets:
            processes.kill()
        raise


def silent_sets(sets: Sequence[Processes]) -> list[Processes]:
    """Return the sets of which a process has ended, or does not reply in time."""
    requests: dict[Any, Processes] = {}
    silent = [processes for processes in sets if not processes.is_complete]
    for processes in sets:
        for member in processes.members:
            status = member.actor.status.options(concurrency_group=CONTROL)
            requests[status.remote()] = processes

    replied = set(wait(list(requests), len(requests), _REPLY_S)) if requests else set()
    for request, processes in requests.items():
        if request not in replied or not _is_reply(request):
            silent.append(processes)
    return silent


def _is_reply(request: Any) -> bool:
    """Whether the reply to a request is no report that the process has ended."""
    try:
        RAY_CALLS.make(ray.get, request)
        return True
    except ray.exceptions.RayError:
        return False


def close(sets: Sequence[Processes]) -> None:
    """Close the workers for a few seconds, then end the processes in any case."""
    try:
        references = []
        for processes in sets:
            if not processes.broken:
                references += processes.close()
        if references:
            wait_while_closing(references, _CLOSE_S)
    finally:
        end(sets)


def end(sets: Sequence[Processes]) -> None:
    """End the processes of all sets; those of a broken set are killed."""
    orderly: list[Member] = []
    for processes in sets:
        if processes.broken:
            processes.kill()
        else:
            orderly += processes.members
            processes.members = []
    process_control.end(orderly)


def check_topologies(role: str, topologies: Sequence[Topology]) -> None:
    """Raise ClusterError unless one rank returns results for each data-parallel rank.

    All ranks must also report the same `dp_size`.
    """
    dp_size = topologies[0].dp_size
    sizes = {topology.dp_size for topology in topologies}
    returning = sorted(
        topology.dp_rank for topology in topologies if topology.returns_results
    )
    if sizes == {dp_size} and returning == list(range(dp_size)):
        return

    reported = [
        (topology.dp_rank, topology.dp_size, topology.returns_results)
        for topology in topologies
    ]
    raise ClusterError(
        f"{role}: each of the data-parallel ranks 0..{dp_size - 1} needs exactly one"
        " rank that returns results; the ranks reported (dp_rank, dp_size,"
        f" returns_results) {reported}"
    )


def _collect_by_set(calls_by_set: Sequence[Sequence[RankCall]]) -> list[list[Any]]:
    """Wait for the replies of several sets at the same time; return them by set."""
    all_calls = [rank_call for calls in calls_by_set for rank_call in calls]
    with reporting_failures_to(()):
        replies = iter(collect(all_calls))
    return [[next(replies) for _ in calls] for calls in calls_by_set]
