"""Objectives by hand: the terms of a token's loss, requested outputs, and reports."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.corrections import NO_CORRECTION, NO_LIMIT
from verl_ray.algorithms.mismatch import MISMATCH_PREFIX
from verl_ray.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    ValueLossConfig,
)
from verl_ray.learning.objectives import (
    LossInputs,
    SupervisedObjective,
    ValueObjective,
)
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs

ROW = torch.tensor([0, 0])
LOG_PROBS = torch.log(torch.tensor([0.5, 0.2]))
ENTROPY = torch.tensor([0.7, 0.3])


def algorithm(
    place: str = "none", estimator: str | None = None, **settings: Any
) -> AlgorithmConfig:
    values: dict[str, Any] = {
        "name": "test",
        "advantage": "grpo",
        "gamma": None,
        "lam": None,
        "whiten_advantages": False,
        "policy_loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "aggregation": "token_mean",
        "aggregation_horizon": None,
        "entropy_coefficient": 0.0,
        "value_loss": None,
        "critic_warmup_steps": 0,
        "correction": NO_CORRECTION,
        "mismatch": NO_LIMIT,
        "truncated": "score",
        "sequence": "row",
    }
    kl = KLConfig(
        importance_weighted=False,
        place=place,
        estimator=estimator,
        coefficient=None,
        controller=None,
        target=None,
        horizon=None,
    )
    return AlgorithmConfig(**values | settings, kl=kl)


def outputs() -> tuple[Tensor, Tensor, TokenOutputs]:
    log_probs, entropy = (
        LOG_PROBS.clone().requires_grad_(),
        ENTROPY.clone().requires_grad_(),
    )
    return log_probs, entropy, TokenOutputs(log_probs=log_probs, entropy=entropy)


def test_on_policy_the_ratio_is_one_and_only_its_gradient_matters() -> None:
    log_probs, _, out = outputs()
    objective = PolicyObjective(algorithm(), 0.5, 0.0)
    assert objective.outputs == RequestedOutputs(
        log_probs=True, entropy=True, temperature=0.5
    )
    found = objective(out, LossInputs(ROW, advantages=torch.tensor([2.0, -3.0])))
    assert found.loss.tolist() == [-2, 3]
    (grad,) = torch.autograd.grad(found.loss.sum(), log_probs)
    assert grad.tolist() == [-2, 3]  # d(-A * ratio) = -A * d log p
    assert found.terms["actor/pg_loss"].tolist() == [-2, 3]
    assert found.terms["actor/entropy"].tolist() == pytest.approx([0.7, 0.3])
    assert "actor/kl_loss" not in found.terms


def test_given_old_log_probs_make_the_ratio() -> None:
    _, _, out = outputs()
    old = torch.log(torch.tensor([0.4, 0.8]))  # ratios 1.25 and 0.25
    found = PolicyObjective(algorithm(), 1.0, 0.0)(
        out, LossInputs(ROW, old_log_probs=old, advantages=torch.ones(2))
    )
    assert found.loss.tolist() == pytest.approx([-1.2, -0.25])  # the first is clipped


def test_entropy_is_subtracted_and_has_its_gradient() -> None:
    _, entropy, out = outputs()
    found = PolicyObjective(algorithm(entropy_coefficient=0.1), 1.0, 0.0)(
        out, LossInputs(ROW, advantages=torch.ones(2))
    )
    assert found.loss.tolist() == pytest.approx([-1.07, -1.03])
    assert torch.autograd.grad(found.loss.sum(), entropy)[0].tolist() == pytest.approx(
        [-0.1, -0.1]
    )
    assert found.terms["actor/pg_loss"].tolist() == pytest.approx([-1, -1])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k2", [0.5 * math.log(2) ** 2, 0.0]),
        ("k3", [0.5 - 1 + math.log(2), 0.0]),  # q / p = 0.25 / 0.5
    ],
)
def test_divergence_from_the_reference(estimator: str, expected: list[float]) -> None:
    _, _, out = outputs()
    ref = torch.log(torch.tensor([0.25, 0.2]))
    objective = PolicyObjective(algorithm("loss", estimator), 1.0, 0.5)
    found = objective(
        out, LossInputs(ROW, advantages=torch.zeros(2), ref_log_probs=ref)
    )
    assert found.terms["actor/kl_loss"].tolist() == pytest.approx(expected, abs=1e-7)
    assert found.loss.tolist() == pytest.approx(
        [0.5 * value for value in expected], abs=1e-7
    )


def test_divergence_charged_in_the_reward_is_not_in_the_loss() -> None:
    _, _, out = outputs()
    given = LossInputs(ROW, advantages=torch.zeros(2), ref_log_probs=torch.zeros(2))
    found = PolicyObjective(algorithm("reward", "k1"), 1.0, 0.5)(out, given)
    assert found.loss.tolist() == [0, 0] and "actor/kl_loss" not in found.terms


def test_how_far_the_sampler_was_is_reported_and_has_no_gradient() -> None:
    _, _, out = outputs()
    given = LossInputs(
        ROW,
        advantages=torch.zeros(2),
        rollout_log_probs=torch.log(torch.tensor([0.4, 0.2])),
    )
    found = PolicyObjective(algorithm(), 1.0, 0.0)(out, given)
    assert found.metrics[
        f"{MISMATCH_PREFIX}token/difference"
    ].tolist() == pytest.approx([0.1, 0.0], abs=1e-7)
    assert found.maxima[f"{MISMATCH_PREFIX}difference"].tolist() == pytest.approx(
        [0.1, 0.0], abs=1e-7
    )
    assert found.metrics[f"{MISMATCH_PREFIX}token/kl"].tolist() == pytest.approx(
        [math.log(0.8), 0.0], abs=1e-7
    )
    assert not any(metric.requires_grad for metric in found.metrics.values())


# -------------------------------------------------------------------- with a correction

# Tokens of one response: probabilities 0.5 and 0.2 now, 0.4 and 0.2 before these
# updates, 0.2 and 0.4 of the sampler.
OLD = torch.log(torch.tensor([0.4, 0.2]))
SAMPLER = torch.log(torch.tensor([0.2, 0.4]))
ADVANTAGES = torch.tensor([1.0, -2.0])


def corrected(
    form: str,
    kind: str | None,
    level: str | None,
    lower: float | None,
    upper: float | None,
    **settings: Any,
) -> tuple[list[float], list[float]]:
    """Return the losses under PPO with clips of 0.2, and the log-probs' gradients."""
    log_probs, _, out = outputs()
    correction = CorrectionConfig(
        normalise=False,
        rejections=None,
        form=form,
        kind=kind,
        level=level,
        lower=lower,
        upper=upper,
    )
    objective = PolicyObjective(algorithm(correction=correction, **settings), 1.0, 0.0)
    given = LossInputs(
        ROW, advantages=ADVANTAGES, old_log_probs=OLD, rollout_log_probs=SAMPLER
    )
    found = objective(out, given)
    assert not any(metric.requires_grad for metric in found.metrics.values())
    assert found.terms["actor/pg_loss"].tolist() == pytest.approx(found.loss.tolist())
    return found.loss.tolist(), torch.autograd.grad(found.loss.sum(), log_probs)[
        0
    ].tolist()


