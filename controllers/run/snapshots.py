"""The state after the last steps, in the memory of the hosts that hold it.

A rank that is lost makes the run go back to such a snapshot, which is at most one step
older than what was lost, and needs no disk. If the driver is lost, the next one goes on
from it.

Invariant: a run goes back to a step only if every rank has its snapshot, and the driver
its own state of that step. Deliberately not here: the memory of the ranks
(`verl_ray/checkpoint/snapshots.py`) and of the driver (`driver_snapshots.py`), and when
a run goes back (`loop.py`).
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from controllers.run.driver_snapshots import (
    DriverSnapshots,
    FinishedStep,
    LeftSnapshots,
)
from controllers.run.second_copies import SecondCopies, homes_of
from controllers.supervisor import reports
from verl_ray.checkpoint.snapshot_files import SnapshotNames, remove
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.snapshot_transfer import (
    Rank,
)
from verl_ray.cluster.waiting import (
    CLUSTER_LOSS,
)
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError
from verl_ray.ownership import Owner
from workers.model_worker import ModelWorker

LARGEST_SHARE = 0.02
"""Share of the time of a run that "measured" lets the copies take, if nothing of them
overlaps with the steps."""

_NUM_STATES = 2

_NUM_COPIES = 3

Groups = Mapping[str, WorkerGroup[Any]]
"""The roles that learn, by name."""


def owner_of_snapshots() -> Owner:
    """Return the owner of a run's snapshots: the process that outlives its drivers."""
    supervisor = reports().supervisor
    return Owner.here() if supervisor is None else Owner.of(supervisor)


