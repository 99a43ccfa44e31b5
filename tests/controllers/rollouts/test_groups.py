"""Groups are collected from pieces of any rows, and come whole and in order."""

from __future__ import annotations

import numpy as np

from controllers.rollouts.whole_groups import GroupCollector
from tests.rows import rollouts_of
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.columns.stages import Rollouts


def piece(*rows: int) -> Sharded[Rollouts]:
    """Rows of groups of three."""
    batch = rollouts_of([2] * len(rows), groups=[row // 3 for row in rows])
    batch = batch.replace(row_id=np.array(rows), trajectory_id=np.array(rows))
    return Sharded.stored(batch, Receipt.of(batch))


def test_a_group_comes_with_its_last_row() -> None:
    groups = GroupCollector(3)

    def added(*rows: int) -> list[int]:
        whole = groups.add(piece(*rows))
        return [] if whole is None else whole.row("row_id").tolist()

    assert added(5, 0, 7) == []
    assert added(2, 4, 1) == [0, 1, 2]
    assert added(8, 3, 11) == [3, 4, 5]
    assert added(10, 9, 6) == [6, 7, 8, 9, 10, 11]
    # Nothing is held any more.
    assert added(14, 12, 13) == [12, 13, 14]
