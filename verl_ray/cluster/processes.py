"""The running form of process sets: actors in their bundles, joined, with the workers of their roles built.

Invariant: start-up is a transaction; if any process of any set fails or makes no progress, all of them end. A restart
replaces every process of a set, and with them every role that shares them. Deliberately not here: calls on workers
(`group.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import ray

from verl_ray.cluster import failures
from verl_ray.cluster.calls import Flight, arrived, collect, failing
from verl_ray.cluster.failures import Member
from verl_ray.cluster.heartbeat import Heartbeat
from verl_ray.cluster.host import WorkerHost
from verl_ray.cluster.lanes import COLLECTIVE, CONTROL, LANES
from verl_ray.cluster.messages import Seat
from verl_ray.cluster.placement import Place, ProcessSet
from verl_ray.cluster.waiting import TICK_S, wait
from verl_ray.errors import ClusterError
from verl_ray.parallel.topology import Topology

W = TypeVar("W")

_CLOSE_S = 5.0
COLLECTIVES_LAST = 4
"""Times run.stall_s: so long ranks wait for each other in one collective. The driver names the one that makes no
progress long before; and those that wait for one that does make progress are not late."""


@dataclass(frozen=True)
class Role(Generic[W]):
    """One role to start: `factory(context, *args)` builds its worker on every rank of the set `processes`."""

    name: str
    processes: str
    factory: Callable[..., W]
    args: tuple[object, ...] = ()


class Processes:
    """The processes of one set that live and die together: all of them, or one of several replicas."""

    def __init__(
        self,
        spec: ProcessSet,
        ranks: Sequence[int],
        place: Place,
        roles: Sequence[Role[Any]],
        log_dir: str,
        stall_s: float,
    ) -> None:
        """`ranks`: those of the set that live and die together; `stall_s`: how long they may make no progress."""
        self.spec = spec
        self.ranks = tuple(ranks)
        self.roles = tuple(roles)
        self.incarnation = 0
        self.broken = False  # a process died or is stuck: the others cannot be asked to end by themselves
        self.members: list[Member] = []
        self.topologies: dict[str, list[Topology]] = {}
        self._place = place
        self._log_dir = log_dir
        self.stall_s = stall_s

    def spawn(self) -> list[Flight]:
        """Create the actors of a new incarnation and ask where they are; rank 0 also where its set will meet."""
        self.incarnation += 1
        self.broken = False
        spec = self.spec
        host = ray.remote(concurrency_groups=LANES, max_restarts=0, max_task_retries=0)(WorkerHost)
        device = "cuda:0" if spec.gpus_per_rank else "cpu"
        self.members = []
        for rank in self.ranks:
            seat = Seat(
                spec.name,
                rank,
                len(self.ranks),
                device,
                spec.threads_per_rank,
                spec.process_group,
                self._log_dir,
                self.incarnation,
            )
            actor = host.options(**self._place.options(rank)).remote(seat)
            heartbeat = Heartbeat(actor.status.options(concurrency_group=CONTROL).remote)
            self.members.append(Member(spec.name, rank, actor, None, heartbeat))
        flights = [self._ask(member, "facts", CONTROL) for member in self.members]
        if spec.process_group:
            flights.append(self._ask(self.members[0], "listen", CONTROL))
        return flights

    def build(self, told: Sequence[Any]) -> list[Flight]:
        """Given the replies to `spawn`: join the ranks and build every role, in the order they were given."""
        ranks = len(self.ranks)
        self.members = [replace(m, facts=facts) for m, facts in zip(self.members, told[:ranks], strict=True)]
        flights = []
        if self.spec.process_group:
            flights += [
                self._ask(member, "join", COLLECTIVE, told[ranks], COLLECTIVES_LAST * self.stall_s)
                for member in self.members
            ]
        for role in self.roles:
            for member in self.members:
                as_role = replace(member, role=role.name)
                flights.append(self._ask(as_role, "build", COLLECTIVE, role.name, role.factory, role.args))
        return flights

    def settle(self, told: Sequence[Any]) -> None:
        """Given the replies to `build`: keep every role's topology. Raises ClusterError when it makes no sense."""
        ranks = len(self.ranks)
        replies = list(told)[ranks if self.spec.process_group else 0 :]
        for index, role in enumerate(self.roles):
            topologies = replies[index * ranks : (index + 1) * ranks]
            check_topologies(role.name, topologies)
            self.topologies[role.name] = topologies

    def ask_memory(self) -> list[Flight]:
        """Of every rank its `CallPeaks`, also while it is busy."""
        there = [member for member in self.members if member.facts is not None]
        flights = [self._ask(member, "memory", CONTROL) for member in there]
        return [replace(flight, method="memory") for flight in flights]

    def close(self) -> list[Any]:
        """Ask every worker to close; references to wait for."""
        return [m.actor.close.options(concurrency_group=COLLECTIVE).remote() for m in self.members]

    def kill(self) -> None:
        """End the processes at once."""
        failures.kill(self.members)
        self.members = []

    def restart(self) -> Restart:
        """End all processes, and begin to start new ones in their place, as one more incarnation; all or nothing."""
        self.kill()
        return Restart(self)

    def start_steps(self) -> Generator[list[Flight], list[Any], None]:
        """The steps of a start: yields what is asked of the processes, and is sent the replies."""
        facts = yield self.spawn()
        told = yield self.build(facts)
        self.settle(told)

    def _ask(self, member: Member, method: str, lane: str, *args: object) -> Flight:
        reply = getattr(member.actor, method).options(concurrency_group=lane).remote(*args)
        return Flight(member, f"start ({method})", None, reply, self.stall_s)


