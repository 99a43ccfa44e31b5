"""The memory plan as people read it.

Invariant: figures are those of `memory_plan.py`. Deliberately not here: where they come from.
"""

from __future__ import annotations

import sys
from typing import get_args

from rich import box
from rich.console import Console
from rich.table import Table

from verl_ray.backends.base import Part
from verl_ray.preflight.machine import GIB, MIB
from verl_ray.preflight.memory_plan import MemoryPlan

_WIDTH = 110  # of tables where there is no terminal to ask


def print_tables(*tables: Table) -> None:
    """To stdout."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for table in tables:
        console.print(table)


def memory_table(found: MemoryPlan) -> Table:
    """What one rank of each role holds, and needs while it works; and what that makes of a device, and of the host."""
    phase, most = found.fullest(on_device=found.on_gpus)
    unit, name = (GIB, "GiB") if most >= 10 * GIB else (MIB, "MiB")
    where = "a device" if found.on_gpus else "the machine"
    title = f"memory in {name} per rank, predicted: {where} is fullest in the phase {phase}, {most / GIB:.2f} GiB"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    parts: tuple[Part, ...] = get_args(Part)
    table.add_column("role", overflow="fold")
    for heading in (*parts, *found.phases):
        table.add_column(heading, justify="right", no_wrap=True)

    def shown(nbytes: int) -> str:
        if not nbytes:
            return "-"
        return f"{nbytes / unit:.3g}" if nbytes < 100 * unit else f"{nbytes / unit:.0f}"

    for role, uses in found.uses.items():
        sizes = (max(use.of(part) for use in uses.values()) for part in parts)
        needed = (uses[phase].computing() for phase in found.phases)
        table.add_row(role, *map(shown, sizes), *map(shown, needed))
    table.add_section()
    blank = [""] * len(parts)
    if found.on_gpus:
        table.add_row("device", *blank, *(shown(found.device(phase)) for phase in found.phases))
    table.add_row("host", *blank, *(shown(found.machine(phase)) for phase in found.phases))
    return table
