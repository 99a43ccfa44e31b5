"""Ours against values that verl has computed, which `verl_values.json` holds.

Where verl deviates from the paper or counts otherwise, the comparison is scaled, and
the comment says why. Not compared, since there is no counterpart: PF-PPO's resampling.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.algorithms import verl_values as given
from tests.algorithms.choices import with_loss
from tests.corrections import corrected
from tests.learning.test_normalised_weights import credit_of
from tests.rows import log_probs_of, on_responses, rollouts_of
from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.aggregation import aggregate
from verl_ray.algorithms.catalogue import KL_ESTIMATORS
from verl_ray.algorithms.correction import rejections
from verl_ray.algorithms.estimators import ResponseColumns
from verl_ray.algorithms.group_baselines import gradient_energy
from verl_ray.algorithms.losses import PolicyTokens, value_loss
from verl_ray.algorithms.mismatch import compare_log_probs, mismatch_metrics
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.algorithms.row_weights import row_weights
from verl_ray.algorithms.token_selection import (
    SelectableTokens,
    largest_covariance,
    some_of_covariance,
)
from verl_ray.columns.batch import offsets_of
from verl_ray.learning.coefficients import AdaptiveKL
from verl_ray.learning.correction_weights import correction_metrics, correction_weights
from verl_ray.learning.objectives import LossInputs
from verl_ray.learning.policy_objective import PolicyObjective, mean_weight
from verl_ray.ops.masked import Moments, whiten
from verl_ray.ops.outputs import TokenOutputs

VERL = json.loads(Path(given.__file__).with_suffix(".json").read_text())
COUNTS = given.MASK == 1
LENGTHS = given.MASK.sum(1)
ROW = torch.tensor(np.repeat(np.arange(5), LENGTHS))
OFFSETS = np.cumsum([0, *LENGTHS])


def tokens_of(values: NDArray[np.float64]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = values[COUNTS].astype(np.float32)
    return found


def tensor_of(values: NDArray[np.float64]) -> torch.Tensor:
    return torch.tensor(values[COUNTS])


def weights_of(mode: str, horizon: int = 5) -> torch.Tensor:
    """Weights of the rows; verl's horizon is the width of the table, unless given."""
    weights = row_weights(
        mode, LENGTHS, total_tokens=14, total_rows=4, horizon=horizon
    )  # fmt: skip
    return torch.from_numpy(weights)


def close(found: Any, expected: Any, **tolerance: float) -> None:
    __tracebackhide__ = True
    values = found.tolist() if hasattr(found, "tolist") else found
    assert values == pytest.approx(expected, **({"rel": 1e-5, "abs": 1e-6} | tolerance))


def selected_of(name: str, settings: dict[str, Any]) -> torch.Tensor | None:
    """Choose tokens by the log-probs at hand, as verl does."""
    choose = {"kl_cov": largest_covariance, "clip_cov": some_of_covariance}.get(name)
    if choose is None:
        return None
    tokens = SelectableTokens(
        tokens_of(given.ADVANTAGES), tokens_of(given.LOG_PROBS), tokens_of(given.SAMPLER), None,
        np.arange(14, dtype=np.uint64), lambda values: values,
    )  # fmt: skip
    read = {key: value for key, value in settings.items() if key in ("cov_share", "cov_min", "cov_max")}  # fmt: skip
    return torch.tensor(choose(tokens, **read)).double()


@pytest.mark.parametrize("name", given.LOSSES)
def test_losses(name: str) -> None:
    _, _, changes = given.LOSSES[name]
    choice = POLICY_LOSSES[name]
    settings = {one.name: usual for one, usual in choice.reads.items()} | changes
    selection_settings = {one.name for one in choice.selection_reads}
    log_probs = tensor_of(given.LOG_PROBS).requires_grad_()
    found = choice.function(
        PolicyTokens(
            log_probs, tensor_of(given.OLD), tensor_of(given.ADVANTAGES), ROW, selected_of(name, settings)
        ),
        **{key: value for key, value in settings.items() if key not in selection_settings},
    )  # fmt: skip

    expected = VERL["losses"][name]
    # verl's GMPO takes the mean over all rows, with and without tokens.
    scale = 4 / 5 if name == "gmpo" else 1.0
    for mode, value in expected["loss"].items():
        loss = aggregate(found.loss, ROW, weights_of(mode))
        close(scale * loss.item(), value)
    loss = aggregate(found.loss, ROW, weights_of("seq_mean_token_mean"))
    (grad,) = torch.autograd.grad(loss, log_probs)
    close(scale * grad, expected["gradient"])
    if "ppo_kl" in expected:
        close(found.metrics["actor/ppo_kl"].mean(), expected["ppo_kl"])


