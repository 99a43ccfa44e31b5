"""Each mistake of `tests/mistakes.py` is answered in a few lines that name the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes import make, mistakes


@pytest.mark.slow
def test_every_mistake_is_answered_with_its_fix(tmp_path: Path) -> None:
    faults = {}
    for mistake in mistakes(tmp_path):
        answer = make(mistake, tmp_path)
        if answer.faults(mistake):
            faults[mistake.name] = (answer.faults(mistake), answer.text)
    assert faults == {}
