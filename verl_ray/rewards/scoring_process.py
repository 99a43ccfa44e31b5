"""One scoring process, as the pool sees it: its connection and its pending units.

Invariant: no call blocks but `terminate`, which is bounded; when `terminate` returns,
the process and everything that it started are gone.

A unit is what a process scores in one go, and what may cost its responses together. A
function of one response scores responses one by one. Coroutines are awaited side by
side, so some responses travel together. A batched function scores all responses to a
prompt in one call: they are one unit, whatever else is scored at the time. The items of
a unit have the same function and are consecutive requests of a call; those of a batched
function are all consecutive requests of one prompt.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_ray.errors import ConfigError, Problem
from verl_ray.rewards.request import FRAME, Needs, RequestRow, ScoreRequest, message

# A guard kills within milliseconds; after this its process group is killed from here.
_KILL_S = 5.0
_READ_BYTES = 1 << 16

# The package may be importable here only because of how this process was started; the
# scorer takes over sys.path whole.
_PROGRAM = (
    "import sys; sys.path.insert(0, {root!r}); from verl_ray.rewards.child import main;"
    " main({descriptor})"
)
_ROOT = str(Path(__file__).parents[2])

MOST_CONCURRENT = 64
"""Coroutines of one process that are awaited side by side."""

_GRACE_S = 1.0
"""Time that a process has to report coroutines which have missed their deadline."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Requests of a call that are scored in one go. Units are compared by identity."""

    items: tuple[int, ...]
    """Indices of the requests in the call."""
    needs: Needs

    @property
    def is_divisible(self) -> bool:
        """Whether its responses can also be scored one by one."""
        return self.needs.unit == "concurrent" and len(self.items) > 1

    def parts(self) -> list[Unit]:
        """Return a unit for each response."""
        return [Unit((item,), self.needs) for item in self.items]

    def limit_s(self, deadline_s: float) -> float:
        """Return how long the unit may take.

        Args:
            deadline_s: How long one response may take.
        """
        if self.needs.unit == "concurrent":
            return deadline_s + _GRACE_S
        return deadline_s * len(self.items)

    def rows(self, requests: Sequence[ScoreRequest]) -> list[RequestRow]:
        """Return the unit's requests as they are sent, without what nobody needs.

        Args:
            requests: The requests of the call.
        """
        tokens, conversation = self.needs.tokens, self.needs.conversation
        return [
            requests[item].row(tokens=tokens, conversation=conversation)
            for item in self.items
        ]


def units_of(
    requests: Sequence[ScoreRequest], needs: Mapping[str, Needs]
) -> list[Unit]:
    """Return the units of the requests of a call, in their order.

    Args:
        requests: The requests.
        needs: What each function needs, by data source; `default` for the others.
    """

    def function_of(item: int) -> str:
        source = requests[item].data_source
        return source if source in needs else "default"

    def group_of(item: int) -> int:
        return requests[item].group

    units: list[Unit] = []
    for source, run in itertools.groupby(range(len(requests)), function_of):
        of_function = needs[source]
        parts: list[tuple[int, ...]]
        if of_function.unit == "single":
            parts = [(item,) for item in run]
        elif of_function.unit == "concurrent":
            items = tuple(run)
            starts = range(0, len(items), MOST_CONCURRENT)
            parts = [items[start : start + MOST_CONCURRENT] for start in starts]
        else:
            parts = [tuple(group) for _, group in itertools.groupby(run, group_of)]
        units += [Unit(part, of_function) for part in parts]
    return units


# ------------------------------------------------------------------------------ process


