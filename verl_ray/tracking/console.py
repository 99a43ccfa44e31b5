"""The progress of a run on a terminal: a block that is painted again, or a line a step.

The block is that of `block.py`. Evaluated steps and the last one remain on the terminal
when it is gone. What is printed at the end of a run is in `printed_report.py`.

Invariant: nothing of a metric is interpreted as markup or sent to the terminal as a
control sequence. Everything that is shown of a step is in the other trackers, too.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from verl_ray.errors import TrackingError
from verl_ray.tracking.base import GLOBAL_STEP, Sample, Tracker
from verl_ray.tracking.block import (
    Course,
    LiveBlock,
    duration_text,
    failed_scores,
    first_shown,
    held_out_label,
    held_out_names,
    live_block,
    speed,
)
from verl_ray.tracking.jsonl import METRICS, read_metrics

_GAP = "  "


class ConsoleTracker(Tracker):
    """Shows the progress of a run."""

    def __init__(
        self,
        total_steps: int,
        folder: Path | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to show progress.

        Args:
            total_steps: Number of steps of the whole run, with those before a resume.
            folder: Folder of the run, whose record may have earlier steps.
            stream: Stream to write to; None for the current stdout.
            clock: Clock in seconds that only increases.
        """
        self._stream = stream or sys.stdout
        self._clock = clock
        self._course = Course(total_steps)

        # The parts of the last line while only the block shows it.
        self._passing: list[str] = []

        self._showing = contextlib.ExitStack()
        name = "" if folder is None else folder.name
        block = live_block(name, folder, stream=stream)
        self._block = self._showing.enter_context(block)
        if self._block is not None:
            for line in _recorded(folder):
                self._course.note(line)
            self._block.view.course = self._course

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Do nothing, since the report at the end shows samples."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show `step`. On a terminal, only an evaluation leaves a line behind."""
        self._course.note({**metrics, GLOBAL_STEP: step}, self._clock())
        parts = step_parts(self._course)

        if self._block is None:
            print(_GAP.join(parts), file=self._stream, flush=True)
            return

        # The block shows the next step instead; this copy stays above it.
        self._passing = parts
        if held_out_names(metrics):
            self._print_passing(self._block)

    def close(self, failed: bool) -> None:
        if self._block is not None:
            self._print_passing(self._block)
        self._showing.close()

    def outputs(self) -> dict[str, str]:
        return {}

    def _print_passing(self, block: LiveBlock) -> None:
        """Print the last line above the block, if it is not there yet."""
        block.print_above(self._passing)
        self._passing = []


def _recorded(folder: Path | None) -> list[dict[str, float]]:
    """Return the lines that a run has recorded so far; none where it has no record."""
    if folder is not None and (folder / METRICS).exists():
        # The record is repaired, and its damage reported, before it is shown.
        with contextlib.suppress(TrackingError):
            return read_metrics(folder / METRICS)
    return []


def step_parts(course: Course) -> list[str]:
    """Return the parts of the line that shows the last step of a run."""
    metrics = course.line
    total = "?" if course.total_steps is None else str(course.total_steps)
    parts = [f"step {course.step:>{len(total)}}/{total}"]
    parts += [f"{label} {metrics[name]:.4g}" for label, name in first_shown(metrics)]
    for name in held_out_names(metrics):
        parts.append(f"held-out {held_out_label(name)} {metrics[name]:.4g}")

    if failures := failed_scores(metrics):
        parts.append(failures)
    parts += speed(metrics)
    if course.remaining_s is not None:
        parts.append(f"{duration_text(course.remaining_s)} left")
    return parts
