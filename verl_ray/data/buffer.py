"""Buffer of scored groups between generation and learning.

The ordinal of a group is the running number of its prompt in the run (`group_id`).
Invariant: a taken group is whole, and every token of it was sampled from a policy at
most `staleness` versions behind the one that learns. Whole means: every row of every
requested group, each once, in the order of the row ids. With staleness 0 a step learns
from its own rollouts alone, which is the synchronous run. Deliberately not here:
tokens, since rollouts are held by reference; and what is generated when
(`controllers/rollouts/producer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from verl_ray.data.batch import Int64
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Rollouts, Scores
from verl_ray.errors import DataError

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


class RolloutBuffer:
    """Groups that are reserved, partly generated, or complete."""

    def __init__(self, group_size: int, staleness: int) -> None:
        """Create an empty buffer.

        Args:
            group_size: Rows of a group.
            staleness: How many policy versions a token may be behind.
        """
        self._group_size = group_size
        self._staleness = staleness
        self._missing: dict[int, int] = {}
        """Pending rows, by the ordinal of each group that is reserved and not taken."""
        self._stored: list[Experience] = []

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
        """Store rows that are generated and scored, of any reserved groups.

        Either all rows are stored or none.

        Raises:
            DataError: a row belongs to no reserved group, or a group gets more rows
                than it has.
        """
        group_ids = experience.rollouts.row("group_id")
        ordinals, counts = np.unique(group_ids, return_counts=True)
        still_missing: dict[int, int] = {}
        for ordinal, count in zip(ordinals.tolist(), counts.tolist(), strict=True):
            missing = self._missing.get(ordinal, 0) - count
            if missing < 0:
                raise DataError(
                    f"group {ordinal} gets {-missing} rows more than it waits"
                    " for; each row is generated once"
                )
            still_missing[ordinal] = missing

        self._missing.update(still_missing)
        self._stored.append(experience)

    def missing(self, ordinals: Int64) -> int:
        """Number of pending rows of these groups, int64 [groups].

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
            DataError: a token is older than `staleness` versions, or of a version that
                is yet to come.
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
        for ordinal in ordinals.tolist():
            del self._missing[ordinal]

        # Rows arrive in any order; a step must not depend on it.
        order = np.argsort(stored.rollouts.row("row_id")[rows], kind="stable")
        taken = stored.select(rows[order])
        self._refuse_other_policies(taken.rollouts, policy_version)
        return taken

    def drop(self, ordinals: Int64) -> None:
        """Forget these groups, int64 [groups]: they may be generated again."""
        for ordinal in ordinals.tolist():
            self._missing.pop(ordinal, None)

        # Some of their rows may be stored already.
        remaining = []
        for experience in self._stored:
            is_dropped = np.isin(experience.rollouts.row("group_id"), ordinals)
            rows = np.flatnonzero(~is_dropped)
            if len(rows):
                remaining.append(experience.select(rows))
        self._stored = remaining

    def _all_stored(self) -> Experience:
        """Everything that is stored, in the order of its arrival."""
        rollouts = Sharded.concat([experience.rollouts for experience in self._stored])
        scores = {}
        for name in self._stored[0].scores:
            parts = [experience.scores[name] for experience in self._stored]
            scores[name] = Sharded.concat(parts)
        return Experience(rollouts, scores)

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
        if newest > policy_version or policy_version - oldest > self._staleness:
            raise DataError(
                f"tokens of the policy versions {oldest} to {newest} were taken for"
                f" version {policy_version}; they may be at most rollout.staleness ="
                f" {self._staleness} versions older"
            )


def _first_few(ordinals: list[int]) -> str:
    """The first few ordinals as text."""
    text = ", ".join(map(str, ordinals[:_LISTED]))
    return text + ", ..." if len(ordinals) > _LISTED else text