def test_three_policies_weigh_the_clipped_loss_by_old_over_sampler() -> None:
    # pi / old = 1.25 (clipped to 1.2) and 1: losses -1.2 and 2; old / sampler = 2 and
    # 0.5
    loss, grad = corrected("three_policy", "tis", "token", None, 1.5)
    assert loss == pytest.approx([-1.2 * 1.5, 2 * 0.5]) and grad == pytest.approx(
        [0, 2 * 0.5]
    )
    loss, grad = corrected("three_policy", "mis", "token", None, 1.5)
    assert loss == pytest.approx([0, 2 * 0.5]) and grad == pytest.approx([0, 2 * 0.5])
    loss, _ = corrected("three_policy", "icepop", "token", 0.6, 3.0)
    assert loss == pytest.approx([-1.2 * 2, 0])
    loss, _ = corrected("three_policy", "tis", "sequence", None, 1.5)  # 2 * 0.5
    assert loss == pytest.approx([-1.2, 2])


def test_two_policies_clip_the_ratio_to_the_sampler_and_only_leave_out() -> None:
    # pi / sampler = 2.5 (clipped to 1.2) and 0.5 (A < 0: clipped to 0.8)
    loss, grad = corrected("two_policy", None, None, None, None)
    assert loss == pytest.approx([-1.2, 1.6]) and grad == [0, 0]
    loss, _ = corrected("two_policy", "mis", "token", None, 2.0)
    assert loss == pytest.approx([0, 1.6])
    loss, _ = corrected(
        "two_policy", "reject", "geometric", 0.5, 1.1
    )  # sqrt(2.5 * 0.5) = 1.118
    assert loss == [0, 0]
    loss, _ = corrected("two_policy", "reject", "geometric", 0.5, 1.2)
    assert loss == pytest.approx([-1.2, 1.6])


