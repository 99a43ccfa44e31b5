"""The report of a run, made anew while it goes on: `report.html`.

Invariant: it is made from what the other trackers have recorded, and takes at most a
fiftieth of the run's time. A report that cannot be made ends no run.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from verl_ray.disk import replace_file
from verl_ray.report.page import page_of
from verl_ray.tracking.base import Sample, Tracker

PAGE = "report.html"
"""File in a run's folder."""

PERIOD_S = 30.0
"""Shortest time between two reports."""

LARGEST_SHARE = 0.02
"""Largest share of the time that may be spent on reports."""


class ReportTracker(Tracker):
    """Makes the report of a run now and then.

    The last one is made after the end of the run is on record (`last_report`).
    """

    def __init__(
        self, run_dir: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Wait for the first period to pass.

        Args:
            run_dir: Folder of the run.
            clock: Clock in seconds that only increases.
        """
        self._folder = run_dir
        self._clock = clock
        self._next_s = clock() + PERIOD_S

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Do nothing: the report reads the record on disk."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Make the report if the last one is old."""
        start_s = self._clock()
        if start_s < self._next_s:
            return
        write_report([self._folder], self._folder / PAGE)
        end_s = self._clock()
        self._next_s = end_s + max(PERIOD_S, (end_s - start_s) / LARGEST_SHARE)

    def close(self, failed: bool) -> None:
        """Do nothing: how the run has ended is not on record yet."""

    def outputs(self) -> dict[str, str]:
        return {"report": str(self._folder / PAGE)}


def last_report(folder: Path) -> None:
    """Make the report of a run that has ended, or say on stderr why there is none."""
    try:
        write_report([folder], folder / PAGE)
    except Exception as error:
        # Whatever prevents it, the run itself has ended as it has.
        with contextlib.suppress(OSError):
            text = f"{folder / PAGE} cannot be made: {error!r}"
            print(text, file=sys.stderr, flush=True)


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write the report of some runs to a file.

    Raises:
        OSError: The file cannot be written.
    """
    # `verl-ray report` may write the same file while the run does.
    replace_file(output, page_of(folders), is_shared=True)
