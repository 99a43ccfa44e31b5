"""The status that a driver keeps of real processes, while its main thread waits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.crew import Echo
from tests.waiting import PATIENCE_S
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.whereabouts import keeping_status
from verl_ray.ownership import Owner
from verl_ray.profiling.process_table import ProcessRow, read_status

pytestmark = pytest.mark.cluster


def test_the_status_says_what_each_process_does(
    crew: Callable[..., WorkerGroup[Any]], tmp_path: Path
) -> None:
    group = crew(Echo, 4)
    pids = group.broadcast(Echo.pid).result()
    group.broadcast(Echo.wait_at_the_gate)
    owners = [Owner.of(pid) for pid in pids]
    os.kill(pids[3], signal.SIGKILL)
    os.kill(pids[2], signal.SIGSTOP)

    with keeping_status(tmp_path):
        rows: dict[int, ProcessRow] = {}
        # A process that is asked for the first time has not replied yet, and two that
        # have just begun may be on different lines.
        end = time.monotonic() + PATIENCE_S
        while len(rows) < 4 or not _is_complete(rows) or rows[0] is not rows[1]:
            assert time.monotonic() < end, rows
            time.sleep(0.05)
            status = read_status(tmp_path)
            if status is not None:
                rows = {
                    rank: row
                    for row in status.rows
                    if row.role == "echo"
                    for rank in row.ranks
                }
    assert status is not None
    # The driver of a test may have groups of others.
    located = {one.owner for one in status.processes if one.role == "echo"}
    assert located == {str(owner) for owner in owners}

    # Those that do the same share a row.
    assert rows[0] is rows[1] and rows[0].ranks == (0, 1)
    assert rows[1].verb == "wait_at_the_gate"
    assert "crew.py:" in rows[1].line and rows[1].line.endswith(" wait_at_the_gate")
    assert rows[1].seconds is not None and rows[1].seconds < PATIENCE_S
    assert rows[2].phase.startswith("no reply for ")
    assert rows[3].phase == "has ended"

    group.kill()
    ended = read_status(tmp_path)
    assert ended is not None and ended.ended == "ended" and not ended.rows


def _is_complete(rows: dict[int, ProcessRow]) -> bool:
    are_known = all(rows[rank].verb for rank in (0, 1))
    return are_known and all(
        rows[rank].phase.startswith(words)
        for rank, words in ((2, "no reply"), (3, "has ended"))
    )
