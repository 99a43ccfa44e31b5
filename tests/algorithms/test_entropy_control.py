"""The weight of the entropy bonus by hand, and its state."""

from __future__ import annotations

import math

import pytest

from tests.algorithms.test_objectives import algorithm
from verl_ray.algorithms.coefficients import EntropyControl

ADAPTIVE = algorithm(
    entropy_coefficient=0.01, entropy_target=0.5, entropy_step=0.005, entropy_max=0.02
)


def test_without_a_target_the_weight_stays() -> None:
    control = EntropyControl(algorithm(entropy_coefficient=0.01))
    assert control.update(0.1) == {}
    assert control.coefficient == 0.01 and control.state() == {}


def test_it_grows_below_the_target_and_falls_above() -> None:
    control = EntropyControl(ADAPTIVE)
    weights = []
    assert EntropyControl(ADAPTIVE).update(0.4) == {"actor/entropy_coefficient": 0.01}
    for entropy in (0.4, 0.4, 0.4, 0.6, 0.4, math.nan, 0.5, 0.6, 0.7, 0.9, 0.4):
        control.update(entropy)
        weights.append(control.coefficient)
    # At most 0.02; no weight in the steps that follow an entropy above the target, and
    # never below 0.
    assert weights == pytest.approx(
        [0.015, 0.02, 0.02, 0, 0.02, 0.02, 0, 0, 0, 0, 0.005]
    )


def test_a_state_continues() -> None:
    whole, before = EntropyControl(ADAPTIVE), EntropyControl(ADAPTIVE)
    for control in (whole, before):
        control.update(0.6)
    after = EntropyControl(ADAPTIVE)
    after.load_state(before.state())
    assert after.coefficient == 0
    whole.update(0.4)
    after.update(0.4)
    assert after.coefficient == whole.coefficient == pytest.approx(0.01)
    # The state of a run without a target.
    after.load_state({})
    assert after.coefficient == whole.coefficient