@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo"])
def test_how_much_is_clipped(name: str) -> None:
    choice, (_, _, settings) = POLICY_LOSSES[name], given.LOSSES[name]
    at = (tensor_of(each) for each in (given.LOG_PROBS, given.OLD, given.ADVANTAGES))
    metrics = choice.function(PolicyTokens(*at, ROW), **settings).metrics
    clipped = sum(values.mean() for key, values in metrics.items() if "clipfrac" in key)
    assert 0 < VERL["losses"][name]["clipped"] < 1
    close(clipped, VERL["losses"][name]["clipped"])


@pytest.mark.parametrize("mode", given.MODES)
def test_aggregations(mode: str) -> None:
    loss = aggregate(tensor_of(given.REWARDS), ROW, weights_of(mode, horizon=8))
    close(loss.item(), VERL["aggregations"][mode])


@pytest.mark.parametrize("name", VERL["advantages"])
def test_advantages(name: str) -> None:
    expected = VERL["advantages"][name]
    choice = ADVANTAGES[name]
    rows = len(given.SCORES)
    scores, group, length = given.SCORES, given.GROUP, given.LENGTH
    is_last = np.zeros(rows, np.bool_)
    if choice.reads_greedy:
        # One more response to each prompt, whose score is verl's baseline.
        scores = np.append(scores, [0.5, 4.0, 0.0])
        group, length = np.append(group, [0, 1, 2]), np.append(length, [1, 1, 1])
        is_last = np.append(is_last, [True] * 3)

    valid = np.ones(len(scores), np.bool_)
    responses = ResponseColumns(
        np.zeros(len(scores), np.int8), group, np.arange(len(scores)), length, is_last
    )
    parts = [
        (weight, values.astype(np.float32))
        for weight, values in zip(given.PART_WEIGHTS, given.PARTS, strict=True)
        if choice.reads_parts
    ]
    found = choice.function(
        scores.astype(np.float32), group, valid, **choice.columns(valid, responses, parts)
    )[:rows]  # fmt: skip
    if name == "reinforce_plus_plus_baseline":
        # verl's deviation is that of a sample, ours that of a population.
        found = whiten(found, Moments.of(found)) * math.sqrt((rows - 1) / rows)
    close(found, expected, rel=1e-5)


@pytest.mark.parametrize("name", VERL["tokens"])
def test_advantages_of_tokens(name: str) -> None:
    kind, *numbers = name.split()
    settings = [float(number) for number in numbers]
    rewards = tokens_of(given.REWARDS)
    function = ADVANTAGES[kind].function
    if kind == "gae":
        values = tokens_of(given.VALUES)
        advantages, returns = function(
            rewards, values, OFFSETS, np.zeros(5, np.float32), *settings
        )
    else:
        returns = advantages = function(rewards, OFFSETS, *settings)
    close(returns, VERL["tokens"][name]["returns"])
    whitened = whiten(advantages, Moments.of(advantages)) * math.sqrt(13 / 14)
    close(whitened, VERL["tokens"][name]["whitened"])


def test_the_optimal_token_baseline() -> None:
    """With verl's handle_zero_tail=False: it is what the formula says of the tail."""
    lengths = given.ENERGY_MASK.sum(1)
    counts = given.ENERGY_MASK == 1
    rows = rollouts_of(lengths.tolist())
    squares = on_responses(rows, given.SQUARED_PROBS[counts].tolist())
    policy = log_probs_of(rows, given.OLD[counts].tolist())
    energy = gradient_energy(rows.response_mask, policy.replace(squared_probs=squares))
    found = ADVANTAGES["optimal_token_baseline"].function(
        given.ENERGY_SCORES.astype(np.float32), given.ENERGY_GROUP, np.ones(5, np.bool_), energy,
        offsets_of(lengths), trajectory=np.arange(5),
    )  # fmt: skip
    close(found, VERL["energy"])


