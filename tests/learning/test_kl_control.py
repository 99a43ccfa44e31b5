"""Controllers of the divergence by hand, at their bounds, and through a checkpoint."""

from __future__ import annotations

import math

import pytest

from verl_ray.config.algorithm import KLConfig
from verl_ray.errors import CheckpointError, NonFiniteError
from verl_ray.learning.coefficients import AdaptiveKL, FixedKL, make_kl_controller


def test_fixed_never_changes() -> None:
    controller = FixedKL(0.05)
    controller.update(100.0, 1000)
    assert controller.coefficient == 0.05 and controller.state() == {}


@pytest.mark.parametrize(
    ("mean_kl", "rollouts", "factor"),
    [
        (6.0, 100, 1.0),  # on target
        (6.6, 100, 1.01),  # 10 % above, a tenth of the horizon
        (60.0, 100, 1.02),  # acted on as if 20 % above
        (0.0, 100, 0.98),
        (-5.0, 100, 0.98),  # an estimate may be negative
        (0.0, 10**9, 0.8),  # more rollouts than the horizon: never below 0
    ],
)
def test_adaptive_by_hand(mean_kl: float, rollouts: int, factor: float) -> None:
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    controller.update(mean_kl, rollouts)
    assert controller.coefficient == pytest.approx(0.1 * factor)


def test_adaptive_steers_to_its_target() -> None:
    """A policy whose divergence is 1 / coefficient settles where that is the target."""
    controller = AdaptiveKL(1.0, target=20.0, horizon=100)
    for _ in range(300):
        controller.update(1 / controller.coefficient, 50)
    assert 1 / controller.coefficient == pytest.approx(20.0, rel=1e-3)


def test_a_divergence_that_is_not_finite_is_refused_and_changes_nothing() -> None:
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(
            NonFiniteError, match=r"over 8 rollouts is .*algorithm\.kl\.estimator"
        ):
            controller.update(bad, 8)
    assert controller.coefficient == 0.1


def test_state_continues_to_the_same_bits() -> None:
    whole, before = AdaptiveKL(0.1, 6.0, 1000), AdaptiveKL(0.1, 6.0, 1000)
    for kl in (7.0, 5.5, 9.0):
        whole.update(kl, 64)
        before.update(kl, 64)
    after = AdaptiveKL(0.3, 6.0, 1000)
    after.load_state(before.state())
    whole.update(6.2, 64)
    after.update(6.2, 64)
    assert after.coefficient == whole.coefficient


def test_a_state_of_the_other_kind_is_refused() -> None:
    fixed, adaptive = FixedKL(0.1), AdaptiveKL(0.1, 6.0, 1000)
    fixed.load_state(fixed.state())
    with pytest.raises(
        CheckpointError,
        match=r"holds \['coefficient'\], but a fixed one holds \[\].*kl\.controller",
    ):
        fixed.load_state(adaptive.state())
    with pytest.raises(CheckpointError, match="adaptive"):
        adaptive.load_state(fixed.state())


def config(**fields: object) -> KLConfig:
    none = dict.fromkeys(KLConfig.model_fields)
    return KLConfig.model_validate(
        none | {"place": "none", "importance_weighted": False} | fields
    )


def test_make() -> None:
    assert make_kl_controller(config()).coefficient == 0
    assert (
        make_kl_controller(
            config(place="loss", estimator="k3", coefficient=0.01, controller="fixed")
        ).coefficient
        == 0.01
    )
    adaptive = make_kl_controller(
        config(
            place="reward",
            estimator="k1",
            coefficient=0.2,
            controller="adaptive",
            target=6.0,
            horizon=100,
        )
    )
    adaptive.update(60.0, 100)
    assert adaptive.coefficient == pytest.approx(0.24)
