"""Whole groups, collected from the pieces in which rollouts arrive.

A batched reward function scores all responses to a prompt in one call, so its result
must not depend on which of them finished together.

Invariant: a group is returned once, whole, with its rows in the order of their row ids.
Deliberately not here: which grader needs groups (`graders.py`).
"""

from __future__ import annotations

import numpy as np

from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Rollouts


class GroupCollector:
    """Rollouts of groups that are not whole yet."""

    def __init__(self, group_size: int) -> None:
        """Start without rollouts; `group_size` is the number of rows of a group."""
        self._group_size = group_size
        self._parts: list[Sharded[Rollouts]] = []

    def add(self, piece: Sharded[Rollouts]) -> Sharded[Rollouts] | None:
        """Add a piece, and return the groups that it completes; None without any."""
        held = Sharded.concat([*self._parts, piece])
        _, group, sizes = np.unique(
            held.row("group_id"), return_inverse=True, return_counts=True
        )
        is_whole = sizes[group] == self._group_size
        remaining = np.flatnonzero(~is_whole)
        self._parts = [held.select(remaining)] if len(remaining) else []

        whole = np.flatnonzero(is_whole)
        if not len(whole):
            return None
        order = np.argsort(held.row("row_id")[whole], kind="stable")
        return held.select(whole[order])
