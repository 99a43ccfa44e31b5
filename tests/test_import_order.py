"""The order of the rooms of `verl_ray`, as it is drawn."""

from __future__ import annotations

import tomllib
from pathlib import Path

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
