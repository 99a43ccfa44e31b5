"""When each process of a run began and ended, and how: `history.jsonl`.

Invariant: there is one line per process that trained, in order. The line of a process
that was killed says so once the next one begins; its end is then the time at which the
last line of metrics.jsonl was written.

Deliberately not here: what the processes did (`jsonl.py`).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from verl_ray.disk import replace_file
from verl_ray.errors import TrackingError
from verl_ray.tracking.jsonl import METRICS

HISTORY = "history.jsonl"

Ending = Literal["running", "finished", "stopped", "failed", "killed"]
"""How a process ended. `running` is what it is until then."""


@dataclass(frozen=True)
class Stint:
    """The part of a run that one process made."""

    begun_s: float
    """Time at which it began, in seconds since 1970."""

    ended_s: float | None
    """Time at which it ended; None while it is running."""

    first_step: int
    """Number of steps that were finished when it began."""

    last_step: int | None
    """Number of steps that were finished when it ended; None if that is not known."""

    ending: Ending

    ready_s: float | None = None
    """Time at which everything was started and the first step could begin; None if it
    did not come to that, or in records of earlier versions."""

    preparing_s: float = 0.0
    """Part of the time until then in which the run made its inputs, in seconds."""


def begin_stint(run_dir: Path, step: int, begun_s: float) -> None:
    """Note that a process begins.

    Args:
        run_dir: Folder of the run.
        step: Number of finished steps. With 0 the run begins anew, and so does its
            history.
        begun_s: Time at which the process began, in seconds since 1970.

    Raises:
        TrackingError: The history cannot be written.
    """
    stints: list[Stint] = []
    if step > 0:
        # The history is not the state of a run, so damage to it ends none.
        try:
            stints = read_history(run_dir)
        except TrackingError as error:
            print(f"warning: {error}", file=sys.stderr, flush=True)
    if stints and stints[-1].ending == "running":
        stints[-1] = _killed(stints[-1], run_dir / METRICS)

    stints.append(Stint(begun_s, None, step, None, "running"))
    _write(run_dir, stints)


def ready_stint(run_dir: Path, preparing_s: float = 0.0) -> None:
    """Note that the process that began last has started everything.

    Args:
        run_dir: Folder of the run.
        preparing_s: Seconds in which it made the inputs of the run.

    Raises:
        TrackingError: The history cannot be read or written.
    """
    stints = read_history(run_dir)
    if stints:
        ready = replace(stints[-1], ready_s=time.time(), preparing_s=preparing_s)
        _write(run_dir, [*stints[:-1], ready])


def end_stint(run_dir: Path, step: int, ending: Ending) -> None:
    """Note that the process that began last has ended.

    Args:
        run_dir: Folder of the run.
        step: Number of finished steps.
        ending: How it ended.

    Raises:
        TrackingError: The history cannot be read or written.
    """
    stints = read_history(run_dir)
    # Somebody may have removed the file in the meantime.
    if not stints:
        return

    *before, last = stints
    ended = replace(last, ended_s=time.time(), last_step=step, ending=ending)
    _write(run_dir, [*before, ended])


def read_history(run_dir: Path) -> list[Stint]:
    """Return the processes of a run in order; none where there is no history.

    Raises:
        TrackingError: The file holds something else.
    """
    path = run_dir / HISTORY
    if not path.exists():
        return []
    try:
        lines = path.read_text("utf-8").splitlines()
        return [Stint(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise TrackingError(
            f"{path}: cannot be read ({error!r}); without it, nobody knows how long"
            " the earlier processes of the run took"
        ) from error


def wall_s(stints: list[Stint]) -> float:
    """Return how long all processes of a run took together, in seconds."""
    now_s = time.time()
    total_s = 0.0
    for stint in stints:
        ended_s = now_s if stint.ended_s is None else stint.ended_s
        total_s += max(0.0, ended_s - stint.begun_s)
    return total_s


def preparing_s(stints: list[Stint]) -> float:
    """Return how long the processes of a run made its inputs, in seconds."""
    return sum(stint.preparing_s for stint in stints)


def starting_s(stints: list[Stint]) -> float:
    """Return how long the processes of a run took until all was started, in seconds.

    The time in which they made its inputs is not a part of it. A process that has ended
    before it was ready did nothing else.
    """
    total_s = 0.0
    for stint in stints:
        ready_s = stint.ended_s if stint.ready_s is None else stint.ready_s
        if ready_s is not None and (
            stint.ready_s or stint.last_step == stint.first_step
        ):
            total_s += max(0.0, ready_s - stint.begun_s - stint.preparing_s)
    return total_s


def _killed(stint: Stint, metrics: Path) -> Stint:
    """Return the part of a process that could not note its end."""
    ended_s = stint.begun_s
    if metrics.exists():
        ended_s = max(ended_s, metrics.stat().st_mtime)
    return replace(stint, ended_s=ended_s, ending="killed")


def _write(run_dir: Path, stints: list[Stint]) -> None:
    lines = "".join(json.dumps(asdict(stint)) + "\n" for stint in stints)
    path = run_dir / HISTORY
    try:
        replace_file(path, lines.encode())
    except OSError as error:
        raise TrackingError(
            f"{path}: cannot be written ({error}); make room there, or choose another"
            " folder with run.dir"
        ) from error
