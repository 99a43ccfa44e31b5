"""Predictions of passes, compared with the most memory that they had on a CPU."""

from __future__ import annotations

import pytest

from scripts.bench.peaks import PASSES, TESTED, PeakCase, measure

pytestmark = pytest.mark.ranks

Figures = dict[str, dict[str, dict[str, int]]]

LOOSEST = 1.6
"""Largest ratio of prediction to measurement.

Predictions add up parts whose peaks are at different moments: parameters that FSDP
gathers and gradients that wait, and what the head takes. These small models have large
heads; `docs/memory.md` has the ratios. Ranks that exchange tokens release copies of
them at other moments in each run, a quarter of their peak.
"""


FAST = ("engine on 1, dtype=bfloat16", "fsdp", "megatron_fsdp", "megatron on 2")
"""How the names of cases begin that are not slow: one of each backend."""


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Figures:
    """Of the cases whose tests are run."""
    chosen = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    return measure([case for case in TESTED if case in chosen])


@pytest.mark.parametrize("passing", PASSES)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name.startswith(FAST) else pytest.mark.slow)
        for case in TESTED
    ],
    ids=lambda case: case.name,
)
def test_a_pass_takes_as_much_as_is_predicted_and_hardly_less(
    figures: Figures, case: PeakCase, passing: str
) -> None:
    predicted = figures[case.name]["predicted"][passing]
    measured = figures[case.name]["measured"][passing]
    assert predicted / LOOSEST < measured <= predicted
