"""Outputs of this process that may close while it still has work to finish.

Invariant: an output that nobody reads any more never ends the process. Deliberately not
here: signals (`signals.py`).
"""

from __future__ import annotations

import contextlib
import os
import select
import stat

_STDOUT = 1
_STDERR = 2

_terminals: tuple[int, ...] = ()
"""Descriptors that were terminals when `remember_terminals` was called."""


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


def _is_pipe_without_reader(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            # A poll for no event still reports errors, and returns at once.
            poll = select.poll()
            poll.register(descriptor, 0)
            return any(event & select.POLLERR for _, event in poll.poll(0))
    return False
