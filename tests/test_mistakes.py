"""Each mistake of `tests/mistakes.py` is answered in a few lines that name the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mistakes import Answer, environment, mistakes
from tests.prepared_commands import PreparedCommands


@pytest.mark.slow
def test_every_mistake_is_answered_with_its_fix(tmp_path: Path) -> None:
    faults = {}
    made = mistakes(tmp_path)
    with PreparedCommands(tmp_path, environment(tmp_path)) as commands:
        for mistake in made:
            code, text = commands.run(mistake.arguments)
            answer = Answer(code, 0, text)
            if answer.faults(mistake):
                faults[mistake.name] = (answer.faults(mistake), text)
    assert len(made) > 100 and faults == {}
