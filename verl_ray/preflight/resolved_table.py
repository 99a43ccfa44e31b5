"""The values that each `auto` becomes, as a table for people.

Invariant: a table shows only what was resolved, each key once. Deliberately not here:
the resolution itself (`resolve.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table

from verl_ray.preflight.memory_table import compact_table, print_tables
from verl_ray.preflight.resolve import Resolution


def print_resolutions(resolutions: Sequence[Resolution], place: str = "here") -> None:
    """Print what each `auto` becomes and why to stdout; nothing where there is none.

    Args:
        resolutions: What was resolved.
        place: The machine, as the end of the title.
    """
    if resolutions:
        print_tables(_auto_table(resolutions, place))


def _auto_table(resolutions: Sequence[Resolution], place: str) -> Table:
    table = compact_table(f"auto: what these settings become {place}")
    # The first column has names, which are not cut.
    table.add_column("key", no_wrap=True)
    # Most values are words, and reasons are sentences.
    table.add_column("value", overflow="fold", max_width=24)
    table.add_column("because", overflow="fold")

    # Roles mostly share their settings, so these share a line.
    sections: dict[tuple[str, str, str], list[str]] = {}
    for resolution in resolutions:
        # Without quotes a value reads as the user would type it.
        value = json.dumps(resolution.value).replace('"', "")
        section, name = _section_and_name(resolution.key)
        sections.setdefault((name, value, resolution.because), []).append(section)

    for (name, value, because), names in sections.items():
        key = f"{names[0]}.{name}"
        if len(names) > 1:
            key = f"{name} of\n{', '.join(names)}"
        table.add_row(key, value, because)

    return table


def _section_and_name(key: str) -> tuple[str, str]:
    """Return the role and the rest of a key of a backend, else section and name."""
    role, separator, name = key.partition(".backend.")
    if separator:
        return role, f"backend.{name}"
    section, _, name = key.rpartition(".")
    return section, name