class Restart:
    """New processes on their way. Whoever waits for them asks now and then, and does other things meanwhile."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._steps = processes.start_steps()
        self._asked = next(self._steps)

    def poll(self) -> bool:
        """Whether they are there; returns at once.

        Raises:
            VerlRayError: one of them failed or makes no progress; all have ended by then.
        """
        try:
            with failing(()):
                replies = arrived(self._asked)
            if replies is None:
                return False
            self._asked = self._steps.send(replies)
        except StopIteration:
            return True
        except BaseException:
            self._processes.kill()
            raise
        return False

    def wait(self) -> None:
        """Until they are there; raises as `poll` does."""
        while not self.poll():
            wait([flight.reply for flight in self._asked], len(self._asked), TICK_S)


def start(sets: Sequence[Processes]) -> None:
    """Bring up all sets side by side, but for those to be built first. Raises, with every process ended, if any part
    fails or makes no progress."""
    try:
        spawned = list(zip(sets, _collect_by_set([one.spawn() for one in sets]), strict=True))
        for first in (True, False):
            wave = [(one, facts) for one, facts in spawned if one.spec.built_first is first]
            told = _collect_by_set([one.build(facts) for one, facts in wave])
            for (one, _), replies in zip(wave, told, strict=True):
                one.settle(replies)
    except BaseException:
        for one in sets:
            one.kill()
        raise


def close(sets: Sequence[Processes]) -> None:
    """Close the workers, then end the processes whether or not that was done in time."""
    try:
        asked = [reference for one in sets if not one.broken for reference in one.close()]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=_CLOSE_S)
    finally:
        for one in sets:
            one.kill()


def check_topologies(role: str, topologies: Sequence[Topology]) -> None:
    """Every row coordinate must be there, and answered for exactly once."""
    count = topologies[0].row_count
    answering = sorted(t.row_index for t in topologies if t.answers)
    if any(t.row_count != count for t in topologies) or answering != list(range(count)):
        told = [(t.row_index, t.row_count, t.answers) for t in topologies]
        raise ClusterError(
            f"{role}: each of the row coordinates 0..{count - 1} needs exactly one rank that answers; the ranks told "
            f"(row_index, row_count, answers) {told}"
        )


def _collect_by_set(flights: Sequence[Sequence[Flight]]) -> list[list[Any]]:
    with failing(()):
        replies = iter(collect([flight for one in flights for flight in one]))
    return [[next(replies) for _ in one] for one in flights]
