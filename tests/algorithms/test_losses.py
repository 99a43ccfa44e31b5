"""Token losses by hand: gradients, clips, and metrics that are averaged over tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.corrections import NO_CORRECTION, NO_LIMIT
from verl_ray.algorithms.losses import (
    PolicyTokens,
    TokenLoss,
    bradley_terry,
    value_loss,
)
from verl_ray.algorithms.policy_losses import POLICY_LOSSES, ppo_clip, reinforce
from verl_ray.config.algorithm import AlgorithmConfig, KLConfig


def tokens_of(log_probs: Tensor, old: Tensor, advantages: Tensor) -> PolicyTokens:
    """Tokens of one row."""
    row = torch.zeros_like(log_probs, dtype=torch.int64)
    return PolicyTokens(log_probs, old, advantages, row)


def clip(
    ratio: list[float], advantages: list[float], dual_clip: float | None = None
) -> tuple[TokenLoss, list[float]]:
    """Return the PPO loss with bounds [0.8, 1.3] at these ratios, and its gradient."""
    log_probs = torch.tensor(ratio).log().requires_grad_()
    old = torch.zeros(len(ratio))
    found = ppo_clip(
        tokens_of(log_probs, old, torch.tensor(advantages)),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=dual_clip,
    )
    (grad,) = torch.autograd.grad(found.loss.sum(), log_probs)
    return found, grad.tolist()


def test_ppo_by_hand() -> None:
    found, grad = clip([1.0, 2.0, 0.5, 2.0, 0.5], [1.0, 1.0, 1.0, -1.0, -1.0])
    # in bounds; too high with A > 0: clipped; low with A > 0: free; high with A < 0:
    # free; low with A < 0: clipped
    assert found.loss.tolist() == pytest.approx([-1, -1.3, -0.5, 2, 0.8])
    assert grad == pytest.approx([-1, 0, -0.5, 2, 0])
    assert found.metrics["actor/pg_clipfrac"].tolist() == [0, 1, 0, 0, 1]
    assert found.metrics["actor/clip_ratio/high"].tolist() == [0, 1, 0, 0, 0]
    assert found.metrics["actor/clip_ratio/low"].tolist() == [0, 0, 0, 0, 1]
    assert found.metrics["actor/ppo_kl"].tolist() == pytest.approx(
        [0, -math.log(2), math.log(2), -math.log(2), math.log(2)]
    )
    assert "actor/pg_clipfrac_lower" not in found.metrics


def test_dual_clip_bounds_the_loss_of_bad_tokens_only() -> None:
    found, grad = clip([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], dual_clip=3.0)
    assert found.loss.tolist() == pytest.approx([3, 2, -1.3])
    assert grad == pytest.approx([0, 2, 0])
    assert found.metrics["actor/pg_clipfrac_lower"].tolist() == [1, 0, 0]


def test_at_equal_policies_the_gradient_is_that_of_reinforce() -> None:
    advantages = torch.tensor([1.0, -2.0, 0.0])
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old = log_probs.detach()
    ppo_gradient = torch.autograd.grad(
        ppo_clip(
            tokens_of(log_probs, old, advantages),
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=None,
        ).loss.sum(),
        log_probs,
    )
    found = reinforce(tokens_of(log_probs, old, advantages))
    assert found.loss.tolist() == [1, -4, 0] and found.metrics[
        "actor/ppo_kl"
    ].tolist() == [0, 0, 0]
    assert torch.equal(
        ppo_gradient[0], torch.autograd.grad(found.loss.sum(), log_probs)[0]
    )
    assert ppo_gradient[0].tolist() == [-1, 2, 0]


def test_far_policies_give_finite_losses_and_gradients() -> None:
    """Unclamped, exp(100) is inf in float32, and inf * 0 is NaN."""
    log_probs = torch.tensor([0.0, 0.0, -100.0], requires_grad=True)
    old = torch.tensor([-100.0, -100.0, 0.0])
    found = ppo_clip(
        tokens_of(log_probs, old, torch.tensor([0.0, -1.0, 1.0])),
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
    )
    assert found.loss[:2].tolist() == pytest.approx([0, math.exp(20)])
    (grad,) = torch.autograd.grad(found.loss.sum(), log_probs)
    assert grad.isfinite().all()


def test_value_loss_by_hand() -> None:
    values = torch.tensor([2.0, 4.0, 1.2], requires_grad=True)
    old, returns = torch.ones(3), torch.tensor([3.0, 0.0, 2.0])
    free = value_loss(values, old, returns, clip=None)
    assert free.loss.tolist() == pytest.approx([0.5, 8, 0.32]) and not free.metrics
    # Held at 1.5, 1.5 and 1.2, the errors are 1.5 (worse than 1), 1.5 (better than 4)
    # and the same 0.8.
    held = value_loss(values, old, returns, clip=0.5)
    assert held.loss.tolist() == pytest.approx([1.125, 8, 0.32])
    assert held.metrics["critic/vf_clipfrac"].tolist() == [1, 0, 0]
    (grad,) = torch.autograd.grad(held.loss.sum(), values)
    assert grad.tolist() == pytest.approx([0, 4, -0.8])


def all_losses(device: str = "cpu") -> list[TokenLoss]:
    log_probs, old, advantages = (
        torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
        .to(device)
        .unbind()
    )
    log_probs.requires_grad_()
    return [
        ppo_clip(
            tokens_of(log_probs, old, advantages),
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=2.0,
        ),
        reinforce(tokens_of(log_probs, old, advantages)),
        value_loss(log_probs, old, advantages, clip=0.1),
    ]


def test_losses_and_metrics_are_per_token_and_metrics_detached() -> None:
    """Nothing is reduced, so the caller can weight by tokens and fetch sums once."""
    for found in all_losses():
        assert (
            found.loss.shape == (6,)
            and found.loss.dtype == torch.float32
            and found.loss.requires_grad
        )
        for metric in found.metrics.values():
            assert (
                metric.shape == (6,)
                and metric.dtype == torch.float32
                and not metric.requires_grad
            )


def test_nothing_makes_the_host_wait_for_the_device() -> None:
    """The meta device has no values, so any `.item()` or branch on a value raises."""
    for found in all_losses("meta"):
        found.loss.sum().backward()


def test_the_clip_fraction_does_not_depend_on_micro_batches() -> None:
    whole, _ = clip([2.0, 1.0, 1.0, 1.0], [1.0] * 4)
    first, _ = clip([2.0], [1.0])
    rest, _ = clip([1.0, 1.0, 1.0], [1.0] * 3)
    name = "actor/pg_clipfrac"
    assert whole.metrics[name].mean() == 0.25
    assert (first.metrics[name].sum() + rest.metrics[name].sum()) / 4 == 0.25
    assert (
        first.metrics[name].mean() + rest.metrics[name].mean()
    ) / 2 == 0.5  # what must not be done


def algorithm(policy_loss: str, **clips: float | None) -> AlgorithmConfig:
    none = KLConfig(
        importance_weighted=False,
        place="none",
        estimator=None,
        coefficient=None,
        controller=None,
        target=None,
        horizon=None,
    )
    return AlgorithmConfig(
        name="test", advantage="grpo", gamma=None, lam=None, whiten_advantages=False, policy_loss=policy_loss,
        clip_low=clips.get("clip_low"), clip_high=clips.get("clip_high"), dual_clip=clips.get("dual_clip"),
        aggregation="token_mean", aggregation_horizon=None, entropy_coefficient=0.0, kl=none, value_loss=None,
        critic_warmup_steps=0, correction=NO_CORRECTION, mismatch=NO_LIMIT, truncated="score", sequence="row",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (algorithm("ppo_clip", clip_low=0.2, clip_high=0.5), [-1.5, 4.0]),
        (
            algorithm("ppo_clip", clip_low=0.2, clip_high=0.28, dual_clip=3.0),
            [-1.28, 3.0],
        ),
        (algorithm("reinforce"), [-math.log(4), math.log(4)]),
    ],
)
def test_by_name_with_the_settings_of_the_configuration(
    config: AlgorithmConfig, expected: list[float]
) -> None:
    log_probs: Tensor = torch.tensor([4.0, 4.0]).log()
    declared, advantages = POLICY_LOSSES[config.policy_loss], torch.tensor([1.0, -1.0])
    found = declared.function(
        tokens_of(log_probs, torch.zeros(2), advantages), **declared.settings(config)
    )
    assert found.loss.tolist() == pytest.approx(expected)


def test_preferences_by_hand() -> None:
    chosen = torch.tensor([math.log(3), 1.0, 0.0], requires_grad=True)
    rejected, margin = (
        torch.tensor([0.0, 1.0, math.log(4)]),
        torch.tensor([0.0, 0.0, -math.log(2)]),
    )
    found = bradley_terry(chosen, rejected, margin, label_smoothing=0.0)
    # sigmoid of the differences log 3, 0 and, with the margin, -log 2: 3/4, 1/2 and 1/3
    torch.testing.assert_close(
        found.loss, torch.tensor([math.log(4 / 3), math.log(2), math.log(3)])
    )
    assert found.metrics["reward/accuracy"].tolist() == [1.0, 0.5, 0.0]
    # the margin is no part of what the scores say: 1/5 for the third pair
    torch.testing.assert_close(
        found.metrics["reward/log_loss"],
        torch.tensor([math.log(4 / 3), math.log(2), math.log(5)]),
    )
    torch.testing.assert_close(
        found.metrics["reward/margin"], torch.tensor([math.log(3), 0.0, -math.log(4)])
    )
    (grad,) = torch.autograd.grad(found.loss.sum(), chosen)
    torch.testing.assert_close(grad, torch.tensor([-1 / 4, -1 / 2, -2 / 3]))


def test_smoothed_labels_by_hand() -> None:
    chosen, nothing = torch.tensor([math.log(3)], requires_grad=True), torch.zeros(1)
    found = bradley_terry(chosen, nothing, nothing, label_smoothing=0.25)
    torch.testing.assert_close(
        found.loss, torch.tensor([0.75 * math.log(4 / 3) + 0.25 * math.log(4)])
    )
    (grad,) = torch.autograd.grad(found.loss.sum(), chosen)
    torch.testing.assert_close(
        grad, torch.zeros(1)
    )  # at 3:1 odds, a quarter of the labels being wrong is what it says
    # a flipped label demands the margin of the other response: odds of 3:2 for, and of
    # 1:6 against
    found = bradley_terry(
        chosen, nothing, torch.tensor([math.log(2)]), label_smoothing=0.25
    )
    torch.testing.assert_close(
        found.loss, torch.tensor([0.75 * math.log(5 / 3) + 0.25 * math.log(7)])
    )
