"""The thread of the driver that keeps the status of the run (`status_file.py`).

It asks every process where it is, a call per process each time. The pause between two
rounds grows with the number of processes. A call was measured to take 0.08 ms, so 512
processes take about a thousandth of the driver's time.

Invariant: the thread needs nothing from the main thread, which may be stuck, and a
failure of the thread is said and ends nothing but the status.
Deliberately not here: what is a failure of the run.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import ray

from verl_ray.cluster.cluster_loss import CLUSTER_LOSS
from verl_ray.cluster.roster import ROSTER
from verl_ray.cluster.thread_stacks import innermost_own_line
from verl_ray.cluster.whereabouts import Census
from verl_ray.ownership import Owner
from verl_ray.profiling.phases import PHASES
from verl_ray.profiling.process_table import ProcessRow, merged
from verl_ray.profiling.status_file import Located, RunStatus, write_status

_PAUSE_S = 3.0
_PAUSE_PER_PROCESS_S = 0.1
_ANSWERS_S = 1.0
_END_S = 3.0


@contextlib.contextmanager
def keeping_status(folder: Path) -> Iterator[None]:
    """Keep the status of a run in its folder during the block, and then say its end."""
    thread = _StatusThread(folder)
    thread.start()
    ended = "ended"
    try:
        yield
    except BaseException as failure:
        ended = f"ended: {type(failure).__name__}"
        raise
    finally:
        thread.end(ended)


class _StatusThread(threading.Thread):
    """Writes the status again and again, until it is told to end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="status", daemon=True)
        self._folder = folder
        self._census = Census()
        self._told_to_end = threading.Event()
        self._rows: tuple[ProcessRow, ...] = ()
        self._processes: tuple[Located, ...] = ()

    def run(self) -> None:
        # Ends when the block does. A round waits a second for answers at most.
        pause_s = _PAUSE_S
        while not self._told_to_end.is_set():
            try:
                pause_s = _PAUSE_S + _PAUSE_PER_PROCESS_S * self._take_census()
                # What `end` writes is the last word.
                if self._told_to_end.is_set():
                    return
                write_status(self._folder, self._status("", pause_s))
            except ray.exceptions.RayError:
                # The cluster is about to end, or has ended; the main thread says so.
                pass
            except Exception:
                print("warning: the status of the run is not kept:", file=sys.stderr)
                traceback.print_exc()
                return
            self._told_to_end.wait(pause_s)

    def end(self, ended: str) -> None:
        """End the thread, and write how the run has ended."""
        self._told_to_end.set()
        # A question to a cluster that is lost may take longer.
        self.join(_END_S)
        self._rows = ()
        self._processes = ()
        write_status(self._folder, self._status(ended, 0.0))

    def _take_census(self) -> int:
        """Ask all processes; return how many there are."""
        if CLUSTER_LOSS.has_happened or not ROSTER.groups:
            return 0
        present = self._census.take(_ANSWERS_S)
        host = socket.gethostname()
        self._rows = tuple(merged(present.rows))
        self._processes = tuple(
            Located(role, rank, info.host_name, info.pid, info.started)
            for role, rank, info in present.processes
            if info.host_name == host
        )
        return len(present.rows)

    def _status(self, ended: str, interval_s: float) -> RunStatus:
        phase, seconds = PHASES.glance()
        driver = ProcessRow(
            "driver",
            (0,),
            (socket.gethostname(),),
            verb="",
            phase=phase,
            seconds=seconds,
            waits_for="",
            line=innermost_own_line(threading.main_thread().ident),
        )
        return RunStatus(
            driver=str(Owner.here()),
            pid=os.getpid(),
            host=socket.gethostname(),
            written=time.time(),
            interval_s=interval_s,
            ended=ended,
            phase=phase,
            rows=() if ended else (driver, *self._rows),
            processes=self._processes,
        )
