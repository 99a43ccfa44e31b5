"""A process of episodes as an operating system sees it: its frames, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

from verl_ray.agents.wire import Frame, FrameReader
from verl_ray.guard import start_guarded
from verl_ray.profiling.memory import GIB, tree_pss_bytes

_READ_BYTES = 1 << 16

_GUARD_S = 60.0
"""Seconds that a guard may take to kill all of a process and remove its folder."""


class GuardedProcess:
    """A process of episodes with its guard, at the other end of a connection."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self.note: Path | None = None
        """File that names a user's code while it holds the event loop."""
        self._frames = FrameReader()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; None before it begins to start."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the program of the process, and connect to it.

        Raises:
            OSError: It cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = start_guarded(
                    "verl_ray.agents.process", theirs.fileno()
                )
            ours.setblocking(False)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            # Nothing else would hang up.
            ours.close()
            raise

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
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise EOFError("it ended")
        return list(self._frames.feed(data))

    async def held_gib(self) -> float:
        """Return the memory that the process holds with its children."""
        assert self._process is not None
        return await asyncio.to_thread(tree_pss_bytes, self._process.pid) / GIB

    def holder(self) -> str:
        """Return which code of the user holds the event loop now; empty if unknown."""
        if self.note is None or not self.note.exists():
            return ""
        return self.note.read_text()

    def how_it_ended(self) -> str:
        """Return how a process that has ended did so, for a person."""
        assert self._process is not None
        code = self._process.returncode
        if code == -signal.SIGKILL:
            return "SIGKILL ended it, as the system does where memory is short"
        if code < 0:
            return f"{signal.Signals(-code).name} ended it"
        return f"it ended with exit code {code}"

    async def end(self) -> None:
        """End the process with all that it started, and wait until it is gone."""
        # The guard of the process kills all of it once the connection is gone.
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self._process is None:
            return
        # It may have much to kill and to remove; what has not ended then hangs.
        try:
            await asyncio.to_thread(self._process.wait, _GUARD_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
