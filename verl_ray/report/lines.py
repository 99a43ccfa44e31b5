"""Recorded lines of a run as series of numbers, and the held-out metrics it goes by.

Invariant: numbers that are not finite are in no series. What a run did not record makes
an empty one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
import numpy.typing as npt

from verl_ray.config.schema import Config
from verl_ray.config.tasks import type_of
from verl_ray.tracking.base import GLOBAL_STEP
from verl_ray.tracking.comparison import is_lower_better
from verl_ray.tracking.history import RunSegment

Line = Mapping[str, float]
"""Metrics of a step by their names, `training/global_step` among them."""


SAVING = "timing_s/save_checkpoint"


def with_saves_in_their_steps(
    lines: Sequence[Line], segments: Iterable[RunSegment] = ()
) -> list[Line]:
    """Return lines in which the time of a checkpoint is that of the step that saved.

    The line of a step is written before its checkpoint, so the next line of the same
    process has its time.

    Args:
        lines: Lines of metrics.jsonl, one for each step.
        segments: The processes of the run, which know the time of their last one.
    """
    moved = list(lines)
    for place, line in enumerate(lines[1:], start=1):
        before = moved[place - 1]
        if SAVING in line and line[GLOBAL_STEP] == before[GLOBAL_STEP] + 1:
            moved[place - 1] = {**before, SAVING: line[SAVING]}
            rest = {name: value for name, value in line.items() if name != SAVING}
            moved[place] = rest

    places = {int(line[GLOBAL_STEP]): place for place, line in enumerate(moved)}
    for segment in segments:
        saved = places.get(segment.saved_step or 0)
        if saved is not None and segment.saved_step and SAVING not in moved[saved]:
            moved[saved] = {**moved[saved], SAVING: segment.saving_s}
    return moved


def setting(config: Mapping[str, object], key: str) -> object:
    """Return the value of a setting in a tree of plain values; None where it is not."""
    node: object = config
    for part in key.split("."):
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


Numbers = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Series:
    """The recorded values of a metric, without those that are not finite."""

    steps: Steps
    values: Numbers

    def __len__(self) -> int:
        return len(self.steps)

    def medians(self, window: int) -> Series:
        """Return the medians over `window` values, at the step in their middle.

        A series that is shorter has none.
        """
        if len(self) < window:
            return Series(self.steps[:0], self.values[:0])
        windows = np.lib.stride_tricks.sliding_window_view(self.values, window)
        middle = window // 2
        steps = self.steps[middle : middle + len(windows)]
        return Series(steps, np.median(windows, axis=1))

    @property
    def noise(self) -> float:
        """The standard deviation of single values around their course.

        It is the median difference of neighbours times 1.4826 / sqrt(2), which is that
        of normal noise, however large some of the differences are.
        """
        apart = np.abs(np.diff(self.values))
        return (
            1.4826 / math.sqrt(2) * float(np.median(apart)) if len(apart) else math.nan
        )


@dataclass(frozen=True)
class RunLines:
    """Lines, settings and processes of a run, as the rules read them."""

    lines: Sequence[Line]
    config: Mapping[str, object]
    history: Sequence[RunSegment] = ()
    faults: Sequence[Mapping[str, object]] = ()
    """Lines of faults.jsonl."""

    @cached_property
    def steps(self) -> list[Line]:
        """Lines of steps, without that of step 0, which is before the training."""
        return [line for line in self.lines if line[GLOBAL_STEP] >= 1]

    def series(self, metric: str, steps_only: bool = True) -> Series:
        """Return the values of a metric.

        Args:
            metric: Its name.
            steps_only: Whether to leave out step 0, which is before the training.
        """
        points = [
            (line[GLOBAL_STEP], line[metric])
            for line in self.lines
            if metric in line and line[GLOBAL_STEP] >= steps_only
        ]
        table = np.array(points, np.float64).reshape(-1, 2)
        table = table[np.isfinite(table[:, 1])]
        return Series(table[:, 0].astype(np.int64), table[:, 1])

    def total(self, metrics: Sequence[str]) -> Series:
        """Return the sums of metrics, over the steps that have any of them."""
        parts = [self.series(metric) for metric in metrics]
        sums: dict[int, float] = {}
        for part in parts:
            for step, value in zip(part.steps.tolist(), part.values, strict=True):
                sums[step] = sums.get(step, 0.0) + value
        steps = sorted(sums)
        values = [sums[step] for step in steps]
        return Series(np.array(steps, np.int64), np.array(values, np.float64))

    def metrics(self, pattern: str) -> list[str]:
        """Return the names of the metrics that match a regular expression."""
        # The name of a data source may have newlines.
        return [name for name in self._names if re.fullmatch(pattern, name, re.DOTALL)]

    @cached_property
    def _names(self) -> list[str]:
        """Names of all metrics, sorted."""
        return sorted({name for line in self.lines for name in line})

    def at(self, key: str) -> object:
        """Return the value of a setting; None where the configuration lacks it."""
        return setting(self.config, key)

    def number(self, key: str, otherwise: float) -> float:
        """Return the value of a setting that is a number."""
        value = self.at(key)
        if isinstance(value, int | float):
            return float(value)
        return otherwise

    def in_words(self, key: str) -> str:
        """Return a setting and its value, as texts name it; of a section its key."""
        value = self.at(key)
        if value is None or isinstance(value, Mapping):
            return key
        return f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}"


# ------------------------------------------------------------------ held-out metrics


@dataclass(frozen=True)
class MainMetric:
    """The held-out metrics that the best step of a run is chosen by."""

    pattern: str
    """Name of the metric, in which * stands for anything."""

    best_is: object
    """`lowest` or `highest`; anything else leaves it to the name of the metric."""

    @classmethod
    def of(cls, config: Mapping[str, object]) -> MainMetric:
        """Return that of a run, by its configuration as a tree of plain values."""
        pattern = setting(config, "run.best_metric")
        if not isinstance(pattern, str):
            # The type of a user's own task is in the file of its trainer.
            kind = type_of(config.get("task")) or Config
            pattern = kind.main_metrics
        return cls(pattern, setting(config, "run.best_is"))

    def is_meant(self, name: str) -> bool:
        """Whether a metric is among them."""
        # A name may hold characters that mean something in a pattern.
        return name == self.pattern or fnmatchcase(name, self.pattern)

    def should_fall(self, name: str) -> bool:
        """Whether a held-out metric is better where it is lower."""
        if self.best_is in ("lowest", "highest") and self.is_meant(name):
            return self.best_is == "lowest"
        return is_lower_better(name)
