"""Connections of the gateway: how many are open, and whose they are.

Invariant: they are well below the files that the process may have open, so that nobody
who connects keeps others from doing so. One that shows no key in time is closed.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from aiohttp import web

from verl_ray.errors import CallRefused

_MOST_OPEN = 8192

_MOST_ACCEPTED = 1024
"""Connections that are accepted at once, before any of them may be closed."""

_MOST_OF_AN_OWNER = 256

_FIRST_KEY_S = 10.0
"""Seconds from the beginning of a connection to the first request with a key."""

# Lines of a log would hold what agents write into their requests.
_OPTIONS: dict[str, Any] = {"access_log": None}


class Connections:
    """The open connections, by their owners.

    Attributes:
        most: How many may be open: half of the files that the process may have.
    """

    def __init__(self) -> None:
        """Begin without any, and let the process have as many files as it may."""
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
        is_bounded = files != resource.RLIM_INFINITY
        self.most = min(_MOST_OPEN, files // 2) if is_bounded else _MOST_OPEN
        self._num_open = 0
        # In the order in which they came. Those of None have shown no key.
        self._owned: dict[object, dict[Connection, None]] = {None: {}}

    async def listen(self, server: web.Server, host: str) -> asyncio.Server:
        """Listen on a free port for connections to a server."""
        return await asyncio.get_running_loop().create_server(
            lambda: Connection(self, server),
            host,
            0,
            backlog=max(1, min(_MOST_ACCEPTED, self.most // 2)),
        )

    def claim(self, connection: Connection, owner: object) -> None:
        """Record whose connection it is, by the key of its latest request.

        Raises:
            CallRefused: The owner has as many as one may have.
        """
        owned = self._owned.setdefault(owner, {})
        if connection in owned:
            return
        if len(owned) >= _MOST_OF_AN_OWNER:
            raise CallRefused(
                f"this episode has {_MOST_OF_AN_OWNER} connections, which is the most;"
                " ask in fewer requests at a time",
                status=429,
            )
        self._forget(connection)
        owned[connection] = None
        connection.owner = owner

    def close_all(self, owner: object) -> None:
        """Close the connections of an owner, who has no others afterwards."""
        for connection in self._owned.pop(owner, {}):
            connection.cut()

    def begin(self, connection: Connection) -> None:
        """Take a new connection, in the place of another one if there are too many."""
        self._num_open += 1
        self._owned[None][connection] = None
        if self._num_open > self.most:
            # Whoever has most gives up the oldest, after those without a key.
            owned = self._owned[None]
            if len(owned) == 1:
                owned = max(self._owned.values(), key=len)
            self._cut(next(iter(owned)))

    def end(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._num_open -= 1
        self._forget(connection)

    def cut_stranger(self, connection: Connection) -> None:
        """Close a connection unless it has shown a key."""
        if connection in self._owned[None]:
            self._cut(connection)

    def _cut(self, connection: Connection) -> None:
        self._forget(connection)
        connection.cut()

    def _forget(self, connection: Connection) -> None:
        self._owned.get(connection.owner, {}).pop(connection, None)


class Connection(web.RequestHandler):
    """A connection, which is counted as long as it is open.

    Attributes:
        owner: Whose it is; None if it has shown no key.
    """

    def __init__(self, connections: Connections, server: web.Server) -> None:
        """Take where it is counted, and the server that it is to."""
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **_OPTIONS)
        self.owner: object = None
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, with a deadline for the first key."""
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        cut = self._connections.cut_stranger
        self._deadline = loop.call_later(_FIRST_KEY_S, cut, self)
        self._connections.begin(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            self._connections.end(self)
        super().connection_lost(exc)

    def cut(self) -> None:
        """Close it, whatever is not sent yet."""
        if self.transport is not None:
            self.transport.abort()
