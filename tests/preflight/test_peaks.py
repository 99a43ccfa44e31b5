"""Predictions of passes, compared with the most memory that they had on a CPU."""

from __future__ import annotations

import pytest

from controllers.bench.peaks import PASSES, TESTED, Case, measure

pytestmark = pytest.mark.ranks

Figures = dict[str, dict[str, dict[str, int]]]

LOOSEST = 1.4
"""Largest ratio of prediction to measurement.

Predictions add gradients to what the head takes, and are at most 1.2 times too large
where activations take far more than weights do.
"""


@pytest.fixture(scope="module")
def figures() -> Figures:
    return measure(TESTED)


@pytest.mark.parametrize("passing", PASSES)
@pytest.mark.parametrize("case", TESTED, ids=lambda case: case.name)
def test_a_pass_takes_as_much_as_is_predicted_and_hardly_less(
    figures: Figures, case: Case, passing: str
) -> None:
    predicted = figures[case.name]["predicted"][passing]
    measured = figures[case.name]["measured"][passing]
    assert predicted / LOOSEST < measured <= predicted
