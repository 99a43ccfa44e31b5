"""When a process last made progress, and whether it still answers: its control lane is asked, and nobody waits for it.

A process is asked when something has been expected of it for an eighth of the limit, and again every eighth, so a run
that goes well asks for nothing. What it answers are seconds of its own clock: those of two machines are never compared.

Invariant: a process is late only if it says itself that it has stood still for the limit while something was expected
of it, or if it does not answer. That the driver did not look for a while makes nobody late. Deliberately not here:
which calls are waited for (`calls.py`), and what a process that is late had done (`failures.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from verl_ray.cluster.messages import Status
from verl_ray.cluster.waiting import wait

ASKED = 0.125
"""Of the limit: so long nothing is asked, and so long an answer may take."""
_GRACE_S = 1.0
"""Where the time is up because nobody looked, the answer may be there and not delivered yet."""


@dataclass
class Clock:
    """The progress of one process as its answers tell it, in seconds of one clock of the caller's."""

    moved: float = float("-inf")
    """It has made progress at this time or later."""
    asked: float | None = None
    """When the question was asked that has no answer yet."""
    told: tuple[float, float] | None = None
    """When the last question was asked that has an answer, and how long the process had stood still by then."""

    def is_due(self, since: float, now: float, stall_s: float) -> bool:
        """Whether to ask, where something has been expected since `since`."""
        if self.asked is not None:
            return False
        before = -float("inf") if self.told is None else self.told[0]
        if now - max(since, self.moved) >= stall_s:
            return True  # only an answer can tell now
        return now - max(since, before) >= ASKED * stall_s

    def ask(self, now: float) -> None:
        """A question is on its way."""
        self.asked = now

    def answer(self, idle_s: float) -> None:
        """The answer: the process last made progress so long before."""
        assert self.asked is not None, "nothing was asked"
        self.told = self.asked, idle_s
        self.moved = max(self.moved, self.asked - idle_s)
        self.asked = None

    def silent_s(self, since: float, now: float) -> float:
        """For how long it has made no progress, as far as is known, while something was expected of it."""
        return now - max(since, self.moved)

    def is_late(self, since: float, now: float, stall_s: float) -> bool:
        """Whether it has certainly made no progress for the limit, while something was expected of it."""
        silent_s = self.silent_s(since, now)
        if silent_s < stall_s:
            return False
        if self.told is not None and min(self.told[1], self.told[0] - since) >= stall_s:
            return True
        # A process that does not answer makes no progress. It may have made some between its last answer and the
        # question, which lie so far apart.
        mute_s = 0.0 if self.asked is None else now - self.asked
        return silent_s >= (1 + ASKED) * stall_s and mute_s >= ASKED * stall_s


class Heartbeat:
    """Of one process: asks it, and remembers what it said last."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        """`ask` asks for a `Status` and returns the reference to it at once."""
        self._ask = ask
        self._pending: Any = None
        self._clock = Clock()
        self._looked = float("-inf")
        self.status: Status | None = None
        """The last answer; None before the first."""

    @property
    def unanswered_s(self) -> float:
        """For how long a question has had no answer; 0 while there is none."""
        return 0.0 if self._clock.asked is None else time.monotonic() - self._clock.asked

    def silent_s(self, since: float) -> float:
        """For how long nothing has been heard of its progress, while something was expected of it, which began at
        `since` (monotonic clock)."""
        return self._clock.silent_s(since, time.monotonic())

    def status_since(self, since: float) -> Status | None:
        """The last answer, if it is to a question that was asked at this time (monotonic clock) or later."""
        told = self._clock.told
        return self.status if told is not None and told[0] >= since else None

    def is_late(self, since: float, stall_s: float) -> bool:
        """Whether the process has made no progress for `stall_s` seconds while something was expected of it, which
        began at `since` (monotonic clock). Asks it now and then, and returns at once while it is well.

        A process that is gone is not late: whatever it was asked for will say so.
        """
        try:
            self._take(0.0)
            now = time.monotonic()
            if self._clock.is_due(since, now, stall_s):
                self._send(now)
            if self._clock.is_late(since, now, stall_s) and now - self._looked > _GRACE_S:
                self._take(_GRACE_S)
            self._looked = now
            return self._clock.is_late(since, now, stall_s)
        except ray.exceptions.RayActorError:
            return False

    def beat(self, interval_s: float, deadline_s: float) -> bool:
        """Ask every `interval_s` seconds, whatever is expected of the process. Returns whether it answers: not if it
        has left a question open for `deadline_s` seconds.

        Raises:
            RayError: the process is gone.
        """
        self._take(0.0)
        now = time.monotonic()
        if self._clock.asked is None and (self._clock.told is None or now - self._clock.told[0] >= interval_s):
            self._send(now)
        if self.unanswered_s > deadline_s and now - self._looked > _GRACE_S:
            self._take(_GRACE_S)
        self._looked = now
        return self.unanswered_s <= deadline_s

    def _send(self, now: float) -> None:
        self._pending = self._ask()
        self._clock.ask(now)

    def _take(self, timeout_s: float) -> None:
        """The answer, if it has come or comes within so many seconds."""
        if self._pending is None:
            return
        ready = wait([self._pending], 1, timeout_s)
        if not ready:
            return
        pending, self._pending = self._pending, None
        try:
            status: Status = ray.get(pending)
        except ray.exceptions.RayError:
            self._clock.asked = None
            raise
        self._clock.answer(status.progress.idle_s)
        self.status = status
