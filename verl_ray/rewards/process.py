"""A pool of processes that score responses and can be killed.

Invariant: `score` answers every item, in order and in bounded time: whatever a function does costs that item's score
and nothing else. An item whose process was ended by something else (the kernel, where memory is short) is scored again,
once, so that what happens beside a run does not change what it learns. Deliberately not a sandbox (functions run with
the rights of the run), not a Ray actor, and not for several callers at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import ConfigError, DataError, Problem, RewardError
from verl_ray.profiling.progress import advance, touch
from verl_ray.rewards.functions import spec_problem
from verl_ray.rewards.health import Health, Score
from verl_ray.rewards.wire import BROKEN, FRAME, READY, STARTED, Item, Start, message

_MESSAGE_S = 0.002  # work per message: far above the cost of sending one (about 50 us), far below what a person notices
_MEMORY = 0.1  # weight of the newest item in the running mean of how long items take
_KILL_S = 5.0  # a guard kills within milliseconds; after this its process group is killed from here
_HEALTHS = tuple(Health)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One response to grade; the arguments of a `RewardFunction`."""

    response: str
    answer: str
    prompt: str
    data_source: str
    extra: dict[str, object]
    """Plain values: they are pickled, and the classes of anything else must be importable in the scoring process."""


class ScoringPool:
    """Processes that hold the imported reward functions and score what they are handed."""

    def __init__(
        self,
        functions: Mapping[str, str],
        processes: int,
        deadline_s: float,
        *,
        key: str = "reward.functions",
        start_deadline_s: float = 120.0,
    ) -> None:
        """Start the processes in parallel and wait until each has imported all functions.

        Args:
            functions: data source -> built-in name or `path/to/file.py:function`; `default` serves the other sources.
            processes: responses scored at the same time.
            deadline_s: how long one response may take, from the moment the function has it.
            key: the configuration's section that `functions` is, for errors to name.
            start_deadline_s: how long the imports may take.

        Raises:
            ConfigError: a function that does not exist or cannot be imported, with the cause.
        """
        self._functions, self._key = dict(functions), key
        problems = [spec_problem(spec, f"{key}.{source}") for source, spec in self._functions.items()]
        if found := [problem for problem in problems if problem]:
            raise ConfigError(found)
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._item_s = _MESSAGE_S  # nothing is known yet: begin with single items
        self._waiting: deque[int] = deque()
        self._scores: dict[int, Score] = {}
        self._returned: set[int] = set()  # items given back by a process that ended before it looked at them
        self._died: dict[int, str] = {}  # items in whose hand a process died -> how; they are scored again
        self._children: list[_Child] = []
        with self._closing_on_error():
            self._children += (self._new_child() for _ in range(processes))
            while not all(child.ready for child in self._children):
                self._attend(wait=True)

    def score(self, items: Sequence[ScoreRequest]) -> list[Score]:
        """Grade `items`; a list of the same length and order. Any exception closes the pool.

        Raises:
            DataError: a data source that no function serves.
            ConfigError: a user's file that could be imported at the start can no longer be.
            RewardError: the pool is closed.
        """
        if not self._children:
            raise RewardError("the scoring pool is closed, expected an open one")
        self._refuse_unknown_sources(items)
        self._waiting.extend(range(len(items)))
        with self._closing_on_error():
            self._attend(wait=False)  # finds processes that ended since the last call, before they are handed work
            self._hand_out(items)
            while self._waiting or any(child.unanswered for child in self._children):
                self._attend(wait=True)
                self._hand_out(items)
        scores = [self._scores[index] for index in range(len(items))]
        self._scores.clear()
        self._returned.clear()
        self._died.clear()
        return scores

    def close(self) -> None:
        """End all processes and everything they started; returns when they are gone. May be called twice."""
        children, self._children = self._children, []
        for child in children:  # first all, then wait: they end in parallel
            child.hang_up()
        for child in children:
            child.end()

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """An exception leaves answers under way that belong to no call: no later call may meet them."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _refuse_unknown_sources(self, items: Sequence[ScoreRequest]) -> None:
        if "default" in self._functions:
            return
        for source in {item.data_source for item in items} - self._functions.keys():
            known = did_you_mean(source, list(self._functions), "data source")
            raise DataError(
                f"no reward function for data source {source!r}. {known} Set {self._key}.{source} or "
                f"{self._key}.default"
            )

    def _new_child(self) -> _Child:
        return _Child(message(Start(sys.path, self._functions, self._key)))

    def _hand_out(self, items: Sequence[ScoreRequest]) -> None:
        """Give each idle process its share of what waits, but no more than a message's worth of work."""
        idle = [child for child in self._children if child.ready and not child.unanswered]
        for served, child in enumerate(idle):
            share = math.ceil(len(self._waiting) / (len(idle) - served))
            count = min(share, max(1, int(_MESSAGE_S / self._item_s)))
            if count:
                indices = [self._waiting.popleft() for _ in range(count)]
                child.hand(indices, [_wire_item(items[index]) for index in indices])

    def _attend(self, *, wait: bool) -> None:
        """Take what the processes have said, and replace those that ended or are over their deadline.

        Waits for the first of: bytes from a process, the end of one, room to send, a deadline.
        """
        poller = select.poll()
        for child in self._children:
            poller.register(child.connection, select.POLLIN | (select.POLLOUT if child.outgoing else 0))
        wait_s = min(map(self._time_left, self._children)) if wait else 0.0
        events = dict(poller.poll(None if wait_s == math.inf else max(0, math.ceil(wait_s * 1000))))
        for child in tuple(self._children):
            connected = True
            if child.connection.fileno() in events:
                child.flush()
                connected = child.receive()
                self._take_frames(child)
            if not connected or self._time_left(child) <= 0:
                self._replace(child, overdue=connected)

    def _time_left(self, child: _Child) -> float:
        """Seconds until `child` must have answered its item or finished its imports; inf when it is idle."""
        if child.ready and not child.unanswered:
            return math.inf
        return child.since + (self._deadline_s if child.ready else self._start_deadline_s) - time.monotonic()

    def _take_frames(self, child: _Child) -> None:
        for kind, time_s, value, text in child.frames():
            if kind == BROKEN:
                raise ConfigError([Problem(**json.loads(text))])
            touch()  # also a process that is ready, or that begins with an item, has got on
            if kind == READY:
                child.ready = True
            elif kind == STARTED:
                child.working = True
            else:
                self._answer(child, value, _HEALTHS[kind], text)
                self._remember(time_s - child.since)
            child.since = time_s

    def _answer(self, child: _Child, value: float, health: Health, detail: str) -> None:
        """Take this as the score of the item that `child` has in hand."""
        item = child.unanswered.popleft()
        self._scores[item] = Score(value, health, detail, rescored=item in self._died)
        advance(1, "scores")

    def _remember(self, item_s: float) -> None:
        self._item_s += _MEMORY * (item_s - self._item_s)

    def _replace(self, child: _Child, *, overdue: bool) -> None:
        """End a process that is overdue or has died, put back the items that it leaves, start a new process.

        The item in hand has failed if the process was overdue, or if it is the second that died with this item.
        """
        self._children.remove(child)
        since = child.since
        cause = child.end()
        self._take_frames(child)  # what it said while it was being ended counts
        if not child.ready:
            raise self._start_failure(cause, overdue=overdue)
        if child.unanswered and overdue and child.since == since:
            late = f"no score within {self._deadline_s:g} s; the process was killed"
            self._answer(child, math.nan, Health.TIMEOUT, late)
            self._remember(self._deadline_s)
        elif child.unanswered and not overdue:
            self._note_death(child, cause)
        self._waiting.extendleft(reversed(child.unanswered))
        self._children.append(self._new_child())

    def _note_death(self, child: _Child, cause: str) -> None:
        """Decide whether the item that a dead process had in hand is scored again or has failed."""
        touch()  # what is done about it is progress; how often that may happen is bounded
        item = child.unanswered[0]
        if not child.working and item not in self._returned:
            # The process was killed while it was idle, which is not held against the item, once.
            self._returned.add(item)
        elif item not in self._died:
            self._died[item] = cause
            print(f"warning: a scoring process {cause}; its item is scored again", file=sys.stderr, flush=True)
        else:
            first = self._died[item]
            detail = f"the scoring process died twice: it {first}, and when the item was scored again, it {cause}"
            self._answer(child, math.nan, Health.EXCEPTION, detail)

    def _start_failure(self, cause: str, *, overdue: bool) -> ConfigError:
        what = f"took longer than {self._start_deadline_s:g} s" if overdue else cause
        rule = f"the scoring process {what} while it imported the reward functions"
        return ConfigError([Problem(self._key, self._functions, rule, "Its last output is in the log")])


