"""The table of a run's processes, and the file of the run's folder that keeps it.

A row says what a process does, for how long, and what it waits for. Ranks that do the
same are one row, so the table of many processes fits a screen. The driver writes the
file every few seconds, also while its main thread is stuck. Any process reads it:
`verl-ray status RUN`.

Invariant: a table is a plain value, which survives JSON. The file is whole at every
moment, and what prevents it from being written, such as a full disk, does nothing to
the run. It need not outlive a loss of power.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from verl_ray.ownership import Owner
from verl_ray.profiling.phases import Count

_WIDTH = 160


IDLE = "idle"
"""Phase of a process that is well and was not called."""


@dataclass(frozen=True)
class ProcessRow:
    """Processes of one role that do the same.

    Attributes:
        role: Role that is called, or the first one of the processes.
        ranks: Ranks of the processes.
        nodes: Names of their nodes.
        verb: Method that was called; empty without a call.
        phase: How far they are: "3/16 micro-batches".
        seconds: Seconds since the call began, of the longest one; None without a call.
        waits_for: What they wait for; empty if it is nothing, or not known.
        line: Innermost line of our own code.
    """

    role: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    verb: str
    phase: str
    seconds: float | None
    waits_for: str
    line: str

    @property
    def _alike(self) -> tuple[str, ...]:
        return self.role, self.verb, self.phase, self.waits_for, self.line

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> ProcessRow:
        """Return the row that this value of a JSON file was made of."""
        lists = {name: tuple(tree[name]) for name in ("ranks", "nodes")}
        return cls(**{**tree, **lists})


def merged(rows: Iterable[ProcessRow]) -> list[ProcessRow]:
    """Return rows in which those that differ in ranks, nodes or seconds are one."""
    merged_rows: dict[tuple[str, ...], ProcessRow] = {}
    for row in rows:
        known = merged_rows.setdefault(row._alike, row)
        if known is row:
            continue
        seconds = [value for value in (known.seconds, row.seconds) if value is not None]
        merged_rows[row._alike] = replace(
            known,
            ranks=tuple(sorted({*known.ranks, *row.ranks})),
            nodes=tuple(dict.fromkeys((*known.nodes, *row.nodes))),
            seconds=max(seconds, default=None),
        )
    return list(merged_rows.values())


def numbers(ranks: Sequence[int]) -> str:
    """Return ranks in a few characters: "0-6,8"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in spans
    )


def table_text(title: str, rows: Iterable[ProcessRow]) -> str:
    """Return a table of processes, a line for each row that differs, as plain text."""
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for heading in ("role", "rank", "node", "verb", "phase", "seconds", "waits for"):
        table.add_column(heading, overflow="fold")
    table.add_column("at", overflow="fold")

    for row in merged(rows):
        node = row.nodes[0] if len(row.nodes) == 1 else f"{len(row.nodes)} nodes"
        seconds = "-" if row.seconds is None else f"{row.seconds:.0f}"
        cells = (row.verb, row.phase, seconds, row.waits_for, row.line)
        table.add_row(
            row.role, numbers(row.ranks), node, *(cell or "-" for cell in cells)
        )

    output = io.StringIO()
    console = Console(
        file=output, width=_WIDTH, force_jupyter=False, highlight=False, markup=False
    )
    console.print(table)
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    # A long title of rich's would be broken at the width of the table.
    return "\n".join([title, *lines])


# --------------------------------------------------------------- the file of the status

STATUS = "status.json"
"""File in a run's folder."""


FINAL = ("ended", "ended: Interrupted")
"""Ends of a run that no other driver follows."""


@dataclass(frozen=True)
class Located:
    """A process of the run.

    Attributes:
        role: Its role, or the first one of several.
        rank: Its rank.
        owner: The process as an owner (`verl_ray/ownership.py`).
    """

    role: str
    rank: int
    owner: str


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at a moment.

    Attributes:
        driver: The driver as an owner (`verl_ray/ownership.py`).
        pid: Process id of the driver.
        host: Host name of the driver's node.
        written: Time of the facts, in seconds since the epoch.
        uptime_s: The same time in seconds since the start of the driver's machine, a
            clock that nobody sets; None in the files of earlier versions.
        interval_s: Seconds after which the driver writes the next status.
        ended: How the run ended; empty while it runs.
        phase: The driver's phase: "step 3/200: updating".
        rows: The processes, the driver first; those that do the same are one row.
        processes: The processes on the driver's node, which a reader there can see.
        count: How much of the phase is done; None where that is not known.
        warnings: The last warnings that the driver has printed.
        supervisor: The process that starts the next driver, as an owner; empty without
            one, and in the files of earlier versions.
        refusal: What refused the start of the driver, where the next one is tried.
    """

    driver: str
    pid: int
    host: str
    written: float
    interval_s: float
    ended: str
    phase: str
    rows: tuple[ProcessRow, ...]
    processes: tuple[Located, ...]
    count: Count | None = None
    warnings: tuple[str, ...] = ()
    uptime_s: float | None = None
    supervisor: str = ""
    refusal: str = ""

    @property
    def is_followed(self) -> bool:
        """Whether another driver follows this one, as this machine sees it.

        A supervisor ends with the last driver.
        """
        driver = Owner.parse(self.driver)
        has_ended = bool(self.ended) or (driver is not None and driver.has_ended)
        supervisor = Owner.parse(self.supervisor)
        is_last = self.ended in FINAL
        return (
            has_ended
            and not is_last
            and supervisor is not None
            and supervisor.is_running
        )

    @property
    def age_s(self) -> float:
        """Seconds since the facts; on another machine, by the clocks of both."""
        owner = Owner.parse(self.driver)
        if owner is None or not owner.is_visible or self.uptime_s is None:
            return max(0.0, time.time() - self.written)
        return max(0.0, uptime_s() - self.uptime_s)


def uptime_s() -> float:
    """Return the seconds since the start of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def write_status(folder: Path, status: RunStatus) -> bool:
    """Write the status of a run; return whether that was possible."""
    tree = asdict(status)
    path = folder / STATUS
    part = path.with_name(f"{STATUS}.part")
    try:
        part.write_text(json.dumps(tree))
        part.replace(path)
        return True
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        return False


def read_status(folder: Path) -> RunStatus | None:
    """Return the last status of a run; None if it has none.

    Raises:
        ValueError: The file holds something else.
        OSError: The file cannot be read.
    """
    try:
        tree: dict[str, Any] = json.loads((folder / STATUS).read_text())
    except FileNotFoundError:
        return None
    try:
        rows = tuple(ProcessRow.from_json(row) for row in tree.pop("rows"))
        processes = tuple(Located(**process) for process in tree.pop("processes"))
        count = tree.pop("count", None)
        warnings = tuple(tree.pop("warnings", ()))
        return RunStatus(
            **tree,
            rows=rows,
            processes=processes,
            count=None if count is None else Count(**count),
            warnings=warnings,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is of another version ({error})") from error
