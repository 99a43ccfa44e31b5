"""A tracker whose calls another thread makes, so that none of them holds up the run.

A service may reply late, or never: its process is stopped, its server is gone.

Invariant: every call but `close` returns at once, and `close` within a limit. The
tracker gets all calls in their order. Deliberately not here: trackers on the disk. A
checkpoint counts their lines.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from verl_ray.errors import TrackingError
from verl_ray.profiling.phases import blocking
from verl_ray.tracking.base import Sample, Tracker

PATIENCE_S = 75.0
"""Seconds that one call of a tracker may take, its last one included."""

_ABORT_S = 15.0
"""Seconds that a call may take to end, and to be tried again, once it was given up."""


class UnhurriedTracker(Tracker):
    """Forwards to another tracker, in a thread of its own."""

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
