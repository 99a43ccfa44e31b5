"""The weight of the entropy bonus by hand, and its state."""

from __future__ import annotations

import math

import pytest
import torch

from tests.learning.test_objectives import algorithm
from verl_ray.engine.base import LossAccumulator
from verl_ray.learning.coefficients import ENTROPY_PER_TOKEN, EntropyControl
from verl_ray.learning.objectives import LossInputs
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.ops.outputs import TokenOutputs

ADAPTIVE = algorithm(
    entropy_coefficient=0.01, entropy_target=0.5, entropy_step=0.005, entropy_max=0.02
)


def per_token(entropy: float) -> dict[str, float]:
    return {ENTROPY_PER_TOKEN: entropy}


def test_without_a_target_the_weight_stays() -> None:
    control = EntropyControl(algorithm(entropy_coefficient=0.01))
    assert control.update(per_token(0.1)) == {}
    assert control.coefficient == 0.01 and control.state() == {}


def test_it_grows_below_the_target_and_falls_above() -> None:
    control = EntropyControl(ADAPTIVE)
    weights = []
    used = EntropyControl(ADAPTIVE).update(per_token(0.4))
    assert used == {"actor/entropy_coefficient": 0.01}
    for entropy in (0.4, 0.4, 0.4, 0.6, 0.4, math.nan, 0.5, 0.6, 0.7, 0.9, 0.4):
        control.update(per_token(entropy))
        weights.append(control.coefficient)
    # At most 0.02; no weight in the steps that follow an entropy above the target, and
    # never below 0.
    assert weights == pytest.approx(
        [0.015, 0.02, 0.02, 0, 0.02, 0.02, 0, 0, 0, 0, 0.005]
    )


def test_a_state_continues() -> None:
    whole, before = EntropyControl(ADAPTIVE), EntropyControl(ADAPTIVE)
    for control in (whole, before):
        control.update(per_token(0.6))
    after = EntropyControl(ADAPTIVE)
    after.load_state(before.state())
    assert after.coefficient == 0
    whole.update(per_token(0.4))
    after.update(per_token(0.4))
    assert after.coefficient == whole.coefficient == pytest.approx(0.01)
    # The state of a run without a target.
    after.load_state({})
    assert after.coefficient == whole.coefficient


@pytest.mark.parametrize(("aggregation", "weight"), [("mean", 1 / 3), ("sum", 1 / 2)])
def test_it_compares_nats_per_token_however_the_loss_is_aggregated(
    aggregation: str, weight: float
) -> None:
    """Rows of one and two tokens with 0.6, 0.3 and 0.3 nats: 0.4 per token.

    Weights are those of token_mean and seq_mean_token_sum, where the term is 0.6.
    """
    log_probs = torch.full((3,), -1.0, requires_grad=True)
    found = PolicyObjective(ADAPTIVE, 1.0, 0.0)(
        TokenOutputs(log_probs=log_probs, entropy=torch.tensor([0.6, 0.3, 0.3])),
        LossInputs(torch.tensor([0, 1, 1]), advantages=torch.ones(3)),
    )
    accumulator = LossAccumulator()
    accumulator.add(torch.zeros(()), found, torch.full((3,), weight), None)
    report = accumulator.report()
    aggregated = {"mean": 0.4, "sum": 0.6}[aggregation]
    assert report.terms["actor/entropy"] == pytest.approx(aggregated)
    assert report.means()[ENTROPY_PER_TOKEN] == pytest.approx(0.4)

    control = EntropyControl(ADAPTIVE)
    control.update(report.terms | report.means())
    assert control.coefficient == pytest.approx(0.015), "0.4 is below 0.5"
