"""Assignment of work to rollout replicas: by session, or else to the least full one.

Invariant: an item is with a single replica at a time, and waits until a replica can
take it. A session stays with its replica as long as that exists, since its prefix is
cached there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class WorkItem(Generic[K]):
    """Responses to generate that share a prefix.

    Attributes:
        session: Identifies the prefix.
        size: Number of responses.
    """

    session: K
    size: int


class Balancer(Generic[R, K]):
    """A queue of items in front of the replicas, which may come and go."""

    def __init__(self, replicas: Iterable[R], limit: int) -> None:
        """Begin with replicas that have no work.

        Args:
            replicas: The replicas that take items.
            limit: Responses that a replica generates at a time. A larger item has a
                replica to itself.
        """
        self._limit = limit
        self._limits: dict[R, int] = {}
        """Replicas with a limit of their own."""
        self._loads: dict[R, int] = dict.fromkeys(replicas, 0)
        self._homes: dict[K, R] = {}
        self._waiting: deque[WorkItem[K]] = deque()

    @property
    def replicas(self) -> tuple[R, ...]:
        """The replicas that take items."""
        return tuple(self._loads)

    @property
    def waiting(self) -> int:
        """Number of items that no replica has."""
        return len(self._waiting)

    def add(self, items: Iterable[WorkItem[K]], *, first: bool = False) -> None:
        """Queue items.

        Args:
            items: The items, which keep their order.
            first: Queue them before those that wait already, instead of behind them.
        """
        if first:
            self._waiting.extendleft(reversed(list(items)))
        else:
            self._waiting.extend(items)

    def assign(self, busy: Container[R] = ()) -> dict[R, list[WorkItem[K]]]:
        """Assign the items that replicas can take now, in the order of the queue.

        An item goes to the replica of its session, or else to one without work, or else
        to the one that is farthest below its limit. The loop consumes the queue until
        it is empty or its first item has to wait; no item passes another.

        Args:
            busy: Replicas that take no items now.

        Returns:
            The items of each replica that gets any.
        """
        assigned: dict[R, list[WorkItem[K]]] = {}
        free = [replica for replica in self._loads if replica not in busy]

        while self._waiting and free:
            item = self._waiting[0]
            replica = self._homes.get(item.session)
            if replica is None or replica not in self._loads:
                replica = min(free, key=self._fullness)

            # A replica without work takes an item of any size.
            has_work, excess = self._fullness(replica)
            is_full = has_work and excess + item.size > 0
            if replica in busy or is_full:
                break

            self._waiting.popleft()
            self._loads[replica] += item.size
            self._homes[item.session] = replica
            assigned.setdefault(replica, []).append(item)
        return assigned

    def place(self, replica: R, items: Iterable[WorkItem[K]]) -> None:
        """Assign items to a replica at once, although others wait for it."""
        for item in items:
            self._loads[replica] += item.size
            self._homes[item.session] = replica

    def _fullness(self, replica: R) -> tuple[bool, int]:
        """Return whether a replica has work, and how far it is above its limit."""
        load = self._loads[replica]
        return load > 0, load - self._limits.get(replica, self._limit)

    def finish(self, replica: R, responses: int) -> None:
        """Subtract finished responses from the load of a replica that still exists."""
        if replica in self._loads:
            self._loads[replica] -= responses

    def remove_replica(self, replica: R) -> None:
        """Assign nothing to a replica any more, and its sessions to any other."""
        self._loads.pop(replica, None)
        self._limits.pop(replica, None)
        self._homes = {
            session: home for session, home in self._homes.items() if home != replica
        }

    def add_replica(self, replica: R) -> None:
        """Assign items to a replica that has no work yet."""
        self._loads[replica] = 0

    def load(self, replica: R) -> int:
        """Return the number of responses that a replica has not finished yet."""
        return self._loads.get(replica, 0)

    def capacity(self, replica: R) -> int:
        """Return the number of responses that a replica may generate in addition."""
        limit = self._limits.get(replica, self._limit)
        return max(0, limit - self.load(replica))

    def set_limit(self, replica: R, limit: int) -> None:
        """Let a replica generate this many responses at a time from now on."""
        self._limits[replica] = limit

    def forget(self, sessions: Iterable[K]) -> None:
        """Let these sessions go to any replica: none of their items comes again."""
        for session in sessions:
            self._homes.pop(session, None)

    def forget_sessions(self) -> None:
        """Let every session go to any replica."""
        self._homes.clear()
