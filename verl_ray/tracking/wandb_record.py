"""The steps that a W&B run has on the disk, in the folders of its processes.

A process of W&B's that is killed loses what it has not flushed, and W&B takes nothing
back. So who goes on compares this record with the run's own.

Invariant: nothing here changes a file. Deliberately not here: what is sent again
(`wandb_run.py`).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from verl_ray.paths import program
from verl_ray.tracking.base import GLOBAL_STEP

_LIMIT_S = 60.0
"""Limit in seconds of W&B's reader for one folder."""

_EMPTY_BYTES = 4096
"""A file that is smaller may hold no step yet."""


def recorded_steps(folder: Path, run_id: str) -> set[int]:
    """Return the steps of a run that are in its folders.

    Args:
        folder: The folder `wandb` of the run.
        run_id: W&B's id of the run.

    Raises:
        OSError: W&B's reader does not start, or reads nothing.
        subprocess.SubprocessError: It does not end.
    """
    steps: set[int] = set()
    # An online run has such folders, too.
    for session in sorted(folder.glob(f"*run-*-{run_id}")):
        steps.update(_steps_in(session))
    return steps


def _steps_in(session: Path) -> Iterator[int]:
    """Yield the steps that one process has flushed; none if it has flushed nothing."""
    command = [program("wandb"), "leet", "inspect", "--json", str(session)]
    # The code is not 0 where the end of a file is missing, as of a killed process.
    reader = subprocess.run(
        command, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    nbytes = sum(path.stat().st_size for path in session.glob("*.wandb"))
    if reader.returncode and not reader.stdout and nbytes > _EMPTY_BYTES:
        raise OSError(reader.stderr.strip())
    for line in reader.stdout.splitlines():
        record = json.loads(line)
        item = record.get("history", {}).get("item", {})
        if GLOBAL_STEP in item:
            yield int(item[GLOBAL_STEP])
