"""scripts/test and .ci/run: which checks, in which order, with which arguments."""

from __future__ import annotations

import pytest

from tests.scripts.checkout import Checkout

pytestmark = pytest.mark.processes

DERANDOMIZED = "--hypothesis-profile derandomized"
FAST = (
    "not cluster and not vllm and not ranks and not processes and not slow and not gpu"
)
CHECKS = ["ruff check .", "ruff format --check .", "mypy ", "lint-imports --no-cache"]


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    assert checkout.run("scripts/setup")[0] == 0
    checkout.notes()
    return checkout


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        ((), f" -m not slow {DERANDOMIZED}"),
        (("--fast",), f" -m {FAST} {DERANDOMIZED}"),
        (("--all",), ""),
    ],
)
def test_every_check_in_order(
    ready: Checkout, arguments: tuple[str, ...], selected: str
) -> None:
    assert ready.run("scripts/test", *arguments)[0] == 0
    assert ready.notes() == [*CHECKS, f"python -m tests.two_passes{selected}"]
    assert ready.folders() == {str(ready.folder)}


def test_continuous_integration_leaves_out_what_is_slow(ready: Checkout) -> None:
    assert ready.run(".ci/run")[0] == 0
    tests = f"python -m tests.two_passes -m not slow {DERANDOMIZED}"
    assert ready.notes() == [*CHECKS, tests]


def test_further_arguments_go_to_pytest(ready: Checkout) -> None:
    ready.run("scripts/test", "--fast", "tests/data", "-x")
    assert ready.notes() == [
        *CHECKS,
        f"python -m pytest -m {FAST} {DERANDOMIZED} tests/data -x",
    ]


@pytest.mark.parametrize(
    "fails", ["ruff check", "ruff format", "mypy", "lint-imports", "two_passes"]
)
def test_the_first_failure_is_the_result(ready: Checkout, fails: str) -> None:
    assert ready.run("scripts/test", fails=fails)[0] == 3
    assert fails in ready.notes()[-1]