def test_two_policies_weigh_reinforce_by_the_policy_that_learns_and_the_weight_is_a_constant() -> (
    None
):
    plain = {"policy_loss": "reinforce", "clip_low": None, "clip_high": None}
    loss, grad = corrected("two_policy", "tis", "token", None, 2.0, **plain)
    assert loss == pytest.approx([-2.0 * math.log(0.5), 0.5 * 2 * math.log(0.2)])
    assert grad == pytest.approx(
        [-2.0, 0.5 * 2]
    )  # had it a gradient, d(w log pi) = w (log pi + 1)
    loss, grad = corrected("two_policy", "icepop", "token", 0.6, 3.0, **plain)
    assert grad == pytest.approx([-2.5, 0])


def test_what_is_left_out_bears_neither_entropy_nor_divergence() -> None:
    _, entropy, out = outputs()
    correction = CorrectionConfig(
        normalise=False,
        rejections=None,
        form="three_policy",
        kind="mis",
        level="token",
        lower=None,
        upper=1.5,
    )
    objective = PolicyObjective(
        algorithm("loss", "k3", correction=correction, entropy_coefficient=0.1), 1.0, 0.5
    )  # fmt: skip
    given = LossInputs(
        ROW,
        advantages=ADVANTAGES,
        old_log_probs=OLD,
        rollout_log_probs=SAMPLER,
        ref_log_probs=torch.zeros(2),
    )
    found = objective(out, given)
    k3 = 1 / 0.2 - 1 - math.log(5)
    assert found.terms["actor/pg_loss"].tolist() == pytest.approx([0, 1.0])
    assert found.terms["actor/kl_loss"].tolist() == pytest.approx([0, k3])
    assert found.loss.tolist() == pytest.approx([0, 1.0 - 0.1 * 0.3 + 0.5 * k3])
    assert torch.autograd.grad(found.loss.sum(), entropy)[0].tolist() == pytest.approx(
        [0, -0.1]
    )


def test_a_correction_that_waits_changes_nothing_and_one_without_a_sampler_is_an_error() -> (
    None
):
    _, _, out = outputs()
    correction = CorrectionConfig(
        normalise=False,
        rejections=None,
        form="two_policy",
        kind="mis",
        level="token",
        lower=None,
        upper=1.5,
    )
    given = LossInputs(
        ROW, advantages=ADVANTAGES, old_log_probs=OLD, rollout_log_probs=SAMPLER
    )
    waiting = PolicyObjective(
        algorithm(correction=correction), 1.0, 0.0, corrects=False
    )(out, given)
    plain = PolicyObjective(algorithm(), 1.0, 0.0)(out, given)
    assert (
        torch.equal(waiting.loss, plain.loss)
        and waiting.metrics.keys() == plain.metrics.keys()
    )
    with pytest.raises(ValueError, match="rollout_log_probs"):
        PolicyObjective(algorithm(correction=correction), 1.0, 0.0)(
            out, LossInputs(ROW, advantages=ADVANTAGES)
        )


# --------------------------------------------------------------------- other objectives


def test_the_critic_by_hand() -> None:
    values = torch.tensor([1.0, 0.0], requires_grad=True)
    given = LossInputs(
        ROW, old_values=torch.tensor([0.0, 0.0]), returns=torch.tensor([1.0, 2.0])
    )
    objective = ValueObjective(ValueLossConfig(clip=0.2, aggregation="token_mean"))
    assert objective.outputs == RequestedOutputs(values=True)
    found = objective(TokenOutputs(values=values), given)
    assert found.loss.tolist() == pytest.approx(
        [0.32, 2.0]
    )  # held at 0.2: (0.2 - 1)^2 / 2; 2^2 / 2
    assert found.terms["critic/vf_loss"].tolist() == pytest.approx([0.32, 2.0])
    assert found.metrics["critic/vf_clipfrac"].tolist() == [1, 0]


def test_supervised_is_the_negative_log_likelihood() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    objective = SupervisedObjective()
    assert objective.outputs == RequestedOutputs(log_probs=True, greedy=True)
    found = objective(
        TokenOutputs(log_probs=log_probs, greedy=torch.tensor([True, False])),
        LossInputs(ROW),
    )
    assert found.loss.tolist() == pytest.approx([math.log(2), math.log(5)])
    assert found.metrics["train/token_accuracy"].tolist() == [1, 0]
    assert not found.metrics["train/loss"].requires_grad


