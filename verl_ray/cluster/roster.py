"""The groups of worker processes that this driver has started.

Invariant: a group is listed from the end of its start to the beginning of its close.
Deliberately not here: what is done with its processes (`idle_processes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports the users of this module
    from verl_ray.cluster.role_processes import RoleProcesses


class Roster:
    """The groups of one driver, in the order of their starts."""

    def __init__(self) -> None:
        self._groups: tuple[RoleProcesses, ...] = ()

    @property
    def groups(self) -> tuple[RoleProcesses, ...]:
        """The groups, one per role, which may share processes; any thread may ask."""
        return self._groups

    @property
    def hosts(self) -> list[RoleProcesses]:
        """One group for each set of processes that live and die together."""
        return [group for group in self._groups if group.is_first_role]

    def add(self, groups: Iterable[RoleProcesses]) -> None:
        """List groups that have started."""
        self._groups = (*self._groups, *groups)

    def remove(self, groups: Iterable[RoleProcesses]) -> None:
        """Forget groups that close; those that are not listed have no effect."""
        closing = set(groups)
        self._groups = tuple(group for group in self._groups if group not in closing)


ROSTER = Roster()
