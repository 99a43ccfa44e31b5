"""scripts/test and .ci/run: which checks, in which order, with which arguments."""

from __future__ import annotations

import pytest

from tests.scripts.checkout import ROOT, Checkout

CHECKS = ["ruff check .", "ruff format --check .", "mypy ", "lint-imports --no-cache"]


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    assert checkout.run("scripts/setup")[0] == 0
    checkout.notes()
    return checkout


@pytest.mark.parametrize("script", ["scripts/test", ".ci/run"])
def test_every_check_in_order(ready: Checkout, script: str) -> None:
    assert ready.run(script)[0] == 0
    *checks, first, second = ready.notes()
    assert checks == CHECKS
    lanes = sorted([first, second], key=len)  # side by side: either may note itself first
    runs = lanes[0].removeprefix("python -m pytest ").split()
    assert "tests/test_readme.py" in runs and all((ROOT / path).is_file() for path in runs)
    assert lanes[1] == "python -m pytest tests " + " ".join(f"--ignore={path}" for path in runs)
    assert ready.folders() == {str(ready.folder)}


def test_the_fast_subset_and_further_arguments(ready: Checkout) -> None:
    ready.run("scripts/test", "--fast", "tests/data", "-x")
    assert ready.notes() == [*CHECKS, "python -m pytest -m not cluster and not vllm and not gpu tests/data -x"]


@pytest.mark.parametrize("fails", ["ruff check", "ruff format", "mypy", "lint-imports", "pytest"])
def test_the_first_failure_is_the_result(ready: Checkout, fails: str) -> None:
    assert ready.run("scripts/test", fails=fails)[0] == 3
    assert fails in ready.notes()[-1]
