"""The contract of a tracker, which receives the metrics and samples of a run.

Invariant: a tracker receives a step all at once. Its samples come first, then `log`
closes it with one set of metrics under the published names. Steps only increase.

Deliberately not here: computing a metric, or deciding when to evaluate.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from verl_ray.tracking.evaluations import HeldOutScores

GLOBAL_STEP = "training/global_step"
SAMPLES = "val/generations"

HELD_OUT = "val-core/"
"""Prefix of the names of main held-out metrics: val-core/<data source>/acc/mean@N."""


@dataclass(frozen=True)
class Sample:
    """A rollout as text, for people to read."""

    prompt: str
    response: str
    answer: str
    data_source: str

    score: float
    """Number from the grader; nan if it failed."""

    truncated: bool
    """Whether the response was cut at the length limit."""

    entries: Mapping[str, float | str] = field(default_factory=dict)
    """What the reward function returned beside the score."""


@dataclass(frozen=True)
class HeldOutResponse:
    """A response to a held-out problem, as the command `evaluate` writes it."""

    problem: int
    """Number of the problem, which is that of its record in the file."""

    data_source: str
    prompt: str
    response: str
    answer: str

    score: float
    """Number from the grader; nan if it failed."""

    finish: str
    """Why the response ended: stop, length or aborted."""

    entries: Mapping[str, float | str] = field(default_factory=dict)
    """What the reward function returned beside the score."""


class Tracker(ABC):
    """A place that receives metrics and samples."""

    required: ClassVar[bool] = False
    """Whether the run stops when this tracker fails.

    Only the record that a resume builds on is worth a run.
    """

    @abstractmethod
    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Record the sample rollouts of `step`, before `log(step)`."""

    def scores(self, step: int, scores: HeldOutScores) -> None:
        """Record the score of every held-out problem of `step`, before `log(step)`.

        Only the record on disk keeps them.
        """
        return

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`, which closes it.

        The metrics include `training/global_step`.
        """

    @abstractmethod
    def close(self, failed: bool) -> None:
        """Write what is pending, and release files, threads and processes.

        A second call does nothing.

        Args:
            failed: Whether the run ended with an error.
        """

    @abstractmethod
    def outputs(self) -> dict[str, str]:
        """Return where a person finds the record: title -> path, URL or command."""

    def state(self) -> dict[str, str]:
        """Return what a resumed run passes to `open_trackers` to continue this record.

        It becomes part of a checkpoint. The part of the record that it covers is on the
        disk when this returns.
        """
        return {}


class Trackers(Tracker):
    """A tracker that forwards to several trackers.

    A required tracker that fails raises. Any other tracker that fails is reported on
    stderr once, and left out from then on. A failing network of a metrics service is no
    reason to lose a run, but a run that records nothing is one.
    """

    required = True

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._all = tuple(trackers)
        self._open = list(trackers)
        self._last_step = -1

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        if step > self._last_step:
            self._for_each(lambda tracker: tracker.samples(step, rows))

    def scores(self, step: int, scores: HeldOutScores) -> None:
        if step > self._last_step:
            self._for_each(lambda tracker: tracker.scores(step, scores))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics under their names, and `step` as the global step.

        A run that goes back after a failure makes steps again, with the same results;
        they are not recorded again.

        Args:
            step: Number of the step.
            metrics: Numbers of Python or NumPy, or 0-d tensors.
        """
        if step <= self._last_step:
            return
        self._last_step = step

        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            # Python's integers stay integers.
            numbers[name] = value if isinstance(value, int) else float(value)
        numbers[GLOBAL_STEP] = step
        self._for_each(lambda tracker: tracker.log(step, numbers))

    def close(self, failed: bool) -> None:
        self._for_each(lambda tracker: tracker.close(failed))
        self._open.clear()

    def outputs(self) -> dict[str, str]:
        outputs: dict[str, str] = {}
        for tracker in self._all:
            outputs.update(tracker.outputs())
        return outputs

    def state(self) -> dict[str, str]:
        state: dict[str, str] = {}
        for tracker in self._all:
            state.update(tracker.state())
        return state

    def _for_each(self, act: Callable[[Tracker], None]) -> None:
        """Let every open tracker act, also after one has failed.

        Raises:
            Exception: The first error of a required tracker.
        """
        fatal: Exception | None = None
        for tracker in tuple(self._open):
            try:
                act(tracker)
            except Exception as error:
                # A tracker that failed is not called again, not even to close it.
                self._open.remove(tracker)
                if not tracker.required:
                    _report_failure(tracker, error)
                elif fatal is None:
                    fatal = error
        if fatal is not None:
            raise fatal


def _report_failure(tracker: Tracker, error: Exception) -> None:
    """Print to stderr that a tracker is left out from now on."""
    name = type(tracker).__name__
    # The reader of stderr may have exited, as `tee` does at Ctrl-C.
    with contextlib.suppress(OSError):
        print(
            f"{name} failed and is off from here; the run goes on: {error!r}",
            file=sys.stderr,
            flush=True,
        )
