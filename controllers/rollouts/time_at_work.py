"""Shares of time in which trainers work, rollout engines do, both, or none.

Invariant: a moment counts once. The share in which trainers are idle, the share in
which engines are, less the share in which both are, and the overlap add up to 1.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from controllers.watch.measures import Metrics


class Occupancy:
    """A clock that says how long each pool works."""

    def __init__(self) -> None:
        """Begin with trainers at work and idle engines."""
        self._trains = True
        self._rollouts = 0.0
        """Share of the engines that have open rows and are not paused."""
        self._rollouts_to_learn_from = 0.0
        """Share of the engines of which some of these rows are to be learned from."""
        self._rollouts_to_learn_from_s = 0.0
        self._last_s = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        self._elapsed_s = 0.0
        self._trainers_idle_s = 0.0
        self._engines_idle_s = 0.0
        self._overlap_s = 0.0

    @contextlib.contextmanager
    def trainers_wait(self) -> Iterator[None]:
        """Count the block as time in which the trainers have nothing to learn from."""
        self._advance()
        self._trains = False
        try:
            yield
        finally:
            self._advance()
            self._trains = True

    def note_rollouts(self, share: float, to_learn_from: float) -> None:
        """Note the shares of the engines that generate from now on, 0 to 1 each.

        Args:
            share: Those that generate anything.
            to_learn_from: Those that generate rows to learn from.
        """
        if (share, to_learn_from) != (self._rollouts, self._rollouts_to_learn_from):
            self._advance()
            self._rollouts = share
            self._rollouts_to_learn_from = to_learn_from

    def _advance(self) -> None:
        now_s = time.monotonic()
        passed_s = now_s - self._last_s
        self._last_s = now_s

        self._elapsed_s += passed_s
        self._engines_idle_s += (1 - self._rollouts) * passed_s
        self._rollouts_to_learn_from_s += self._rollouts_to_learn_from * passed_s
        if self._trains:
            self._overlap_s += self._rollouts * passed_s
        else:
            self._trainers_idle_s += passed_s

    def take(self) -> Metrics:
        """Return the shares since the last call."""
        self._advance()
        elapsed_s = max(self._elapsed_s, 1e-9)
        trainers_idle = self._trainers_idle_s / elapsed_s
        engines_idle = self._engines_idle_s / elapsed_s
        overlap = self._overlap_s / elapsed_s
        self._begin()
        return {
            "perf/trainers_idle": trainers_idle,
            "perf/rollouts_idle": engines_idle,
            "perf/overlap": overlap,
            "perf/both_idle": max(0.0, trainers_idle + engines_idle + overlap - 1),
        }

    def take_rollouts_s(self) -> float:
        """Return for how long the engines have generated rows to learn from.

        This counts everything since the last call, between the steps too.
        """
        self._advance()
        seconds = self._rollouts_to_learn_from_s
        self._rollouts_to_learn_from_s = 0.0
        return seconds
