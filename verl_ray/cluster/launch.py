"""From a plan of process sets and roles to worker groups that can be called.

Invariant: all groups are up, or nothing is left of any. Deliberately not here: which sets and roles a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from verl_ray.cluster.calls import Deadline, collect
from verl_ray.cluster.group import CALL_KEY, WorkerGroup
from verl_ray.cluster.placement import Place, ProcessSet, place, release
from verl_ray.cluster.processes import START_KEY, Processes, Role, close, start
from verl_ray.profiling.memory import CallPeaks

W = TypeVar("W")


class Groups:
    """The groups of a run: `groups[role]` is the group that was started for this `Role`."""

    def __init__(self, sets: Sequence[Processes], places: Sequence[Place], call_deadline_s: float) -> None:
        self._sets = sets
        self._places = places
        self._call_deadline_s = call_deadline_s
        self._groups: dict[str, WorkerGroup[Any]] = {
            role.name: WorkerGroup(role.name, one, call_deadline_s) for one in sets for role in one.roles
        }

    def __getitem__(self, role: Role[W]) -> WorkerGroup[W]:
        return cast(WorkerGroup[W], self._groups[role.name])

    def ask_memory(self) -> Callable[[], list[CallPeaks]]:
        """Ask all processes what they held in the calls that ended since this was asked last; they answer while they
        are busy. Returns what waits for the answers."""
        deadline = Deadline.of(self._call_deadline_s, CALL_KEY)
        flights = [flight for one in self._sets for flight in one.ask_memory(deadline)]
        return lambda: collect(flights)

    def close(self) -> None:
        """Close all workers, end their processes and give the bundles back. Closing twice is closing once."""
        try:
            close(self._sets)
        finally:
            release({one.group.id: one.group for one in self._places}.values())
            self._sets, self._places = (), ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def start_groups(
    sets: Sequence[ProcessSet],
    roles: Sequence[Role[Any]],
    *,
    start_deadline_s: float,
    call_deadline_s: float,
    log_dir: Path,
) -> Groups:
    """Reserve bundles, start all processes side by side, join them and build every role's workers.

    Roles of one set are built in the given order. Raises ClusterError when the cluster cannot hold the plan, and the
    typed error of the part (set or role, rank, node) that failed or was late; everything else is ended by then.
    """
    unknown = {role.processes for role in roles} - {one.name for one in sets}
    if unknown:
        raise ValueError(f"roles name process sets that are not in the plan: {sorted(unknown)}")
    deadline = Deadline.of(start_deadline_s, START_KEY)
    places = place(sets, start_deadline_s)
    running = [
        Processes(
            one,
            places[one.name],
            [role for role in roles if role.processes == one.name],
            str(log_dir.resolve()),
            call_deadline_s,
        )
        for one in sets
    ]
    try:
        start(running, deadline)
    except BaseException:
        release({one.group.id: one.group for one in places.values()}.values())
        raise
    return Groups(running, tuple(places.values()), call_deadline_s)
