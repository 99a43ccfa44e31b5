"""Metrics of the mismatch of sampler and trainer by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from verl_ray.algorithms.mismatch import (
    compare_log_probs,
    fresh_means,
    mismatch_metrics,
    of_units,
)

TRAINER = np.array([0.5, 0.25, 0.8, 0.1])  # two responses, of two tokens each
SAMPLER = np.array([0.25, 0.5, 0.8, 0.2])
ROW = torch.tensor([0, 0, 1, 1, 2, 2])


def metrics_of(
    trainer: np.ndarray,
    sampler: np.ndarray,
    parts: list[list[int]],
    unit: Tensor | None = None,
) -> dict[str, float]:
    """Return the metrics from sums over parts (micro-batches, ranks).

    With units there is one loss for each, in place of one for each token.
    """
    compared = [place for part in parts for place in part]
    losses = len(compared) if unit is None else len(unit[compared].unique())
    sums: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for part in parts:
        log_p, log_q = (
            torch.tensor(np.log(p[part]), dtype=torch.float32)
            for p in (trainer, sampler)
        )
        means, maxima = compare_log_probs(log_p, log_q, ROW[part])
        values_of_part = len(part)
        if unit is not None:
            _, number = unit[part].unique(return_inverse=True)
            values_of_part = int(number.max()) + 1
            means, maxima = of_units(means, maxima, number, values_of_part)
        for name, values in means.items():
            assert values.shape == (values_of_part,) and values.dtype == torch.float32
            sums[name] = sums.get(name, 0.0) + float(values.sum())
        for name, values in maxima.items():
            peaks[name] = max(peaks.get(name, 0.0), float(values.max()))
    return mismatch_metrics(
        {name: total / losses for name, total in sums.items()}, peaks
    )


@pytest.mark.parametrize(
    "unit", [None, ROW[:4], ROW[:4] * 0], ids=["token", "row", "pair"]
)
@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3]], [[2, 3], [0, 1]]], ids=["at once", "row by row"]
)
def test_by_hand(parts: list[list[int]], unit: Tensor | None) -> None:
    if unit is not None and not unit.any():
        # A unit is in one part.
        parts = [[0, 1, 2, 3]]
    found = metrics_of(TRAINER, SAMPLER, parts, unit)
    difference = np.array([0.25, 0.25, 0, 0.1])
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.15)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert found["training/rollout_probs_diff_std"] == pytest.approx(difference.std())
    correlation = np.corrcoef(TRAINER, SAMPLER)[0, 1]
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(
        correlation, rel=1e-5
    )
    # trainer / sampler = 2, 1/2, 1, 1/2
    ln2 = math.log(2)
    assert found["rollout_corr/kl"] == pytest.approx(ln2 / 4)
    assert found["rollout_corr/k3_kl"] == pytest.approx(
        (2 + 0.5 + 1 + 0.5 - 4 + ln2) / 4
    )
    assert found["rollout_corr/chi2_token"] == pytest.approx(
        (4 + 0.25 + 1 + 0.25) / 4 - 1
    )
    assert found["rollout_corr/chi2_seq"] == pytest.approx(
        (1 + 0.25) / 2 - 1
    )  # products 1 and 1/2
    assert found["rollout_corr/training_ppl"] == pytest.approx(
        (1 / math.sqrt(0.125) + 1 / math.sqrt(0.08)) / 2
    )
    assert found["rollout_corr/rollout_ppl"] == pytest.approx(
        (1 / math.sqrt(0.125) + 1 / math.sqrt(0.16)) / 2
    )
    # -log p per token: of the trainer 3 ln 2 / 2 and -log(0.08) / 2
    trainer_log_ppl = (1.5 * ln2 - math.log(0.08) / 2) / 2
    assert found["rollout_corr/training_log_ppl"] == pytest.approx(trainer_log_ppl)
    assert found["rollout_corr/rollout_log_ppl"] == pytest.approx(
        trainer_log_ppl - ln2 / 4
    )
    assert found["rollout_corr/log_ppl_diff"] == pytest.approx((0 + ln2 / 2) / 2)
    assert found["rollout_corr/ppl_ratio"] == pytest.approx((1 + math.sqrt(2)) / 2)


@pytest.mark.parametrize(
    ("trainer", "sampler", "rows", "expected"),
    [
        (TRAINER, SAMPLER, [0, 1], [0.5, 0.0, 0.25]),
        (SAMPLER, TRAINER, [0, 1], [0.0, -0.5, 0.25]),
        (TRAINER, SAMPLER, [1], [0.5, 0.5, 0.5]),
        (SAMPLER, TRAINER, [1], [-0.5, -0.5, 0.5]),
        # A third row of 0.8 and 0.2 against 0.2 and 0.2: half of log(1 / 4).
        ([*SAMPLER, 0.8, 0.2], [*TRAINER, 0.2, 0.2], [1, 2], [-0.5, -1.0, 0.75]),
        ([*TRAINER, 0.8, 0.2], [*SAMPLER, 0.2, 0.2], [1, 2], [0.5, -1.0, 0.75]),
    ],
)
@pytest.mark.parametrize("unit", [False, True])
def test_the_extreme_differences_of_rows(
    trainer: np.ndarray,
    sampler: np.ndarray,
    rows: list[int],
    expected: list[float],
    unit: bool,
) -> None:
    """In multiples of log 2, on either side of 0, whatever the order of the rows."""
    row = torch.tensor([0, 0, 1, 1, 2, 2])
    parts = [[2 * each, 2 * each + 1] for each in rows]
    for ordered in (parts, parts[::-1], [[place for part in parts for place in part]]):
        found = metrics_of(
            np.array(trainer), np.array(sampler), ordered, row if unit else None
        )
        names = ("diff_max", "diff_min", "abs_diff")
        values = [found[f"rollout_corr/log_ppl_{name}"] / math.log(2) for name in names]
        assert values == pytest.approx(expected, abs=1e-6)


FRESH = (
    "staleness/fresh_kl",
    "staleness/fresh_k3_kl",
    "staleness/fresh_probs_diff_mean",
)


def fresh_metrics_of(is_fresh: list[int], parts: list[list[int]]) -> dict[str, float]:
    """Return the metrics from sums over parts, where some tokens are fresh."""
    sums: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for part in parts:
        log_p, log_q = (
            torch.tensor(np.log(p[part]), dtype=torch.float32)
            for p in (TRAINER, SAMPLER)
        )
        means, maxima = compare_log_probs(log_p, log_q, ROW[part])
        fresh = torch.tensor(is_fresh, dtype=torch.float32)[part]
        means |= fresh_means(means, fresh)
        for name, values in means.items():
            sums[name] = sums.get(name, 0.0) + float(values.sum())
        for name, values in maxima.items():
            peaks[name] = max(peaks.get(name, 0.0), float(values.max()))
    means_of_all = {name: total / 4 for name, total in sums.items()}
    found = mismatch_metrics(means_of_all, peaks)
    return {
        name: value for name, value in found.items() if name.startswith("staleness/")
    }


@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3]], [[2, 3], [0, 1]]], ids=["at once", "row by row"]
)
def test_fresh_tokens_by_hand(parts: list[list[int]]) -> None:
    """The mean is over the fresh tokens alone: the first and the last of four."""
    ln2 = math.log(2)
    found = fresh_metrics_of([1, 0, 0, 1], parts)
    # sampler / trainer = 1/2 and 2; k3 = ratio - 1 - log ratio with trainer / sampler
    kl = (-ln2 + ln2) / 2
    k3 = ((2 - 1 - ln2) + (0.5 - 1 + ln2)) / 2
    expected = dict(zip(FRESH, (kl, k3, (0.25 + 0.1) / 2), strict=True))
    assert found == pytest.approx(expected, abs=1e-6)


def test_older_tokens_do_not_count_as_mismatch() -> None:
    """Where the fresh tokens are exact, all of the mismatch is the policy's drift."""
    assert fresh_metrics_of([0, 0, 1, 0], [[0, 1, 2, 3]]) == dict.fromkeys(FRESH, 0.0)


