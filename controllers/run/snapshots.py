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

import contextlib
import math
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, Self

import ray

from controllers.run.driver_snapshots import (
    DriverSnapshots,
    FinishedStep,
    LeftSnapshots,
)
from controllers.supervisor import reports
from verl_ray.checkpoint.snapshot_files import SnapshotNames, remove
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.placement import node_resources
from verl_ray.cluster.signals import finishing
from verl_ray.cluster.snapshot_transfer import (
    Rank,
    begin_copy,
    begin_look,
    begin_removal,
)
from verl_ray.cluster.waiting import (
    CLUSTER_LOSS,
    RAY_CALLS,
    TICK_S,
    wait,
    wait_while_closing,
)
from verl_ray.cluster.whereabouts import ROSTER
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError
from verl_ray.ownership import Owner
from verl_ray.profiling.phases import blocking
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
                of_ranks_s = max(max(seconds) for seconds in replies)
                self._copies_s.append(of_ranks_s + self._driver_s)
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


# ---------------------------------------------------------------------- second copies

# A lost node takes the snapshots of its ranks with it. Their copies lie in the memory
# of another node of the run, and travel to where the ranks start again.
#
# Invariant: each node that has ranks that learn sends to one other node, in a ring. At
# most one step is on its way. Copies of before are removed once the new ones are whole.
# A copy that fails never ends the run.


_REPLY_S = 30.0
"""Limit in seconds of a task that only looks at files; its process starts first."""

_CLOSE_S = 5.0

_START_S = 30.0
"""Limit in seconds of the start of a task's process on a busy node."""

_PATIENCE_FACTOR = 4
"""Limit of all copies of a step, as a multiple of that of a piece. A task that is
stopped itself ends nothing."""

_NAME_OF_ERROR = f"{CheckpointError.__module__}.{CheckpointError.__name__}: "
"""What Ray puts before the text of an error."""

_NO_ROOM = "cannot be written"

Homes = Mapping[Rank, str]
"""Ray's id of the node of each rank that learns."""


