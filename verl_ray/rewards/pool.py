"""Pool of processes that score responses and can be killed.

Invariant: `score` returns a score for every item, in order and in bounded time:
whatever a function does costs the scores of its unit and no other. Where the responses
of a unit can also be scored one by one, they are, and a response costs its own score
alone. A process may also be killed or stopped from outside (by the kernel, when memory
is short). Its unit is then scored again, once, so that what else happens on the machine
does not change what a run learns. Where the first responses all miss the deadline, it
raises instead (`FruitlessRun`). Of one process, no call blocks but `terminate`, which
is bounded; when it returns, the process and everything that it started are gone.

A unit is what a process scores in one go, and what may cost its responses together. A
function of one response scores responses one by one. Coroutines are awaited side by
side, so some responses travel together. A batched function scores all responses to a
prompt in one call: they are one unit, whatever else is scored at the time. The items of
a unit have the same function and are consecutive requests of a call; those of a batched
function are all consecutive requests of one prompt.

It is no sandbox (functions run with the rights of the run), no Ray actor, and not for
several callers at once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from verl_ray.errors import ConfigError, DataError, Problem, RewardError
from verl_ray.processes.child import ChildProcess
from verl_ray.processes.frames import (
    READ_BYTES,
    Frame,
    FrameReader,
    frame,
    require_unbroken,
    start_frame,
)
from verl_ray.processes.isolation import Isolation
from verl_ray.profiling.progress import advance, touch
from verl_ray.rewards.failure_limit import FruitlessRun
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.request import Needs, RequestRow, ScoreRequest, scores_from
from verl_ray.rewards.specs import spec_problems
from verl_ray.suggest import did_you_mean

# Work per message: far above the cost of sending one (about 50 us), far below what a
# person notices.
_MESSAGE_S = 0.002
# Weight of the newest unit in the running mean of how long units take.
_NEWEST_WEIGHT = 0.1


class ScoringPool:
    """Processes that have imported the reward functions, and score items."""

    def __init__(
        self,
        functions: Mapping[str, str],
        processes: int,
        deadline_s: float,
        *,
        key: str = "reward.functions",
        start_deadline_s: float = 120.0,
        max_failed_fraction: float = 1.0,
        warns_of_deaths: bool = True,
    ) -> None:
        """Start the processes in parallel and wait for their imports.

        Args:
            functions: Data source -> spec (`specs.py`); `default` serves the other
                sources.
            processes: Number of responses that are scored at the same time.
            deadline_s: How long one response may take, from the moment the function
                has it; a unit of several may take as much for each.
            key: The configuration's section that `functions` is, for errors to name.
            start_deadline_s: How long the imports may take.
            max_failed_fraction: The fraction of scores that may fail. `score` raises
                where the first items, none of which gets a score, take their whole
                deadline or end their process. With 1 it never does.
            warns_of_deaths: Whether to print a line if a unit is scored again because
                its process died.

        Raises:
            ConfigError: a function does not exist or cannot be imported; the cause is
                in the message.
        """
        self._functions = dict(functions)
        self._key = key
        problems = spec_problems(functions, key)
        if problems:
            raise ConfigError(problems)

        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._start_was_broken_off = False  # by a signal from outside
        self._max_failed_fraction = max_failed_fraction
        self._warns_of_deaths = warns_of_deaths
        self._fruitless = FruitlessRun(max_failed_fraction)

        # Before any unit was timed, units travel one by one.
        self._unit_s = _MESSAGE_S
        self._needs: dict[str, Needs] = {}
        """What the functions need, by data source."""
        self._requests: Sequence[ScoreRequest] = ()
        """The requests of this call."""
        self._unassigned: deque[Unit] = deque()
        self._scores: dict[int, Score] = {}
        self._untouched: set[Unit] = set()
        """Units whose process was killed before it had begun with them."""
        # A process scores one unit at a time, so each is apart from others anyway.
        self._isolation = Isolation[ScoringProcess, Unit](1, free_losses=1)
        """Units whose process died with them in hand; they are scored again."""
        self._processes: list[ScoringProcess] = []

        self._start(processes)

    def _start(self, processes: int) -> None:
        with self._closing_on_error():
            for _ in range(processes):
                self._processes.append(self._new_process())
            # Ends when every process is ready; a failed import raises.
            while not all(process.ready for process in self._processes):
                self._handle_events(wait=True)

    @property
    def needs_groups(self) -> bool:
        """Whether a function scores all responses to a prompt in one call."""
        return any(needs.unit == "group" for needs in self._needs.values())

    def score(self, items: Sequence[ScoreRequest]) -> list[Score]:
        """Score `items`. Any exception closes the pool.

        Returns:
            One score per item, in the same order.

        Raises:
            DataError: no function serves a data source.
            ConfigError: a user's file that could be imported at the start can no longer
                be.
            RewardError: the pool is closed, or too many of the first items were
                fruitless.
        """
        if not self._processes:
            raise RewardError("the scoring pool is closed, expected an open one")
        self._refuse_unknown_sources(items)

        self._requests = items
        self._unassigned.extend(units_of(items, self._needs))
        with self._closing_on_error():
            # Replaces processes that died since the last call, before they get units.
            self._handle_events(wait=False)
            self._assign()
            # Each round waits for a frame, the end of a process or a deadline; the loop
            # ends when every unit has its scores.
            while self._unassigned or self._has_pending():
                self._handle_events(wait=True)
                self._assign()

        scores = [self._scores[index] for index in range(len(items))]
        self._scores.clear()
        self._untouched.clear()
        self._isolation.withdraw(lambda _: True)
        return scores

    def _has_pending(self) -> bool:
        return any(process.pending for process in self._processes)

    def close(self) -> None:
        """Terminate all processes and everything they started. May be called twice."""
        processes = self._processes
        self._processes = []

        # Every process begins to stop before the first wait, so they stop in parallel.
        for process in processes:
            process.child.hang_up()
        for process in processes:
            process.terminate()

    def __enter__(self) -> ScoringPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Close the pool on any exception.

        Scores that are still to come would otherwise reach a later call, for other
        items.
        """
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _refuse_unknown_sources(self, items: Sequence[ScoreRequest]) -> None:
        if "default" in self._functions:
            return
        sources = {item.data_source for item in items}
        for source in sources - self._functions.keys():
            known = did_you_mean(source, list(self._functions), "data source")
            raise DataError(
                f"no reward function for data source {source!r}. {known} Set"
                f" {self._key}.{source} or {self._key}.default"
            )

    # ----------------------------------------------------------------- units and frames

    def _new_process(self) -> ScoringProcess:
        return ScoringProcess(
            {
                "functions": self._functions,
                "key": self._key,
                "deadline_s": self._deadline_s,
            }
        )

    def _assign(self) -> None:
        """Send each idle process its share of the unassigned units.

        A share is at most a message's worth of work, and at least one unit.
        """
        most = max(1, int(_MESSAGE_S / self._unit_s))
        idle = [
            process
            for process in self._processes
            if process.ready and not process.pending
        ]
        for num_served, process in enumerate(idle):
            share = math.ceil(len(self._unassigned) / (len(idle) - num_served))
            count = min(share, most)
            if count:
                units = [self._unassigned.popleft() for _ in range(count)]
                process.send_units(units, self._requests)

    def _handle_events(self, *, wait: bool) -> None:
        """Take the frames that have arrived, and replace dead and overdue processes.

        Args:
            wait: Whether to wait for the first event: bytes from a process, the end of
                one, space in a socket for outgoing bytes, or a deadline.
        """
        poller = select.poll()
        for process in self._processes:
            events = select.POLLIN
            if process.outgoing:
                events |= select.POLLOUT
            poller.register(process.child.connection, events)

        wait_s = min(map(self._remaining_s, self._processes)) if wait else 0.0
        # The deadline of a group may be longer than a worker may make no progress.
        if wait_s > self._deadline_s and self._has_pending():
            wait_s = self._deadline_s
            touch()
        # None waits without a limit: every process is idle.
        timeout_ms = None if wait_s == math.inf else max(0, math.ceil(wait_s * 1000))
        ready_descriptors = dict(poller.poll(timeout_ms))

        # A copy, since `_replace` changes the list.
        for process in tuple(self._processes):
            is_connected = True
            if process.child.connection.fileno() in ready_descriptors:
                process.flush()
                is_connected = process.receive()
                self._take_frames(process)
            if not is_connected or self._remaining_s(process) <= 0:
                self._replace(process, overdue=is_connected)

    def _remaining_s(self, process: ScoringProcess) -> float:
        return process.remaining_s(self._deadline_s, self._start_deadline_s)

    def _take_frames(self, process: ScoringProcess) -> None:
        for message in process.take_frames():
            require_unbroken(message)
            # Any other frame is progress, also that a process is ready or has begun.
            touch()
            time_s = message.fields["time_s"]
            if message.kind == "ready":
                process.ready = True
                self._start_was_broken_off = False
                needs = message.fields["needs"]
                self._needs = {source: Needs(*each) for source, each in needs.items()}
            elif message.kind == "started":
                process.has_begun = True
            else:
                self._record(process, scores_from(message.fields["scores"]))
                self._update_unit_time(time_s - process.waiting_since)
            process.waiting_since = time_s

    def _record(self, process: ScoringProcess, scores: list[Score]) -> None:
        """Record the scores of the unit that `process` has in hand."""
        unit = process.pending.popleft()
        rescored = bool(self._isolation.causes(unit))
        for item, score in zip(unit.items, scores, strict=True):
            self._scores[item] = replace(score, rescored=True) if rescored else score
        advance(len(scores), "scores")
        replies = (ScoreHealth.OK, ScoreHealth.NONE)
        if any(score.health in replies for score in scores):
            self._fruitless.end()

    def _update_unit_time(self, unit_s: float) -> None:
        self._unit_s += _NEWEST_WEIGHT * (unit_s - self._unit_s)

    # ------------------------------------------------------ deaths and missed deadlines

    def _replace(self, process: ScoringProcess, *, overdue: bool) -> None:
        """Terminate a process that is overdue or dead, and start a new one.

        The unit in hand has failed if the process was overdue, or if it is the second
        process that died with this unit. The other pending units are put back.
        """
        self._processes.remove(process)
        waiting_since = process.waiting_since
        # It was not slow, so it counts as dead.
        is_stopped = overdue and process.child.is_stopped
        cause = process.terminate()
        if overdue and not is_stopped:
            cause = f"took longer than {self._start_deadline_s:g} s"
        # Scores that it sent while it was being terminated count.
        self._take_frames(process)
        if not process.ready:
            # Whoever stopped or killed it may not come again.
            is_by_others = is_stopped or (process.child.was_killed and not overdue)
            if not is_by_others or self._start_was_broken_off:
                raise start_failure(self._key, self._functions, cause)
            self._start_was_broken_off = True

        is_late = overdue and process.waiting_since == waiting_since
        if process.pending and is_late and not is_stopped:
            self._note_delay(process)
        elif process.pending and (is_late or not overdue):
            self._note_death(process, cause)

        self._unassigned.extendleft(reversed(process.pending))
        # Another prompt tells more than another response to the same one.
        if self._fruitless.prompts:
            self._unassigned = deque(sorted(self._unassigned, key=self._is_fruitless))
        self._processes.append(self._new_process())

    def _note_delay(self, process: ScoringProcess) -> None:
        """Decide what becomes of the unit that an overdue process had in hand."""
        unit = process.pending[0]
        limit_s = unit.limit_s(self._deadline_s)
        self._update_unit_time(limit_s)
        if unit.is_divisible:
            # Any of its coroutines may have blocked all others.
            parts = self._divide(process)
            self._isolation.note_loss(process, parts, "blocked its event loop")
            return
        if unit.needs.unit == "concurrent":
            limit_s = self._deadline_s
        subject = "score" if len(unit.items) == 1 else "scores of the group"
        late = f"no {subject} within {limit_s:g} s; the process was killed"
        self._record_fruitless(process, ScoreHealth.TIMEOUT, late)

    def _note_death(self, process: ScoringProcess, cause: str) -> None:
        """Decide whether the unit that a dead process had in hand is scored again."""
        # A replacement is progress; how often there can be one is bounded.
        touch()
        unit = process.pending[0]
        if not process.has_begun and unit not in self._untouched:
            # Killed while it was idle: the unit is not the cause, the first time.
            self._untouched.add(unit)
        else:
            parts = self._divide(process) if unit.is_divisible else [unit]
            loss = self._isolation.note_loss(process, parts, cause)
            if loss.culprit is None:
                self._warn_of_death(unit, cause)
                return
            first, last = self._isolation.causes(unit)
            detail = (
                f"the scoring process died twice: it {first}, and when the item was"
                f" scored again, it {last}"
            )
            self._record_fruitless(process, ScoreHealth.EXCEPTION, detail)

    def _warn_of_death(self, unit: Unit, cause: str) -> None:
        if self._warns_of_deaths:
            scored = "item is" if len(unit.items) == 1 else "items are"
            warning = f"warning: a scoring process {cause}; its {scored} scored again"
            print(warning, file=sys.stderr, flush=True)

    def _divide(self, process: ScoringProcess) -> list[Unit]:
        """Put the responses of the unit in hand in its place, to be scored alone."""
        parts = process.pending.popleft().parts()
        process.pending.extendleft(reversed(parts))
        return parts

    def _record_fruitless(
        self, process: ScoringProcess, health: ScoreHealth, detail: str
    ) -> None:
        """Record a unit without a score; give up after too many before any score.

        Raises:
            RewardError: The grader is broken, as far as these units tell.
        """
        unit = process.pending[0]
        failed = Score(math.nan, health, detail)
        self._record(process, [failed] * len(unit.items))
        for item in unit.items:
            self._fruitless.add(self._requests[item].prompt)

        if self._fruitless.is_too_long:
            section = self._key.rpartition(".")[0]
            raise RewardError(
                f"{self._key} gave no score to the first"
                f" {self._fruitless.responses} responses, to"
                f" {len(self._fruitless.prompts)} different prompts, which"
                f" {section}.max_failed_fraction = {self._max_failed_fraction:g} does"
                f" not allow. The last one: {detail}. Expected a number within"
                f" {section}.deadline_s = {self._deadline_s:g}: make the functions"
                f" faster, or raise it"
            )

    def _is_fruitless(self, unit: Unit) -> bool:
        return self._requests[unit.items[0]].prompt in self._fruitless.prompts


