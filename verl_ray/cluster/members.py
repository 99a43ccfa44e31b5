"""Worker processes as the driver knows them, and their heartbeats.

A heartbeat tells when a process last made progress, and whether it still replies.
The driver requests the status of a process in its control group and never waits for
the reply. It sends the first request once a call has been pending for an eighth of the
limit, and again every eighth, so a run without long calls sends none. A reply holds
seconds of the process's own clock: clocks of two machines are never compared.

Invariant: a process is late only if it reports that it has made no progress for the
limit while a call was pending, or if it does not reply. It is never late because the
driver did not look for a while. A member never changes; a process that starts or gets a
role is another member.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from verl_ray.cluster.context import ProcessInfo, Status
from verl_ray.cluster.waiting import RAY_CALLS, wait

QUERY_FRACTION = 0.125
"""Fraction of the limit between two requests, and for which a reply may take."""

# If the time ran out while the driver did not look, the reply may be available already
# and only not delivered yet.
_GRACE_S = 1.0


# --------------------------------------------------------------------------- heartbeats


@dataclass
class ProgressClock:
    """Progress of one process according to its replies.

    All times are seconds of one clock of the caller.

    Attributes:
        progress_at: The process made progress at this time or later.
        requested_at: Time of the request that has no reply yet; None if there is none.
        replied: Time of the last request that has a reply, and how many seconds the
            process had made no progress by then; None before the first reply.
    """

    progress_at: float = float("-inf")
    requested_at: float | None = None
    replied: tuple[float, float] | None = None

    def is_due(self, since: float, now: float, stall_s: float) -> bool:
        """Whether to send a request, for a call that is pending since `since`."""
        if self.requested_at is not None:
            return False

        # The time has run out as far as is known: only a new reply can tell more.
        if self.silent_s(since, now) >= stall_s:
            return True

        last_request = -float("inf")
        if self.replied is not None:
            last_request = self.replied[0]
        return now - max(since, last_request) >= QUERY_FRACTION * stall_s

    def record_request(self, now: float) -> None:
        """Record that a request was sent."""
        self.requested_at = now

    def record_reply(self, idle_s: float) -> None:
        """Record the reply: the process had made no progress for `idle_s` seconds."""
        assert self.requested_at is not None, "there was no request"
        self.replied = (self.requested_at, idle_s)
        # The process measured `idle_s` after the request was sent, so its last progress
        # was at this time or later.
        self.progress_at = max(self.progress_at, self.requested_at - idle_s)
        self.requested_at = None

    def silent_s(self, since: float, now: float) -> float:
        """Seconds without known progress while a call was pending since `since`."""
        return now - max(since, self.progress_at)

    def is_late(self, since: float, now: float, stall_s: float) -> bool:
        """Whether the process certainly made no progress for `stall_s` seconds.

        Only the time counts during which a call was pending since `since`.
        """
        silent_s = self.silent_s(since, now)
        if silent_s < stall_s:
            return False

        if self.replied is not None:
            requested_at, idle_s = self.replied
            pending_s = requested_at - since
            if min(idle_s, pending_s) >= stall_s:
                return True

        # A process that does not reply makes no progress. It may still have made some
        # between its last reply and the request, which lie this far apart.
        if self.requested_at is None:
            return False
        unanswered_s = now - self.requested_at
        return (
            silent_s >= (1 + QUERY_FRACTION) * stall_s
            and unanswered_s >= QUERY_FRACTION * stall_s
        )


class Heartbeat:
    """Requests the status of one process, and remembers its last reply.

    Args:
        request: Function that requests a `Status` from the process and returns the
            reference to the reply at once.
    """

    def __init__(self, request: Callable[[], Any]) -> None:
        self._request = request
        self._pending: Any = None
        self._clock = ProgressClock()
        self._last_look = float("-inf")
        self.status: Status | None = None
        """The last reply; None before the first."""

    @property
    def unanswered_s(self) -> float:
        """Seconds since the request that has no reply yet; 0 if there is none."""
        if self._clock.requested_at is None:
            return 0.0
        return time.monotonic() - self._clock.requested_at

    def silent_s(self, since: float) -> float:
        """Seconds without known progress for a call that is pending since `since`.

        `since` is a time of the monotonic clock.
        """
        return self._clock.silent_s(since, time.monotonic())

    def status_since(self, since: float) -> Status | None:
        """The last reply if it was requested at `since` (monotonic clock) or later."""
        replied = self._clock.replied
        if replied is not None and replied[0] >= since:
            return self.status
        return None

    def is_late(self, since: float, stall_s: float) -> bool:
        """Whether the process made no progress for `stall_s` seconds.

        Only the time counts during which a call was pending, which is since `since`
        (monotonic clock). The method sends a request now and then. It returns at once
        while the process is well. A process that has ended is not late: the pending
        call reports its end.
        """
        try:
            self._receive(0.0)
            now = time.monotonic()
            if self._clock.is_due(since, now, stall_s):
                self._send(now)

            looked_away = now - self._last_look > _GRACE_S
            if self._clock.is_late(since, now, stall_s) and looked_away:
                self._receive(_GRACE_S)
            self._last_look = now
            return self._clock.is_late(since, now, stall_s)
        except ray.exceptions.RayActorError:
            return False

    def poll(self, interval_s: float, deadline_s: float) -> bool:
        """Request the status every `interval_s` seconds, whether calls pend or not.

        Returns:
            False once a request has had no reply for `deadline_s` seconds.

        Raises:
            RayError: The process has ended.
        """
        self._receive(0.0)
        now = time.monotonic()
        replied = self._clock.replied
        is_due = replied is None or now - replied[0] >= interval_s
        if self._clock.requested_at is None and is_due:
            self._send(now)

        looked_away = now - self._last_look > _GRACE_S
        if self.unanswered_s > deadline_s and looked_away:
            self._receive(_GRACE_S)
        self._last_look = now
        return self.unanswered_s <= deadline_s

    def request(self) -> None:
        """Receive the reply that is available, then request the status once more.

        It returns at once. A request that has no reply yet stays the only one.
        """
        try:
            self._receive(0.0)
            if self._clock.requested_at is None:
                self._send(time.monotonic())
        # The pending call reports the end of the process.
        except ray.exceptions.RayError:
            return

    def _send(self, now: float) -> None:
        self._pending = self._request()
        self._clock.record_request(now)

    def _receive(self, timeout_s: float) -> None:
        """Record the pending reply if it is available within `timeout_s` seconds."""
        if self._pending is None:
            return
        ready = wait([self._pending], 1, timeout_s)
        if not ready:
            return

        reply = self._pending
        self._pending = None
        try:
            status: Status = RAY_CALLS.make(ray.get, reply)
        except ray.exceptions.RayError:
            self._clock.requested_at = None
            raise
        self._clock.record_reply(status.progress.idle_s)
        self.status = status


# ------------------------------------------------------------------------------ members


@dataclass(frozen=True)
class Member:
    """One worker process of a group.

    Attributes:
        role: Role under which the process is called.
        rank: Rank of the process.
        actor: Ray's handle of the process.
        process_info: Location of the process; None until the process has reported it.
        heartbeat: Progress of the process, shared by all members of the same process.
    """

    role: str
    rank: int
    actor: Any
    process_info: ProcessInfo | None
    heartbeat: Heartbeat

    @property
    def node(self) -> str:
        """Name of the process's node for messages."""
        if self.process_info is None:
            return "a node not known yet"
        return self.process_info.node
