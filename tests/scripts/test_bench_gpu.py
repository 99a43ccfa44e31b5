"""scripts/bench_gpu: the environment as it is, flags and the exit code passed through."""

from __future__ import annotations

import pytest

from tests.scripts.checkout import Checkout

pytestmark = pytest.mark.processes


def test_it_measures_in_the_environment_that_is_there(checkout: Checkout) -> None:
    code, output = checkout.run("scripts/bench_gpu", "--only", "devices")
    assert code == 0, output
    assert checkout.notes() == ["python -m scripts.bench gpu --only devices"]
    assert checkout.folders() == {str(checkout.folder)}


def test_its_exit_code_is_that_of_the_bench(checkout: Checkout) -> None:
    assert checkout.run("scripts/bench_gpu", fails="-m scripts.bench")[0] == 3
