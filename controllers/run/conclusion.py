"""The end of a run, however it ends: its report, and its exit code.

Invariant: the report is made from the record on disk, so a resumed run reports the same
as a run that was never stopped, but for the time that its start took.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from controllers.run.best import best_of, evaluations_of
from controllers.run.finished import REPORT
from controllers.run.next_command import next_in_words
from controllers.supervisor import reports
from controllers.trainers.base import Task
from controllers.watch.measures import Metrics
from verl_ray.algorithms.intervals import Interval
from verl_ray.checkpoint.manifest import installed_versions
from verl_ray.cluster.signals import stop_requested
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.disk import replace_file
from verl_ray.errors import ConfigError, Interrupted
from verl_ray.report.findings import findings
from verl_ray.report.lines import RunLines, with_saves_in_their_steps
from verl_ray.report.record import held_out_courses, noting, read_faults
from verl_ray.report.summary import summary
from verl_ray.report.tracker import last_report
from verl_ray.tracking import GLOBAL_STEP, Trackers
from verl_ray.tracking.base import Sample
from verl_ray.tracking.comparison import intervals, paired_differences
from verl_ray.tracking.evaluations import (
    HeldOutScores,
    read_scores,
    recorded_evaluations,
)
from verl_ray.tracking.history import (
    Ending,
    RunSegment,
    begin_segment,
    end_segment,
    phase_durations,
    preparing_s,
    read_history,
    ready_segment,
    starting_s,
    wall_s,
)
from verl_ray.tracking.jsonl import METRICS, newest_samples, read_metrics
from verl_ray.tracking.printed_report import HeldOut, Report, show

SHOWN_SAMPLES = 5

FILE_WIDTH = 80


class Conclusion:
    """Notes how a process of a run begins and ends, and reports the run."""

    def __init__(
        self, config: Config, first_step: int, begun_s: float, command: str = ""
    ) -> None:
        """Note that a process begins.

        Args:
            config: configuration of the run.
            first_step: Number of steps that were finished before.
            begun_s: Time at which the process began, in seconds since 1970.
            command: The command that was typed; empty for none.
        """
        self._run = config.run
        self._folder = Path(config.run.dir)
        self._first_step = first_step
        self._task: Task[Any, Any] | None = None
        self._trackers: Trackers | None = None
        self._preparing_s = 0.0
        begin_segment(
            self._folder,
            first_step,
            begun_s,
            command,
            installed_versions(),
            follows=reports().restarts > 0,
        )

    def prepared(self, seconds: float) -> None:
        """Note how long the run took to make its inputs."""
        self._preparing_s = seconds

    def record(self, task: Task[Any, Any], trackers: Trackers, first_step: int) -> None:
        """Note that all is started, and that the record of the run is open.

        Args:
            task: The task.
            trackers: They write the record.
            first_step: Number of steps that were finished before.
        """
        self._task = task
        self._trackers = trackers
        self._first_step = first_step
        ready_segment(self._folder, first_step, self._preparing_s)

    def finish(self) -> int:
        """Report a run that has nothing left to do.

        Returns:
            The exit code: 0, or 1 if the run did not reach the gain that it promised.
        """
        task = self._task
        assert task is not None
        lines = read_metrics(self._folder / METRICS)
        step = self._last_step(lines)
        end_segment(self._folder, step, "finished")
        last_report(self._folder)

        best = best_of(task.config, evaluations_of(lines))
        how = best.early_stop_in_words()
        if how is None or step >= task.config.run.steps:
            how = f"finished after {step} steps"
        self._report(lines, how)
        print(next_in_words(task.config))

        before, after = _first_and_last(evaluations_of(lines))
        shortfall = task.shortfall(
            {} if before is None else dict(before.metrics),
            {} if after is None else dict(after.metrics),
        )
        if shortfall is None:
            return 0
        print(shortfall, file=sys.stderr)
        return 1

    def break_off(self, failure: BaseException) -> None:
        """Report a run that was stopped or has failed.

        Nothing is raised here: the failure says why the run ended.

        Args:
            failure: What ended the run.
        """
        stopped = isinstance(failure, Interrupted) or stop_requested()
        ending: Ending = "stopped" if stopped else "failed"

        # The terminal and the disk may be what failed.
        with contextlib.suppress(Exception):
            lines = []
            if (self._folder / METRICS).exists():
                lines = read_metrics(self._folder / METRICS)
            step = self._last_step(lines)
            end_segment(self._folder, step, ending)

            is_recorded = self._task is not None and bool(lines)
            # A setting that was refused did not become a run.
            if isinstance(failure, ConfigError) and not is_recorded:
                return
            # The page does not depend on the terminal, so it comes first.
            last_report(self._folder)
            if self._task is not None and lines:
                how = f"{ending} after step {step} of {self._task.config.run.steps}"
                self._report(lines, how)
            else:
                self._report_start(ending)

    def _report_start(self, ending: Ending) -> None:
        """Print the report of a run that ended before there was anything to record."""
        segments = read_history(self._folder)
        total_s = wall_s(segments)
        outputs = {"run": str(self._folder), "logs": str(self._folder / "logs")}
        title = f"{self._run.name}: {ending} before the end of the first step"
        durations = phase_durations(
            [], total_s, starting_s(segments), preparing_s(segments)
        )
        show(Report(title, total_s, durations, outputs=outputs))

    def _report(self, lines: Sequence[Metrics], how: str) -> None:
        """Print the report of the run, and write it to run.dir."""
        assert self._task is not None and self._trackers is not None
        outputs = {
            "run": str(self._folder),
            **self._task.outputs(),
            **self._trackers.outputs(),
        }
        title = f"{self._run.name}: {how}"
        report = report_of(self._task, title, lines, outputs)
        show(report)

        text = io.StringIO()
        show(report, text, FILE_WIDTH)
        content = text.getvalue().encode(errors="backslashreplace")
        replace_file(self._folder / REPORT, content)

    def _last_step(self, lines: Sequence[Metrics]) -> int:
        """Return the number of finished steps."""
        if not lines:
            return self._first_step
        return int(lines[-1][GLOBAL_STEP])


def report_of(
    task: Task[Any, Any],
    title: str,
    lines: Sequence[Metrics],
    outputs: Mapping[str, str],
) -> Report:
    """Return the report of a run from its record.

    Args:
        task: the task of the run.
        title: how the run ended.
        lines: lines of its metrics.jsonl.
        outputs: what a person may open, by title.
    """
    folder = task.folder
    evaluations = evaluations_of(lines)
    before, after = _first_and_last(evaluations)

    # A damaged file is named, and leaves out its part of the report.
    damage: list[str] = []

    scores = _scores_of(folder, (before, after), damage)
    changes: Mapping[str, Interval] = {}
    if len(scores) == 2:
        first, last = (scores[step] for step in sorted(scores))
        changes = paired_differences(first, last)

    samples: list[Sample] = []
    with noting(damage):
        samples = newest_samples(folder, SHOWN_SAMPLES)

    segments: list[RunSegment] = []
    with noting(damage):
        segments = read_history(folder)
    total_s = wall_s(segments)
    faults = read_faults(folder, segments[0].begun_s if segments else 0.0, damage)
    tree = to_tree(task.config)
    moved = with_saves_in_their_steps(lines, segments)
    shown = findings(moved, tree, segments, faults)
    durations = phase_durations(
        moved, total_s, starting_s(segments), preparing_s(segments)
    )
    courses = held_out_courses(lines, tree)
    run = RunLines(lines, tree)

    return Report(
        title=title,
        summary=summary(run, courses, changes, durations, total_s),
        total_s=total_s,
        durations=durations,
        before=_with_intervals(before, scores),
        after=_with_intervals(after, scores),
        changes=changes,
        best=best_of(task.config, evaluations).in_words(),
        warnings=[*map(str, shown), *damage],
        samples=samples,
        outputs=outputs,
    )


def _first_and_last(
    evaluations: Mapping[int, Metrics],
) -> tuple[HeldOut | None, HeldOut | None]:
    """Return the first and the last evaluation; a single one after a step is last."""
    if not evaluations:
        return None, None

    first = min(evaluations)
    last = max(evaluations)
    before = HeldOut(first, evaluations[first])
    after = HeldOut(last, evaluations[last])
    if first < last:
        return before, after
    return (before, None) if first == 0 else (None, after)


def _scores_of(
    folder: Path, sides: Sequence[HeldOut | None], damage: list[str]
) -> dict[int, HeldOutScores]:
    """Return the scores of some evaluations, by step.

    Records of older versions have none. `damage` receives a sentence for each that
    cannot be read.
    """
    paths = recorded_evaluations(folder)
    scores = {}
    for side in sides:
        if side is not None and side.step in paths:
            with noting(damage):
                scores[side.step] = read_scores(paths[side.step])
    return scores


def _with_intervals(
    side: HeldOut | None, scores: Mapping[int, HeldOutScores]
) -> HeldOut | None:
    """Return an evaluation with the intervals of its metrics, where it has scores."""
    if side is None or side.step not in scores:
        return side
    return replace(side, intervals=intervals(scores[side.step]))
