"""The order of the rooms, as it is enforced, as it is drawn, and as each room states it."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest

import verl_ray.columns.batch
import verl_ray.columns.stages
import verl_ray.data.batch
import verl_ray.data.stages

ROOT = Path(__file__).resolve().parents[1]


def enforced(folder: str) -> list[str]:
    """The lines of the order of a folder's rooms."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = [
        each["layers"] for each in contracts if each["name"] == f"the rooms of {folder}"
    ]
    return layers


def test_the_order_that_is_drawn_is_the_one_that_is_enforced() -> None:
    _, _, text = (
        (ROOT / "ARCHITECTURE.md")
        .read_text()
        .partition("Each room of `verl_ray` imports")
    )
    _, drawn, table = text.split("\n\n")[:3]
    order = [line.strip().replace(".py", "") for line in drawn.splitlines()]
    assert order == enforced("verl_ray")

    rows = re.findall(r"^\| `verl_ray/(\w+)(?:\.py)?` \|", table, re.MULTILINE)
    assert rows == " | ".join(order).split(" | ")


@pytest.mark.parametrize(
    ("folder", "others"),
    [("verl_ray", []), ("controllers", ["workers", "verl_ray"])],
)
def test_each_room_states_what_it_may_import(folder: str, others: list[str]) -> None:
    lines = [line.split(" | ") for line in enforced(folder)]
    for rooms, below in itertools.pairwise(lines):
        for room in rooms:
            text = ROOT / folder / room / "__init__.py"
            if text.exists():
                stated = re.search(r"It may import ([^.]*)\.", text.read_text())
                assert stated is not None, room
                assert re.findall(r"`(\w+)`", stated[1]) == [*below, *others], room


def test_rows_are_also_under_the_paths_that_they_had() -> None:
    assert verl_ray.data.batch.Batch is verl_ray.columns.batch.Batch
    assert verl_ray.data.stages.Rollouts is verl_ray.columns.stages.Rollouts
