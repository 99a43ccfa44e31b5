"""The contract of a tracker, which receives the metrics and samples of a run.

Invariant: a tracker receives a step all at once. Its samples come first, then `log`
closes it with one set of metrics under the published names. Steps only increase.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from verl_ray.errors import TrackingError
from verl_ray.profiling.phases import blocking
from verl_ray.tracking.evaluations import HeldOutScores
from verl_ray.tracking.held_out_responses import HeldOutResponse

GLOBAL_STEP = "training/global_step"
SAMPLES = "val/generations"

HELD_OUT = "val-core/"
"""Prefix of the names of main held-out metrics: val-core/<data source>/acc/mean@N."""


PATIENCE_S = 75.0
"""Seconds that one call of a tracker may take, its last one included."""

_ABORT_S = 15.0
"""Seconds that a call may take to end, and to be tried again, once it was given up."""


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

    @classmethod
    def of(cls, response: HeldOutResponse) -> Sample:
        """Return a held-out response as a sample."""
        return cls(
            prompt=response.prompt,
            response=response.response,
            answer=response.answer,
            data_source=response.data_source,
            score=response.score,
            truncated=response.finish == "length",
            entries=response.entries,
        )


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

    def responses(self, step: int, rows: Iterable[HeldOutResponse]) -> None:
        """Record every response of the evaluation of `step`, before `log(step)`.

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

        It becomes part of a checkpoint or a snapshot.
        """
        return {}

    def sync(self) -> None:
        """Wait until the disk has the part of the record that `state` covers.

        A checkpoint counts it. A tracker whose record is elsewhere waits for nothing.
        """
        return


class Trackers(Tracker):
    """A tracker that forwards to several trackers.

    A required tracker that fails raises. Any other tracker that fails is reported on
    stderr once, and left out from then on. A failing network of a metrics service is no
    reason to lose a run, but a run that records nothing is one. Errors that come out of
    what is recorded, such as a stop while rows are read, are no failures of a tracker.
    """

    required = True

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._all = tuple(trackers)
        self._open = list(trackers)
        self._last_step = -1

    def add(self, tracker: Tracker) -> None:
        """Forward to another tracker, too, from now on."""
        self._all = (*self._all, tracker)
        self._open.append(tracker)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        if step > self._last_step:
            self._for_each(lambda tracker: tracker.samples(step, rows))

    def scores(self, step: int, scores: HeldOutScores) -> None:
        if step > self._last_step:
            self._for_each(lambda tracker: tracker.scores(step, scores))

    def responses(self, step: int, rows: Iterable[HeldOutResponse]) -> None:
        if step > self._last_step:
            self._for_each(lambda tracker: tracker.responses(step, rows))

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

    def sync(self) -> None:
        for tracker in self._all:
            tracker.sync()

    def _for_each(self, act: Callable[[Tracker], None]) -> None:
        """Let every open tracker act, also after one has failed.

        Raises:
            TrackingError: The first error of a required tracker.
            Exception: Any other error that it met, such as one of reading rows.
        """
        fatal: Exception | None = None
        for tracker in tuple(self._open):
            try:
                act(tracker)
            except Exception as error:
                # It can go on, as the run may after a process that was lost.
                if tracker.required and not isinstance(error, TrackingError):
                    raise
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


class UnhurriedTracker(Tracker):
    """Forwards to another tracker in a thread of its own, so that none of its calls
    holds up the run.

    A service may reply late, or never: its process is stopped, its server is gone.
    Every call but `close` returns at once, and `close` within a limit. The tracker gets
    all calls in their order. Trackers on the disk need none: a checkpoint counts their
    lines.
    """

    def __init__(
        self,
        tracker: Tracker,
        give_up: Callable[[], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Begin to forward.

        Args:
            tracker: The tracker.
            give_up: Lets the call fail that the tracker is in.
            patience_s: Seconds that one call may take.
        """
        self._tracker = tracker
        self._give_up = give_up
        self._patience_s = patience_s
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._began_s: float | None = None
        """When the present call began or was given up; None between two calls."""

        self._is_given_up = False
        self._is_closed = False
        name = type(tracker).__name__
        self._thread = threading.Thread(target=self._forward, name=name, daemon=True)
        self._thread.start()

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        self._call(lambda: self._tracker.samples(step, rows))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = dict(metrics)
        self._call(lambda: self._tracker.log(step, numbers))

    def close(self, failed: bool) -> None:
        """Wait for what is pending, at most for the limit.

        Raises:
            TrackingError: The tracker does not come to its end.
            Exception: What it raised in a call.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._calls.put(lambda: self._tracker.close(failed))
        self._calls.put(None)
        with blocking(f"{self._thread.name} takes its last lines"):
            self._thread.join(self._patience_s)
            if self._thread.is_alive():
                self._give_up()
                self._thread.join(_ABORT_S)
            if self._thread.is_alive():
                # It may have begun again meanwhile, with what outlives this process.
                self._give_up()
        self._raise_failure()
        if self._thread.is_alive():
            raise self._stuck(self._patience_s + _ABORT_S)

    def outputs(self) -> dict[str, str]:
        return self._tracker.outputs()

    def state(self) -> dict[str, str]:
        return self._tracker.state()

    def _call(self, call: Callable[[], None]) -> None:
        self._raise_failure()
        self._calls.put(call)

        began_s = self._began_s
        if began_s is None:
            return
        lasts_s = time.monotonic() - began_s
        if lasts_s > self._patience_s and self._is_given_up:
            self._is_closed = True
            raise self._stuck(lasts_s)
        if lasts_s > self._patience_s:
            self._is_given_up = True
            self._began_s = time.monotonic()
            self._give_up()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _stuck(self, seconds: float) -> TrackingError:
        return TrackingError(f"it has not taken its last lines for {seconds:.0f} s")

    def _forward(self) -> None:
        # Consumes the calls in their order. Ends at None, or where one of them fails.
        while (call := self._calls.get()) is not None:
            self._is_given_up = False
            self._began_s = time.monotonic()
            try:
                call()
            except Exception as error:
                self._error = error
                return
            finally:
                self._began_s = None
