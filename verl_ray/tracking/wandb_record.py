"""The steps that a W&B run has on the disk, in the folders of its processes.

A process of W&B's that is killed loses what it has not flushed, and W&B takes
nothing back. So who goes on compares this record with the run's own.

Invariant: nothing here changes a file of W&B's record.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from verl_ray.json_lines import lines_of
from verl_ray.paths import program
from verl_ray.tracking.base import (
    GLOBAL_STEP,
)

_LIMIT_S = 60.0
"""Limit in seconds of W&B's reader for one folder."""

_EMPTY_BYTES = 4096
"""A file that is smaller may hold no step yet."""


def recorded_steps(folder: Path, run_id: str) -> list[tuple[int, int]]:
    """Return W&B's number and the step of each line of a run that is in its folders.

    The first process of a run counts from 0, and so do all that are offline.

    Args:
        folder: The folder `wandb` of the run.
        run_id: W&B's id of the run.

    Raises:
        OSError: W&B's reader does not start, or reads nothing.
        subprocess.SubprocessError: It does not end.
    """
    lines: list[tuple[int, int]] = []
    # An online run has such folders, too.
    for session in sorted(folder.glob(f"*run-*-{run_id}")):
        lines.extend(_steps_in(session))
    return lines


def _steps_in(session: Path) -> Iterator[tuple[int, int]]:
    """Yield number and step of each line that one process has flushed.

    There is none if it has flushed nothing.
    """
    command = [program("wandb"), "leet", "inspect", "--json", str(session)]
    # Its log would lie in /tmp, where another user may have put a link or a pipe.
    environment = {**os.environ, "WANDB_DIR": str(session.parents[1])}
    # The code is not 0 where the end of a file is missing, as of a killed process.
    reader = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
        env=environment,
    )
    nbytes = sum(path.stat().st_size for path in session.glob("*.wandb"))
    if reader.returncode and not reader.stdout and nbytes > _EMPTY_BYTES:
        raise OSError(reader.stderr.strip())
    for line in lines_of(reader.stdout):
        record = json.loads(line)
        item = record.get("history", {}).get("item", {})
        if GLOBAL_STEP in item:
            yield int(item["_step"]), int(item[GLOBAL_STEP])
