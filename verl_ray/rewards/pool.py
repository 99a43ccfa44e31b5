"""Pool of processes that score responses and can be killed.

Invariant: `score` returns a score for every item, in order and in bounded time:
whatever a function does costs that item's score and no other. A process may also be
killed from outside (by the kernel, when memory is short). Its item is then scored
again, once, so that what else happens on the machine does not change what a run learns.
Where the first responses all miss the deadline, it raises instead (`FruitlessRun`).
Deliberately not a sandbox (functions run with the rights of the run), not a Ray actor,
and not for several callers at once.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import ConfigError, DataError, Problem, RewardError
from verl_ray.profiling.progress import advance, touch
from verl_ray.rewards.failure_limit import FruitlessRun
from verl_ray.rewards.functions import spec_problem
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.request import ScoreRequest
from verl_ray.rewards.scoring_process import ScoringProcess
from verl_ray.rewards.wire import BROKEN, READY, STARTED, Item, Start, message

# Work per message: far above the cost of sending one (about 50 us), far below what a
# person notices.
_MESSAGE_S = 0.002
# Weight of the newest item in the running mean of how long items take.
_NEWEST_WEIGHT = 0.1
_HEALTHS = tuple(ScoreHealth)


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
            functions: Data source -> built-in name or `path/to/file.py:function`;
                `default` serves the other sources.
            processes: Number of responses that are scored at the same time.
            deadline_s: How long one response may take, from the moment the function
                has it.
            key: The configuration's section that `functions` is, for errors to name.
            start_deadline_s: How long the imports may take.
            max_failed_fraction: The fraction of scores that may fail. `score` raises
                once items that take their whole deadline, or end their process, show
                that more will. With 1 it never does.
            warns_of_deaths: Whether to print a line if an item is scored again because
                its process died.

        Raises:
            ConfigError: a function does not exist or cannot be imported; the cause is
                in the message.
        """
        self._functions = dict(functions)
        self._key = key
        self._refuse_bad_specs()
        self._deadline_s = deadline_s
        self._start_deadline_s = start_deadline_s
        self._max_failed_fraction = max_failed_fraction
        self._warns_of_deaths = warns_of_deaths
        self._fruitless = FruitlessRun(max_failed_fraction)

        # Before any item was timed, items travel one by one.
        self._item_s = _MESSAGE_S
        self._prompts: list[str] = []
        """The prompt of each item of this call."""
        self._unassigned: deque[int] = deque()
        self._scores: dict[int, Score] = {}
        self._untouched: set[int] = set()
        """Items whose process was killed before it had begun with them."""
        self._first_deaths: dict[int, str] = {}
        """Items whose process died with them in hand -> how; they are scored again."""
        self._processes: list[ScoringProcess] = []

        with self._closing_on_error():
            for _ in range(processes):
                self._processes.append(self._new_process())
            # Ends when every process is ready; a failed import raises.
            while not all(process.ready for process in self._processes):
                self._handle_events(wait=True)

    def score(self, items: Sequence[ScoreRequest]) -> list[Score]:
        """Score `items`. Any exception closes the pool.

        Returns:
            One score per item, in the same order.

        Raises:
            DataError: no function serves a data source.
            ConfigError: a user's file that could be imported at the start can no longer
                be.
            RewardError: the pool is closed, or too many items in a row were fruitless.
        """
        if not self._processes:
            raise RewardError("the scoring pool is closed, expected an open one")
        self._refuse_unknown_sources(items)

        self._prompts = [item.prompt for item in items]
        self._unassigned.extend(range(len(items)))
        with self._closing_on_error():
            # Replaces processes that died since the last call, before they get items.
            self._handle_events(wait=False)
            self._assign(items)
            # Each round waits for a frame, the end of a process or a deadline; the loop
            # ends when every item has a score.
            while self._unassigned or self._has_pending():
                self._handle_events(wait=True)
                self._assign(items)

        scores = [self._scores[index] for index in range(len(items))]
        self._scores.clear()
        self._untouched.clear()
        self._first_deaths.clear()
        return scores

    def _has_pending(self) -> bool:
        return any(process.pending for process in self._processes)

    def close(self) -> None:
        """Terminate all processes and everything they started. May be called twice."""
        processes = self._processes
        self._processes = []

        # Every process begins to stop before the first wait, so they stop in parallel.
        for process in processes:
            process.hang_up()
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

    # ------------------------------------------------------------------------- refusals

    def _refuse_bad_specs(self) -> None:
        problems = []
        for source, spec in self._functions.items():
            problem = spec_problem(spec, f"{self._key}.{source}")
            if problem is not None:
                problems.append(problem)
        if problems:
            raise ConfigError(problems)

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

    # ----------------------------------------------------------------- items and frames

    def _new_process(self) -> ScoringProcess:
        start = Start(sys.path, self._functions, self._key)
        return ScoringProcess(message(start))

    def _assign(self, items: Sequence[ScoreRequest]) -> None:
        """Send each idle process its share of the unassigned items.

        A share is at most a message's worth of work, and at least one item.
        """
        most = max(1, int(_MESSAGE_S / self._item_s))
        idle = [
            process
            for process in self._processes
            if process.ready and not process.pending
        ]
        for num_served, process in enumerate(idle):
            share = math.ceil(len(self._unassigned) / (len(idle) - num_served))
            count = min(share, most)
            if count:
                indices = [self._unassigned.popleft() for _ in range(count)]
                batch = [_wire_item(items[index]) for index in indices]
                process.send_items(indices, batch)

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
            poller.register(process.connection, events)

        wait_s = min(map(self._remaining_s, self._processes)) if wait else 0.0
        # None waits without a limit: every process is idle.
        timeout_ms = None if wait_s == math.inf else max(0, math.ceil(wait_s * 1000))
        ready_descriptors = dict(poller.poll(timeout_ms))

        # A copy, since `_replace` changes the list.
        for process in tuple(self._processes):
            is_connected = True
            if process.connection.fileno() in ready_descriptors:
                process.flush()
                is_connected = process.receive()
                self._take_frames(process)
            if not is_connected or self._remaining_s(process) <= 0:
                self._replace(process, overdue=is_connected)

    def _remaining_s(self, process: ScoringProcess) -> float:
        """Seconds until `process` must send a score, or have finished its imports.

        Infinite for an idle process.
        """
        if process.ready and not process.pending:
            return math.inf
        deadline_s = self._deadline_s if process.ready else self._start_deadline_s
        return process.waiting_since + deadline_s - time.monotonic()

    def _take_frames(self, process: ScoringProcess) -> None:
        # Consumes the complete frames; the rest of an incomplete one comes later.
        for kind, time_s, value, text in process.frames():
            if kind == BROKEN:
                raise ConfigError([Problem(**json.loads(text))])

            # Any other frame is progress, also that a process is ready or has begun.
            touch()
            if kind == READY:
                process.ready = True
            elif kind == STARTED:
                process.has_begun = True
            else:
                self._record_score(process, value, _HEALTHS[kind], text)
                self._update_item_time(time_s - process.waiting_since)
            process.waiting_since = time_s

    def _record_score(
        self, process: ScoringProcess, value: float, health: ScoreHealth, detail: str
    ) -> None:
        """Record the score of the item that `process` has in hand."""
        item = process.pending.popleft()
        rescored = item in self._first_deaths
        self._scores[item] = Score(value, health, detail, rescored=rescored)
        advance(1, "scores")
        if health is ScoreHealth.OK:
            self._fruitless.end()

    def _update_item_time(self, item_s: float) -> None:
        self._item_s += _NEWEST_WEIGHT * (item_s - self._item_s)

    # ------------------------------------------------------ deaths and missed deadlines

    def _replace(self, process: ScoringProcess, *, overdue: bool) -> None:
        """Terminate a process that is overdue or dead, and start a new one.

        The item in hand has failed if the process was overdue, or if it is the second
        process that died with this item. The other pending items are put back.
        """
        self._processes.remove(process)
        waiting_since = process.waiting_since
        cause = process.terminate()
        # Scores that it sent while it was being terminated count.
        self._take_frames(process)
        if not process.ready:
            raise self._start_failure(cause, overdue=overdue)

        is_late = overdue and process.waiting_since == waiting_since
        if process.pending and is_late:
            late = f"no score within {self._deadline_s:g} s; the process was killed"
            self._record_fruitless(process, ScoreHealth.TIMEOUT, late)
            self._update_item_time(self._deadline_s)
        elif process.pending and not overdue:
            self._note_death(process, cause)

        self._unassigned.extendleft(reversed(process.pending))
        # Another prompt tells more than another response to the same one.
        if self._fruitless.prompts:
            self._unassigned = deque(sorted(self._unassigned, key=self._is_fruitless))
        self._processes.append(self._new_process())

    def _note_death(self, process: ScoringProcess, cause: str) -> None:
        """Decide whether the item that a dead process had in hand is scored again."""
        # A replacement is progress; how often there can be one is bounded.
        touch()
        item = process.pending[0]
        if not process.has_begun and item not in self._untouched:
            # Killed while it was idle: the item is not the cause, the first time.
            self._untouched.add(item)
        elif item not in self._first_deaths:
            self._first_deaths[item] = cause
            if self._warns_of_deaths:
                warning = (
                    f"warning: a scoring process {cause}; its item is scored again"
                )
                print(warning, file=sys.stderr, flush=True)
        else:
            first_cause = self._first_deaths[item]
            detail = (
                f"the scoring process died twice: it {first_cause}, and when the item"
                f" was scored again, it {cause}"
            )
            self._record_fruitless(process, ScoreHealth.EXCEPTION, detail)

    def _record_fruitless(
        self, process: ScoringProcess, health: ScoreHealth, detail: str
    ) -> None:
        """Record an item without a score; give up after too many in a row.

        Raises:
            RewardError: The grader is broken, as far as these items tell.
        """
        prompt = self._prompts[process.pending[0]]
        self._record_score(process, math.nan, health, detail)
        self._fruitless.add(prompt)

        if self._fruitless.is_too_long:
            section = self._key.rpartition(".")[0]
            raise RewardError(
                f"{self._key} gave no score to {self._fruitless.responses} responses in"
                f" a row, to {len(self._fruitless.prompts)} different prompts, which"
                f" {section}.max_failed_fraction = {self._max_failed_fraction:g} does"
                f" not allow. The last one: {detail}. Expected a number within"
                f" {section}.deadline_s = {self._deadline_s:g}: make the functions"
                f" faster, or raise it"
            )

    def _is_fruitless(self, item: int) -> bool:
        return self._prompts[item] in self._fruitless.prompts

    def _start_failure(self, cause: str, *, overdue: bool) -> ConfigError:
        event = cause
        if overdue:
            event = f"took longer than {self._start_deadline_s:g} s"
        rule = f"the scoring process {event} while it imported the reward functions"
        fix = "Its last output is in the log"
        return ConfigError([Problem(self._key, self._functions, rule, fix)])


def _wire_item(request: ScoreRequest) -> Item:
    return (
        request.response,
        request.answer,
        request.prompt,
        request.data_source,
        request.extra,
    )
