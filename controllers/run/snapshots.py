"""The state after the last steps, in the memory of the hosts that hold it.

A rank that is lost makes the run go back to such a snapshot, which is at most one step
older than what was lost, and needs no disk.

Invariant: a run goes back to a step only if every rank has its snapshot, and the driver
its own state of that step. Deliberately not here: the memory
(`verl_ray/checkpoint/snapshots.py`), other nodes (`second_copies.py`), and when a run
goes back (`loop.py`).
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from controllers.run.second_copies import SecondCopies, homes_of
from verl_ray.checkpoint.snapshot_files import SnapshotNames
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.snapshot_transfer import Rank
from verl_ray.config.run import RunConfig
from verl_ray.errors import CheckpointError
from workers.model_worker import ModelWorker

LARGEST_SHARE = 0.02
"""Share of the time of a run that "measured" lets the copies take, if nothing of them
overlaps with the steps."""

_NUM_STATES = 2

_NUM_COPIES = 3

Groups = Mapping[str, WorkerGroup[Any]]
"""The roles that learn, by name."""


@dataclass(frozen=True)
class FinishedStep:
    """The driver's state after a step."""

    step: int
    """Number of the step, counted from 1."""

    trainer: Mapping[str, Any]
    """State of the trainer, as JSON."""

    belongings: object
    """What the trainer had in the memory of the driver with this state."""

    unrecorded: dict[str, float] | None
    """Metrics of the step until its line is written, then None."""

    best: dict[str, Any] | None
    """State of the best evaluation."""


class Snapshots:
    """Takes a snapshot of every step, or of every few, and finds the newest again."""

    def __init__(
        self,
        every: int | Literal["measured"],
        folder: str,
        second_copies: SecondCopies | None = None,
    ) -> None:
        """Begin without snapshots.

        Args:
            every: Steps from one snapshot to the next; 0 for none. "measured" follows
                from how long copies and steps take.
            folder: Folder of the run.
            second_copies: Those on other nodes; None for none.
        """
        self._every = every
        self._names = SnapshotNames.of(folder)
        self._second_copies = second_copies or SecondCopies(False, math.inf)

        self._states: dict[int, FinishedStep] = {}
        """The driver's part of the last snapshots, by step."""

        self._calls: list[Call[list[float]]] = []
        """Calls that have begun the last snapshot."""

        self._copies_s: deque[float] = deque(maxlen=_NUM_COPIES)
        """Seconds of the last copies, of the slowest rank each."""

        self._newest_step = 0
        self._last_finished_s = time.monotonic()

    @classmethod
    def of(cls, run: RunConfig) -> Self:
        """Return the snapshots of a run, without any yet."""
        second_copies = SecondCopies(run.recovery.snapshot_copies == 2, run.stall_s)
        return cls(run.recovery.taken_every, run.dir, second_copies)

    @property
    def are_taken(self) -> bool:
        """Whether there are any."""
        return self._every != 0

    def take(self, finished: FinishedStep, groups: Groups) -> None:
        """Begin the snapshot of a finished step, if it is due."""
        now_s = time.monotonic()
        step_s = now_s - self._last_finished_s
        self._last_finished_s = now_s
        if self.are_taken:
            self._finish_calls(groups)
        if self._is_due(finished.step, step_s):
            self._begin(finished, groups)

    def _begin(self, finished: FinishedStep, groups: Groups) -> None:
        step = finished.step
        self._states[step] = finished
        for earlier in sorted(self._states)[:-_NUM_STATES]:
            del self._states[earlier]
        self._newest_step = step
        self._calls = [
            group.broadcast(ModelWorker.begin_snapshot, self._names, step)
            for group in groups.values()
        ]
        self._second_copies.begin(self._names, step, homes_of(groups))

    def _finish_calls(self, groups: Groups) -> None:
        """Take the replies of the last snapshot, which is the last one if it failed."""
        calls, self._calls = self._calls, []
        try:
            # The replies are here: the ranks were called again since.
            replies = wait_all(calls)
        except CheckpointError as error:
            self._give_up(error, groups)
        else:
            if replies:
                self._copies_s.append(max(max(seconds) for seconds in replies))

    def _give_up(self, error: CheckpointError, groups: Groups) -> None:
        """Go on without second copies, or where there are none, without snapshots."""
        self._states.clear()
        self._newest_step = 0
        if self._second_copies.are_made:
            self._second_copies.give_up(self._names, str(error))
            return
        self._every = 0
        drops = [
            group.broadcast(ModelWorker.drop_snapshots) for group in groups.values()
        ]
        wait_all(drops)
        print(
            "warning: the run takes no more snapshots, so a lost process costs all"
            f" steps since the last checkpoint: {error}",
            file=sys.stderr,
            flush=True,
        )

    def _is_due(self, step: int, step_s: float) -> bool:
        """Return whether a step gets a snapshot."""
        if self._every == "measured":
            # A single copy may have waited for a busy host.
            copy_s = statistics.median(self._copies_s or [0.0])
            every = max(1, math.ceil(copy_s / (LARGEST_SHARE * step_s)))
        else:
            every = self._every
        if every == 0 or step < self._newest_step + every:
            return False
        # The place of the snapshot before would be taken while it is sent.
        return not self._second_copies.are_on_their_way

    def update(self, finished: FinishedStep) -> None:
        """Replace the driver's part of a snapshot, if there is one of this step."""
        if finished.step in self._states:
            self._states[finished.step] = finished

    def newest(self, groups: Groups) -> FinishedStep | None:
        """Return the newest step of which every rank has a snapshot, if any has.

        Lost processes have started again, and have what they left. Where they were
        lost with their node, they get the second copies.
        """
        # The calls were of processes that may not exist any more.
        self._calls = []
        self._second_copies.stop()
        if not self._states:
            return None
        calls = {
            role: group.broadcast(ModelWorker.snapshot_steps, self._names)
            for role, group in groups.items()
        }
        own: dict[Rank, list[int]] = {}
        for role, call in calls.items():
            for rank, steps in enumerate(call.result()):
                own[role, rank] = steps
        copies = self._second_copies.find(self._names)

        for step in sorted(self._states, reverse=True):
            lacking = [rank for rank, steps in own.items() if step not in steps]
            sources = {
                rank: copies[rank][step]
                for rank in lacking
                if step in copies.get(rank, {})
            }
            if len(sources) == len(lacking) and self._second_copies.bring(
                self._names, step, sources, homes_of(groups)
            ):
                return self._states[step]
        return None

    def load(self, step: int, groups: Groups) -> None:
        """Let every rank load its snapshot of a step; later ones are void."""
        self._names = self._names.back_to(step)
        calls = [
            group.broadcast(ModelWorker.load_snapshot, self._names, step)
            for group in groups.values()
        ]
        wait_all(calls)
        self._states = {
            known: state for known, state in self._states.items() if known <= step
        }
        self._newest_step = step
        self._last_finished_s = time.monotonic()

    def forget_all(self) -> None:
        """Make all snapshots void: the run goes back to another state."""
        self._names = self._names.anew()
        self._second_copies.stop()
        self._calls = []
        self._states = {}
        self._newest_step = 0
        self._last_finished_s = time.monotonic()

    def close(self) -> None:
        """Remove the second copies; ranks remove their own snapshots as they close."""
        self._second_copies.close(self._names)
