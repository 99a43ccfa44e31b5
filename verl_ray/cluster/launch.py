"""From a plan of process sets and roles to worker groups that can be called.

Invariant: all groups are up, or nothing is left of any. Deliberately not here: which sets and roles a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from verl_ray.cluster.calls import answered
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.placement import Place, ProcessSet, place, release
from verl_ray.cluster.processes import Processes, Role, close, start
from verl_ray.profiling.memory import CallPeaks

W = TypeVar("W")

_MEMORY_S = 2.0  # for a record that nothing depends on


class Groups:
    """The groups of a run: `groups[role]` is the group that was started for this `Role`."""

    def __init__(self, sets: Sequence[Processes], places: Sequence[Place]) -> None:
        self._sets = sets
        self._places = places
        self._groups: dict[str, list[WorkerGroup[Any]]] = {}
        for one in sets:
            for role in one.roles:
                self._groups.setdefault(role.name, []).append(WorkerGroup(role.name, one))

    def __getitem__(self, role: Role[W]) -> WorkerGroup[W]:
        (group,) = self._groups[role.name]
        return cast(WorkerGroup[W], group)

    def replicas(self, role: Role[W]) -> tuple[WorkerGroup[W], ...]:
        """The groups of a role whose processes are replicas, one each."""
        return tuple(self._groups[role.name])

    def ask_memory(self) -> Callable[[], list[CallPeaks]]:
        """Ask all processes what they held in the calls that ended since this was asked last; they answer while they
        are busy. Returns what waits a moment for the answers; those of processes that are lost are left out."""
        flights = [flight for one in self._sets for flight in one.ask_memory()]
        return lambda: answered(flights, _MEMORY_S)

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
    stall_s: float,
    log_dir: Path,
) -> Groups:
    """Reserve bundles, start all processes side by side, join them and build every role's workers.

    Sets that are `built_first` are built before the others, roles of one set in the given order. Raises ClusterError
    when the cluster cannot hold the plan, and the typed error of the part (set or role, rank, node) that failed or made
    no progress for `stall_s` seconds, which is the limit of later calls, too; everything else is ended by then.
    """
    unknown = {role.processes for role in roles} - {one.name for one in sets}
    if unknown:
        raise ValueError(f"roles name process sets that are not in the plan: {sorted(unknown)}")
    places = place(sets, stall_s)
    running = [
        Processes(
            one,
            ranks,
            places[one.name],
            [role for role in roles if role.processes == one.name],
            str(log_dir.resolve()),
            stall_s,
        )
        for one in sets
        for ranks in ([[rank] for rank in range(one.num_ranks)] if one.replicas else [list(range(one.num_ranks))])
    ]
    try:
        start(running)
    except BaseException:
        release({one.group.id: one.group for one in places.values()}.values())
        raise
    return Groups(running, tuple(places.values()))
