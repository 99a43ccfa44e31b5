"""Starting the workers of `crew.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.crew import processes
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import Groups, start_groups
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session


@pytest.fixture
def crew(cluster: Session, tmp_path: Path) -> Iterator[Callable[..., WorkerGroup[Any]]]:
    """`crew(factory, ranks, ...)` starts one group; all are closed after the test."""
    started: list[Groups] = []

    def start(
        factory: type[Any],
        ranks: int,
        *args: object,
        process_group: bool = False,
        stall_s: float = 20.0,
    ) -> WorkerGroup[Any]:
        role = Role(factory.__name__.lower(), "trainer", factory, args)
        plan = [processes("trainer", ranks, process_group)]
        groups = start_groups(plan, [role], stall_s=60, log_dir=tmp_path / "logs")
        started.append(groups)
        group = groups[role]
        # Of the calls: a start shows no progress for longer than tests wait
        group._processes.stall_s = stall_s
        return group

    yield start
    for groups in started:
        groups.close()