@pytest.mark.parametrize("name", given.ESTIMATORS)
def test_divergences(name: str) -> None:
    log_probs = tensor_of(given.LOG_PROBS).requires_grad_()
    found = KL_ESTIMATORS[name].function(log_probs, tensor_of(given.REFERENCE))
    close(found, VERL["divergences"][name]["values"])
    (grad,) = torch.autograd.grad(found.sum(), log_probs)
    close(grad, VERL["divergences"][name]["gradient"])


def test_the_critic() -> None:
    values = tensor_of(given.VALUES).requires_grad_()
    found = value_loss(
        values, tensor_of(given.OLD_VALUES), tensor_of(given.RETURNS), clip=0.3
    )
    expected = VERL["values"]
    for mode, value in expected["loss"].items():
        close(aggregate(found.loss, ROW, weights_of(mode)).item(), value)
    loss = aggregate(found.loss, ROW, weights_of("token_mean"))
    close(torch.autograd.grad(loss, values)[0], expected["gradient"])
    close(found.metrics["critic/vf_clipfrac"].mean(), expected["clipped"])


def test_the_controller_of_the_divergence() -> None:
    control = AdaptiveKL(0.1, 1.0, 10_000)
    found = []
    for divergence, rows in given.KL_STEPS:
        control.update(divergence, rows)
        found.append(control.coefficient)
    close(found, VERL["kl_control"])


@pytest.mark.parametrize("name", given.CORRECTIONS)
def test_weights_against_the_sampler(name: str) -> None:
    kind, level = name.split()
    config = corrected(
        form="three_policy", kind=kind, level=level, upper=1.5,
        lower=0.6 if kind == "icepop" else None,
    )  # fmt: skip
    log_ratio = tensor_of(given.OLD - given.SAMPLER)
    found = correction_weights(config, log_ratio, ROW)
    assert found is not None
    expected = VERL["corrections"][name]
    close(found.weight, expected["weights"])
    means = {key: values.double().mean().item() for key, values in found.means.items()}
    maxima = {key: values.max().item() for key, values in found.maxima.items()}
    metrics = correction_metrics(means, maxima)
    # verl's deviation of the four rows is that of a sample.
    metrics["rollout_corr/rollout_is_seq_std"] *= math.sqrt(4 / 3)
    close({key: metrics[key] for key in expected["metrics"]}, expected["metrics"])


@pytest.mark.parametrize("name", given.CORRECTIONS)
def test_weights_over_their_mean(name: str) -> None:
    kind, level = name.split()
    correction = corrected(
        form="three_policy", kind=kind, level=level, upper=1.5, normalise=True,
        lower=0.6 if kind == "icepop" else None,
    )  # fmt: skip
    rows = rollouts_of(LENGTHS.tolist())
    rows = rows.replace(
        rollout_log_probs=on_responses(rows, tokens_of(given.SAMPLER).tolist())
    )
    old = log_probs_of(rows, tokens_of(given.OLD).tolist())
    mean = mean_weight(
        with_loss("ppo_clip", correction=correction),
        rows, credit_of(rows, [True] * 5), old, lambda values: values,
    )  # fmt: skip
    close(mean, VERL["normalised"][name]["mean"])
    weights = correction_weights(correction, tensor_of(given.OLD - given.SAMPLER), ROW)
    assert weights is not None
    close(weights.weight / mean, VERL["normalised"][name]["weights"])


@pytest.mark.parametrize("name", given.REJECTIONS)
def test_rejections(name: str) -> None:
    log_ratio = tensor_of(given.OLD - given.SAMPLER)
    found = rejections({name: given.REJECTIONS[name]}, log_ratio, ROW)[name]
    assert 0 < found.sum() < 14
    assert (~found).tolist() == [kept == 1 for kept in VERL["rejections"][name]]


