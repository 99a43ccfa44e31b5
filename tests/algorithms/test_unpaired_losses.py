"""Losses of single responses with labels: by hand, against TRL's, and their metrics."""

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

from tests.algorithms.preferences import unpaired_objective
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.preference_losses import PREFERENCE_LOSSES, LabelledResponses
from verl_ray.learning.objectives import LossInputs
from verl_ray.learning.preference_objective import label_metrics
from verl_ray.ops.outputs import TokenOutputs

LENGTHS = torch.tensor([5, 3, 1, 4, 2])
ROW = torch.repeat_interleave(torch.arange(5), LENGTHS)
LABELS = torch.tensor([True, False, False, True, False])
UNPAIRED = [name for name, loss in PREFERENCE_LOSSES.items() if loss.is_unpaired]


def log_probs_of(seed: int) -> Tensor:
    values = -np.random.default_rng(seed).uniform(0.05, 2, len(ROW))
    return torch.tensor(values, dtype=torch.float64)


def sums_of(log_probs: Tensor) -> Tensor:
    return torch.zeros(5, dtype=torch.float64).index_add(0, ROW, log_probs)


def measured(
    loss: str,
    log_probs: Tensor,
    reference: Tensor,
    labels: Tensor = LABELS,
    **settings: Any,
) -> TokenLoss:
    inputs = LossInputs(ROW, desirable=labels, ref_log_prob=sums_of(reference))
    objective = unpaired_objective(loss, **settings)
    found = objective(TokenOutputs(log_probs=log_probs), inputs)
    assert found.loss.shape == (5,) and found.loss.dtype == torch.float32
    return found


def means_of(found: TokenLoss) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in found.metrics.items()}


def test_losses_by_hand() -> None:
    """At the reference each is half of its weight; off it, sigmoids of beta = 2."""
    for loss in UNPAIRED:
        found = measured(
            loss, log_probs_of(0), log_probs_of(0), kl=0.0, undesirable_weight=3.0
        )
        assert found.loss.tolist() == [0.5, 1.5, 1.5, 0.5, 1.5]

    def function(loss: str) -> list[float]:
        ratios = torch.tensor([0.5, -0.3])
        responses = LabelledResponses(
            ratios, 0 * ratios, torch.tensor([True, False]), kl=0.1
        )
        weights = {"desirable_weight": 1.0, "undesirable_weight": 3.0}
        losses = PREFERENCE_LOSSES[loss].function(responses, beta=2.0, **weights)
        return [float(value) for value in losses]

    assert function("kto") == pytest.approx(
        [1 / (1 + math.exp(0.8)), 3 / (1 + math.exp(0.8))], rel=1e-6
    )
    assert function("apo_zero_unpaired") == pytest.approx(
        [1 / (1 + math.exp(1.0)), 3 / (1 + math.exp(0.6))], rel=1e-6
    )


@pytest.mark.parametrize("loss", UNPAIRED)
def test_gradients_are_those_of_finite_differences(loss: str) -> None:
    declared = PREFERENCE_LOSSES[loss]
    settings = declared.settings(unpaired_objective(loss).config)
    reference = sums_of(log_probs_of(1))

    def function(log_prob: Tensor) -> Tensor:
        responses = LabelledResponses(log_prob, reference, LABELS, kl=0.4)
        return declared.function(responses, **settings)

    assert torch.autograd.gradcheck(function, sums_of(log_probs_of(0)).requires_grad_())


def test_a_loss_that_needs_a_divergence_has_one() -> None:
    with pytest.raises(ValueError, match="kto needs kl"):
        measured("kto", log_probs_of(0), log_probs_of(1))
    found = measured("apo_zero_unpaired", log_probs_of(0), log_probs_of(1))
    assert "kl" not in found.metrics


