"""Replay: groups of earlier steps in place of those that teach nothing.

A group whose scores are all equal has no advantage under a group baseline. Dynamic
sampling draws another one for it; replay takes one of an earlier step, whose scores
differ, as TRL's replay buffer does. It costs no generation, and its tokens are older.

Invariant: what is replayed follows from the scores of the batches in their order alone.
A group is replayed once, so it is learned from twice at most, and never with tokens
that are more than algorithm.replay_age versions old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controllers.rollouts.admission import with_spread
from controllers.rollouts.stored_groups import (
    read_groups,
    usable_groups,
    warn_of_unusable,
    write_groups,
)
from controllers.watch.measures import response_scores
from verl_ray.algorithms.credit import says_something
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.batch import Int64
from verl_ray.data.buffer import Experience
from verl_ray.rewards.shaping import Shaping

FOLDER = "replay"
"""Name of the folder in a checkpoint."""


@dataclass(frozen=True, eq=False)
class Exchange:
    """A batch in which groups of earlier steps take the place of others.

    Attributes:
        groups: The rows to learn from, in the order of their ids.
        replaced: Ordinals of groups that are not in it, ascending, int64.
        replayed: Ordinals of the groups in their place, int64.
    """

    groups: Experience
    replaced: Int64
    replayed: Int64


class Replay:
    """Groups of earlier steps that may be learned from once more.

    Attributes:
        groups: Their rows; None for no group.
    """

    def __init__(self, config: RLConfig) -> None:
        """Begin without groups."""
        assert config.algorithm.replay is not None
        self._size = config.algorithm.replay
        assert config.algorithm.replay_age is not None
        self._oldest_age = config.algorithm.replay_age
        self._config = config
        self._shaping = Shaping(config)
        self.groups: Experience | None = None

    def exchange(self, batch: Experience, version: int) -> Exchange:
        """Exchange the groups of a batch whose scores are all equal, as far as it goes.

        Args:
            batch: Whole groups.
            version: Version of the policy that learns.
        """
        group_id = batch.rollouts.row("group_id")
        scores = self._shaping.weigh(response_scores(batch.scores))
        finish = batch.rollouts.row("finish")
        teaches = with_spread(self._config, group_id, scores, finish)
        lacking = np.unique(group_id[~teaches])

        # A resumed run may have a smaller bound.
        stored = self._of_age(self.groups, version)
        ranked = self._by_spread(stored)
        replayed = np.sort(ranked[: len(lacking)])
        replaced = lacking[: len(replayed)]

        remaining = np.setdiff1d(ranked, replayed)
        # Nobody knows the age of a version that no step may learn from any more.
        candidates = self._of_age(
            _joined([_without(batch, lacking), _only(stored, remaining)]), version + 1
        )
        self.groups = _only(candidates, self._by_spread(candidates)[: self._size])

        groups = _joined([_without(batch, replaced), _only(stored, replayed)])
        assert groups is not None, "a batch keeps its size"
        return Exchange(groups, replaced, replayed)

    def files(self) -> Callable[[Path], None]:
        """Return what writes the groups of now to the folder of a checkpoint."""
        groups = self.groups

        def write(checkpoint: Path) -> None:
            if groups is not None:
                write_groups(checkpoint / FOLDER, groups, self._config)

        return write

    def read(self, checkpoint: Path) -> None:
        """Take back the groups of a checkpoint."""
        stored = read_groups(checkpoint / FOLDER)
        self.groups = None
        if stored is None:
            return
        # Their age is looked at before they are replayed.
        any_version = np.zeros(len(stored.groups.rollouts), np.int64)
        usable = usable_groups(stored, self._config, any_version)
        warn_of_unusable(stored, usable, self._config, "are not replayed")
        if len(usable.rollouts):
            self.groups = usable

    def _of_age(self, groups: Experience | None, version: int) -> Experience | None:
        """Return the groups that are not too old for this version."""
        if groups is None:
            return None
        rollouts = groups.rollouts
        oldest = rollouts.row("oldest_version")
        # A row without response tokens has no version.
        is_old = (oldest >= 0) & (version - oldest > self._oldest_age)
        return _without(groups, np.unique(rollouts.row("group_id")[is_old]))

    def _by_spread(self, groups: Experience | None) -> Int64:
        """Return ordinals by the standard deviation of their scores, the largest first.

        Of equal ones the newest comes first.
        """
        if groups is None:
            return np.empty(0, np.int64)
        scores = self._shaping.weigh(response_scores(groups.scores))
        group_id = groups.rollouts.row("group_id")
        ordinals, group = np.unique(group_id, return_inverse=True)

        finish = groups.rollouts.row("finish")
        is_member = scores.ok & says_something(self._config.algorithm, finish)
        group, score = group[is_member], scores.score[is_member].astype(np.float64)
        counts = np.maximum(np.bincount(group, minlength=len(ordinals)), 1)
        mean = np.bincount(group, score, len(ordinals)) / counts
        squares = np.bincount(group, (score - mean[group]) ** 2, len(ordinals))
        order = np.lexsort((-ordinals, -squares / counts))
        ranked: Int64 = ordinals[order]
        return ranked


def _only(groups: Experience | None, ordinals: Int64) -> Experience | None:
    """Return the groups with these ordinals; None for no row."""
    if groups is None:
        return None
    rows = np.flatnonzero(np.isin(groups.rollouts.row("group_id"), ordinals))
    return groups.select(rows) if len(rows) else None


def _without(groups: Experience, ordinals: Int64) -> Experience | None:
    """Return the groups but for those with these ordinals; None for no row."""
    return _only(groups, np.setdiff1d(groups.rollouts.row("group_id"), ordinals))


def _joined(parts: Sequence[Experience | None]) -> Experience | None:
    """Return the rows of all parts in the order of their ids; None for no row."""
    joined = Experience.concat([part for part in parts if part is not None])
    if joined is None:
        return None
    order = np.argsort(joined.rollouts.row("row_id"), kind="stable")
    return joined.select(order)
