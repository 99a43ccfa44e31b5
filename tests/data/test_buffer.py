"""The buffer is first in, first out, and refuses what is too old."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.sharded import Receipt, Sharded
from verl_ray.data.stages import Scores
from verl_ray.errors import DataError


def experience(version: int) -> Experience:
    scores = Scores.ok(np.array([version], np.float32))
    held = Sharded.stored(None, Receipt.of(scores))
    return Experience(held, held, version)  # type: ignore[arg-type]  # the buffer looks at neither


def test_first_in_first_out() -> None:
    buffer = RolloutBuffer(staleness=1)
    for version in (3, 4):
        buffer.put(experience(version))
    assert [buffer.take(4).policy_version, buffer.take(4).policy_version] == [3, 4]


def test_a_synchronous_run_learns_from_its_own_rollouts_alone() -> None:
    buffer = RolloutBuffer(staleness=0)
    for version in (2, 3, 4):
        buffer.put(experience(version))
    with pytest.raises(DataError, match=r"rollouts of policy version 2 are 1 versions behind 3; at most 0"):
        buffer.take(3)
    assert buffer.take(3).policy_version == 3
    with pytest.raises(DataError, match="are -1 versions behind 3"):  # a version that is yet to come
        buffer.take(3)


def test_an_empty_buffer_says_so() -> None:
    with pytest.raises(DataError, match="empty"):
        RolloutBuffer(0).take(0)
