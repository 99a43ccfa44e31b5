"""Losses of the policy against those of TRL: the same numbers, value and gradient.

TRL's own code runs, on the CPU and in float64: a trainer without a model, whose
log-probs are given. Where TRL divides by something else, the comparison is scaled, and
the comment says why. Not compared, since TRL has none of them: DPPO, DRO, M2PO,
Clip-Cov, KL-Cov.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections import defaultdict
from dataclasses import MISSING, dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.algorithms.choices import with_loss
from tests.corrections import corrected
from verl_ray.algorithms.aggregation import aggregate
from verl_ray.algorithms.row_weights import row_weights
from verl_ray.algorithms.token_selection import SelectableTokens, largest_entropy
from verl_ray.learning.objectives import LossInputs
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.ops.outputs import TokenOutputs

LENGTHS = np.array([5, 3, 1, 0, 4, 2])
"""Trained tokens of the rows; one has none."""
ADVANTAGES = (1.2, -0.7, 0.5, 0.9, -1.5, 0.0)
HORIZON = 8


@dataclass(frozen=True)
class Columns:
    """Values of the trained tokens, float64 [15] each; `row` is int64."""

    row: Tensor
    log_probs: Tensor
    old: Tensor
    sampler: Tensor
    reference: Tensor
    entropy: Tensor
    advantages: Tensor


def columns(spread: float = 0.4, seed: int = 0) -> Columns:
    random = np.random.default_rng(seed)
    count = int(LENGTHS.sum())
    old = -random.uniform(0.5, 3, count)
    near = [old + random.normal(0, each, count) for each in (spread, 0.3, 0.5)]
    entropy = random.permutation(np.linspace(0.1, 3, count))
    row = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
    return Columns(
        row, *(torch.tensor(each) for each in (near[0], old, *near[1:], entropy)),
        torch.tensor(ADVANTAGES, dtype=torch.float64)[row],
    )  # fmt: skip


# ------------------------------------------------------------------------------- TRL


@functools.cache
def trl() -> SimpleNamespace:
    """TRL's trainers, and the usual values of its settings.

    TRL imports vLLM where there is one, which costs seconds that losses do not need.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
        grpo = importlib.import_module("trl.trainer.grpo_trainer")
        gmpo = importlib.import_module("trl.experimental.gmpo.gmpo_trainer")
        config = importlib.import_module("trl.trainer.grpo_config")
    usual = {
        field.name: field.default
        for field in fields(config.GRPOConfig)
        if field.default is not MISSING
    }
    return SimpleNamespace(grpo=grpo.GRPOTrainer, gmpo=gmpo.GMPOTrainer, usual=usual)


ONE_PROCESS = SimpleNamespace(
    num_processes=1,
    gather=lambda values: values,
    reduce=lambda values, reduction: values,
    pad_across_processes=lambda values, dim, pad_index: values,
)
"""What TRL asks of the accelerator."""


