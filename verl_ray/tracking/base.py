"""What a tracker is: a place that receives the numbers and the sample rollouts of a run.

Invariant: a step is told in one go. Its samples come first, then `log` closes it with one merged set of metrics
under the published names, and steps only go up. Deliberately not here: computing a metric, or deciding when to
evaluate.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

GLOBAL_STEP = "training/global_step"
SAMPLES = "val/generations"
HELD_OUT = "val-core/"
"""Begins the names of held-out accuracies: val-core/<data source>/acc/mean@N."""


@dataclass(frozen=True)
class Sample:
    """One rollout as text, for people to read."""

    prompt: str
    response: str
    answer: str
    data_source: str
    score: float
    """The grader's number; nan = it failed."""
    truncated: bool
    """The response was cut at the length limit."""


class Tracker(ABC):
    """A place that receives metrics and samples."""

    required: ClassVar[bool] = False
    """Whether the run stops when this tracker fails. Only the record that a resume builds on is worth a run."""

    @abstractmethod
    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Record the sample rollouts of `step`; before `log(step)`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`, and so close it. `metrics` holds `training/global_step` too."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Write what is pending and let go of files, threads and processes. A second call does nothing."""

    @abstractmethod
    def outputs(self) -> dict[str, str]:
        """Where a person finds what was recorded: title -> path, URL or command."""

    def state(self) -> dict[str, str]:
        """What a resumed run hands to `open_trackers` so that it continues this record; goes into the checkpoint. What
        it counts has to be as durable as a checkpoint when this returns."""
        return {}


class Trackers(Tracker):
    """A tracker that is a list of trackers.

    A required tracker that fails raises. Any other one says so on stderr once and is left out from then on: the
    network of a metrics service is no reason to lose a run, and a run that records nothing is.
    """

    required = True

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._all = tuple(trackers)
        self._open = list(trackers)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        self._each(lambda tracker: tracker.samples(step, rows))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` (Python, NumPy or 0-d tensor numbers) under their names and `step` as the global step."""
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        numbers[GLOBAL_STEP] = step
        self._each(lambda tracker: tracker.log(step, numbers))

    def close(self, failed: bool) -> None:
        self._each(lambda tracker: tracker.close(failed))
        self._open.clear()

    def outputs(self) -> dict[str, str]:
        return {title: place for tracker in self._all for title, place in tracker.outputs().items()}

    def state(self) -> dict[str, str]:
        return {key: value for tracker in self._all for key, value in tracker.state().items()}

    def _each(self, act: Callable[[Tracker], None]) -> None:
        """Let every open tracker act, also after one has failed; then raise the first error of a required one."""
        fatal: Exception | None = None
        for tracker in tuple(self._open):
            try:
                act(tracker)
            except Exception as error:
                self._open.remove(tracker)
                if tracker.required:
                    fatal = fatal or error
                else:
                    name = type(tracker).__name__
                    with contextlib.suppress(OSError):  # whoever read it has gone, as `tee` does at Ctrl-C
                        print(
                            f"{name} failed and is off from here; the run goes on: {error!r}",
                            file=sys.stderr,
                            flush=True,
                        )
        if fatal is not None:
            raise fatal
