"""The status of a run, which its driver keeps in a small file of the run's folder.

The driver writes the file every few seconds, also while its main thread is stuck. Any
process reads it: `verl-ray status RUN`.

Invariant: the file is whole at every moment, and what prevents it from being written,
such as a full disk, does nothing to the run. It need not outlive a loss of power.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_ray.profiling.process_table import ProcessRow

STATUS = "status.json"
"""File in a run's folder."""


@dataclass(frozen=True)
class Located:
    """A process of the run.

    Attributes:
        role: Its role, or the first one of several.
        rank: Its rank.
        host: Host name of its node.
        pid: Process id.
        started: Start of the process in seconds since the epoch.
    """

    role: str
    rank: int
    host: str
    pid: int
    started: float


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at a moment.

    Attributes:
        driver: The driver as an owner (`verl_ray/ownership.py`).
        pid: Process id of the driver.
        host: Host name of the driver's node.
        written: Time of the facts, in seconds since the epoch.
        interval_s: Seconds after which the driver writes the next status.
        ended: How the run ended; empty while it runs.
        phase: The driver's phase: "step 3/200: updating".
        rows: The processes, the driver first; those that do the same are one row.
        processes: The processes on the driver's node, which a reader there can see.
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
        return RunStatus(**tree, rows=rows, processes=processes)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is of another version ({error})") from error