class ScoringProcess:
    """One scoring process. The unit in hand is the first pending one."""

    def __init__(self, start: bytes) -> None:
        """Start the process.

        Args:
            start: The first message to it, a `wire.Start`.
        """
        self.ready = False
        """Whether the process has imported the reward functions."""
        self.has_begun = False
        """Whether the process has begun with the units that were sent last."""
        self.pending: deque[Unit] = deque()
        """The units without scores, in the order they were sent."""
        self.outgoing = b""
        """Bytes that did not fit into the socket yet."""
        self._incoming = bytearray()
        self.connection, its_end = socket.socketpair()
        with its_end:
            self._process = _launch(its_end.fileno())
        self.was_killed = False
        """Whether a signal ended the process, once it is terminated."""
        self.connection.setblocking(False)
        self.waiting_since = time.monotonic()
        """When the process was started, got its units, or sent its last frame."""
        self._send(start)

    def send_units(self, units: list[Unit], requests: Sequence[ScoreRequest]) -> None:
        """Send units of the requests of a call; no unit may be pending."""
        self.pending.extend(units)
        self.has_begun = False
        self.waiting_since = time.monotonic()
        self._send(message([unit.rows(requests) for unit in units]))

    def _send(self, data: bytes) -> None:
        self.outgoing += data
        self.flush()

    def flush(self) -> None:
        """Send as many outgoing bytes as the socket takes.

        A process that has exited is noticed when it is read from.
        """
        with contextlib.suppress(BlockingIOError, ConnectionError):
            # Ends when all is sent, or with BlockingIOError when the socket is full.
            while self.outgoing:
                num_sent = self.connection.send(self.outgoing)
                self.outgoing = self.outgoing[num_sent:]

    def receive(self) -> bool:
        """Take the bytes that have arrived; return False at the end of the stream."""
        try:
            data = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._incoming += data
        return bool(data)

    def frames(self) -> Iterator[tuple[int, float, str]]:
        """Take the complete frames that have arrived: kind, time (s), text."""
        # Each round consumes one frame; ends where the next one is incomplete.
        while len(self._incoming) >= FRAME.size:
            kind, time_s, length = FRAME.unpack_from(self._incoming)
            end = FRAME.size + length
            if len(self._incoming) < end:
                return
            text = self._incoming[FRAME.size : end].decode()
            del self._incoming[:end]
            yield kind, time_s, text

    def remaining_s(self, deadline_s: float, start_deadline_s: float) -> float:
        """Return the seconds until the process must send the next frame.

        Infinite for an idle process.

        Args:
            deadline_s: How long a response may take.
            start_deadline_s: How long the imports may take.
        """
        if not self.ready:
            limit_s = start_deadline_s
        elif self.pending:
            limit_s = self.pending[0].limit_s(deadline_s)
        else:
            return math.inf
        return self.waiting_since + limit_s - time.monotonic()

    @property
    def is_stopped(self) -> bool:
        """Whether the scorer, or its guard, was stopped from outside (SIGSTOP)."""
        with contextlib.suppress(psutil.Error):
            guard = psutil.Process(self._process.pid)
            family = [guard, *guard.children()]
            return any(each.status() == psutil.STATUS_STOPPED for each in family)
        return False

    def hang_up(self) -> None:
        """Make the guard kill the scorer and everything that it started."""
        # The process may have exited before.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def terminate(self) -> str:
        """Hang up, take the last frames, and wait until every process is gone.

        Returns:
            How the scorer ended, as the end of a sentence.
        """
        was_stopped = self.is_stopped
        self.hang_up()

        # Ends at the end of the stream, which comes when every descendant is dead, or
        # when nothing has arrived for _KILL_S.
        self.connection.settimeout(_KILL_S)
        with contextlib.suppress(TimeoutError):
            while self.receive():
                pass

        # The process group outlives a guard that was itself killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.was_killed = code < 0
        self.connection.close()

        if was_stopped:
            return "was stopped (SIGSTOP)"
        if code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"exited with status {code}"


def start_failure(key: str, functions: object, event: str) -> ConfigError:
    """Return the error about a process that did not become ready.

    Args:
        key: Key of the functions.
        functions: The functions.
        event: What it did instead, as the middle of a sentence.
    """
    rule = f"the scoring process {event} while it imported the reward functions"
    fix = "Its last output is in the log"
    return ConfigError([Problem(key, functions, rule, fix)])


def _launch(descriptor: int) -> subprocess.Popen[bytes]:
    """Start a scoring process that is connected to the socket `descriptor`."""
    program = _PROGRAM.format(root=_ROOT, descriptor=descriptor)
    return subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        stdin=subprocess.DEVNULL,
        # The prints of functions go to the log, in one order with what they write to
        # stderr.
        stdout=2,
        pass_fds=[descriptor],
        # Ctrl-C is for the driver; and the processes form one group, to kill together.
        start_new_session=True,
    )
