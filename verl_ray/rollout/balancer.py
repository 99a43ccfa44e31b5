"""Which server draws what: sticky by session, else the least loaded one that is there.

Invariant: an item is with one server at a time, and waits at most until one has room; a session stays with its server
as long as that is there, since its prefix is cached there. Deliberately not here: servers, and how they are found to be
well or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Item(Generic[K]):
    """Something to draw: `size` responses that share a prefix."""

    session: K
    size: int


class Balancer(Generic[S, K]):
    def __init__(self, servers: Iterable[S], room: int) -> None:
        """`room`: responses that a server draws at a time; a larger item has a server to itself."""
        self._room = room
        self._loads: dict[S, int] = dict.fromkeys(servers, 0)
        self._homes: dict[K, S] = {}
        self._waiting: deque[Item[K]] = deque()

    @property
    def servers(self) -> tuple[S, ...]:
        return tuple(self._loads)

    @property
    def waiting(self) -> int:
        """Items that no server has."""
        return len(self._waiting)

    def add(self, items: Iterable[Item[K]], *, first: bool = False) -> None:
        """Items to draw, behind those that wait, or before them."""
        if first:
            self._waiting.extendleft(reversed(list(items)))
        else:
            self._waiting.extend(items)

    def assign(self, busy: Container[S] = ()) -> dict[S, list[Item[K]]]:
        """Hand out what servers have room for, in the order it came: to the session's server, else the least loaded.

        An item that must wait for its session's server lets none behind it pass. `busy`: servers that take none now.
        """
        given: dict[S, list[Item[K]]] = {}
        while self._waiting and (free := [server for server in self._loads if server not in busy]):
            item = self._waiting[0]
            home = self._homes.get(item.session)
            server = home if home in self._loads else min(free, key=self._loads.__getitem__)
            assert server is not None
            load = self._loads[server]
            if server in busy or (load and load + item.size > self._room):
                break
            self._waiting.popleft()
            self._loads[server] += item.size
            self._homes[item.session] = server
            given.setdefault(server, []).append(item)
        return given

    def done(self, server: S, responses: int) -> None:
        """A server has finished so many responses. One that has left since: no effect."""
        if server in self._loads:
            self._loads[server] -= responses

    def leave(self, server: S) -> None:
        """The server is gone: nothing goes to it any more, and its sessions may go anywhere."""
        self._loads.pop(server, None)
        self._homes = {session: home for session, home in self._homes.items() if home != server}

    def join(self, server: S) -> None:
        """A server is there, with nothing to do."""
        self._loads[server] = 0

    def forget(self) -> None:
        """All sessions are over."""
        self._homes.clear()
