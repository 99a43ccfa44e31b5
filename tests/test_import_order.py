"""The order of the rooms of `verl_ray`: as it is drawn, and the earlier paths of two of their modules."""

from __future__ import annotations

import tomllib
from pathlib import Path

import verl_ray.columns.batch
import verl_ray.columns.stages
import verl_ray.data.batch
import verl_ray.data.stages

ROOT = Path(__file__).resolve().parents[1]


def test_the_order_that_is_drawn_is_the_one_that_is_enforced() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (enforced,) = [
        each["layers"] for each in contracts if each["name"] == "the rooms of verl_ray"
    ]

    _, _, text = (
        (ROOT / "ARCHITECTURE.md")
        .read_text()
        .partition("Each room of `verl_ray` imports")
    )
    drawn = text.split("\n\n")[1].splitlines()
    assert [line.strip().replace(".py", "") for line in drawn] == enforced


def test_rows_are_also_under_the_paths_that_they_had() -> None:
    assert verl_ray.data.batch.Batch is verl_ray.columns.batch.Batch
    assert verl_ray.data.stages.Rollouts is verl_ray.columns.stages.Rollouts
