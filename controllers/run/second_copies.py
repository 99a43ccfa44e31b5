"""Second copies of snapshots, in the memory of another node of the run.

A lost node takes the snapshots of its ranks with it. Their copies travel to where the
ranks start again.

Invariant: each node that has ranks that learn sends to one other node, in a ring. At
most one step is on its way. Copies of before are removed once the new ones are whole.
A copy that fails never ends the run.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray

from verl_ray.checkpoint.snapshot_files import SnapshotNames
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
from verl_ray.cluster.whereabouts import REGISTRY
from verl_ray.errors import CheckpointError
from verl_ray.profiling.phases import blocking

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

    members = [member for group in REGISTRY.groups for member in group.members()]
    infos = [member.process_info for member in members]
    living = {node.node_id for node in node_resources()}
    others = {info.node_id for info in infos if info is not None} & living
    return {node: min(others - {node}) for node in nodes if others - {node}}


def _by_node(places: Iterable[tuple[Rank, str]]) -> dict[str, list[Rank]]:
    ranks: dict[str, list[Rank]] = {}
    for rank, node in places:
        ranks.setdefault(node, []).append(rank)
    return ranks