class Snapshots:
    """Takes a snapshot of every step, or of every few, and finds the newest again."""

    def __init__(
        self,
        every: int | Literal["measured"],
        names: SnapshotNames,
        second_copies: SecondCopies | None = None,
        in_memory: DriverSnapshots | None = None,
        inherited: Mapping[int, FinishedStep] | None = None,
    ) -> None:
        """Begin with the snapshots that an earlier driver has left, if any.

        Args:
            every: Steps from one snapshot to the next; 0 for none. "measured" follows
                from how long copies and steps take.
            names: Their names.
            second_copies: Those on other nodes; None for none.
            in_memory: Writes the driver's parts where the next driver finds them; None
                for a run that no other driver follows.
            inherited: The driver's parts that an earlier driver has left, by step.
        """
        self._every = every
        self._names = names
        self._second_copies = second_copies or SecondCopies(False, math.inf)
        self._in_memory = in_memory

        self._states: dict[int, FinishedStep] = dict(inherited or {})
        """The driver's part of the last snapshots, by step."""

        self._are_left = bool(inherited)
        """Whether these are of an earlier driver, and not yet gone on from."""

        self._are_kept = False
        """Whether they have a state that could not be saved."""

        self._driver_s = 0.0
        """Seconds in which the driver's part was written since the last copy."""

        self._calls: list[Call[list[float]]] = []
        """Calls that have begun the last snapshot."""

        self._copies_s: deque[float] = deque(maxlen=_NUM_COPIES)
        """Seconds of the last copies, of the slowest rank each."""

        self._newest_step = 0
        self._last_finished_s = time.monotonic()

    @classmethod
    def of(
        cls, config: Config, inherited: LeftSnapshots | None, *, on_own_cluster: bool
    ) -> Self:
        """Return the snapshots of a run.

        What an earlier driver has left is taken over or, where this run differs from
        that one, removed.

        Args:
            config: Resolved configuration of the run.
            inherited: What an earlier driver has left of steps after the checkpoint.
            on_own_cluster: Whether the run has a cluster of one node, which each of its
                drivers starts anew.
        """
        run, tree = config.run, to_tree(config)
        difference = None if inherited is None else inherited.differs(tree)
        if inherited is not None and difference is not None:
            print(
                f"the snapshot of step {inherited.newest} is left out: {difference}",
                flush=True,
            )
            inherited = None

        if inherited is None:
            names = SnapshotNames.of(run.dir, owner_of_snapshots())
            steps: Mapping[int, FinishedStep] = {}
        else:
            names, steps = inherited.names, inherited.steps
        names = replace(names, on_own_cluster=on_own_cluster)
        names.remove_others()
        second_copies = SecondCopies(run.recovery.snapshot_copies == 2, run.stall_s)
        in_memory = DriverSnapshots(tree, steps)
        return cls(run.recovery.taken_every, names, second_copies, in_memory, steps)

    @property
    def are_taken(self) -> bool:
        """Whether there are any."""
        return self._every != 0

    @property
    def newest_step(self) -> int:
        """The newest step that ranks may have a snapshot of; 0 where there is none."""
        return max(self._states, default=0)

    def is_due(self, step: int, groups: Groups) -> bool:
        """Return whether a step that has just finished gets a snapshot."""
        now_s = time.monotonic()
        step_s = now_s - self._last_finished_s
        self._last_finished_s = now_s
        if self.are_taken:
            self._finish_calls(groups)
        return self._is_due(step, step_s)

    def take(
        self, finished: FinishedStep, groups: Groups, saved_step: int | None
    ) -> None:
        """Begin the snapshot of a finished step that is due.

        Args:
            finished: The driver's part.
            groups: The roles that learn.
            saved_step: Step of the newest checkpoint; None without one.
        """
        step = finished.step
        self._states[step] = finished
        for earlier in sorted(self._states)[:-_NUM_STATES]:
            self._drop(earlier)
        self._newest_step = step
        self._calls = [
            group.broadcast(ModelWorker.begin_snapshot, self._names, step)
            for group in groups.values()
        ]
        self._second_copies.begin(self._names, step, homes_of(groups))
        self._write(finished, saved_step)

    def _write(self, finished: FinishedStep, saved_step: int | None) -> None:
        """Write the driver's part where the next driver finds it."""
        began_s = time.monotonic()
        if self._in_memory is not None:
            self._in_memory.write(self._names, finished, saved_step)
        self._driver_s += time.monotonic() - began_s

    def _drop(self, step: int) -> None:
        """Forget the driver's part of a step."""
        del self._states[step]
        if self._in_memory is not None:
            self._in_memory.drop(step)

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
                slowest_rank_s = max(max(seconds) for seconds in replies)
                self._copies_s.append(slowest_rank_s + self._driver_s)
                self._driver_s = 0.0

    def _give_up(self, error: CheckpointError, groups: Groups) -> None:
        """Go on without second copies, or where there are none, without snapshots."""
        for step in list(self._states):
            self._drop(step)
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

    def has(self, step: int) -> bool:
        """Return whether the driver has its part of a step's snapshot."""
        return step in self._states

    def update(self, finished: FinishedStep, saved_step: int | None) -> None:
        """Replace the driver's part of a snapshot that there is; see `take`."""
        self._states[finished.step] = finished
        self._write(finished, saved_step)

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
        if self._are_left:
            # Nobody knows where the ranks of the earlier driver were.
            self._second_copies.expect(own, homes_of(groups))
        copies = self._second_copies.find(self._names)

        for step in sorted(self._states, reverse=True):
            lacking = [rank for rank, steps in own.items() if step not in steps]
            sources = {
                rank: copies[rank][step]
                for rank in lacking
                if step in copies.get(rank, {})
            }
            if len(sources) == len(lacking) and self._second_copies.send_back(
                self._names, step, sources, homes_of(groups)
            ):
                return self._states[step]
        print(
            f"the snapshots of steps {sorted(self._states)} are left out: ranks lack"
            " their parts",
            flush=True,
        )
        return None

    def load(self, step: int, groups: Groups) -> None:
        """Let every rank load its snapshot of a step; later ones are void."""
        self._names = self._names.back_to(step)
        calls = [
            group.broadcast(ModelWorker.load_snapshot, self._names, step)
            for group in groups.values()
        ]
        wait_all(calls)
        for known in list(self._states):
            if known > step:
                self._drop(known)
        if self._are_left and not self._second_copies.are_made:
            self._second_copies.close(self._names)
        self._newest_step = step
        self._last_finished_s = time.monotonic()

    def go_on(self) -> None:
        """Note that the run has the state of the one that was loaded."""
        self._are_left = False

    def keep(self) -> None:
        """Keep them for another driver, since their state could not be saved."""
        self._are_kept = True

    def forget_all(self) -> None:
        """Make all snapshots void: the run goes back to another state."""
        self._names = self._names.anew()
        self._second_copies.stop()
        self._calls = []
        for step in list(self._states):
            self._drop(step)
        self._are_left = False
        self._newest_step = 0
        self._last_finished_s = time.monotonic()

    @property
    def are_for_another(self) -> bool:
        """Whether another driver may go on from them once this one has ended.

        It has asked for one, has lost its cluster, could not save its last step, or has
        not come to use what the driver before has left.
        """
        is_unused = self._are_left or self._are_kept
        return is_unused or reports().has_asked or CLUSTER_LOSS.has_happened

    def close(self) -> None:
        """Remove the snapshots, unless another driver goes on from them.

        Ranks that close remove their own as well.
        """
        if self.are_for_another:
            return
        self._second_copies.close(self._names)
        for path in self._names.paths_here():
            remove(path)
