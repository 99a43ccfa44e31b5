"""scripts/drills: flags and the exit code passed through."""

from __future__ import annotations

import pytest

from tests.scripts.checkout import Checkout

pytestmark = pytest.mark.processes


def test_it_passes_flags_and_the_exit_code_on(checkout: Checkout) -> None:
    assert checkout.run("scripts/setup")[0] == 0
    checkout.notes()
    code, output = checkout.run("scripts/drills", "--list", "--fault", "kill")
    assert code == 0, output
    assert checkout.notes() == ["python -m tests.drills --list --fault kill"]
    assert checkout.folders() == {str(checkout.folder)}

    assert checkout.run("scripts/drills", fails="-m tests.drills")[0] == 3