@pytest.mark.parametrize("name", VERL["two_policy"])
def test_two_policies(name: str) -> None:
    """verl's bypass mode: the loss compares with the sampler's policy alone."""
    policy_loss, _, part = name.partition(", ")
    correction: dict[str, Any] = {"form": "two_policy"}
    if policy_loss == "reinforce":
        correction |= {"kind": "tis", "level": part, "upper": 1.5}
    elif part:
        correction |= {"rejections": {"token_k1": given.REJECTIONS["token_k1"]}}
    algorithm = with_loss(policy_loss, correction=corrected(**correction))
    log_probs = tensor_of(given.LOG_PROBS).requires_grad_()
    found = PolicyObjective(algorithm, 1.0, 0.0)(
        TokenOutputs(log_probs=log_probs, entropy=torch.zeros(14)),
        LossInputs(
            ROW, rollout_log_probs=tensor_of(given.SAMPLER), advantages=tensor_of(given.ADVANTAGES)
        ),
    )  # fmt: skip
    close(found.loss.sum().item(), VERL["two_policy"][name]["loss"])
    (grad,) = torch.autograd.grad(found.loss.sum(), log_probs)
    close(grad, VERL["two_policy"][name]["gradient"])


def test_the_mismatch() -> None:
    means, maxima = compare_log_probs(
        tensor_of(given.OLD), tensor_of(given.SAMPLER), ROW
    )
    found = mismatch_metrics(
        {key: values.mean().item() for key, values in means.items()},
        {key: values.max().item() for key, values in maxima.items()},
    )
    expected = VERL["mismatch"]
    # verl's deviation is that of a sample.
    found["training/rollout_probs_diff_std"] *= math.sqrt(14 / 13)
    close(found, {key: expected[key] for key in found})
    assert expected.keys() - found.keys() == {"training/rollout_probs_diff_valid"}


# ------------------------------------------------------------- numbers of verl's tests


def test_rewards_that_hardly_differ() -> None:
    rewards = np.array([1.0, 1.00001, 2.0, 2.00001], np.float32)
    found = ADVANTAGES["grpo"].function(
        rewards, np.array([0, 0, 1, 1]), np.ones(4, np.bool_)
    )
    close(found, [-0.6196, 0.6196] * 2, rel=1e-4)


@pytest.mark.parametrize(("dual_clip", "expected"), [(None, 10.0), (3.0, 3.0)])
def test_one_token_far_off(dual_clip: float | None, expected: float) -> None:
    tokens = PolicyTokens(
        torch.tensor([math.log(10)]), torch.zeros(1), -torch.ones(1), torch.tensor([0])
    )
    found = POLICY_LOSSES["ppo_clip"].function(
        tokens, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip
    )
    close(found.loss, [expected])


def test_icepop_of_three_tokens() -> None:
    config = corrected(
        form="three_policy", kind="icepop", level="token", lower=0.5, upper=5.0
    )
    ratio, row = torch.tensor([0.4, 0.8, 6.0]), torch.tensor([0, 0, 0])
    found = correction_weights(config, ratio.log(), row)
    assert found is not None
    close(found.weight, [0, 0.8, 0])
    metrics = correction_metrics(
        {key: values.double().mean().item() for key, values in found.means.items()},
        {key: values.max().item() for key, values in found.maxima.items()},
    )
    close(metrics["rollout_corr/rollout_is_std"], 0.3771236)
    close(metrics["rollout_corr/rollout_is_eff_sample_size"], 1 / 3)
    close(metrics["rollout_corr/rollout_rs_masked_fraction"], 2 / 3)

    old = torch.full((3,), -1.0)
    objective = PolicyObjective(with_loss("ppo_clip", correction=config), 1.0, 0.0)
    loss = objective(
        TokenOutputs(log_probs=old, entropy=torch.zeros(3)),
        LossInputs(
            row, rollout_log_probs=torch.tensor([-0.5, -3.5, -0.8]), old_log_probs=old,
            advantages=torch.tensor([1.0, -1.0, 2.0]),
        ),
    ).loss  # fmt: skip
    close(loss, [-0.60653067, 0, -2 * 0.81873075])
