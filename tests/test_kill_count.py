"""A run of random kills shows as many as it was asked for, or fails."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tests.kills import Run, dies_so_often


class ScriptedRun(Run):
    """A run whose processes end with these codes."""

    codes: list[int]
    faults: list[int]

    def process(self, faults: Sequence[str], *_: str) -> tuple[int, str]:
        self.faults.append(len(faults))
        return self.codes.pop(0), "what it said"


@pytest.mark.parametrize(
    ("codes", "is_enough"),
    [
        ([-9, 130, -9, 0], True),
        ([-9, -9, 0], False),  # the run ended first
        ([0], False),
        ([-9, 1], False),
    ],
)
def test_three_drivers_have_died(
    codes: list[int],
    is_enough: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = ScriptedRun(cast(Any, None), tmp_path, "one_step_off", 12)
    # A run is frozen, but for what a script notes.
    object.__setattr__(run, "codes", codes)
    object.__setattr__(run, "faults", [])
    assert dies_so_often(run, 3, random.Random(0)) == is_enough
    assert not run.codes
    # Only the process after the last death is left alone.
    assert [bool(count) for count in run.faults[:3]] == [True] * len(run.faults[:3])
    assert run.faults[3:] == ([0] if is_enough else [])
    said = capsys.readouterr().out
    assert ("3 of 3 drivers died in 12 steps" in said) == is_enough