def test_nothing_is_told_of_fresh_tokens_where_there_are_none() -> None:
    assert fresh_metrics_of([0, 0, 0, 0], [[0, 1, 2, 3]]) == {}


def test_one_policy_is_at_distance_zero() -> None:
    found = metrics_of(TRAINER, TRAINER, [[0, 1, 2, 3]])
    differences = (
        "rollout_corr/k",
        "rollout_corr/chi2",
        "rollout_corr/log_ppl",
        "training/rollout_probs_diff",
    )
    apart = {
        name: value for name, value in found.items() if name.startswith(differences)
    }
    assert set(apart.values()) == {0.0} and len(apart) == 11
    assert (
        found["rollout_corr/ppl_ratio"] == 1
        and found["rollout_corr/training_ppl"] == found["rollout_corr/rollout_ppl"]
    )


def test_near_zero_digits_are_kept_and_far_apart_nothing_overflows() -> None:
    near = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0 + 1e-6, -2.0])
    means, _ = compare_log_probs(*near, torch.tensor([0, 0]))
    assert float(means["mismatch/token/chi2"][0]) == pytest.approx(-2e-6, rel=0.1)
    means, maxima = compare_log_probs(
        torch.tensor([-0.1, -90.0]), torch.tensor([-90.0, -0.1]), torch.tensor([0, 1])
    )
    assert all(
        bool(values.isfinite().all()) for values in (*means.values(), *maxima.values())
    )


def test_policies_that_do_not_vary_have_no_correlation_and_nothing_compared_tells_nothing() -> (
    None
):
    constant = np.full(4, 0.5)
    assert math.isnan(
        metrics_of(constant, constant, [[0, 1, 2, 3]])[
            "training/rollout_actor_probs_pearson_corr"
        ]
    )
    assert mismatch_metrics({"actor/entropy": 1.0}, {}) == {}


def test_no_gradient_and_no_wait_for_the_device() -> None:
    log_probs: Tensor = torch.zeros(4, device="meta", requires_grad=True)
    means, maxima = compare_log_probs(
        log_probs,
        torch.zeros(4, device="meta"),
        torch.zeros(4, dtype=torch.int64, device="meta"),
    )
    assert not any(
        values.requires_grad for values in (*means.values(), *maxima.values())
    )
