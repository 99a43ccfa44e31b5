"""Losses of a policy on preferences: by hand, against TRL's, and their metrics."""

from __future__ import annotations

import importlib
import math
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms.preferences import preference_objective
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.preference_losses import DECLARED, PREFERENCE_LOSSES, Pairs
from verl_ray.learning.objectives import LossInputs
from verl_ray.ops.outputs import TokenOutputs

LENGTHS = np.array([5, 3, 1, 4, 2, 6])
"""Response tokens of the rows: three pairs, each the chosen row and the rejected one."""
NUM_TOKENS = int(LENGTHS.sum())
ROW = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
UNIT = torch.tensor([0, 0, 1, 1, 2, 2])


def log_probs_of(seed: int) -> Tensor:
    values = -np.random.default_rng(seed).uniform(0.05, 2, NUM_TOKENS)
    return torch.tensor(values, dtype=torch.float64)


def sums_of(log_probs: Tensor) -> Tensor:
    return torch.zeros(6, dtype=torch.float64).index_add(0, ROW, log_probs)


def measured(
    loss: str, log_probs: Tensor, reference: Tensor, **settings: Any
) -> TokenLoss:
    """Return our losses of the pairs, [3], in the precision of the log-probs."""
    inputs = LossInputs(ROW, UNIT, ref_log_prob=sums_of(reference))
    objective = preference_objective(loss, **settings)
    found = objective(TokenOutputs(log_probs=log_probs), inputs)
    assert found.loss.shape == (3,) and found.loss.dtype == torch.float32
    return found


# ------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("sigmoid", math.log(2)), ("cdpo", math.log(2)), ("robust", math.log(2)), ("hinge", 1.0),
        ("ipo", 1 / (4 * 0.1**2)), ("sigmoid_norm", math.log(2)), ("apo_zero", 1.0), ("apo_down", 1.0),
    ],
)  # fmt: skip
def test_at_the_reference(loss: str, expected: float) -> None:
    """Without a difference from the reference no loss depends on the responses."""
    found = measured(loss, log_probs_of(0), log_probs_of(0))
    assert found.loss.tolist() == pytest.approx([expected] * 3, rel=1e-6)


def test_one_pair_by_hand() -> None:
    """Log ratios of 0.5 and -0.3 on two tokens and one, beta = 2."""
    pairs = Pairs(*(torch.tensor([value]) for value in (-1.0, -2.3, -1.5, -2.0, 2, 1)))
    assert [
        float(PREFERENCE_LOSSES[name].function(pairs, beta=2.0, **more))
        for name, more in (
            ("sigmoid", {}),
            ("cdpo", {"label_smoothing": 0.1}),
            ("robust", {"label_smoothing": 0.1}),
            ("hinge", {}),
            ("ipo", {}),
            ("sigmoid_norm", {}),
            ("apo_zero", {}),
            ("apo_down", {}),
        )
    ] == pytest.approx(
        [
            math.log1p(math.exp(-1.6)),
            0.9 * math.log1p(math.exp(-1.6)) + 0.1 * math.log1p(math.exp(1.6)),
            (0.9 * math.log1p(math.exp(-1.6)) - 0.1 * math.log1p(math.exp(1.6))) / 0.8,
            0.0,
            (0.25 + 0.3 - 0.25) ** 2,
            math.log1p(math.exp(-2 * 0.55)),
            1 - 1 / (1 + math.exp(-1)) + 1 / (1 + math.exp(0.6)),
            1 / (1 + math.exp(-1)) + 1 - 1 / (1 + math.exp(-1.6)),
        ],
        rel=1e-5,
    )


def test_losses_without_a_reference_by_hand() -> None:
    """Two tokens of probability 1/2 each, and one of probability 1/4."""
    zero = torch.zeros(1)
    chosen, rejected = torch.tensor([2 * math.log(0.5)]), torch.tensor([math.log(0.25)])
    pairs = Pairs(
        chosen, rejected, zero, zero, torch.tensor([2.0]), torch.tensor([1.0])
    )
    simpo = PREFERENCE_LOSSES["simpo"].function(pairs, beta=2.0, gamma=1.0)
    assert float(simpo) == pytest.approx(
        math.log1p(math.exp(-(2 * math.log(2) - 1))), rel=1e-6
    )
    # The odds are 1 and 1/3.
    orpo = PREFERENCE_LOSSES["orpo"].function(pairs, beta=0.5)
    assert float(orpo) == pytest.approx(math.log(2) + 0.5 * math.log1p(1 / 3), rel=1e-6)


def test_rpo_adds_the_likelihood_of_the_chosen_response_per_token() -> None:
    log_probs, reference = log_probs_of(0), log_probs_of(1)
    plain = measured("sigmoid", log_probs, reference)
    added = measured("sigmoid", log_probs, reference, rpo_alpha=0.3)
    per_token = (-sums_of(log_probs) / torch.tensor(LENGTHS))[0::2].float()
    assert torch.allclose(added.loss, plain.loss + 0.3 * per_token)
    assert torch.allclose(added.terms["actor/nll_loss"], per_token)


