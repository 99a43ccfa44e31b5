"""Engines of several devices see those of whole groups of trainer ranks, on one node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.spans import PREFIX, Given

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: object) -> dict[str, list[dict[str, Given]]]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    ended = subprocess.run(
        [sys.executable, "-m", "tests.cluster.spans", *map(str, arguments)], cwd=ROOT, capture_output=True,
        text=True, timeout=500, env={**inherited, "HOME": str(folder), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.rpartition(PREFIX)[2])
    return found


def assert_engines_see_their_groups(given: dict[str, Given], parallel: int) -> None:
    """Each engine is on the node of its group of ranks, and sees their GPUs in order."""
    trainers, engines = given["actor"], given["rollout"]
    assert len(engines) == len(trainers) // parallel
    assert len({tuple(each) for each in trainers}) == len(trainers)
    for number, (node, gpus) in enumerate(engines):
        group = trainers[number * parallel : (number + 1) * parallel]
        assert {home for home, _ in group} == {node}
        assert gpus == ",".join(gpu for _, gpu in group)


@pytest.mark.cluster
def test_an_engine_sees_the_gpus_of_its_ranks_and_again_after_a_restart(
    tmp_path: Path,
) -> None:
    (stages,) = run(tmp_path, 4, 2).values()
    for given in stages:
        assert_engines_see_their_groups(given, 2)
    assert stages[0] == stages[1]


@pytest.mark.slow
@pytest.mark.cluster
def test_so_do_engines_of_all_widths_and_after_a_node_was_lost(tmp_path: Path) -> None:
    found = run(tmp_path, 8, 1, 2, 4, 8)
    for parallel in (1, 2, 4, 8):
        before, after = found[str(parallel)]
        assert_engines_see_their_groups(before, parallel)
        assert before == after

    before, after = run(tmp_path, 4, 2, "--nodes")["0"]
    for given in (before, after):
        assert_engines_see_their_groups(given, 2)
    homes = [{node for node, _ in given["rollout"]} for given in (before, after)]
    assert len(homes[0] & homes[1]) == 1 and len(homes[0] | homes[1]) == 3