def test_a_missing_column_is_named() -> None:
    _, _, out = outputs()
    with pytest.raises(ValueError, match="advantages"):
        PolicyObjective(algorithm(), 1.0, 0.0)(out, LossInputs(ROW))
    with pytest.raises(ValueError, match="ref_log_probs"):
        PolicyObjective(algorithm("loss", "k3"), 1.0, 0.5)(
            out, LossInputs(ROW, advantages=torch.zeros(2))
        )


def test_columns_are_those_of_a_training_batch() -> None:
    from verl_ray.columns.stages import TrainingBatch

    assert set(LossInputs.columns()) <= TrainingBatch.columns().keys()


def test_the_mismatch_of_fresh_tokens_is_reported_apart() -> None:
    """Only where rows may have older tokens: then `is_fresh` says which are not."""
    _, _, out = outputs()
    sampled = torch.log(torch.tensor([0.25, 0.2]))
    inputs = LossInputs(ROW, advantages=torch.ones(2), rollout_log_probs=sampled)
    objective = PolicyObjective(algorithm(), 1.0, 0.0)
    assert not any("fresh" in name for name in objective(out, inputs).metrics)

    inputs = LossInputs(
        ROW,
        advantages=torch.ones(2),
        rollout_log_probs=sampled,
        is_fresh=torch.tensor([0.0, 1.0]),
    )
    means = objective(out, inputs).metrics
    assert means["mismatch/fresh/share"].tolist() == [0, 1]
    assert means["mismatch/fresh/difference"].tolist() == pytest.approx([0, 0])
    assert means["mismatch/token/difference"].tolist() == pytest.approx([0.25, 0])


def test_a_bounded_divergence_is_counted() -> None:
    _, _, out = outputs()
    reference = torch.tensor([0.0, LOG_PROBS[1].item() + 3.0])
    found = PolicyObjective(algorithm("loss", "k3"), 1.0, 0.5)(
        out, LossInputs(ROW, advantages=torch.ones(2), ref_log_probs=reference)
    )
    assert found.metrics["actor/kl_clipfrac"].tolist() == [0, 1]
    assert found.terms["actor/kl_loss"][1] == 10
    found = PolicyObjective(algorithm("loss", "k2"), 1.0, 0.5)(
        out, LossInputs(ROW, advantages=torch.ones(2), ref_log_probs=reference)
    )
    assert "actor/kl_clipfrac" not in found.metrics


def test_log_ratios_that_losses_hold_are_counted() -> None:
    """The old policy is 21 and 19 below; with two policies, the sampler 19 and 21."""
    _, _, out = outputs()
    inputs = LossInputs(
        ROW, advantages=torch.ones(2), old_log_probs=LOG_PROBS - torch.tensor([21.0, 19.0]),
        rollout_log_probs=LOG_PROBS - torch.tensor([19.0, 21.0]),
    )  # fmt: skip
    name = "actor/log_ratio_clipfrac"
    found = PolicyObjective(algorithm(), 1.0, 0.0)(out, inputs)
    assert found.metrics[name].tolist() == [1, 0]
    two = algorithm(correction=NO_CORRECTION.model_copy(update={"form": "two_policy"}))
    found = PolicyObjective(two, 1.0, 0.0)(out, inputs)
    assert found.metrics[name].tolist() == [0, 1]
    # A loss without a ratio holds none.
    plain = algorithm(policy_loss="reinforce", clip_low=None, clip_high=None)
    assert name not in PolicyObjective(plain, 1.0, 0.0)(out, inputs).metrics


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize(
    "estimator", ["k2", "k3", "k1_straight_through", "k3_straight_through", "abs"]
)
def test_an_importance_weighted_divergence_has_an_unbiased_gradient(
    estimator: str, bounded: bool
) -> None:
    """In expectation over tokens of the old policy, exactly, not sampled."""
    # Bounded: the reference has 1/2 where the policy has 1/42, so log q/p is log 21.
    policy = [20.0, 21.0, 1.0] if bounded else [2.0, 1.0, 1.0]
    logits = torch.tensor(policy).log().requires_grad_()
    old = torch.tensor([0.25, 0.25, 0.5]).log()
    reference = torch.tensor([0.25, 0.25, 0.5]).log()
    log_probs = torch.log_softmax(logits, 0)
    probs = log_probs.exp()
    log_ratio = log_probs - reference
    (exact,) = torch.autograd.grad((probs * log_ratio).sum(), logits, retain_graph=True)

    weighted = KLConfig(
        place="loss", estimator=estimator, importance_weighted=True, coefficient=1.0,
        controller="fixed", target=None, horizon=None,
    )  # fmt: skip
    config = algorithm("loss", estimator).model_copy(update={"kl": weighted})
    found = PolicyObjective(config, 1.0, 1.0)(
        TokenOutputs(log_probs=log_probs, entropy=torch.zeros(3)),
        LossInputs(
            torch.arange(3), old_log_probs=old, advantages=torch.zeros(3),
            ref_log_probs=reference,
        ),
    )  # fmt: skip
    (grad,) = torch.autograd.grad((old.exp() * found.loss).sum(), logits)
    torch.testing.assert_close(grad, exact)

    # The value is the ratio times the estimate: 10 at the last token where bounded.
    k3 = (-log_ratio).exp() - 1 + log_ratio
    estimates = {
        "k2": log_ratio.square() / 2, "k1_straight_through": log_ratio, "abs": log_ratio.abs(),
    }  # fmt: skip
    estimate = estimates.get(estimator, k3.clamp(max=10)).detach()
    assert (k3[2] > 10).item() == bounded
    ratio = (probs / old.exp()).detach()
    torch.testing.assert_close(found.terms["actor/kl_loss"], ratio * estimate)