def _wire_item(request: ScoreRequest) -> Item:
    return (request.response, request.answer, request.prompt, request.data_source, request.extra)


# The package may be importable here only because of how this process was started; the scorer takes over sys.path whole.
_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from verl_ray.rewards.child import main; main({descriptor})"
_ROOT = str(Path(__file__).parents[2])


class _Child:
    """One scoring process as the pool sees it. The item in hand is the first unanswered one."""

    def __init__(self, start: bytes) -> None:
        self.ready = False
        self.working = False  # it has begun with what it was handed last
        self.unanswered: deque[int] = deque()
        self.outgoing = b""
        self._incoming = bytearray()
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _PROGRAM.format(root=_ROOT, descriptor=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what functions print goes to the log, in the order of what they write to stderr
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the driver; and one process group to kill
            )
        self.connection.setblocking(False)
        self.since = time.monotonic()  # when it was started, handed its items, or last said something
        self._send(start)

    def hand(self, indices: list[int], items: list[Item]) -> None:
        """Send `items`, known to the caller as `indices`; nothing may be unanswered."""
        self.unanswered.extend(indices)
        self.working = False
        self.since = time.monotonic()
        self._send(message(items))

    def _send(self, data: bytes) -> None:
        self.outgoing += data
        self.flush()

    def flush(self) -> None:
        """Send what fits into the socket; a process that ended is noticed when it is read from."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self.outgoing:
                self.outgoing = self.outgoing[self.connection.send(self.outgoing) :]

    def receive(self) -> bool:
        """Take what has arrived; False at the end of the stream."""
        try:
            data = self.connection.recv(1 << 16)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._incoming += data
        return bool(data)

    def frames(self) -> Iterator[tuple[int, float, float, str]]:
        """The complete frames that have arrived: kind, time in seconds, value, text."""
        while len(self._incoming) >= FRAME.size:
            kind, time_s, value, length = FRAME.unpack_from(self._incoming)
            end = FRAME.size + length
            if len(self._incoming) < end:
                return
            text = self._incoming[FRAME.size : end].decode()
            del self._incoming[:end]
            yield kind, time_s, value, text

    def hang_up(self) -> None:
        """Tell the guard to kill the scorer and all that it started."""
        with contextlib.suppress(OSError):  # it ended first
            self.connection.shutdown(socket.SHUT_WR)

    def end(self) -> str:
        """Hang up, take the last words, wait until every process is gone; returns how the scorer ended."""
        self.hang_up()
        self.connection.settimeout(_KILL_S)
        with contextlib.suppress(TimeoutError):
            while self.receive():
                pass
        with contextlib.suppress(ProcessLookupError):  # the group outlives a guard that was itself killed
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.connection.close()
        return f"was killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exited with status {code}"
