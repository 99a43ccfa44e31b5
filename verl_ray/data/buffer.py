"""Between those who draw and score rollouts and those who learn from them: groups, by their ordinals.

The ordinal of a group is the running number of its prompt in the run (`group_id`). Invariant: what is taken is whole
(every row of every group asked for, each once, in the order of its row ids), and every token of it was sampled from a
policy at most `staleness` versions behind the one that learns. With staleness 0 a step learns from its own rollouts
alone, which is the synchronous run. Deliberately not here: tokens, since rollouts are held by reference; and who draws
what when (`controllers/rollouts/producer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from verl_ray.data.batch import Int64
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Rollouts, Scores
from verl_ray.errors import DataError


@dataclass(frozen=True, eq=False)
class Experience:
    """Scored rollouts, row by row."""

    rollouts: Sharded[Rollouts]
    scores: Mapping[str, Sharded[Scores]]
    """By grader."""

    def select(self, rows: Int64) -> Experience:
        """The given rows, int64 [rows], in the given order."""
        scores = {name: graded.select(rows) for name, graded in self.scores.items()}
        return Experience(self.rollouts.select(rows), scores)


class RolloutBuffer:
    """Groups that are reserved, on their way, or here."""

    def __init__(self, group_size: int, staleness: int) -> None:
        """`group_size`: rows of a group; `staleness`: how many policy versions a token may be behind."""
        self._group_size, self._staleness = group_size, staleness
        self._missing: dict[int, int] = {}
        """Rows that are still to come, by the ordinal of each group that is reserved and not taken."""
        self._held: list[Experience] = []

    def reserve(self, ordinals: Int64) -> None:
        """These groups are being drawn. `ordinals` int64 [groups].

        Raises:
            DataError: one of them is reserved already.
        """
        asked = ordinals.tolist()
        if twice := sorted(self._missing.keys() & set(asked)):
            raise DataError(f"groups may be drawn once, and these are drawn or here already: {_listed(twice)}")
        self._missing.update(dict.fromkeys(asked, self._group_size))

    def put(self, experience: Experience) -> None:
        """Rows that are drawn and scored, of any groups that are reserved.

        Raises:
            DataError: a row is of no reserved group, or a group gets more rows than it has.
        """
        ordinals, rows = np.unique(experience.rollouts.row("group_id"), return_counts=True)
        for ordinal, count in zip(ordinals.tolist(), rows.tolist(), strict=True):
            left = self._missing.get(ordinal, 0) - count
            if left < 0:
                raise DataError(f"group {ordinal} gets {-left} rows more than it waits for; each is drawn once")
            self._missing[ordinal] = left
        self._held.append(experience)

    def missing(self, ordinals: Int64) -> int:
        """How many rows of these groups, int64 [groups], are still to come.

        Raises:
            DataError: one of them is not reserved, so nobody draws it.
        """
        asked = ordinals.tolist()
        if strange := sorted(set(asked) - self._missing.keys()):
            raise DataError(f"nobody draws the groups {_listed(strange)}: reserve them before they are taken")
        return sum(self._missing[ordinal] for ordinal in asked)

    def take(self, ordinals: Int64, policy_version: int, wait: Callable[[], None]) -> Experience:
        """These groups, int64 [groups], for the policy that learns next.

        Args:
            wait: waits for some of what is still to come, and puts it here; called until nothing is missing.

        Raises:
            DataError: a token is older than `staleness` versions, or of a version that is yet to come.
        """
        while self.missing(ordinals):
            wait()

        held = Experience(
            Sharded.concat([one.rollouts for one in self._held]),
            {name: Sharded.concat([one.scores[name] for one in self._held]) for name in self._held[0].scores},
        )
        wanted = np.isin(held.rollouts.row("group_id"), ordinals)
        others = np.flatnonzero(~wanted)
        self._held = [held.select(others)] if len(others) else []
        for ordinal in ordinals.tolist():
            del self._missing[ordinal]

        rows = np.flatnonzero(wanted)
        order = np.argsort(held.rollouts.row("row_id")[rows], kind="stable")
        taken = held.select(rows[order])
        self._refuse_other_policies(taken.rollouts, policy_version)
        return taken

    def drop(self, ordinals: Int64) -> None:
        """Nobody takes these groups, int64 [groups]: they may be drawn again."""
        for ordinal in ordinals.tolist():
            self._missing.pop(ordinal, None)
        kept = [np.flatnonzero(~np.isin(one.rollouts.row("group_id"), ordinals)) for one in self._held]
        self._held = [one.select(rows) for one, rows in zip(self._held, kept, strict=True) if len(rows)]

    def _refuse_other_policies(self, rollouts: Sharded[Rollouts], policy_version: int) -> None:
        drawn = rollouts.row("response_length") > 0
        versions = np.stack([rollouts.row("oldest_version"), rollouts.row("newest_version")])[:, drawn]
        if not versions.size:
            return
        oldest, newest = int(versions[0].min()), int(versions[1].max())
        if newest > policy_version or policy_version - oldest > self._staleness:
            raise DataError(
                f"tokens of the policy versions {oldest} to {newest} were taken for version {policy_version}; they may "
                f"be at most rollout.staleness = {self._staleness} versions older"
            )


def _listed(ordinals: list[int]) -> str:
    """The first few."""
    return ", ".join(map(str, ordinals[:8])) + (", ..." if len(ordinals) > 8 else "")