def test_orpo_at_certainty_is_finite() -> None:
    """A response of probability 1 has infinite odds."""
    log_probs = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    half = torch.tensor([math.log(0.5)], dtype=torch.float64)
    zero, one = torch.zeros_like(half), torch.ones_like(half)
    pairs = Pairs(half, log_probs, zero, zero, one, one)
    loss = PREFERENCE_LOSSES["orpo"].function(pairs, beta=0.1)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert loss.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize(
    "loss", [name for name in DECLARED if not DECLARED[name].is_unpaired]
)
def test_gradients_are_those_of_finite_differences(loss: str) -> None:
    declared = PREFERENCE_LOSSES[loss]
    config = preference_objective(loss).config
    random = np.random.default_rng(2)
    tokens = torch.tensor([4.0, 2.0, 7.0], dtype=torch.float64)
    fixed = [torch.tensor(-random.uniform(0.2, 3, 3)) for _ in range(2)]

    def function(chosen: Tensor, rejected: Tensor) -> Tensor:
        pairs = Pairs(chosen, rejected, *fixed, tokens, tokens + 1)
        return declared.function(pairs, **declared.settings(config))

    points = tuple(
        torch.tensor(-random.uniform(0.2, 3, 3), requires_grad=True) for _ in range(2)
    )
    assert torch.autograd.gradcheck(function, points)


# ------------------------------------------------------------------------- against TRL

MASK = torch.zeros(6, 9, dtype=torch.int64)
"""TRL's: [chosen rows, rejected rows] over two tokens of prompt, a response, and
padding."""
ORDER = torch.tensor([0, 2, 4, 1, 3, 5])
for place, index in enumerate(ORDER.tolist()):
    MASK[place, 2 : 2 + int(LENGTHS[index])] = 1


def trl_loss(
    loss: str, log_probs: Tensor, reference: Tensor, **settings: Any
) -> tuple[Tensor, dict[str, float]]:
    """Return the mean loss of TRL's DPOTrainer over the pairs, and its metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
        trainer_class = importlib.import_module("trl.trainer.dpo_trainer").DPOTrainer
    table = torch.zeros(6, 8, dtype=torch.float64)
    rows = torch.argsort(ORDER)[ROW]
    columns = torch.cat([torch.arange(int(length)) for length in LENGTHS]) + 1
    table = table.index_put((rows, columns), log_probs)
    outputs = SimpleNamespace(
        log_probs=table, entropy=table, mean_logits=table, is_top1=table < 0
    )

    def itself(values: Tensor) -> Tensor:
        return values

    trainer = trainer_class.__new__(trainer_class)
    vars(trainer).update(
        model=SimpleNamespace(training=True), beta=settings["beta"], label_smoothing=settings.get("label_smoothing", 0.0),
        loss_types=[loss], loss_weights=[1.0], f_divergence_type="reverse_kl", use_weighting=False,
        ld_alpha=None, precompute_ref_logps=True, aux_loss_enabled=False, _total_train_tokens=0, _tp_size=1,
        accelerator=SimpleNamespace(device="cpu", gather=itself, gather_for_metrics=itself),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    sums = sums_of(reference)
    inputs = {
        "input_ids": MASK, "attention_mask": MASK, "completion_mask": MASK,
        "ref_chosen_logps": sums[0::2], "ref_rejected_logps": sums[1::2],
    }  # fmt: skip
    found = trainer._compute_loss(lambda **_: outputs, inputs, return_outputs=False)
    return found, {
        name: values[0]
        for name, values in trainer._metrics["train"].items()
        if name.startswith(("rewards/", "logps/"))
    }


@pytest.mark.parametrize(
    "loss",
    [
        name
        for name, one in DECLARED.items()
        if one.has_reference and not one.is_unpaired
    ],
)
@pytest.mark.parametrize("beta", [0.1, 1.5])
def test_losses_gradients_and_metrics_are_those_of_trl(loss: str, beta: float) -> None:
    settings = {"beta": beta}
    if loss in ("cdpo", "robust"):
        settings["label_smoothing"] = 0.2
    log_probs, reference = log_probs_of(0).requires_grad_(), log_probs_of(1)

    found = measured(loss, log_probs, reference, **settings)
    (gradient,) = torch.autograd.grad(found.loss.mean(), log_probs)
    if loss == "cdpo":
        # TRL has none; it is its loss of either label, weighted.
        right, metrics = trl_loss("sigmoid", log_probs, reference, beta=beta)
        wrong, _ = trl_loss("sigmoid", log_probs, reference, beta=-beta)
        expected = 0.8 * right + 0.2 * wrong
    else:
        expected, metrics = trl_loss(loss, log_probs, reference, **settings)
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)

    assert float(found.loss.mean()) == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-9)
    means = {name: float(values.mean()) for name, values in found.metrics.items()}
    assert means == pytest.approx(metrics, rel=1e-6)


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_losses_without_a_reference_are_those_of_trl(beta: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
        cpo = importlib.import_module("trl.experimental.cpo.cpo_trainer").CPOTrainer
        orpo = importlib.import_module("trl.experimental.orpo.orpo_trainer").ORPOTrainer
    log_probs = log_probs_of(3)
    means = sums_of(log_probs) / torch.tensor(LENGTHS)
    here = SimpleNamespace(device="cpu")

    simpo = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=0.7, beta=beta, label_smoothing=0.0, accelerator=here,
    )  # fmt: skip
    losses, chosen, rejected = cpo.cpo_loss(simpo, means[0::2], means[1::2])
    found = measured("simpo", log_probs, log_probs, beta=beta, gamma=0.7)
    assert torch.allclose(found.loss, losses.float())
    assert torch.allclose(found.metrics["rewards/chosen"], chosen.float())
    assert torch.allclose(found.metrics["rewards/rejected"], rejected.float())

    odds = SimpleNamespace(beta=beta, accelerator=here)
    losses, *_ = orpo.odds_ratio_loss(odds, means[0::2], means[1::2])
    found = measured("orpo", log_probs, log_probs, beta=beta)
    assert torch.allclose(found.loss, (-means[0::2] - losses).float())
