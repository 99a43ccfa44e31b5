"""Estimators of the divergence: by hand, on arrays and tensors, without overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from verl_ray.algorithms.catalogue import KL_ESTIMATORS
from verl_ray.ops.kl import (
    MAX_K3,
    absolute,
    bounded_k3,
    k1,
    k2,
    k3,
    straight_through_k1,
    straight_through_k3,
)


def test_by_hand() -> None:
    log_probs = np.log(np.array([0.5, 0.25], dtype=np.float32))
    ref_log_probs = np.log(np.array([0.25, 0.5], dtype=np.float32))
    ln2 = 0.693147
    assert k1(log_probs, ref_log_probs) == pytest.approx([ln2, -ln2], abs=1e-6)
    assert k2(log_probs, ref_log_probs) == pytest.approx(
        [ln2**2 / 2, ln2**2 / 2], abs=1e-6
    )
    assert k3(log_probs, ref_log_probs) == pytest.approx(
        [0.5 - 1 + ln2, 2 - 1 - ln2], abs=1e-6
    )
    assert absolute(log_probs, ref_log_probs) == pytest.approx([ln2, ln2], abs=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_arrays_and_tensors_agree_and_keep_their_kind(name: str) -> None:
    rng = np.random.default_rng(0)
    log_probs, ref_log_probs = rng.normal(size=(2, 50)).astype(np.float32)
    array = KL_ESTIMATORS[name].function(log_probs, ref_log_probs)
    tensor = KL_ESTIMATORS[name].function(
        torch.from_numpy(log_probs), torch.from_numpy(ref_log_probs)
    )
    assert array.dtype == np.float32 and tensor.dtype == torch.float32
    np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "bias"), [("k1", 0.0), ("k3", 0.0), ("k2", 0.01)])
def test_mean_over_the_whole_distribution_is_the_divergence(
    name: str, bias: float
) -> None:
    """The expectation is exact, over all outcomes, not sampled."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    divergence = float((p * np.log(p / q)).sum())
    estimate = float((p * KL_ESTIMATORS[name].function(np.log(p), np.log(q))).sum())
    assert estimate == pytest.approx(divergence, abs=bias or 1e-12)


def test_gradient_of_k2_is_that_of_the_divergence_and_of_k1_is_none() -> None:
    """Expected gradients are taken over all outcomes.

    The sampled outcomes are held fixed, as in a loss.
    """
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64), 0)
    log_p = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad(
        (log_p.exp() * (log_p - ref)).sum(), logits, retain_graph=True
    )
    p = log_p.detach().exp()
    (k2_gradient,) = torch.autograd.grad(
        (p * k2(log_p, ref)).sum(), logits, retain_graph=True
    )
    (k1_gradient,) = torch.autograd.grad((p * k1(log_p, ref)).sum(), logits)
    torch.testing.assert_close(k2_gradient, exact)
    torch.testing.assert_close(k1_gradient, torch.zeros_like(k1_gradient))


def test_k3_of_a_policy_that_has_barely_moved_keeps_its_digits() -> None:
    difference = np.array([1e-3, -1e-3], dtype=np.float32)
    expected = pytest.approx([4.99833e-7, 5.00167e-7], rel=1e-3)
    assert k3(difference, np.zeros_like(difference)) == expected
    assert k3(torch.from_numpy(difference), torch.zeros(2)).tolist() == expected


def test_k3_cannot_overflow() -> None:
    far = torch.tensor([-1000.0, 1000.0], requires_grad=True)
    estimate = k3(far, torch.zeros(2))
    assert estimate.tolist() == pytest.approx([np.exp(20) - 21, 999.0])
    estimate.sum().backward()
    assert far.grad is not None and far.grad.tolist() == [0.0, 1.0]


def test_one_token_cannot_outweigh_a_batch() -> None:
    # k3 is 10 where the log of q/p is 2.61, and 2.2e4 at 10 nats.
    log_probs = torch.tensor([-2.5, -2.7, -10.0, 11.5], requires_grad=True)
    estimate = bounded_k3(log_probs, torch.zeros(4))
    assert estimate.tolist() == pytest.approx([np.exp(2.5) - 3.5, 10, 10, 10])
    estimate.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([1 - np.exp(2.5), 0, 0, 0])
    for name in ("k3", "k3_straight_through"):
        assert KL_ESTIMATORS[name].bound == MAX_K3


@pytest.mark.parametrize(
    ("function", "value"), [(straight_through_k1, k1), (straight_through_k3, k3)]
)
def test_a_straight_through_estimate_has_the_gradient_of_k2(
    function: Any, value: Any
) -> None:
    log_probs = torch.tensor([-1.0, -3.0], requires_grad=True)
    reference = torch.tensor([-1.5, -2.0])
    estimate = function(log_probs, reference)
    assert estimate.tolist() == value(log_probs, reference).tolist()
    (grad,) = torch.autograd.grad(estimate.sum(), log_probs)
    assert grad.tolist() == [0.5, -1.0]
