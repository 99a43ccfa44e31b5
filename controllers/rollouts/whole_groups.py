"""Whole groups, collected from the pieces in which rollouts arrive.

A batched reward function scores all responses to a prompt in one call, so its
result must not depend on which of them finished together.

Invariant: a group is returned once, whole, with its rows in the order of their row
ids.
"""

from __future__ import annotations

import numpy as np

from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Rollouts


class GroupCollector:
    """Rollouts of groups that are not whole yet."""

    def __init__(self, group_size: int) -> None:
        """Start without rollouts; a group has `group_size` trajectories."""
        self._group_size = group_size
        self._parts: list[Sharded[Rollouts]] = []

    def add(self, piece: Sharded[Rollouts]) -> Sharded[Rollouts] | None:
        """Add a piece, and return the groups that it completes; None without any."""
        held = Sharded.concat([*self._parts, piece])
        group = held.row("group_id")
        _, first_rows = np.unique(held.row("trajectory_id"), return_index=True)
        groups, sizes = np.unique(group[first_rows], return_counts=True)
        is_whole = np.isin(group, groups[sizes == self._group_size])
        remaining = np.flatnonzero(~is_whole)
        self._parts = [held.select(remaining)] if len(remaining) else []

        whole = np.flatnonzero(is_whole)
        if not len(whole):
            return None
        order = np.argsort(held.row("row_id")[whole], kind="stable")
        return held.select(whole[order])
