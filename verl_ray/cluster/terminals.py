"""Outputs of this process that may close, or fill a disk, while it has work to finish.

Invariant: an output that nobody reads any more never ends the process, and neither does
one that a disk does not take.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import sys
from typing import Any

_STDOUT = 1
_STDERR = 2

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_terminals: tuple[int, ...] = ()
"""Descriptors that were terminals when `remember_terminals` was called."""


class _Output(io.BufferedWriter):
    """A buffer whose writes do not fail with its disk; it says later what was lost.

    What waits in the buffer is written as soon as the disk has room again. The buffer
    takes data and records what it gave the file in C, where no handler of a signal can
    run in between: one that raises there would let a line be written twice.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(io.FileIO(descriptor, "w", closefd=False))
        self._lost_bytes = 0

    def write(self, data: Any) -> int:
        """Take bytes; return how many are taken or lost."""
        size = memoryview(data).nbytes
        try:
            if self._lost_bytes:
                note = f"[{self._lost_bytes} bytes of output did not fit on the disk]\n"
                super().write(note.encode())
                self._lost_bytes = 0
            super().write(data)
        except OSError as error:
            _leave_disks(error)
            self._lost_bytes += size
        return size

    def flush(self) -> None:
        """Give the file what it takes now."""
        try:
            super().flush()
        except OSError as error:
            _leave_disks(error)


def _leave_disks(error: OSError) -> None:
    if error.errno not in _OF_DISKS:
        raise error


def outlast_full_disks() -> None:
    """Let no print of this process fail because the disk of its output is full.

    The output of a run often goes to a file beside what the run writes. Streams that
    somebody else has put in place stay as they are.
    """
    for name, descriptor in (("stdout", _STDOUT), ("stderr", _STDERR)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or stream is None:
            continue
        stream.flush()
        # PYTHONUNBUFFERED asks for the second.
        is_prompt = stream.line_buffering or stream.write_through
        output = io.TextIOWrapper(
            _Output(descriptor),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=is_prompt or descriptor == _STDERR,
        )
        setattr(sys, name, output)


def remember_terminals() -> None:
    """Remember which of stdout and stderr are terminals now."""
    global _terminals
    _terminals = tuple(
        descriptor for descriptor in (_STDOUT, _STDERR) if os.isatty(descriptor)
    )


def leave_closed_outputs() -> None:
    """Send output to nowhere if its terminal has closed or its reader has exited.

    Such a reader is the `tee` that Ctrl-C ended as well. An error of a print would end
    the work that has to be finished.
    """
    global _terminals
    closed = [
        descriptor
        for descriptor in (_STDOUT, _STDERR)
        if descriptor not in _terminals and _is_pipe_without_reader(descriptor)
    ]
    closed += [descriptor for descriptor in _terminals if not os.isatty(descriptor)]
    if not closed:
        return

    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in closed:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
    _terminals = tuple(set(_terminals) - set(closed))


def print_error(message: str) -> None:
    """Print to stderr, where signals are answered, even if nobody reads it any more."""
    leave_closed_outputs()
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _is_pipe_without_reader(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            # A poll for no event still reports errors, and returns at once.
            poll = select.poll()
            poll.register(descriptor, 0)
            return any(event & select.POLLERR for _, event in poll.poll(0))
    return False
