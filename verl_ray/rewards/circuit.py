"""Circuit breaker: stops sending to a service that fails.

Invariant: after `failures` failed batches in a row, at most one batch per `reset_s` is
sent until one succeeds. Deliberately not here: what a failure is (`remote.py`).
"""

from __future__ import annotations

import math
import sys
import time

from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.service_messages import BatchFailure


class CircuitBreaker:
    """State of the connection to a service: closed (all go) or open (one may try).

    It is closed at first, and opens when too many batches fail in a row. From then on
    one trial at a time decides: a trial that succeeds closes the circuit. Each opening
    begins a new era. A batch of an earlier era no longer counts, whatever its result.
    """

    def __init__(self, name: str, failures: int, reset_s: float) -> None:
        """Create a closed circuit.

        Args:
            name: The name of the service, for warnings.
            failures: The circuit opens after this many failed batches in a row.
            reset_s: Seconds between two trials of an open circuit.
        """
        self.era = 0
        """How often the circuit has opened."""
        self._name = name
        self._limit = failures
        self._reset_s = reset_s
        self._num_failed = 0
        """Failed batches in a row."""
        self._last_failure = ""
        # When the next trial may go. None: the circuit is closed. Infinite: a trial is
        # under way.
        self._trial_at: float | None = None

    def enter(self) -> int | None:
        """Let one more batch go, which has to call `leave` at its end.

        Returns:
            The era in which it goes; None where it may not go.
        """
        if self._trial_at is not None:
            if time.monotonic() < self._trial_at:
                return None
            self._trial_at = math.inf
        return self.era

    def leave(self, era: int, failure: str | None) -> None:
        """Note the end of a batch that entered in `era`.

        Args:
            failure: Why it failed; None for a batch that succeeded.
        """
        if era != self.era:
            return

        if failure is None:
            self._num_failed = 0
            if self._trial_at is not None:
                self._trial_at = None
                _warn(f"{self._name}: replies again, the circuit is closed")
            return

        self._num_failed += 1
        self._last_failure = failure
        if self._num_failed < self._limit:
            return
        # A failed trial of an open circuit comes here too, without a second warning.
        if self._trial_at is None:
            _warn(
                f"{self._name}: the circuit is open, {self._num_failed} batches failed"
                f" in a row, the last with: {failure}. Every score fails at once; one"
                f" batch may try every {self._reset_s:g} s"
            )
        self._trial_at = time.monotonic() + self._reset_s
        self.era += 1

    def refusal(self) -> BatchFailure:
        """Failure of a batch that may not go."""
        detail = (
            f"not sent: the circuit is open after {self._num_failed} failed batches in"
            f" a row, the last: {self._last_failure}"
        )
        return BatchFailure(ScoreHealth.UNAVAILABLE, detail)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