# -------------------------------------------------------------------------------- units

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
        return [requests[item].row(self.needs) for item in self.items]


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
        function_needs = needs[source]
        parts: list[tuple[int, ...]]
        if function_needs.unit == "single":
            parts = [(item,) for item in run]
        elif function_needs.unit == "concurrent":
            items = tuple(run)
            starts = range(0, len(items), MOST_CONCURRENT)
            parts = [items[start : start + MOST_CONCURRENT] for start in starts]
        else:
            parts = [tuple(group) for _, group in itertools.groupby(run, group_of)]
        units += [Unit(part, function_needs) for part in parts]
    return units


# -------------------------------------------------------------------- a scoring process

_LAST_S = 1.0
"""Seconds to wait for the end of the stream of a process that has ended."""


class ScoringProcess:
    """One scoring process. The unit in hand is the first pending one."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        """Start the process.

        Args:
            start: The fields of the first message to it.
        """
        self.ready = False
        """Whether the process has imported the reward functions."""
        self.has_begun = False
        """Whether the process has begun with the units that were sent last."""
        self.pending: deque[Unit] = deque()
        """The units without scores, in the order they were sent."""
        self.outgoing = b""
        """Bytes that did not fit into the socket yet."""
        self.child = ChildProcess("verl_ray.rewards.child")
        self.child.connection.setblocking(False)
        self.waiting_since = time.monotonic()
        """When the process was started, got its units, or sent its last frame."""
        self._reader = FrameReader()
        self._frames: list[Frame] = []
        self._send(start_frame(start))

    def send_units(self, units: list[Unit], requests: Sequence[ScoreRequest]) -> None:
        """Send units of the requests of a call; no unit may be pending."""
        self.pending.extend(units)
        self.has_begun = False
        self.waiting_since = time.monotonic()
        rows = [unit.rows(requests) for unit in units]
        body = pickle.dumps(rows, protocol=pickle.HIGHEST_PROTOCOL)
        self._send(frame("units", {}, body))

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
                num_sent = self.child.connection.send(self.outgoing)
                self.outgoing = self.outgoing[num_sent:]

    def receive(self) -> bool:
        """Take the bytes that have arrived; return False at the end of the stream.

        What is no frame ends the stream as well.
        """
        try:
            data = self.child.connection.recv(READ_BYTES)
            self._frames += self._reader.feed(data)
        except BlockingIOError:
            return True
        except (ConnectionError, ValueError):
            return False
        return bool(data)

    def take_frames(self) -> list[Frame]:
        """Take the frames that have arrived."""
        frames, self._frames = self._frames, []
        return frames

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

    def terminate(self) -> str:
        """End the process, and take its last frames.

        Returns:
            How it ended, as the end of a sentence.
        """
        cause = self.child.end()
        # No process is there that could send more, so the stream ends, if nothing is
        # wrong with it.
        self.child.connection.settimeout(_LAST_S)
        with contextlib.suppress(TimeoutError):
            while self.receive():
                pass
        self.child.connection.close()
        return cause


def start_failure(key: str, functions: object, event: str) -> ConfigError:
    """Return the error about a process that did not become ready, which may pass.

    Args:
        key: Key of the functions.
        functions: The functions.
        event: What it did instead, as the middle of a sentence.
    """
    rule = f"the scoring process {event} while it imported the reward functions"
    fix = "Its last output is in the log"
    return ConfigError([Problem(key, functions, rule, fix, may_pass=True)])
