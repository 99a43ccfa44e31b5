"""Buffer of scored groups between generation and learning.

The ordinal of a group is the running number of its prompt in the run (`group_id`). The
age of a token is counted in policy versions, of which there is one per training step,
and in optimizer steps, of which a training step may make several.

Invariant: a taken group is whole, and every token of it was sampled from a policy at
most `staleness` versions behind the one that learns. Whole means: every trajectory of
every requested group, each once, with all of its rows, in the order of the row ids.
With staleness 0 a step learns from its own rollouts alone, which is the synchronous
run. Rollouts are held by reference. With rollout.staleness = s and U optimizer steps
per training step, update u (counted from 0) of a training step learns from no token
that is older than s versions or s * U + u optimizer steps. Admission keeps the bound
(`controllers/rollouts/admission.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from verl_ray.columns.batch import Int64
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Rollouts, Scores, last_rows, sums_of_trajectories
from verl_ray.errors import DataError

NO_VERSION = np.iinfo(np.int64).max
"""The oldest version of a group without tokens."""

_LISTED = 8  # ordinals that an error names


@dataclass(frozen=True, eq=False)
class Experience:
    """Scored rollouts, row by row."""

    rollouts: Sharded[Rollouts]
    scores: Mapping[str, Sharded[Scores]]
    """Scores by grader."""

    def select(self, rows: Int64) -> Experience:
        """Return the rows `rows`, int64 [rows], in this order."""
        scores = {name: scored.select(rows) for name, scored in self.scores.items()}
        return Experience(self.rollouts.select(rows), scores)

    def of_trajectories(self) -> Experience:
        """Return the last row of each trajectory, which has its score.

        It is this object where every trajectory has one row. The rows of one are
        adjacent.
        """
        rows = last_rows(self.rollouts.row("trajectory_id"))
        return self if len(rows) == len(self.rollouts) else self.select(rows)

    @property
    def response_lengths(self) -> Int64:
        """Response tokens of each trajectory, int64 [trajectories]."""
        rollouts = self.rollouts
        lengths = rollouts.row("response_length").astype(np.int64)
        return sums_of_trajectories(rollouts.row("trajectory_id"), lengths)

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self | None:
        """Return the rows of all parts, one part after another; None without parts."""
        if not parts:
            return None
        rollouts = Sharded.concat([part.rollouts for part in parts])
        scores = {
            name: Sharded.concat([part.scores[name] for part in parts])
            for name in parts[0].scores
        }
        return cls(rollouts, scores)


@dataclass(frozen=True, eq=False)
class FinishedGroups:
    """Groups that are generated and scored; int64 [groups] each."""

    ordinals: Int64
    oldest: Int64
    """Oldest policy version of a token; -1 without tokens."""
    newest: Int64


class RolloutBuffer:
    """Groups that are reserved, partly generated, or complete."""

    def __init__(self, group_size: int, staleness: int) -> None:
        """Create an empty buffer.

        Args:
            group_size: Trajectories of a group.
            staleness: How many policy versions a token may be behind.
        """
        self._group_size = group_size
        self.staleness = staleness
        self._missing: dict[int, int] = {}
        """Pending trajectories, by the ordinal of each group that is reserved and not
        taken."""
        self._stored: list[Experience] = []
        self._versions: dict[int, tuple[int, int]] = {}
        """Oldest and newest version of a token, by the ordinal of each group here."""
        self._finished: set[int] = set()
        """Ordinals that became complete since they were last taken note of."""
        self._whole_since: dict[int, float] = {}
        """When each group that is here became complete, on the monotonic clock."""
        self._queue_s: list[float] = []
        """How long the groups that were taken had been complete."""
        self.num_waiting = 0
        """Groups that were complete and stayed here when others were last taken."""

    def reserve(self, ordinals: Int64) -> None:
        """Note that these groups, int64 [groups], are being generated.

        Raises:
            DataError: a group is reserved already.
        """
        requested = ordinals.tolist()
        twice = sorted(self._missing.keys() & set(requested))
        if twice:
            raise DataError(
                "a group may be generated once, but these are reserved already:"
                f" {_first_few(twice)}"
            )
        self._missing.update(dict.fromkeys(requested, self._group_size))

    def put(self, experience: Experience) -> None:
        """Store trajectories that are generated and scored, of any reserved groups.

        All rows of a trajectory come at once. Either all rows are stored or none.

        Raises:
            DataError: a row belongs to no reserved group or comes twice, or a group
                gets more trajectories than it has.
        """
        row_ids, counts = np.unique(
            experience.rollouts.row("row_id"), return_counts=True
        )
        if (counts > 1).any():
            twice = row_ids[counts > 1].tolist()
            raise DataError(
                f"the rows {_first_few(twice)} came twice; each of them is generated"
                " once"
            )
        group_ids = experience.rollouts.row("group_id")
        _, first_rows = np.unique(
            experience.rollouts.row("trajectory_id"), return_index=True
        )
        ordinals, counts = np.unique(group_ids[first_rows], return_counts=True)
        still_missing: dict[int, int] = {}
        for ordinal, count in zip(ordinals.tolist(), counts.tolist(), strict=True):
            missing = self._missing.get(ordinal, 0) - count
            if missing < 0:
                raise DataError(
                    f"group {ordinal} gets {-missing} responses more than it waits"
                    " for; each of them is generated once"
                )
            still_missing[ordinal] = missing

        self._missing.update(still_missing)
        self._stored.append(experience)
        self._note_versions(experience.rollouts)
        now_s = time.monotonic()
        for ordinal, missing in still_missing.items():
            if not missing:
                self._whole_since[ordinal] = now_s
                self._finished.add(ordinal)

    def _note_versions(self, rollouts: Sharded[Rollouts]) -> None:
        """Widen the range of versions of each group by those of further rows."""
        ordinals, group = np.unique(rollouts.row("group_id"), return_inverse=True)
        oldest = np.full(len(ordinals), NO_VERSION, np.int64)
        newest = np.full(len(ordinals), -1, np.int64)
        # A row without response tokens has no version.
        has_tokens = rollouts.row("response_length") > 0
        np.minimum.at(
            oldest, group[has_tokens], rollouts.row("oldest_version")[has_tokens]
        )
        np.maximum.at(
            newest, group[has_tokens], rollouts.row("newest_version")[has_tokens]
        )
        columns = zip(ordinals.tolist(), oldest.tolist(), newest.tolist(), strict=True)
        for ordinal, first, last in columns:
            known_first, known_last = self._versions.get(ordinal, (NO_VERSION, -1))
            self._versions[ordinal] = min(known_first, first), max(known_last, last)

    def take_finished(self) -> FinishedGroups:
        """Return the groups that became complete since the last call.

        They stay here, unless they have been taken meanwhile.
        """
        ordinals = np.array(sorted(self._finished), np.int64)
        self._finished = set()
        versions = [self._versions[ordinal] for ordinal in ordinals.tolist()]
        for ordinal in ordinals.tolist():
            if ordinal not in self._missing:
                del self._versions[ordinal]
        pairs = np.array(versions, np.int64).reshape(-1, 2)
        is_empty = pairs[:, 1] < 0
        return FinishedGroups(
            ordinals, np.where(is_empty, -1, pairs[:, 0]), pairs[:, 1]
        )

    def missing(self, ordinals: Int64) -> int:
        """Number of pending trajectories of these groups, int64 [groups].

        Raises:
            DataError: a group is not reserved, so its rows would never come.
        """
        requested = ordinals.tolist()
        unknown = sorted(set(requested) - self._missing.keys())
        if unknown:
            raise DataError(
                f"the groups {_first_few(unknown)} are not being generated: reserve"
                " them before they are taken"
            )
        return sum(self._missing[ordinal] for ordinal in requested)

    def take(
        self, ordinals: Int64, policy_version: int, wait: Callable[[], None]
    ) -> Experience:
        """Take these groups, int64 [groups], for the policy that learns next.

        Args:
            policy_version: The version that learns from the groups.
            wait: Waits for some of the pending rows, and puts them here. It is called
                until no row of these groups is missing.

        Raises:
            DataError: a token is older than `staleness` versions, of a version that is
                yet to come, or of none that was recorded.
        """
        # Each round waits for rows and stores them; ends when every group is whole.
        while self.missing(ordinals):
            wait()

        stored = self._all_stored()
        is_requested = np.isin(stored.rollouts.row("group_id"), ordinals)
        rows = np.flatnonzero(is_requested)
        other_rows = np.flatnonzero(~is_requested)
        self._stored = [stored.select(other_rows)] if len(other_rows) else []
        # A taken group is no longer reserved.
        now_s = time.monotonic()
        for ordinal in ordinals.tolist():
            del self._missing[ordinal]
            self._queue_s.append(now_s - self._whole_since.pop(ordinal))
            if ordinal not in self._finished:
                del self._versions[ordinal]
        self.num_waiting = len(self.whole_groups)

        # Rows arrive in any order; a step must not depend on it.
        order = np.argsort(stored.rollouts.row("row_id")[rows], kind="stable")
        taken = stored.select(rows[order])
        self._refuse_other_policies(taken.rollouts, policy_version)
        return taken

    @property
    def whole_groups(self) -> Int64:
        """Ordinals of the groups that are complete, ascending, int64 [groups]."""
        whole = [ordinal for ordinal, missing in self._missing.items() if not missing]
        return np.array(sorted(whole), np.int64)

    def whole(self, among: Int64 | None = None) -> Experience | None:
        """Return the complete groups, in the order of their rows; they stay here.

        None if there are none.

        Args:
            among: Ordinals of the groups to choose from, int64 [groups]; None for all.
        """
        if not self._stored:
            return None
        stored = self._all_stored()
        ordinals = stored.rollouts.row("group_id")
        is_chosen = np.isin(ordinals, self.whole_groups)
        if among is not None:
            is_chosen &= np.isin(ordinals, among)
        rows = np.flatnonzero(is_chosen)
        if not len(rows):
            return None
        order = np.argsort(stored.rollouts.row("row_id")[rows], kind="stable")
        return stored.select(rows[order])

    def take_queue_s(self) -> float:
        """Return the mean seconds from complete to taken, since the last call."""
        queue_s = self._queue_s
        self._queue_s = []
        return sum(queue_s) / len(queue_s) if queue_s else 0.0

    def restore(self, experience: Experience) -> None:
        """Take back complete groups that `whole` returned in an earlier process."""
        self.reserve(np.unique(experience.rollouts.row("group_id")))
        self.put(experience)

    def drop_unfinished(self) -> None:
        """Forget every group that is not complete: it may be generated again."""
        unfinished = [ordinal for ordinal, missing in self._missing.items() if missing]
        self.discard(np.array(unfinished, np.int64))

    def discard(self, ordinals: Int64) -> None:
        """Forget these groups, int64 [groups], where they are here."""
        for ordinal in ordinals.tolist():
            self._missing.pop(ordinal, None)
            self._versions.pop(ordinal, None)
            self._whole_since.pop(ordinal, None)
            self._finished.discard(ordinal)
        if self._stored:
            stored = self._all_stored()
            remaining = ~np.isin(stored.rollouts.row("group_id"), ordinals)
            rows = np.flatnonzero(remaining)
            self._stored = [stored.select(rows)] if len(rows) else []

    def _all_stored(self) -> Experience:
        """Everything that is stored, in the order of its arrival."""
        stored = Experience.concat(self._stored)
        assert stored is not None, "something is stored"
        return stored

    def _refuse_other_policies(
        self, rollouts: Sharded[Rollouts], policy_version: int
    ) -> None:
        # A row without response tokens has no version.
        has_tokens = rollouts.row("response_length") > 0
        oldest_versions = rollouts.row("oldest_version")[has_tokens]
        newest_versions = rollouts.row("newest_version")[has_tokens]
        if not oldest_versions.size:
            return

        oldest = int(oldest_versions.min())
        newest = int(newest_versions.max())
        if oldest < 0:
            number = np.count_nonzero(oldest_versions < 0)
            raise DataError(
                f"{number} responses have tokens without a policy version, so nobody"
                " knows how old they are"
            )
        if newest > policy_version or policy_version - oldest > self.staleness:
            raise DataError(
                f"tokens of the policy versions {oldest} to {newest} were taken for"
                f" version {policy_version}; they may be at most rollout.staleness ="
                f" {self.staleness} versions older"
            )


def _first_few(ordinals: list[int]) -> str:
    """The first few ordinals as text."""
    text = ", ".join(map(str, ordinals[:_LISTED]))
    return text + ", ..." if len(ordinals) > _LISTED else text
