"""scripts/quickstart: one command from any folder, with overrides and exit code passed
through.
"""

from __future__ import annotations

import pytest

from tests.scripts.checkout import Checkout

pytestmark = pytest.mark.processes


def test_it_sets_up_and_trains_in_the_checkout(checkout: Checkout) -> None:
    code, output = checkout.run("scripts/quickstart", "run.seed=1", "run.name=a b")
    assert code == 0, output
    assert (
        checkout.notes()[-1]
        == "python -m controllers train --config-name quickstart run.seed=1 run.name=a b"
    )
    assert checkout.folders() == {str(checkout.folder)}
    checkout.run("scripts/quickstart")
    assert checkout.notes() == ["python -m controllers train --config-name quickstart"]


def test_its_exit_code_is_that_of_the_run_or_of_the_set_up(checkout: Checkout) -> None:
    assert checkout.run("scripts/quickstart", fails="-m controllers")[0] == 3
    checkout.notes()
    (checkout.folder / "requirements-cpu.lock").open("a").write("# changed\n")
    assert checkout.run("scripts/quickstart", fails="-m pip")[0] != 0
    assert not any("controllers train" in note for note in checkout.notes())