def trainer_of(loss_type: str, micro_batches: int, **changes: Any) -> Any:
    """Return a trainer of TRL that can do nothing but compute losses."""
    settings = trl().usual | {"steps_per_generation": micro_batches} | changes
    trainer_class = trl().gmpo if loss_type == "gmpo" else trl().grpo
    trainer = trainer_class.__new__(trainer_class)
    vars(trainer).update(
        settings,
        args=SimpleNamespace(**settings),
        loss_type=loss_type,
        epsilon_low=settings["epsilon"],
        epsilon_high=settings["epsilon_high"] or settings["epsilon"],
        max_completion_length=HORIZON,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=micro_batches,
        accelerator=ONE_PROCESS,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    return trainer


def padded(values: Tensor) -> Tensor:
    """Return a value per token as [rows, 5], with 1 where there is no token."""
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.cat([torch.arange(int(length)) for length in LENGTHS])
    table = torch.ones(len(LENGTHS), 5, dtype=torch.float64)
    return table.index_put((row, place), values)


def of_trl(
    loss_type: str,
    at: Columns,
    parts: tuple[list[int], ...] = ([0, 1, 2, 3, 4, 5],),
    weight: Tensor | None = None,
    **changes: Any,
) -> tuple[float, Tensor]:
    """Return TRL's loss of an optimizer step, and its gradient.

    Args:
        loss_type: TRL's name of the loss.
        at: The tokens.
        parts: The rows of each micro-batch.
        weight: Importance weights of the tokens against the sampler.
        changes: Settings that are not as usual.
    """
    trainer = trainer_of(loss_type, len(parts), **changes)
    log_probs = at.log_probs.clone().requires_grad_()
    token_values = {
        "old_per_token_logps": at.old,
        "ref_per_token_logps": at.reference,
        "sampling_per_token_logps": at.sampler,
    }
    if weight is not None:
        token_values["importance_sampling_ratio"] = weight
    counts = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    row_values = {
        "prompt_ids": torch.zeros(6, 1),
        "prompt_mask": torch.ones(6, 1),
        "completion_ids": torch.zeros(6, 5),
        "completion_mask": counts.double(),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        **{name: padded(values) for name, values in token_values.items()},
    }
    total = torch.zeros((), dtype=torch.float64)
    for rows in parts:
        outputs = padded(log_probs)[rows], padded(at.entropy)[rows], None
        trainer._get_per_token_logps_and_entropies = lambda *_, o=outputs, **__: o
        inputs = {name: values[rows] for name, values in row_values.items()}
        inputs["num_items_in_batch"] = torch.tensor(float(LENGTHS.sum()))
        total = total + trainer._compute_loss(trainer.model, inputs)
    (grad,) = torch.autograd.grad(total, log_probs)
    return total.item(), grad


# ------------------------------------------------------------------------------ ours


def of_ours(
    policy_loss: str,
    aggregation: str,
    at: Columns,
    uncertain: Tensor | None = None,
    **changes: Any,
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Return our loss, its gradient, and the metrics of the tokens."""
    config = with_loss(policy_loss, **changes)
    log_probs = at.log_probs.clone().requires_grad_()
    found = PolicyObjective(config, 1.0, config.kl.coefficient or 0.0)(
        TokenOutputs(log_probs=log_probs, entropy=at.entropy),
        LossInputs(
            at.row, rollout_log_probs=at.sampler, old_log_probs=at.old,
            ref_log_probs=at.reference, advantages=at.advantages, uncertain=uncertain,
        ),
    )  # fmt: skip
    weights = row_weights(
        aggregation, LENGTHS, total_tokens=int(LENGTHS.sum()),
        total_rows=int((LENGTHS > 0).sum()), horizon=HORIZON,
    )  # fmt: skip
    loss = aggregate(found.loss, at.row, torch.from_numpy(weights))
    (grad,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), grad, found.metrics


def agree(
    ours: tuple[float, Tensor, dict[str, Tensor]],
    theirs: tuple[float, Tensor],
    scale: float = 1.0,
) -> None:
    # Weights and temperatures are float32.
    assert ours[0] == pytest.approx(scale * theirs[0], rel=1e-6, abs=1e-7)
    torch.testing.assert_close(ours[1], scale * theirs[1], rtol=1e-6, atol=1e-8)


ROWS = 6 / 5
"""TRL's means over rows count those without trained tokens, ours do not."""


# ------------------------------------------------------------------------ comparisons


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss_type", "aggregation", "scale"),
    [
        ("dapo", "token_mean", 1.0),
        ("bnpo", "token_mean", 1.0),
        ("grpo", "seq_mean_token_mean", ROWS),
        ("dr_grpo", "seq_mean_token_sum_norm", ROWS),
    ],
)
@pytest.mark.parametrize(
    ("clip", "theirs"),
    [
        ({"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}, {}),
        # The two-sided clip of INTELLECT-2.
        ({"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}, {"delta": 1.5}),
    ],
)
def test_clipped_losses(
    loss_type: str,
    aggregation: str,
    scale: float,
    clip: dict[str, Any],
    theirs: dict[str, Any],
    seed: int,
) -> None:
    at = columns(seed=seed)
    ours = of_ours("ppo_clip", aggregation, at, **clip)
    agree(ours, of_trl(loss_type, at, epsilon=0.2, epsilon_high=0.28, **theirs), scale)
    # Some tokens are beyond each bound, and others within.
    for name in ("actor/pg_clipfrac", *(["actor/pg_clipfrac_lower"] if theirs else [])):
        assert 0 < ours[2][name].mean() < 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [("grpo", "seq_mean_token_mean"), ("luspo", "seq_mean_token_sum")],
)
def test_gspo_and_luspo(loss_type: str, aggregation: str, seed: int) -> None:
    at = columns(seed=seed)
    ours = of_ours("gspo", aggregation, at, clip_low=0.05, clip_high=0.1)
    theirs = of_trl(
        loss_type, at, importance_sampling_level="sequence", epsilon=0.05, epsilon_high=0.1
    )  # fmt: skip
    agree(ours, theirs, ROWS)
    assert 0 < ours[2]["actor/pg_clipfrac"].mean() < 1


@pytest.mark.parametrize("seed", range(3))
def test_cispo(seed: int) -> None:
    """TRL's epsilon_high is the upper bound of the ratio itself."""
    at = columns(seed=seed)
    ours = of_ours("cispo", "token_mean", at, ratio_max=1.3)
    agree(ours, of_trl("cispo", at, epsilon_high=1.3))
    assert 0 < ours[2]["actor/pg_clipfrac"].mean() < 1


@pytest.mark.parametrize("seed", range(3))
def test_sapo(seed: int) -> None:
    """The usual temperatures of both are the same."""
    at = columns(seed=seed)
    agree(of_ours("sapo", "seq_mean_token_mean", at), of_trl("sapo", at), ROWS)


@pytest.mark.parametrize("seed", range(3))
def test_vespo(seed: int) -> None:
    """The usual powers and rates of both are the same.

    With importance weights TRL's ratio is that to the sampler.
    """
    at = columns(seed=seed)
    agree(of_ours("vespo", "token_mean", at), of_trl("vespo", at))

    ours = of_ours("vespo", "token_mean", at, correction=corrected(form="two_policy"))
    agree(ours, of_trl("vespo", at, weight=(at.old - at.sampler).exp()))


@pytest.mark.parametrize("seed", range(3))
def test_gmpo(seed: int) -> None:
    """TRL's value counts -A of a row without trained tokens; its gradient does not."""
    at = columns(seed=seed)
    ours = of_ours("gmpo", "seq_mean_token_mean", at)
    value, grad = of_trl("gmpo", at, epsilon=0.4)
    agree(ours, (value + ADVANTAGES[3] / 6, grad), ROWS)
    assert 0 < ours[2]["actor/pg_clipfrac"].mean() < 1


@pytest.mark.parametrize("weighted", [False, True])
def test_divergence_from_the_reference(weighted: bool) -> None:
    at = columns()
    kl = {"place": "loss", "estimator": "k3", "coefficient": 0.3}
    ours = of_ours(
        "ppo_clip", "token_mean", at, kl=kl | {"controller": "fixed", "importance_weighted": weighted}
    )  # fmt: skip
    agree(ours, of_trl("dapo", at, beta=0.3, use_bias_correction_kl=weighted))


def test_weights_of_the_sampler() -> None:
    """Token weights up to 1.2, which TRL computes before the loss."""
    at = columns()
    correction = corrected(form="three_policy", kind="tis", level="token", upper=1.2)
    ours = of_ours("ppo_clip", "token_mean", at, correction=correction)
    weight = (at.old - at.sampler).exp().clamp(max=1.2)
    used = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    theirs = of_trl("dapo", at, weight=weight, **used)
    assert (weight == 1.2).any()
    agree(ours, theirs)


def test_rows_that_have_drifted() -> None:
    """TRL's threshold of the off-policy mask."""
    at = columns()
    ours = of_ours("ppo_clip", "token_mean", at, negative_drift=0.05)
    agree(ours, of_trl("dapo", at, off_policy_mask_threshold=0.05))
    assert 0 < ours[2]["actor/passed_over"].sum() < 7, "rows 1 and 4 have 7 tokens"


@pytest.mark.parametrize("share", [0.2, 0.4])
def test_tokens_of_large_entropy(share: float) -> None:
    """Both keep the divisor, which counts all tokens.

    TRL takes what reaches a quantile that it interpolates, so that it may take one
    token more than the share; here it does not.
    """
    at = columns()
    tokens = SelectableTokens(
        *(np.zeros(15, np.float32),) * 3, at.entropy.numpy().astype(np.float32),
        np.arange(15, dtype=np.uint64), lambda each: each,
    )  # fmt: skip
    uncertain = torch.tensor(largest_entropy(tokens, share=share)).double()
    ours = of_ours("ppo_clip", "token_mean", at, uncertain)
    agree(ours, of_trl("dapo", at, top_entropy_quantile=share))
    assert uncertain.sum() == int(share * 15)


def test_micro_batches() -> None:
    """Sums over an optimizer step agree, whatever the micro-batches.

    TRL's other losses take means of micro-batches, which depend on the cut where rows
    or tokens are not shared out evenly: ours of the whole is none of theirs.
    """
    at = columns()
    parts = ([4, 0], [1, 2, 3, 5])
    ours = of_ours("ppo_clip", "token_mean", at)
    theirs = of_trl("dapo", at, parts)
    agree(ours, theirs)
    agree(
        of_ours("cispo", "token_mean", at), of_trl("cispo", at, parts, epsilon_high=5.0)
    )
    assert of_trl("bnpo", at, parts)[0] != pytest.approx(ours[0], rel=0.01)
