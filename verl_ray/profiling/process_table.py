"""The table of a run's processes: what each does, for how long, and what it waits for.

Ranks that do the same are one row, so the table of many processes fits a screen.

Invariant: a table is a plain value, which survives JSON.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH = 160


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
