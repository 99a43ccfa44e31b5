"""The trace of a run, gathered from its processes after each step (run.trace=steps).

Invariant: no step waits for a process that is busy. Processes reply in their control
group, and the reply of one that does not reply soon is taken after the next step; what
it noted is not lost but for what its buffer cannot hold.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_ray.cluster.launch import Groups
from verl_ray.errors import ClusterError, Interrupted
from verl_ray.profiling.trace import MOST_BYTES, SPANS, TRACE, TraceFile
from verl_ray.tracking.base import Sample, Tracker

DRIVER = "driver"

_SOON_S = 2.0
"""Seconds that a step gives processes for their replies."""

_LAST_S = 30.0
"""Seconds that the end of a run gives them."""


class TraceTracker(Tracker):
    """Appends what the processes did since the last step to trace.json."""

    def __init__(self, run_dir: Path, groups: Groups, *, continues: bool) -> None:
        """Begin to gather spans.

        Args:
            run_dir: Folder of the run.
            groups: The processes of the run.
            continues: Whether the run goes on from a checkpoint in this folder.

        Raises:
            OSError: The file cannot be read or written.
        """
        self._path = run_dir / TRACE
        self._groups = groups
        self._file = TraceFile(self._path, continues=continues)
        self._warned: set[str] = set()

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Do nothing: samples take no time."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._gather()

    def close(self, failed: bool) -> None:
        # Processes of a run that has failed may be lost, and no reply of them comes.
        if failed:
            self._file.append([SPANS.take(DRIVER)])
            return
        # A process whose last reply was late is asked only the second time.
        deadline = time.monotonic() + _LAST_S
        for _ in range(2):
            self._gather(max(0.0, deadline - time.monotonic()))

    def outputs(self) -> dict[str, str]:
        return {"trace": str(self._path)}

    def _gather(self, within_s: float = _SOON_S) -> None:
        """Write the spans of all processes that ended since the last time."""
        if self._file.is_full:
            self._warn_once(
                "full",
                f"{self._path} has {MOST_BYTES >> 20} MiB, and nothing more is written"
                " to it",
            )
            return
        processes = [SPANS.take(DRIVER)]
        # A stop is heeded by the loop, which has a line to write first.
        with contextlib.suppress(Interrupted):
            try:
                processes += self._groups.take_spans(within_s)
            except ClusterError as error:
                self._warn_once(
                    "cluster",
                    f"{self._path} lacks what processes did in this step, and they are"
                    f" asked again after the next: {error}",
                )
        self._file.append(processes)

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            print(f"warning: {text}", file=sys.stderr, flush=True)
