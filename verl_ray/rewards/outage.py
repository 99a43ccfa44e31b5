"""A service as a whole: whether it answers, and the wait until it does again.

A request that fails may be at fault itself, or the service is away. Another request
tells which: the last one that the service has answered is sent again. Where it has
answered none, it is sent an empty one, which no row can be to blame for.

Invariant: a failure is blamed on a request only where the service answers another one
after it. Every wait ends: with an answer, or after the limit with an error. What is
sent to find out gives nobody a score.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from verl_ray.errors import GraderOutage
from verl_ray.profiling.progress import touch, waiting_for

LONGEST_PAUSE_S = 15.0
"""Longest pause between two requests to a service that is away, without its jitter."""

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failure that may be the service's as a whole."""

    detail: str
    retry_after_s: float = 0.0
    """Delay that the service requested before the next attempt."""


Ask = Callable[[bytes], Awaitable[Refusal | None]]
"""Sends a request's body once; None where the service answers it, rightly or not."""


class Availability:
    """Whether a service answers, as its requests and those of this object tell."""

    def __init__(
        self,
        name: str,
        key: str,
        max_outage_s: float,
        pause_s: float,
        ask: Ask,
        empty: bytes,
    ) -> None:
        """Begin without an answer and without an outage.

        Args:
            name: Key and address of the service, for people.
            key: Key of `max_outage_s`.
            max_outage_s: Longest outage in seconds.
            pause_s: First pause between two requests in an outage. It doubles.
            ask: Sends a request.
            empty: Body of a request without any rows.
        """
        self.num_outages = 0
        """How many outages have begun."""
        self.outage_s = 0.0
        """Seconds of all outages that have ended."""
        self._name = name
        self._key = key
        self._max_outage_s = max_outage_s
        self._pause_s = pause_s
        self._ask = ask
        # Not seeded: ranks that failed together should not come back together.
        self._random = random.Random()

        self._answered_at = float("-inf")
        self._probe = empty
        """The last request that the service has answered; before it the empty one."""
        self._since: float | None = None
        """Beginning of the present outage; None while the service answers."""
        # Who holds it finds out; the others wait for that.
        self._gate = asyncio.Lock()

    def note_answer(self, body: bytes) -> None:
        """Note that the service has answered a request with this body."""
        self._answered_at = time.monotonic()
        self._probe = body
        self._end()

    async def wait_for_end(self) -> None:
        """Wait until nobody is finding out whether the service is away.

        Raises:
            GraderOutage: The service is away for longer than the limit.
        """
        async with self._gate:
            pass

    async def has_answered_since(
        self, sent_at: float, num_outages: int, refusal: Refusal
    ) -> bool:
        """Find out whether a request has failed by itself; else wait for the service.

        Args:
            sent_at: Time at which the request was last sent (monotonic clock).
            num_outages: Value of the attribute when it was first sent.
            refusal: How it has failed.

        Returns:
            Whether the service has answered another one since, without an outage.

        Raises:
            GraderOutage: The service is away for longer than the limit.
        """
        async with self._gate:
            if self._answered_at <= sent_at:
                last = await self._refusal_since(sent_at)
                if last is not None:
                    await self._wait(sent_at, last)
            self._end()
        return self.num_outages == num_outages

    async def _refusal_since(self, sent_at: float) -> Refusal | None:
        """Ask once; return None where the service has answered anything since a time.

        Others may have had an answer meanwhile.
        """
        refusal = await self._ask(self._probe)
        if refusal is None:
            self._answered_at = time.monotonic()
        return None if self._answered_at > sent_at else refusal

    async def _wait(self, sent_at: float, refusal: Refusal) -> None:
        """Begin an outage, and ask until an answer comes or the limit is reached.

        Raises:
            GraderOutage: The limit is reached.
        """
        self._begin(sent_at, refusal)
        pause_s = self._pause_s
        last: Refusal | None = refusal
        while last is not None:
            with waiting_for(f"{self._name}: {last.detail}"):
                await self._pause(pause_s, last)
                if self._answered_at > sent_at:
                    return
                last = await self._refusal_since(sent_at)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _begin(self, since: float, refusal: Refusal) -> None:
        if self._since is not None:
            return
        self._since = since
        self.num_outages += 1
        _say(
            f"{self._name} is away: {refusal.detail}. It is asked again until it"
            f" answers, at most for {self._key} = {self._max_outage_s:g} s"
        )

    def _end(self) -> None:
        if self._since is None:
            return
        outage_s = time.monotonic() - self._since
        self._since = None
        self.outage_s += outage_s
        _say(f"{self._name} answers again after {outage_s:.0f} s")

    async def _pause(self, pause_s: float, refusal: Refusal) -> None:
        """Wait before the next request, as progress of this process.

        Raises:
            GraderOutage: The limit is reached.
        """
        assert self._since is not None, "there is an outage"
        end = self._since + self._max_outage_s
        if time.monotonic() >= end:
            raise GraderOutage(
                f"{self._name} has not answered for"
                f" {time.monotonic() - self._since:.0f} s ({self._key} ="
                f" {self._max_outage_s:g}). The last reply: {refusal.detail}. See to"
                " the service, or raise the limit"
            )
        jitter = self._random.uniform(0.5, 1.5)
        wait_s = max(pause_s * jitter, refusal.retry_after_s)
        until = min(time.monotonic() + wait_s, end)
        # Ends at the time, or with an answer to a request that was under way.
        began = time.monotonic()
        while (rest_s := until - time.monotonic()) > 0 and self._answered_at <= began:
            await asyncio.sleep(min(rest_s, _LOOK_S))
            touch()


def _say(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
