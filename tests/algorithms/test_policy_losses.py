"""Losses of the policy: numbers by hand, and gradients of the papers' objectives."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests import style
from verl_ray.algorithms.losses import PolicyLoss, PolicyTokens, TokenLoss
from verl_ray.algorithms.policy_losses import POLICY_LOSSES

Array = NDArray[np.float64]

ROW = torch.tensor([0, 0, 0, 1, 2, 2])
LENGTHS = np.array([3, 1, 2])


CHOSEN = {"m2po": 1.0, "kl_cov": 1.0}
"""What every token is where nothing else is said: 1 if it was chosen."""


def settings_of(name: str, **changes: object) -> dict[str, object]:
    choice = POLICY_LOSSES[name]
    usual = {
        setting.name: value
        for setting, value in choice.reads.items()
        if setting not in choice.selection_reads
    }
    return usual | changes


def loss_of(
    name: str,
    log_ratio: list[float],
    advantages: list[float],
    row: list[int] | None = None,
    *,
    old: list[float] | None = None,
    selected: list[float] | None = None,
    **changes: object,
) -> tuple[TokenLoss, list[float]]:
    """Return a loss at these log ratios, and the gradient of its plain sum."""
    old_log_probs = torch.tensor(old or [-2.0] * len(log_ratio))
    log_probs = (old_log_probs + torch.tensor(log_ratio)).requires_grad_()
    tokens = PolicyTokens(
        log_probs,
        old_log_probs,
        torch.tensor(advantages),
        torch.tensor(row or range(len(log_ratio))),
        torch.tensor(selected or [CHOSEN.get(name, 0.0)] * len(log_ratio)),
    )
    found = POLICY_LOSSES[name].function(tokens, **settings_of(name, **changes))
    (grad,) = torch.autograd.grad(found.loss.sum(), log_probs)
    return found, grad.tolist()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_at_the_old_policy_the_gradient_is_that_of_the_policy_gradient(
    name: str,
) -> None:
    advantages = [1.0, 1.0, 1.0, -2.0, 0.0, 0.0]
    found, grad = loss_of(name, [0.0] * 6, advantages, ROW.tolist())
    assert grad == pytest.approx([-a for a in advantages], abs=1e-6)
    assert found.metrics["actor/ppo_kl"].tolist() == [0] * 6
    assert not any(
        values.any() for key, values in found.metrics.items() if "clipfrac" in key
    )


# -------------------------------------------------------------------- numbers by hand


def test_reinforce_by_hand() -> None:
    """Its ratio is no matter."""
    found, grad = loss_of("reinforce", [0.5, -1.0], [2, -1])
    assert found.loss.tolist() == pytest.approx([-2 * -1.5, -3.0])
    assert grad == [-2, 1]


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    found, grad = loss_of("cispo", [math.log(8), math.log(0.1)], [1, -1], ratio_max=5.0)
    # -min(8, 5) * A * (-2 + log 8), and -0.1 * A * (-2 + log 0.1)
    assert found.loss.tolist() == pytest.approx(
        [-5 * (math.log(8) - 2), 0.1 * (math.log(0.1) - 2)]
    )
    assert grad == pytest.approx([-5, 0.1])
    assert found.metrics["actor/pg_clipfrac"].tolist() == [1, 0]
    assert "actor/pg_clipfrac_lower" not in found.metrics

    found, grad = loss_of("cispo", [math.log(0.1)], [1], ratio_min=0.5)
    assert grad == pytest.approx([-0.5])
    assert found.metrics["actor/pg_clipfrac_lower"].tolist() == [1]


def test_the_gate_of_sapo_by_hand() -> None:
    found, grad = loss_of(
        "sapo", [math.log(2), math.log(2), 0.3], [1, -1, 0], temperature_negative=2.0
    )
    # 4 / tau * sigmoid(tau (r - 1)): 4 sigmoid(1), 2 sigmoid(2)
    assert found.loss.tolist() == pytest.approx([-4 * 0.7310586, 2 * 0.8807971, 0])
    # 4 sigmoid (1 - sigmoid) * r
    assert grad == pytest.approx([-4 * 0.1966119 * 2, 4 * 0.1049936 * 2, 0])
    assert found.metrics["actor/gate"].tolist()[:2] == pytest.approx(
        [4 * 0.1966119, 4 * 0.1049936]
    )


def test_dppo_leaves_out_tokens_that_moved_too_far_where_they_are_pushed() -> None:
    old = [math.log(0.5)] * 5
    ratios = [math.log(p / 0.5) for p in (0.8, 0.6, 0.2, 0.2, 0.8)]
    # Up by 0.3 with A > 0: out. Up by 0.1: in. Down by 0.3 with A > 0: moves back, in.
    # Down by 0.3 with A < 0: out. Up with A < 0: moves back, in.
    found, grad = loss_of("dppo_tv", ratios, [1, 1, 1, -1, -1], old=old)
    assert found.metrics["actor/pg_clipfrac"].tolist() == [1, 0, 0, 1, 0]
    assert grad == pytest.approx([0, -1.2, -0.4, 0, 1.6])
    _, grad = loss_of("dppo_tv", ratios, [1, 1, 1, -1, -1], old=old, ratio_max=1.5)
    assert grad == pytest.approx([0, -1.2, -0.4, 0, 1.5])


def test_the_divergence_of_dppo_kl_by_hand() -> None:
    old = [math.log(0.5)] * 3
    ratios = [math.log(p / 0.5) for p in (0.7, 0.6, 0.7)]
    # KL of (0.5, 0.5) from (0.7, 0.3) is 0.0872, from (0.6, 0.4) 0.0204.
    for limit, left_out in ((0.05, [1, 0, 0]), (0.09, [0, 0, 0]), (0.02, [1, 1, 0])):
        found, _ = loss_of(
            "dppo_kl", ratios, [1, 1, -1], old=old, divergence_high=limit
        )
        assert found.metrics["actor/pg_clipfrac"].tolist() == left_out
    # A token that is certain has no other one.
    found, grad = loss_of("dppo_kl", [0.0, 0.0], [1, -1], old=[0.0, 0.0])
    assert found.loss.isfinite().all() and grad == pytest.approx([-1, 1])


def test_dro_by_hand() -> None:
    found, grad = loss_of("dro", [0.5], [2], distance_penalty=0.4)
    assert found.loss.tolist() == pytest.approx([-2 * -1.5 + 0.2 * 0.25])
    assert grad == pytest.approx([-2 + 0.4 * 0.5])


def test_gspo_by_hand() -> None:
    # The mean log ratios are 0.2, -0.1 and 0.3: the first row is clipped at 1.1, the
    # second at 0.95, the third has A < 0 and is free.
    found, grad = loss_of(
        "gspo", [0.1, 0.2, 0.3, -0.1, 0.6, 0.0], [1, 1, 1, -1, -2, -2], ROW.tolist(),
        clip_low=0.05, clip_high=0.1,
    )  # fmt: skip
    free = 2 * math.exp(0.3)
    assert found.loss.tolist() == pytest.approx([-1.1] * 3 + [0.95] + [free] * 2)
    assert grad == pytest.approx([0, 0, 0, 0, free, free])
    assert found.metrics["actor/pg_clipfrac"].tolist() == [1, 1, 1, 1, 0, 0]


def test_gmpo_by_hand() -> None:
    # Clipped by the sign of A: 0.4 and -1 (A > 0); 1 and -0.4 (A < 0).
    found, grad = loss_of("gmpo", [1.0, -1.0, 1.0, -1.0], [1, 1, -1, -1], [0, 0, 1, 1])
    low, high = math.exp(-0.3), math.exp(0.3)
    assert found.loss.tolist() == pytest.approx([-low, -low, high, high])
    assert grad == pytest.approx([0, -low, high, 0])
    assert found.metrics["actor/pg_clipfrac"].tolist() == [1, 0, 0, 1]


def test_vespo_by_hand() -> None:
    half = math.log(0.5) / 2
    found, grad = loss_of("vespo", [half, half, 0.0], [1, 1, -1], [0, 0, 1])
    # phi(0.5) = e^3 * 0.5^2 * e^-1.5
    phi = 0.25 * math.exp(1.5)
    assert grad == pytest.approx([-phi, -phi, 1])
    assert found.metrics["actor/gate"].tolist() == pytest.approx([phi, phi, 1])
    _, grad = loss_of("vespo", [half, half], [-1, -1], [0, 0])
    assert grad == pytest.approx([0.125 * math.exp(1)] * 2)


def test_chosen_tokens_are_treated_apart() -> None:
    ratios, chosen = [math.log(2), math.log(2)], [1.0, 0.0]
    found, grad = loss_of("m2po", ratios, [1, 1], selected=chosen)
    assert found.loss.tolist() == pytest.approx([-2, 0])
    assert grad == pytest.approx([-2, 0])
    assert found.metrics["actor/pg_clipfrac"].tolist() == [0, 1]

    found, grad = loss_of("clip_cov", ratios, [-1, -1], selected=chosen)
    assert found.loss.tolist() == pytest.approx([0, 2])
    assert grad == pytest.approx([0, 2])

    found, grad = loss_of("kl_cov", ratios, [1, 1], selected=chosen, cov_penalty=0.5)
    assert found.loss.tolist() == pytest.approx([-2 + 0.5 * math.log(2), -2])
    assert grad == pytest.approx([-2 + 0.5, -2])
    for name in ("clip_cov", "kl_cov"):
        found, _ = loss_of(name, ratios, [1, 1], selected=chosen)
        assert found.metrics["actor/selected"].tolist() == chosen


# ---------------------------------------------- the papers' objectives, by differences


def clipped(ratio: Array, a: Array, low: float, high: float) -> Array:
    return np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)


def means(values: Array) -> Array:
    """Means over the rows of ROW, repeated at their tokens."""
    row = ROW.numpy()
    return (np.bincount(row, values) / LENGTHS)[row]


def binary_kl(new: Array, old: Array) -> Array:
    p, q = np.exp(old), np.exp(new)
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def kept(name: str, new: Array, old: Array, a: Array) -> Array:
    """Where DPPO keeps a token, and its weight."""
    moved = np.exp(new) - np.exp(old)
    if name == "dppo_tv":
        out = ((a > 0) & (moved > 0.2)) | ((a < 0) & (moved < -0.2))
    else:
        out = (a * moved > 0) & (binary_kl(new, old) > 0.05)
    return np.where(out, 0, np.minimum(np.exp(new - old), 20))


def vespo_gate(new: Array, old: Array, a: Array) -> Array:
    w = np.exp(means(new - old) * LENGTHS[ROW.numpy()])
    positive, negative = w**2 * np.exp(3 - 3 * w), w**3 * np.exp(2 - 2 * w)
    return np.where(a < 0, negative, positive)


def gmpo_objective(new: Array, old: Array, a: Array) -> Array:
    sign = np.sign(a)
    worse = np.minimum(sign * (new - old), sign * np.clip(new - old, -0.4, 0.4))
    return means(a) * np.exp(means(sign * worse))


OBJECTIVES: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    # New log-probs, those where constants are frozen, old ones, advantages.
    "ppo_clip": lambda new, _, old, a: clipped(np.exp(new - old), a, 0.2, 0.2),
    "reinforce": lambda new, _, old, a: a * new,
    "cispo": lambda new, at, old, a: np.minimum(np.exp(at - old), 5) * a * new,
    "sapo": lambda new, _, old, a: (
        4 * a / np.where(a > 0, 1, 1.05)
        / (1 + np.exp(-np.where(a > 0, 1, 1.05) * (np.exp(new - old) - 1)))
    ),
    "dppo_tv": lambda new, at, old, a: kept("dppo_tv", at, old, a) * a * new,
    "dppo_kl": lambda new, at, old, a: kept("dppo_kl", at, old, a) * a * new,
    "dro": lambda new, _, old, a: a * new - 0.05 * (new - old) ** 2,
    "gspo": lambda new, _, old, a: clipped(np.exp(means(new - old)), a, 3e-4, 4e-4),
    "gmpo": lambda new, _, old, a: gmpo_objective(new, old, a),
    "m2po": lambda new, _, old, a: np.exp(new - old) * a,
    "clip_cov": lambda new, _, old, a: clipped(np.exp(new - old), a, 0.2, 0.2),
    "kl_cov": lambda new, _, old, a: np.exp(new - old) * a - np.abs(new - old),
    "vespo": lambda new, at, old, a: vespo_gate(at, old, a) * a * new,
}  # fmt: skip


def example(seed: int, spread: float) -> tuple[Array, Array, Array]:
    """Log-probs, old ones, and an advantage per row."""
    random = np.random.default_rng(seed)
    old = -random.uniform(0.2, 3, 6)
    new = np.minimum(old + random.normal(0, spread, 6), -0.01)
    return new, old, random.normal(0, 1, 3)[ROW.numpy()]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_value_and_gradient_are_those_of_the_paper(name: str, seed: int) -> None:
    """Weights that are equal within a row: the mean over rows of means over tokens."""
    # GSPO's bounds are so near to 1 that rows are clipped, or not, at small distances.
    new, old, a = example(seed, 3e-4 if name == "gspo" else 0.5)
    objective = OBJECTIVES[name]
    weight = (1 / (3 * LENGTHS))[ROW.numpy()]

    def loss_at(log_probs: Array) -> float:
        return float(-(weight * objective(log_probs, new, old, a)).sum())

    step = 1e-6
    expected = [
        (loss_at(new + step * unit) - loss_at(new - step * unit)) / (2 * step)
        for unit in np.eye(6)
    ]
    log_probs = torch.tensor(new, requires_grad=True)
    chosen = torch.full((6,), CHOSEN.get(name, 0.0))
    tokens = PolicyTokens(log_probs, torch.tensor(old), torch.tensor(a), ROW, chosen)
    found = POLICY_LOSSES[name].function(tokens, **settings_of(name))
    loss = (found.loss * torch.tensor(weight)).sum()
    assert loss.item() == pytest.approx(loss_at(new), rel=1e-6)
    (grad,) = torch.autograd.grad(loss, log_probs)
    assert grad.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


# ------------------------------------------------------------------------ far policies


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_far_policies_give_finite_losses_and_a_nan_is_not_hidden(name: str) -> None:
    far = [100.0, -100.0, 100.0, -100.0]
    found, grad = loss_of(name, far, [1, -1, -1, 0], old=[-100.0, -1, -100.0, -1])
    assert found.loss.isfinite().all() and np.isfinite(grad).all()
    for values in found.metrics.values():
        assert values.shape == (4,) and values.dtype == torch.float32
        assert not values.requires_grad
    found, _ = loss_of(name, [math.nan], [1])
    assert found.loss.isnan().all()


def test_each_flag_names_what_reads_it() -> None:
    """A reader of a flag knows what it causes, without a search."""
    modules = style.modules()
    (losses,) = (one for one in modules if one.path == "verl_ray/algorithms/losses.py")
    (declared,) = (
        node for node in losses.tree.body if isinstance(node, ast.ClassDef) and node.name == "PolicyLoss"
    )  # fmt: skip
    text = ast.get_source_segment(losses.text, declared) or ""

    # `sequence` is the name of other things as well.
    flags = {
        field.name for field in fields(PolicyLoss) if type(field.default) is not str
    }
    flags -= {"name", "paper", "function", "reads"}
    readers = {
        (node.attr, function.name)
        for module in modules
        if any(f".{flag}" in module.text for flag in flags)
        for function in module.functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and node.attr in flags
    }
    assert {flag for flag, _ in readers} == flags
    for flag, reader in readers:
        doc = re.search(rf'\n    {flag}: [^"]*"""(.*?)"""', text, re.DOTALL)
        assert doc is not None and f"`{reader}`" in doc[1], (flag, reader)
