"""The process of W&B's that takes the lines of a run and sends them.

W&B waits for it without a limit: in some of its requests, in `wandb.teardown`, and
once more when this process exits. A process that is stopped, or whose connection is
broken, never ends by itself.

Invariant: whatever waits here ends within a limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import psutil

_NAME = "wandb-core"
_ADDRESS = "WANDB_SERVICE"
"""Variable with the address of a process of W&B's that runs."""

_END_S = 10.0
"""Seconds that the process may take to end by itself, and again once it is killed."""


class WandbProcess:
    """The process that W&B starts for a tracker."""

    def __init__(self) -> None:
        """Note whether there is one already, which belongs to somebody else."""
        self.is_own = _ADDRESS not in os.environ

    def present(self) -> list[psutil.Process]:
        """Return the tracker's own process, if it runs."""
        if not self.is_own:
            return []
        processes = []
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if process.name() == _NAME:
                    processes.append(process)
        return processes

    def kill(self) -> None:
        """Kill the process, so that calls fail that wait for it.

        Any thread may call this.
        """
        for process in self.present():
            with contextlib.suppress(psutil.Error):
                process.kill()

    @contextlib.contextmanager
    def killed_after(self, limit_s: float) -> Iterator[None]:
        """Kill the process if the block takes longer; what waits for it fails."""
        is_over = threading.Event()

        def watch() -> None:
            # Waits for the end of the block, which ends it. Past the limit it kills
            # whatever process the block starts.
            remaining_s = limit_s
            while not is_over.wait(remaining_s):
                self.kill()
                remaining_s = 1.0

        threading.Thread(target=watch, name="W&B starts", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def end(self) -> None:
        """End the process within a limit, and forget it.

        Otherwise W&B calls it once more when this process exits.
        """
        processes = self.present()
        _forget_exit_hook()
        ending = threading.Thread(target=_tear_down, name="W&B ends", daemon=True)
        ending.start()
        ending.join(_END_S)
        # The end of the process ends the wait for it, too.
        self.kill()
        ending.join(_END_S)
        # W&B does not wait for a process that it has lost the connection to.
        psutil.wait_procs(processes, _END_S)
        os.environ.pop(_ADDRESS, None)


def _forget_exit_hook() -> None:
    """Unregister what W&B would do with its process when this process exits."""
    from wandb.sdk import wandb_setup

    setup = wandb_setup._singleton
    connection = setup._connection if setup is not None else None
    if connection is not None and connection._cleanup is not None:
        connection._cleanup()


def _tear_down() -> None:
    """Ask the process to end, and wait for it."""
    import wandb

    # It asks this process to exit with the code of a process that was killed.
    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown(exit_code=1)
