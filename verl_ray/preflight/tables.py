"""Tables for people: memory, the values of each `auto`, sizes of a step, and roles.

Invariant: all figures are those of `memory_plan.py`, or values of the configuration,
and a table of `auto` shows only what was resolved, each key once.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table

from verl_ray.backends.base import MemoryPart
from verl_ray.config.schema import Config, RoleBatch, batch_algebra
from verl_ray.preflight.machine import GIB, MIB
from verl_ray.preflight.memory_plan import MemoryPlan
from verl_ray.preflight.role_memory import Phase, RoleMemory

if TYPE_CHECKING:  # tables alone need no more
    from verl_ray.preflight.resolve import Resolution

# Columns of a table that is not printed to a terminal.
_WIDTH = 110

# No table is wider.
_WIDEST = 1000


def print_tables(*tables: RenderableType) -> None:
    """Print tables, and lines that are as long as they are, to stdout."""
    # rich measures a terminal itself, and reads COLUMNS.
    knows_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(force_jupyter=False, width=None if knows_width else _WIDTH)
    for table in tables:
        # A path that is not cut can be copied.
        console.print(table, soft_wrap=isinstance(table, str), highlight=False)


def text_of(*tables: RenderableType) -> str:
    """Return tables as they are printed to a file."""
    text = io.StringIO()
    console = Console(file=text, force_jupyter=False, width=_WIDTH, highlight=False)
    for table in tables:
        console.print(table)
    return text.getvalue()


def compact_table(title: str) -> Table:
    """Return an empty table without frames, whose first column begins a line."""
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def memory_in_words(plan: MemoryPlan, *, nodes: int = 1) -> str:
    """Return where and when the memory is fullest, and how full it is predicted to be.

    Args:
        plan: Memory plan of a run.
        nodes: Number of hosts, whose memory is a sum.
    """
    phase, most = plan.fullest(on_device=plan.on_gpus, nodes=nodes)
    place = "a device" if plan.on_gpus else "the machine"
    return f"{place} is fullest in the phase {phase}, {most / GIB:.2f} GiB"


class _MemoryTables:
    """The table of a memory plan, which becomes two where it would be too wide."""

    def __init__(self, plan: MemoryPlan, nodes: int) -> None:
        self._plan = plan
        self._nodes = nodes

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        parts = _parts_of(self._plan)
        whole = _table(self._plan, parts, self._plan.phases, self._nodes)
        if console.measure(whole, options=options.update(width=_WIDEST)).maximum <= (
            options.max_width
        ):
            yield whole
            return

        yield _table(self._plan, parts, (), self._nodes)
        yield _table(self._plan, (), self._plan.phases, self._nodes)


def memory_table(plan: MemoryPlan, *, nodes: int = 1) -> RenderableType:
    """Return the memory of one rank of each role, and of a device and the hosts.

    A row of a role has the largest size of each part in any phase, and the memory that
    the role needs in each phase while it computes.

    Args:
        plan: Memory plan of a run.
        nodes: Number of hosts, whose memory is shown as a sum.
    """
    return _MemoryTables(plan, nodes)


def _parts_of(plan: MemoryPlan) -> tuple[MemoryPart, ...]:
    """Return the parts of memory that some role has."""
    parts: tuple[MemoryPart, ...] = get_args(MemoryPart)
    memory = [each for phases in plan.by_role.values() for each in phases.values()]
    return tuple(part for part in parts if any(each.of(part) for each in memory))


def _table(
    plan: MemoryPlan,
    parts: tuple[MemoryPart, ...],
    phases: tuple[Phase, ...],
    nodes: int,
) -> Table:
    """Return a table with some of the parts, and some of the phases."""
    _, most = plan.fullest(on_device=plan.on_gpus, nodes=nodes)
    # One unit for the whole table, so that figures can be compared.
    unit = MIB
    unit_name = "MiB"
    if most >= 10 * GIB:
        unit = GIB
        unit_name = "GiB"

    title = f"memory in {unit_name} per rank, predicted"
    if phases:
        title += f": {memory_in_words(plan, nodes=nodes)}"
    table = compact_table(title)
    # The edge between numbers is enough, and 80 columns hold all parts.
    table.padding = 0
    table.add_column("role", no_wrap=True)
    for heading in (*parts, *phases):
        table.add_column(heading, justify="right", no_wrap=True)

    for role, by_phase in plan.by_role.items():
        sizes = _sizes_of(by_phase, parts, phases)
        table.add_row(role, *[_text(size, unit) for size in sizes])

    # A device and the host have phases alone.
    if not phases:
        return table

    table.add_section()
    blank = [""] * len(parts)
    if plan.on_gpus:
        device_cells = [_text(plan.device_bytes(phase), unit) for phase in phases]
        table.add_row("device", *blank, *device_cells)
    host_cells = [_text(plan.host_bytes(phase, nodes=nodes), unit) for phase in phases]
    hosts = "host" if nodes == 1 else f"{nodes} hosts"
    table.add_row(hosts, *blank, *host_cells)
    return table


def _sizes_of(
    by_phase: Mapping[Phase, RoleMemory],
    parts: tuple[MemoryPart, ...],
    phases: tuple[Phase, ...],
) -> list[int]:
    """Return the largest size of each part, then the need of each phase, in bytes."""
    largest = [max(memory.of(part) for memory in by_phase.values()) for part in parts]
    needed = [by_phase[phase].computing() for phase in phases]
    return largest + needed


def _text(nbytes: int, unit: int) -> str:
    """Return a size in a unit, with three digits."""
    if not nbytes:
        return "-"
    if nbytes < 100 * unit:
        return f"{nbytes / unit:.3g}"
    return f"{nbytes / unit:.0f}"


# ----------------------------------------------------------------------- values of auto


def print_resolutions(resolutions: Sequence[Resolution], place: str = "here") -> None:
    """Print what each `auto` becomes and why to stdout; nothing where there is none.

    Args:
        resolutions: What was resolved.
        place: The machine, as the end of the title.
    """
    if resolutions:
        print_tables(auto_table(resolutions, place))


_FEW = 3


def resolutions_in_words(resolutions: Sequence[Resolution]) -> str:
    """Return how many settings were `auto`, and what the first of them became."""
    values: dict[str, object] = {}
    for each in resolutions:
        # Roles mostly share their settings.
        key = _without_role(each.key)
        if values.get(key, each.value) != each.value:
            key = each.key
        values[key] = each.value
    few = [*values.items()][:_FEW]
    shown = [f"{key}={_as_typed(value)}" for key, value in few]
    more = ", ..." if len(values) > _FEW else ""
    return f"{len(values)} settings were auto: {', '.join(shown)}{more}"


def auto_table(resolutions: Sequence[Resolution], place: str = "here") -> Table:
    """Return the table of what each `auto` becomes and why.

    Args:
        resolutions: What was resolved.
        place: The machine, as the end of the title.
    """
    table = compact_table(f"auto: what these settings become {place}")
    # The first column has names, which are not cut.
    table.add_column("key", no_wrap=True)
    # Most values are words, and reasons are sentences.
    table.add_column("value", overflow="fold", max_width=24)
    table.add_column("because", overflow="fold")

    # Roles mostly share their settings, so these share a line.
    sections: dict[tuple[str, str, str], list[str]] = {}
    for resolution in resolutions:
        value = _as_typed(resolution.value)
        section, name = _section_and_name(resolution.key)
        sections.setdefault((name, value, resolution.because), []).append(section)

    for (name, value, because), names in sections.items():
        key = f"{names[0]}.{name}"
        if len(names) > 1:
            key = f"{name} of\n{', '.join(names)}"
        table.add_row(key, value, because)

    return table


def _as_typed(value: object) -> str:
    """Return a value as the user would type it, which is without quotes."""
    return json.dumps(value).replace('"', "")


def _without_role(key: str) -> str:
    """Return the key of a backend without its role, and any other as it is."""
    _, separator, name = key.partition(".backend.")
    return f"backend.{name}" if separator else key


def _section_and_name(key: str) -> tuple[str, str]:
    """Return the role and the rest of a key of a backend, else section and name."""
    role, separator, name = key.partition(".backend.")
    if separator:
        return role, f"backend.{name}"
    section, _, name = key.rpartition(".")
    return section, name


# --------------------------------------------------- the sizes of a step, and the roles

# Stands for a number that a role does not have.
_NONE = "-"

# Narrow enough for long names of roles on a terminal with 80 columns.
_BATCH_COLUMNS = (
    "role",
    "ranks",
    "rows\nper\nrank",
    "mini-\nbatch",
    "per\nrank",
    "updates\nper step",
    "micro-\nbatch\ntokens",
)
_ROLE_COLUMNS = (
    "role",
    "backend",
    "dtype",
    "ranks",
    "placement",
)


def batch_table(config: Config) -> Table:
    """Return the sizes of one step, a row per role."""
    sizes = batch_algebra(config)
    title = (
        f"one step: {config.step_in_words}, each of up to {sizes.max_row_tokens} tokens"
    )
    table = Table(title=title, title_justify="left")

    role_column, *number_columns = _BATCH_COLUMNS
    table.add_column(role_column, justify="left", no_wrap=True)
    for heading in number_columns:
        table.add_column(heading, justify="right", no_wrap=True)

    for role in sizes.roles:
        table.add_row(*_batch_cells(role))

    return table


def _batch_cells(role: RoleBatch) -> list[str]:
    mini_batch = _NONE
    if role.mini_batch_size is not None:
        mini_batch = str(role.mini_batch_size)

    per_rank = _NONE
    if role.mini_batch_size_per_rank is not None:
        per_rank = str(role.mini_batch_size_per_rank)

    # A role that does not learn makes no updates.
    updates = str(role.updates_per_step or _NONE)

    return [
        role.role,
        str(role.ranks),
        str(role.rows_per_rank),
        mini_batch,
        per_rank,
        updates,
        f"<= {role.micro_batch_tokens_per_rank}",
    ]


def role_table(config: Config) -> Table:
    """Return the roles of a run: models on backends, graders of texts, and engines."""
    table = Table(title="roles", title_justify="left")
    # The first column has names, which are not cut.
    for number, heading in enumerate(_ROLE_COLUMNS):
        table.add_column(heading, overflow="fold", no_wrap=number == 0)

    # A single role shares no process.
    has_others = len(config.model_roles) + len(config.engines) > 1
    placement = "separate"
    if has_others and config.shares_processes:
        placement = "colocated"

    for name, role in config.model_roles.items():
        table.add_row(
            name,
            role.backend.description(role.num_ranks),
            role.backend.dtype,
            str(role.num_ranks),
            placement,
        )

    for name, grader in config.graders.items():
        # Other graders are models or engines, which have rows as such.
        if grader.cpu_ranks is not None:
            table.add_row(
                name,
                grader.kind,
                _NONE,
                str(grader.cpu_ranks),
                "CPU only",
            )

    for name, engine in config.engines.items():
        settings = engine.config
        is_judge = name in config.judges
        table.add_row(
            name,
            "vllm",
            settings.dtype,
            f"{settings.num_replicas} x {settings.ranks_per_replica}",
            "separate" if is_judge else placement,
        )

    return table


def source_lines(config: Config) -> str:
    """Return the model, functions or service of each role, a line for each of them.

    They stand in no table, since paths are long.
    """
    sources = {name: role.model.folder for name, role in config.model_roles.items()}
    for name, grader in config.graders.items():
        if grader.cpu_ranks is not None:
            sources[name] = grader.source_in_words
    sources |= {name: engine.path for name, engine in config.engines.items()}

    roles_of: dict[str, list[str]] = {}
    for name, source in sources.items():
        roles_of.setdefault(source, []).append(name)

    lines = [f"  {', '.join(names)}: {source}" for source, names in roles_of.items()]
    return "\n".join(["models, functions and services", *lines])
