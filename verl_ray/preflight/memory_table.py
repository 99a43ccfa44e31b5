"""The memory plan as a table for people.

Invariant: all figures are those of `memory_plan.py`.

Deliberately not here: where the figures come from.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import get_args

from rich import box
from rich.console import Console
from rich.table import Table

from verl_ray.backends.base import MemoryPart
from verl_ray.preflight.machine import GIB, MIB
from verl_ray.preflight.memory_plan import MemoryPlan
from verl_ray.preflight.role_memory import Phase, RoleMemory

# Columns of a table that is not printed to a terminal.
_WIDTH = 110

_PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)


def print_tables(*tables: Table) -> None:
    """Print tables to stdout."""
    # rich measures a terminal itself.
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(width=width)
    for table in tables:
        console.print(table)


def memory_table(plan: MemoryPlan) -> Table:
    """Return the memory of one rank of each role, and of a device and the host.

    A row of a role has the largest size of each part in any phase, and the memory that
    the role needs in each phase while it computes.
    """
    phase, most = plan.fullest(on_device=plan.on_gpus)
    # One unit for the whole table, so that figures can be compared.
    unit = MIB
    unit_name = "MiB"
    if most >= 10 * GIB:
        unit = GIB
        unit_name = "GiB"

    place = "a device" if plan.on_gpus else "the machine"
    title = (
        f"memory in {unit_name} per rank, predicted: {place} is fullest in the phase"
        f" {phase}, {most / GIB:.2f} GiB"
    )
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("role", overflow="fold")
    for heading in (*_PARTS, *plan.phases):
        table.add_column(heading, justify="right", no_wrap=True)

    for role, by_phase in plan.by_role.items():
        sizes = _sizes_of(by_phase, plan.phases)
        table.add_row(role, *[_text(size, unit) for size in sizes])

    table.add_section()
    blank = [""] * len(_PARTS)
    if plan.on_gpus:
        of_device = [_text(plan.device_bytes(phase), unit) for phase in plan.phases]
        table.add_row("device", *blank, *of_device)
    of_host = [_text(plan.host_bytes(phase), unit) for phase in plan.phases]
    table.add_row("host", *blank, *of_host)
    return table


def _sizes_of(
    by_phase: Mapping[Phase, RoleMemory], phases: tuple[Phase, ...]
) -> list[int]:
    """Return the largest size of each part, then the need of each phase, in bytes."""
    parts = [max(memory.of(part) for memory in by_phase.values()) for part in _PARTS]
    needed = [by_phase[phase].computing() for phase in phases]
    return parts + needed


def _text(nbytes: int, unit: int) -> str:
    """Return a size in a unit, with three digits."""
    if not nbytes:
        return "-"
    if nbytes < 100 * unit:
        return f"{nbytes / unit:.3g}"
    return f"{nbytes / unit:.0f}"
