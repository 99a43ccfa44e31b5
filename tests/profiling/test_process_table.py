"""The table of a run's processes."""

from __future__ import annotations

from dataclasses import replace

from verl_ray.profiling.process_table import ProcessRow, merged, numbers, table_text

ROW = ProcessRow("actor", (0,), ("a",), "update", "3/16", 1.0, "", "workers/actor.py:1")


def test_ranks_that_do_the_same_are_one_row() -> None:
    stuck = replace(ROW, ranks=(7,), verb="save", seconds=90.0)
    others = [
        replace(ROW, ranks=(rank,), nodes=(f"node {rank // 8}",), seconds=float(rank))
        for rank in range(512)
        if rank != 7
    ]
    (together, alone) = merged([*others, stuck])
    assert numbers(together.ranks) == "0-6,8-511"
    assert len(together.nodes) == 64 and together.seconds == 511.0
    assert alone == stuck

    lines = table_text("a title", [*others, stuck]).splitlines()
    assert lines[0] == "a title" and len(lines) == 5
    assert lines[3].split()[:5] == ["actor", "0-6,8-511", "64", "nodes", "update"]
    assert lines[4].split()[:6] == ["actor", "7", "a", "save", "3/16", "90"]
