"""The report about a run that stands still: one table, and a file with all stacks.

It is made when `run.stall_s` is exceeded. The table says of every process what it does,
for how long, what it waits for, and at which line of ours. The stacks of all processes
go to a file in the run's folder of logs, since there may be hundreds.

Invariant: a report that cannot be written or printed does not hide the error that it is
about. Deliberately not here: who is to blame (`stalls.py`, `idle_processes.py`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verl_ray.cluster.failures import stacks_of, stacks_text
from verl_ray.cluster.members import Member
from verl_ray.cluster.roster import ROSTER
from verl_ray.cluster.whereabouts import Census
from verl_ray.errors import DeadlineExceeded
from verl_ray.profiling.process_table import ProcessRow, table_text

_ANSWERS_S = 1.0


class Hang:
    """All processes of this driver at the moment at which a limit was exceeded."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._rows: list[ProcessRow] = []
        self._stacks: dict[int, str] = {}

    def gather(self, involved: Sequence[Member]) -> dict[int, str]:
        """Ask all processes of the roster where they are, and for their stacks.

        It takes a few seconds where processes do not reply.

        Args:
            involved: Processes that the error is about, which may be starting.

        Returns:
            The stacks, by the identity of the process's handle (`stacks_of`).
        """
        by_actor = {id(member.actor): member for member in involved}
        for group in ROSTER.hosts:
            for member in group.members():
                by_actor.setdefault(id(member.actor), member)
        self._members = list(by_actor.values())
        self._rows = Census().take(_ANSWERS_S, involved).rows
        self._stacks = stacks_of(self._members)
        return self._stacks

    def report(self, error: DeadlineExceeded) -> None:
        """Print the table, and write the stacks to a file that the error then names."""
        table = table_text(
            f"{error.role} rank {error.rank} on {error.node}: {error.message}",
            self._rows,
        )
        with contextlib.suppress(OSError):
            print(table, file=sys.stderr, flush=True)

        log_dirs = [group.log_dir for group in ROSTER.hosts]
        # While processes start for the first time, their error shows the stacks.
        if not log_dirs:
            return
        name = time.strftime("stacks-%Y%m%d-%H%M%S.txt")
        path = Path(log_dirs[0]) / name
        text = f"{table}\n\n{stacks_text(self._members, self._stacks)}\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as failure:
            error.add_note(f"the stacks of all processes were not written: {failure}")
        else:
            error.add_note(f"the stacks of all processes are in {path}")