def test_means_of_a_label_without_responses_are_left_out() -> None:
    log_probs = log_probs_of(0)
    found = measured("kto", log_probs, log_probs_of(1), labels=LABELS | True, kl=0.0)
    metrics = label_metrics(means_of(found))
    assert metrics.keys() == {"rewards/chosen", "logps/chosen"}
    mean = float(sums_of(log_probs).mean())
    assert metrics["logps/chosen"] == pytest.approx(mean, rel=1e-6)
    assert label_metrics({"actor/loss": 1.0}) == {}


# ------------------------------------------------------------------------- against TRL

MASK = torch.zeros(5, 9, dtype=torch.int64)
"""Two tokens of prompt, a response, and padding."""
for place, length in enumerate(LENGTHS.tolist()):
    MASK[place, 2 : 2 + length] = 1


def table_of(log_probs: Tensor) -> Tensor:
    """Log-probs as TRL has them, [rows, places]."""
    table = torch.zeros(5, 8, dtype=torch.float64)
    columns = torch.cat([torch.arange(int(length)) for length in LENGTHS]) + 1
    return table.index_put((ROW, columns), log_probs)


def trl_loss(
    loss: str,
    log_probs: Tensor,
    reference: Tensor,
    mismatched: tuple[Tensor, Tensor],
    **settings: float,
) -> tuple[Tensor, dict[str, float]]:
    """Return the mean loss of TRL's KTOTrainer over the responses, and its metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
        trainer_class = importlib.import_module("trl.trainer.kto_trainer").KTOTrainer

    other_ids = MASK + 1

    def model(input_ids: Tensor, **_: Any) -> SimpleNamespace:
        table = table_of(mismatched[0] if input_ids is other_ids else log_probs)
        return SimpleNamespace(log_probs=table, entropy=table, mean_logits=table)

    def itself(values: Tensor) -> Tensor:
        return values

    trainer = trainer_class.__new__(trainer_class)
    vars(trainer).update(
        model=SimpleNamespace(training=True), loss_type=loss, calculate_KL=loss == "kto", precompute_ref_logps=True,
        aux_loss_enabled=False, _total_train_tokens=0, _tp_size=1, **settings,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=itself),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    # `Tensor.to` returns the tensor itself, which the model is asked for.
    inputs = {
        "input_ids": MASK, "attention_mask": MASK, "completion_mask": MASK, "label": LABELS,
        "KL_input_ids": other_ids, "KL_attention_mask": MASK, "KL_completion_mask": MASK,
        "ref_logps": sums_of(reference), "ref_KL_logps": sums_of(mismatched[1]),
    }  # fmt: skip
    found = trainer._compute_loss(model, inputs, return_outputs=False)
    names = ("rewards/", "logps/", "kl")
    metrics = trainer._metrics["train"]
    return found, {name: metrics[name][0] for name in metrics if name.startswith(names)}


@pytest.mark.parametrize("loss", UNPAIRED)
@pytest.mark.parametrize("seeds", [(2, 3), (3, 2)])
def test_losses_gradients_and_metrics_are_those_of_trl(
    loss: str, seeds: tuple[int, int]
) -> None:
    """One order of the other responses has a mean log ratio below 0, which counts 0."""
    settings = {"beta": 0.7, "desirable_weight": 1.3, "undesirable_weight": 0.6}
    log_probs, reference = log_probs_of(0).requires_grad_(), log_probs_of(1)
    others = log_probs_of(seeds[0]), log_probs_of(seeds[1])
    kl = max(0.0, float((sums_of(others[0]) - sums_of(others[1])).mean()))
    assert (kl > 0) == (seeds == (2, 3))

    found = measured(loss, log_probs, reference, kl=kl, **settings)
    (gradient,) = torch.autograd.grad(found.loss.mean(), log_probs)
    expected, metrics = trl_loss(loss, log_probs, reference, others, **settings)
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)

    assert float(found.loss.mean()) == pytest.approx(float(expected), rel=1e-6)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-9)
    means = means_of(found)
    if loss != "kto":
        metrics["kl"] = kl
    assert label_metrics(means) | {"kl": means["kl"]} == pytest.approx(
        metrics, rel=1e-6
    )