def test_at_a_bounded_token_the_policy_is_pulled_to_the_reference() -> None:
    """One token of the policy itself, where log q/p is 4 and k3 is 49.6."""
    log_probs = torch.tensor([-6.0], requires_grad=True)
    kl = {"place": "loss", "estimator": "k3", "importance_weighted": True}
    config = algorithm("loss", "k3")
    config = config.model_copy(update={"kl": config.kl.model_copy(update=kl)})
    found = PolicyObjective(config, 1.0, 0.5)(
        TokenOutputs(log_probs=log_probs, entropy=torch.zeros(1)),
        LossInputs(
            torch.zeros(1).long(), advantages=torch.zeros(1), ref_log_probs=torch.tensor([-2.0])
        ),
    )  # fmt: skip
    assert found.loss.tolist() == [5] and found.terms["actor/kl_loss"].tolist() == [10]
    # r * (log p - log q) = -4, which raises p.
    assert torch.autograd.grad(found.loss.sum(), log_probs)[0].tolist() == [-2]


def test_tokens_that_are_not_uncertain_bear_no_policy_loss() -> None:
    log_probs, _, out = outputs()
    inputs = LossInputs(ROW, advantages=torch.ones(2), uncertain=torch.tensor([0, 1.0]))
    found = PolicyObjective(algorithm(entropy_coefficient=0.1), 1.0, 0.0)(out, inputs)
    # The entropy bonus stays.
    assert found.loss.tolist() == pytest.approx([-0.07, -1.03])
    assert torch.autograd.grad(found.loss.sum(), log_probs)[0].tolist() == [0, -1]
    assert found.metrics["actor/passed_over"].tolist() == [1, 0]


def test_drifted_rows_with_negative_advantages_are_passed_over() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -1.0, -1.0, -3.0], requires_grad=True)
    out = TokenOutputs(log_probs=log_probs, entropy=torch.zeros(5))
    inputs = LossInputs(
        torch.tensor([0, 0, 1, 2, 2]),
        # Means of log p_sampler - log p: 0.5, 0 and 0.5.
        rollout_log_probs=torch.tensor([-0.5, -1.5, -1.0, -0.5, -2.5]),
        advantages=torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0]),
    )
    for limit, passed_over in ((0.4, [1, 1, 0, 0, 0]), (0.6, [0, 0, 0, 0, 0])):
        found = PolicyObjective(algorithm(negative_drift=limit), 1.0, 0.0)(out, inputs)
        assert found.metrics["actor/passed_over"].tolist() == passed_over
        assert (found.loss == 0).tolist() == [each == 1 for each in passed_over]


def test_positive_rows_are_imitated_besides() -> None:
    log_probs, _, out = outputs()
    weight = torch.tensor([0.5, 0.0])
    found = PolicyObjective(algorithm(), 1.0, 0.0)(
        out, LossInputs(ROW, advantages=torch.zeros(2), nll_weight=weight)
    )
    assert found.loss.tolist() == pytest.approx([0.5 * math.log(2), 0])
    assert found.terms["actor/positive_nll"].tolist() == found.loss.tolist()
    (grad,) = torch.autograd.grad(found.loss.sum(), log_probs)
    assert grad.tolist() == [-0.5, 0]


def test_the_present_weight_of_the_entropy_counts() -> None:
    _, _, out = outputs()
    inputs = LossInputs(ROW, advantages=torch.ones(2))
    found = PolicyObjective(
        algorithm(entropy_coefficient=0.1), 1.0, 0.0, entropy_coefficient=0.2
    )(out, inputs)
    assert found.loss.tolist() == pytest.approx([-1.14, -1.06])
