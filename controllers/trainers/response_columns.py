"""Columns of the responses of a step, which are all that the driver knows of them.

Deliberately not here: their scores (`controllers/watch/measures.py`).
"""

from __future__ import annotations

from verl_ray.algorithms.estimators import ResponseColumns
from verl_ray.algorithms.groups import is_last_of_group
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Rollouts


def response_columns(rollouts: Sharded[Rollouts], group_size: int) -> ResponseColumns:
    """Return the columns of some rollouts."""
    return ResponseColumns(
        finish=rollouts.row("finish"),
        group_id=rollouts.row("group_id"),
        trajectory_id=rollouts.row("trajectory_id"),
        length=rollouts.row("response_length"),
        is_last=is_last_of_group(rollouts.row("row_id"), group_size),
    )
