"""A process of episodes as its pool's event loop sees it: its frames, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from verl_ray.agents.loop_watch import CodePlace, place_in_note
from verl_ray.processes.child import ChildProcess
from verl_ray.processes.frames import READ_BYTES, Frame, FrameReader
from verl_ray.profiling.memory import GIB, tree_pss_bytes


class EpisodeProcess:
    """A process of episodes with its guard, at the other end of a connection."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self.note: Path | None = None
        """File that names a user's code while it holds the event loop."""
        self._frames = FrameReader()
        self._child: ChildProcess | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Start the program of the process, and connect to it.

        Raises:
            OSError: It cannot be started.
        """
        self._child = ChildProcess("verl_ray.agents.process")
        connection = self._child.connection
        connection.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=connection)

    def write(self, message: bytes) -> None:
        """Send a frame."""
        assert self._writer is not None, "it is connected"
        self._writer.write(message)

    async def receive(self) -> list[Frame]:
        """Wait for frames of the process, and return those that are complete.

        Raises:
            EOFError: It has ended.
            ValueError: What it sends are no frames.
        """
        data = await self._reader.read(READ_BYTES)
        if not data:
            raise EOFError("it ended")
        return list(self._frames.feed(data))

    async def held_gib(self) -> float:
        """Return the memory that the process holds with its children."""
        assert self._child is not None
        return await asyncio.to_thread(tree_pss_bytes, self._child.pid) / GIB

    def holder(self) -> CodePlace | None:
        """Return which code of the user holds the event loop now, if that is known."""
        return None if self.note is None else place_in_note(self.note)

    async def end(self) -> str:
        """End the process with all that it started, and wait until it is gone.

        Returns:
            How it ended, as the end of a sentence.
        """
        if self._child is None:
            return "was not started"
        cause = await asyncio.to_thread(self._child.end)
        if self._writer is None:
            self._child.connection.close()
            return cause
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        return cause
