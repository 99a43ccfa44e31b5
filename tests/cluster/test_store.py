"""Rows out of Ray's object store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tests.cluster.crew import rows_of
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import put, read
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Rows


class Reader:
    """Reads what it is given, and ends a moment after the caller knows."""

    def count(self, boxes: list[Sharded[Rows]]) -> Iterator[int]:
        yield read(boxes[0], 20.0).num_tokens


@pytest.mark.slow
@pytest.mark.cluster
def test_an_object_that_ray_forgets_is_read_all_the_same(cluster: Session) -> None:
    """Ray forgets one about every 500 calls, where a call begins as another ends."""
    reader = ray.remote(Reader).options(num_cpus=0, max_concurrency=8).remote()
    rows = put(rows_of([500]))
    for _ in range(2500):
        counts = reader.count.options(num_returns="streaming").remote([rows])
        assert ray.get(next(counts), timeout=60) == 500
    ray.kill(reader)
