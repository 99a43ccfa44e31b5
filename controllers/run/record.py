"""The record of a run: its trackers, and two of them that look at the run itself.

Invariant: the trackers end with the block of the run, and know then whether it failed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from controllers.run.recovery import Recovery
from controllers.supervisor import reports
from controllers.system.build import System
from verl_ray.cluster.launch import Groups
from verl_ray.cluster.signals import raising_signals
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.errors import ClusterError, Interrupted
from verl_ray.profiling.phases import blocking
from verl_ray.profiling.trace import MOST_BYTES, SPANS, TRACE, TraceFile
from verl_ray.report.findings import FAILED_SCORES, PATIENCE, learns_nothing
from verl_ray.report.lines import Line
from verl_ray.report.tracker import ReportTracker
from verl_ray.tracking import Sample, Tracker, Trackers, open_trackers
from verl_ray.tracking.jsonl import METRICS, read_metrics

_DRIVER = "driver"
"""Name of the driver's track in a trace."""

_SOON_S = 2.0
"""Seconds that a step gives processes for their spans."""

_LAST_S = 30.0
"""Seconds that the end of a run gives them."""


@contextlib.contextmanager
def recording(config: Config, recovery: Recovery, system: System) -> Iterator[Trackers]:
    """Yield the trackers of the run, and close them as failed if the block raises."""
    trackers = Trackers([])
    try:
        # W&B may wait for its server, and knows nothing of signals.
        with raising_signals(), blocking("opening the record (tracking)"):
            trackers = open_trackers(
                config.tracking,
                config.run,
                to_tree(config),
                report=ReportTracker(Path(config.run.dir)),
                committed_step=recovery.recorded_step,
                state=recovery.tracker_state,
                follows=reports().restarts > 0,
            )
        # The record is repaired by now, and so are its last lines.
        recorded = read_metrics(Path(config.run.dir) / METRICS)
        trackers.add(LearningWatch(config, recorded))
        if config.run.trace == "steps":
            continues = recovery.recorded_step is not None
            trackers.add(
                TraceTracker(Path(config.run.dir), system.groups, continues=continues)
            )
        yield trackers
    except BaseException:
        trackers.close(failed=True)
        raise
    trackers.close(failed=False)


class LearningWatch(Tracker):
    """Prints a warning when the newest steps have a cause to learn nothing.

    What is printed follows from recorded lines and the configuration alone, so a
    resumed run prints the same as one that never stopped.
    """

    def __init__(self, config: Config, recorded: Sequence[Line]) -> None:
        """Take the configuration and the lines of the steps before.

        Args:
            config: Configuration of the run.
            recorded: Lines of metrics.jsonl that a resumed run continues.
        """
        self._config = to_tree(config)
        self._lines: deque[Line] = deque(recorded, maxlen=PATIENCE)
        self._printed: set[str] = set()

    def samples(self, step: int, rows: Sequence[Sample]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the causes that the newest steps show and that were not printed."""
        self._lines.append(metrics)
        for cause in learns_nothing(list(self._lines), self._config):
            # Failed scores are in the line of each step, and were reported before.
            is_new = cause.kind not in self._printed | {FAILED_SCORES}
            if is_new and cause.last_step == step:
                self._printed.add(cause.kind)
                print(f"warning: {cause}", file=sys.stderr, flush=True)

    def close(self, failed: bool) -> None: ...

    def outputs(self) -> dict[str, str]:
        return {}


class TraceTracker(Tracker):
    """Appends what the processes did since the last step to trace.json.

    No step waits for a process that is busy, and hardly for one that hangs: processes
    reply in their control group, and one that was late is not waited for again before
    it has replied. What it noted is not lost but for what its buffer cannot hold.
    """

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
            self._file.append([SPANS.take(_DRIVER)])
            return
        # A process whose last reply was late is asked only the second time.
        deadline = time.monotonic() + _LAST_S
        for _ in range(2):
            self._gather(max(0.0, deadline - time.monotonic()), waits_for_late=True)

    def outputs(self) -> dict[str, str]:
        return {"trace": str(self._path)}

    def _gather(
        self, within_s: float = _SOON_S, *, waits_for_late: bool = False
    ) -> None:
        """Write the spans of all processes that ended since the last time."""
        if self._file.is_full:
            self._warn_once(
                "full",
                f"{self._path} has {MOST_BYTES >> 20} MiB, and nothing more is written"
                " to it",
            )
            return
        processes = [SPANS.take(_DRIVER)]
        # A stop is heeded by the loop, which has a line to write first.
        with contextlib.suppress(Interrupted):
            try:
                processes += self._groups.take_spans(
                    within_s, waits_for_late=waits_for_late
                )
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