class SecondCopies:
    """The copies of the snapshots of a run, and those that are on their way."""

    def __init__(
        self, are_made: bool, patience_s: float, start_s: float = _START_S
    ) -> None:
        """Begin without copies.

        Args:
            are_made: Whether there are any.
            patience_s: Longest time in seconds without progress of one.
            start_s: Longest time in seconds until the process has started that sends
                one.
        """
        self.are_made = are_made
        self._limits_s = (patience_s, start_s)
        self._targets: dict[str, str] = {}
        """The node that each node sends to."""

        self._kept: set[tuple[Rank, str]] = set()
        """Ranks, and the nodes that may have copies of theirs."""

        self._pending: list[Any] = []
        self._pending_names: SnapshotNames | None = None
        self._pending_homes: Homes = {}
        self._began_s = 0.0
        self._have_failed = False
        """Whether a copy of the step that is on its way has failed."""
        self._targets_lack_room = False
        self._said: set[str] = set()

    # ------------------------------------------------------------------ after each step

    @property
    def are_on_their_way(self) -> bool:
        """Whether the copies of the last step have not all arrived."""
        if not self._pending:
            return False
        if not self._check(self._take_arrived()):
            self._have_failed = True

        limit_s = _PATIENCE_FACTOR * sum(self._limits_s)
        if self._pending and time.monotonic() - self._began_s > limit_s:
            self._say(f"it has not arrived within {limit_s:g} s")
            self._have_failed = True
            self.stop()
        if self._pending:
            return True

        if self._targets_lack_room and self.are_made:
            assert self._pending_names is not None, "its copies have arrived"
            self.give_up(self._pending_names, "there is no room for it")
        elif self._have_failed:
            # A node may be lost.
            self._targets = {}
        else:
            self._remove_others()
        return False

    def expect(self, ranks: Iterable[Rank], homes: Homes) -> None:
        """Look for snapshots of these ranks on all nodes but their own.

        An earlier driver may have had the ranks, or their copies, there.
        """
        nodes = {node.node_id for node in node_resources()}
        self._kept = {
            (rank, node) for rank in ranks for node in nodes if node != homes[rank]
        }

    def begin(self, names: SnapshotNames, step: int, homes: Homes) -> None:
        """Begin to copy the snapshots of a step, unless others are on their way."""
        if self.are_on_their_way or not self.are_made:
            return
        sources = _by_node(homes.items())
        if self._targets.keys() != sources.keys():
            self._targets = _ring(sources)
        if not self._targets:
            self._say("the run has one node")
            return

        self._pending_names, self._pending_homes = names, homes
        self._began_s = time.monotonic()
        self._have_failed = False
        for source, ranks in sources.items():
            target = self._targets[source]
            self._kept.update((rank, target) for rank in ranks)
            self._pending.append(
                begin_copy(names, ranks, step, source, target, *self._limits_s)
            )

    def _remove_others(self) -> None:
        """Begin to remove copies in places that the whole ones have not."""
        homes = self._pending_homes
        present = {(rank, self._targets[home]) for rank, home in homes.items()}
        others = self._kept - present
        self._kept = present
        assert self._pending_names is not None, "its copies have arrived"
        # A rank that started again where its copy was has it as its own.
        self._begin_removals(self._pending_names, others - set(homes.items()))

    def _begin_removals(
        self, names: SnapshotNames, copies: Iterable[tuple[Rank, str]]
    ) -> list[Any]:
        return [
            begin_removal(names, ranks, node)
            for node, ranks in _by_node(copies).items()
        ]

    def _take_arrived(self) -> list[Any]:
        """Return the copies that have ended; the others are still pending."""
        if not self._pending:
            return []
        arrived = wait(self._pending, len(self._pending), 0.0)
        self._pending = [each for each in self._pending if each not in arrived]
        return arrived

    def _check(self, arrived: Iterable[Any]) -> bool:
        """Return whether these copies are whole; say once why others are not."""
        are_whole = True
        for copy in arrived:
            try:
                RAY_CALLS.make(ray.get, copy, timeout=TICK_S)
            except ray.exceptions.RayError as error:
                are_whole = False
                self._say(str(error).strip().rpartition("\n")[2])
                # Without room there will be none later, either.
                if isinstance(error, CheckpointError) and _NO_ROOM in str(error):
                    self._targets_lack_room = True
        return are_whole

    def _say(self, reason: str) -> None:
        """Warn of a reason once, whatever its rank and step."""
        reason = reason.replace(_NAME_OF_ERROR, "")
        signature = re.sub(r"\d+", "N", reason)
        if signature not in self._said:
            self._said.add(signature)
            print(
                f"warning: a snapshot has no second copy: {reason}"
                " (run.recovery.snapshot_copies=1 makes none)",
                file=sys.stderr,
                flush=True,
            )

    def give_up(self, names: SnapshotNames, reason: str) -> None:
        """Remove all copies, and make no more: the snapshots need their room."""
        self._say(reason)
        self.are_made = False
        self.close(names)

    # ------------------------------------------------------------------------- recovery

    def stop(self) -> None:
        """Give up what is on its way."""
        # Ray may abort the driver where a task is cancelled by force, or just when its
        # reply comes: the reply of a task that it counts as ended is an unexpected
        # state (task_manager.cc, CompletePendingTask). So one that has ended is left.
        self._take_arrived()
        for copy in self._pending:
            RAY_CALLS.make(ray.cancel, copy)
        if self._pending:
            wait(self._pending, len(self._pending), _REPLY_S)
        self._pending = []

    def find(self, names: SnapshotNames) -> dict[Rank, dict[int, str]]:
        """Return the steps of each rank's copies, and the nodes that have them."""
        if not self._kept:
            return {}
        living = {node.node_id for node in node_resources()}
        copies = [(rank, node) for rank, node in self._kept if node in living]
        looks = [
            (node, ranks, begin_look(names, ranks, node))
            for node, ranks in _by_node(copies).items()
        ]
        if looks:
            wait([look for *_, look in looks], len(looks), _REPLY_S)
        steps_of: dict[Rank, dict[int, str]] = {}
        for node, ranks, look in looks:
            with contextlib.suppress(ray.exceptions.RayError):
                answers = RAY_CALLS.make(ray.get, look, timeout=TICK_S)
                for rank, steps in zip(ranks, answers, strict=True):
                    steps_of.setdefault(rank, {}).update(dict.fromkeys(steps, node))
        return steps_of

    def send_back(
        self,
        names: SnapshotNames,
        step: int,
        sources: Mapping[Rank, str],
        homes: Homes,
    ) -> bool:
        """Copy snapshots of a step to the present nodes of their ranks.

        Args:
            names: Names of the snapshots.
            step: The step.
            sources: The ranks, and the nodes that have the copies.
            homes: The nodes of all ranks.

        Returns:
            Whether they have all arrived.
        """
        by_way: dict[tuple[str, str], list[Rank]] = {}
        for rank, source in sources.items():
            if source != homes[rank]:
                by_way.setdefault((source, homes[rank]), []).append(rank)
        self._pending = [
            begin_copy(names, ranks, step, source, target, *self._limits_s)
            for (source, target), ranks in by_way.items()
        ]
        if not self._pending:
            return True
        limit_s = _PATIENCE_FACTOR * sum(self._limits_s)
        arrived = wait(self._pending, len(self._pending), limit_s)
        are_whole = self._check(arrived) and len(arrived) == len(self._pending)
        self.stop()
        return are_whole

    def close(self, names: SnapshotNames) -> None:
        """Remove all copies."""
        if CLUSTER_LOSS.has_happened or not self._kept:
            return
        # A signal must leave nothing behind. What the end of a run meets here is no
        # failure of it: a node may be lost.
        removing = blocking("removing the second copies of snapshots")
        with finishing(), removing, contextlib.suppress(Exception):
            # A copy that is broken off may still write for a moment.
            if self._pending:
                wait_while_closing(self._pending, _CLOSE_S)
            self._take_arrived()
            for copy in self._pending:
                RAY_CALLS.attempt(_CLOSE_S, ray.cancel, copy)
            living = {node.node_id for node in node_resources()}
            copies = [(rank, node) for rank, node in self._kept if node in living]
            removals = self._begin_removals(names, copies)
            if removals:
                wait_while_closing(removals, _REPLY_S)
        self._kept = set()
        self._pending = []


def homes_of(groups: Mapping[str, WorkerGroup[Any]]) -> dict[Rank, str]:
    """Return the node of each rank of these groups."""
    homes: dict[Rank, str] = {}
    for role, group in groups.items():
        for member in group.members():
            assert member.process_info is not None, "its processes have started"
            homes[role, member.rank] = member.process_info.node_id
    return homes


def _ring(sources: Iterable[str]) -> dict[str, str]:
    """Return the node that each of these nodes sends to; none without another node."""
    nodes = sorted(sources)
    if len(nodes) > 1:
        return dict(zip(nodes, (*nodes[1:], nodes[0]), strict=True))

    members = [member for group in ROSTER.groups for member in group.members()]
    infos = [member.process_info for member in members]
    living = {node.node_id for node in node_resources()}
    others = {info.node_id for info in infos if info is not None} & living
    return {node: min(others - {node}) for node in nodes if others - {node}}


def _by_node(places: Iterable[tuple[Rank, str]]) -> dict[str, list[Rank]]:
    ranks: dict[str, list[Rank]] = {}
    for rank, node in places:
        ranks.setdefault(node, []).append(rank)
    return ranks
