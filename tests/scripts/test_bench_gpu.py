"""scripts/bench_gpu: the environment as it is, the GPU in bfloat16, further flags and
the exit code passed through.
"""

from __future__ import annotations

import pytest

from tests.scripts.checkout import Checkout

pytestmark = pytest.mark.processes

BENCH = "python -m controllers bench fsdp --device cuda --dtype bfloat16 --model 500m --rows 256"


def test_it_measures_in_the_environment_that_is_there(checkout: Checkout) -> None:
    code, output = checkout.run("scripts/bench_gpu", "--rows", "8")
    assert code == 0, output
    assert checkout.notes() == [f"{BENCH} --micro-batch-tokens 8192 --rows 8"]
    assert checkout.folders() == {str(checkout.folder)}


def test_its_exit_code_is_that_of_the_bench(checkout: Checkout) -> None:
    assert checkout.run("scripts/bench_gpu", fails="-m controllers")[0] == 3
