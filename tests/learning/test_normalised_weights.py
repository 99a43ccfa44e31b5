"""Weights of a correction over their mean: by hand, and whatever the ranks are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.corrections import NO_CORRECTION
from tests.learning.test_objectives import algorithm
from tests.rows import log_probs_of, on_responses, rollouts_of
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Credit, LogProbs, Rollouts
from verl_ray.config.algorithm import AlgorithmConfig, CorrectionConfig
from verl_ray.errors import DataError
from verl_ray.learning.correction_weights import correction_metrics
from verl_ray.learning.objectives import LossInputs
from verl_ray.learning.policy_objective import PolicyObjective, mean_weight
from verl_ray.ops.outputs import TokenOutputs

RATIOS = [4.0, 0.5, 0.125, 1.0, 3.0]
"""Of three tokens of one row, one of another, and one of a row that is left out."""


def correction(kind: str, level: str, lower: float | None = None) -> AlgorithmConfig:
    return algorithm(correction=correction_of(kind, level, lower))


def correction_of(
    kind: str, level: str, lower: float | None = None
) -> CorrectionConfig:
    return NO_CORRECTION.model_copy(
        update={
            "form": "three_policy", "kind": kind, "level": level, "lower": lower, "upper": 2.0,
            "normalise": True,
        }
    )  # fmt: skip


def credit_of(rows: Rollouts, in_loss: list[bool]) -> Credit:
    zeros = np.zeros(rows.num_rows, np.float32)
    return Credit(
        offsets=rows.offsets, advantages=rows.response_mask.astype(np.float32),
        in_loss=np.array(in_loss), is_positive=zeros > 0, reward=zeros, kl=zeros,
        kl_bounded=zeros.astype(np.int64), advantage_statistics=np.zeros((rows.num_rows, 4)),
    )  # fmt: skip


def mini_batch(ratios: list[float]) -> tuple[Rollouts, Credit, LogProbs]:
    rows = rollouts_of([3, 1, 1])
    sampler = on_responses(rows, [-2.0] * 5)
    rows = rows.replace(rollout_log_probs=sampler)
    old = log_probs_of(rows, [-2.0 + float(np.log(ratio)) for ratio in ratios])
    return rows, credit_of(rows, [True, True, False]), old


def itself(values: NDArray[Any]) -> NDArray[Any]:
    return values


@pytest.mark.parametrize(
    ("kind", "level", "lower", "expected"),
    [
        ("tis", "token", None, (2 + 0.5 + 0.125 + 1) / 4),
        # What the kind leaves out counts as 0.
        ("mis", "token", None, (0 + 0.5 + 0.125 + 1) / 4),
        ("icepop", "token", 0.25, (0 + 0.5 + 0 + 1) / 4),
        # The products of the two rows are 0.25 and 1: the mean is over two.
        ("tis", "sequence", None, (0.25 + 1) / 2),
        ("tis", "geometric", None, (0.25 ** (1 / 3) + 1) / 2),
    ],
)
def test_the_mean_by_hand(
    kind: str, level: str, lower: float | None, expected: float
) -> None:
    """These are the numbers of verl's rollout_is_batch_normalize, too."""
    found = mean_weight(correction(kind, level, lower), *mini_batch(RATIOS), itself)
    assert found == pytest.approx(expected, rel=1e-6)


def test_rejections_do_not_change_the_mean_and_zeros_are_not_divided_by() -> None:
    rejecting = algorithm(
        correction=correction_of("tis", "token").model_copy(
            update={"rejections": {"token_k1": (None, 2.0)}}
        )
    )
    found = mean_weight(rejecting, *mini_batch(RATIOS), itself)
    assert found == pytest.approx(3.625 / 4)
    far = [9.0, 9.0, 9.0, 9.0, 1.0]
    assert mean_weight(correction("mis", "token"), *mini_batch(far), itself) == 1
    rows, credit, old = mini_batch(RATIOS)
    nothing = rows.select([]), credit.select([]), old.select([])
    assert mean_weight(correction("tis", "token"), *nothing, itself) == 1
    broken = [float("nan"), *RATIOS[1:]]
    assert np.isnan(
        mean_weight(correction("tis", "token"), *mini_batch(broken), itself)
    )


def test_log_probs_of_before_the_step_are_needed() -> None:
    rows, credit, _ = mini_batch(RATIOS)
    with pytest.raises(DataError, match=r"algorithm.correction.normalise needs"):
        mean_weight(correction("tis", "token"), rows, credit, None, itself)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=2, max_size=8).filter(any),
    seed=st.integers(0, 1000),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    ranks=st.integers(1, 3),
    data=st.data(),
)
def test_ranks_and_the_order_of_rows_change_nothing(
    lengths: list[int], seed: int, level: str, ranks: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    rows = rollouts_of(lengths)
    tokens = sum(lengths)
    rows = rows.replace(rollout_log_probs=on_responses(rows, random.normal(-2, 1, tokens)))  # fmt: skip
    old = log_probs_of(rows, random.normal(-2, 1, tokens).tolist())
    credit = credit_of(rows, (random.random(len(lengths)) < 0.8).tolist())
    config = correction("tis", level)
    whole = mean_weight(config, rows, credit, old, itself)

    order = np.array(data.draw(st.permutations(range(len(lengths)))))
    parts: list[Int64] = np.array_split(order, ranks)
    sums: list[NDArray[Any]] = []
    for part in parts:
        own = rows.select(part), credit.select(part), old.select(part)
        mean_weight(config, *own, lambda values: sums.append(values) or values)
    total = np.sum(sums, axis=0)
    for part in parts:
        own = rows.select(part), credit.select(part), old.select(part)
        found = mean_weight(config, *own, lambda _: total)
        assert found == pytest.approx(whole, rel=1e-12)


def test_the_loss_is_divided_and_the_factor_reported() -> None:
    """Weights 1.5 and 0.5 over their mean of 1 / 2 are 3 and 1; masks are as before."""
    config = algorithm(
        policy_loss="reinforce", clip_low=None, clip_high=None,
        correction=correction_of("tis", "token").model_copy(update={"upper": 1.5}),
    )  # fmt: skip
    log_probs = torch.log(torch.tensor([0.4, 0.2])).requires_grad_()
    outputs = TokenOutputs(log_probs=log_probs, entropy=torch.zeros(2))
    inputs = LossInputs(
        torch.tensor([0, 0]), advantages=torch.ones(2), old_log_probs=log_probs.detach(),
        rollout_log_probs=torch.log(torch.tensor([0.2, 0.4])),
    )  # fmt: skip
    found = PolicyObjective(config, 1.0, 0.0, mean_weight=0.5)(outputs, inputs)
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_probs)
    assert gradient.tolist() == pytest.approx([-3, -1])
    means = {name: float(each.mean()) for name, each in found.metrics.items()}
    maxima = {name: float(each.max()) for name, each in found.maxima.items()}
    metrics = correction_metrics(means, maxima)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(0.5)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1)
