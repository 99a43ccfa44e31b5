"""A command with a guard, as the event loop that waits for it sees it.

What the command starts is known by its guard, and without that, should it be killed, by
an environment variable.

Invariant: nothing that the command has started outlives its end, `stop`, the event loop
or this process, and none of it is read here but a report of bounded size. What has
killed its guard and emptied its environment ends with this process at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_ray.processes.command_guard import HUNG_UP, TOO_MANY, kill_marked

COMMAND_ID = "VERL_RAY_COMMAND_ID"
"""Environment variable of a command that no other command has the value of."""

_STOP_S = 60.0
"""Seconds that a guard may take to kill all of a command and remove its folder."""

# Of the package nothing is imported, which would take three times as long.
_PROGRAM = (
    f"import sys; sys.path.append({str(Path(__file__).parent)!r});"
    " from command_guard import main; main()"
)


@dataclass(frozen=True)
class Printed:
    """The last bytes of what a command has printed, as text.

    Attributes:
        num_omitted_bytes: Bytes before them.
    """

    text: str = ""
    num_omitted_bytes: int = 0


@dataclass(frozen=True)
class CommandEnd:
    """The end of a command.

    Attributes:
        cause: How it ended, as the end of a sentence; empty where its exit status is 0.
        stdout: What it has printed.
        stderr: Its messages.
    """

    cause: str
    stdout: Printed = Printed()
    stderr: Printed = Printed()


class GuardedCommand:
    """A command that runs until its end, or until it is stopped."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        stdin: Path,
        environment: Mapping[str, str],
        max_processes: int,
        note_start: Callable[[], None],
    ) -> None:
        """Start the command, and do not wait for it. An event loop must run.

        Args:
            words: Its program and its arguments.
            folder: Its current folder, which is removed with it.
            stdin: File that its stdin is.
            environment: All of its environment variables but `COMMAND_ID`.
            max_processes: Processes that it may have; all are killed where it has more.
            note_start: Called once it runs, or cannot.

        Raises:
            OSError: The guard cannot be started.
        """
        self._folder = folder
        self._max_processes = max_processes
        self._note_start = note_start
        self._id = secrets.token_hex(16)
        self._connection, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), str(max_processes), str(folder), *words]
        try:
            with theirs, stdin.open("rb") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments],
                    stdin=file,
                    # What the guard itself says goes to the log.
                    stdout=2,
                    pass_fds=[theirs.fileno()],
                    env={**environment, COMMAND_ID: self._id},
                    start_new_session=True,
                )
        except BaseException:
            self._connection.close()
            raise
        self._end = asyncio.ensure_future(self._read())

    async def end(self) -> CommandEnd:
        """Wait until the command has ended and all that it started is gone."""
        return await asyncio.shield(self._end)

    async def stop(self) -> CommandEnd | None:
        """Kill the command with all that it started, and wait for that.

        Returns:
            Its end; None if the guard did not answer, which was then killed as well.
        """
        # It may be gone already.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        if self._process.returncode is None:
            # A guard that was stopped kills nothing.
            self._process.send_signal(signal.SIGCONT)
        await asyncio.wait({self._end}, timeout=_STOP_S)
        if self._end.done():
            return self._end.result()
        self._process.kill()
        return None

    async def _read(self) -> CommandEnd:
        try:
            self._connection.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=self._connection)
            await reader.read(1)
        finally:
            self._note_start()
        try:
            report = await reader.read()
            await self._exit()
        finally:
            writer.close()
        # A guard that was killed has killed and removed nothing.
        if not report:
            survivors = await asyncio.to_thread(kill_marked, self._id)
            if survivors:
                ids = ", ".join(map(str, survivors))
                reason = f"process {ids} of a command without its guard still runs"
                print(reason, file=sys.stderr)
        if self._folder.exists():
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        return self._end_of(report)

    async def _exit(self) -> None:
        """Wait until the guard's process is gone."""
        if self._process.poll() is not None:
            return
        loop = asyncio.get_running_loop()
        exited = asyncio.Event()
        descriptor = os.pidfd_open(self._process.pid)
        loop.add_reader(descriptor, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._process.wait()

    def _end_of(self, report: bytes) -> CommandEnd:
        """Return the end that a guard has reported."""
        first, _, printed = report.partition(b"\n")
        if not first:
            return CommandEnd("lost its guard, which was killed")
        kind, *numbers = first.decode().split()
        code, num_out, shown_out, num_err = map(int, numbers)
        stdout = _printed(printed[:shown_out], num_out)
        stderr = _printed(printed[shown_out:], num_err)
        return CommandEnd(self._cause(kind, code), stdout, stderr)

    def _cause(self, kind: str, code: int) -> str:
        if kind == TOO_MANY:
            return f"had more than {self._max_processes} processes, and was killed"
        if kind == HUNG_UP:
            return "was stopped"
        if code > 0:
            return f"exited with status {code}"
        if code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return ""


def _printed(data: bytes, num_bytes: int) -> Printed:
    return Printed(data.decode(errors="replace"), num_bytes - len(data))
