"""Weights and masks by hand, and a corrected loss that does not depend on the cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.corrections import NO_LIMIT
from verl_ray.algorithms.aggregation import aggregate
from verl_ray.algorithms.correction import CORRECTIONS, LEVELS, REJECTIONS, rejections
from verl_ray.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
)
from verl_ray.learning.correction_weights import correction_metrics, correction_weights
from verl_ray.learning.objectives import LossInputs
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.ops.outputs import TokenOutputs

RATIO = torch.tensor(
    [4.0, 0.5, 0.125, 1.0]
)  # of three tokens of one response, and of another's only one
ROW = torch.tensor([0, 0, 0, 1])


def config(
    kind: str, level: str, lower: float | None, upper: float
) -> CorrectionConfig:
    return CorrectionConfig(
        normalise=False,
        rejections=None,
        form="three_policy",
        kind=kind,
        level=level,
        lower=lower,
        upper=upper,
    )


@pytest.mark.parametrize(
    ("kind", "level", "lower", "upper", "weight", "mask"),
    [
        ("tis", "token", None, 2.0, [2, 0.5, 0.125, 1], [1, 1, 1, 1]),
        ("mis", "token", None, 2.0, [0, 0.5, 0.125, 1], [0, 1, 1, 1]),
        ("icepop", "token", 0.25, 2.0, [0, 0.5, 0, 1], [0, 1, 0, 1]),
        ("reject", "token", 0.25, 2.0, [0, 1, 0, 1], [0, 1, 0, 1]),
        # the product of the first response is 4 * 0.5 * 0.125 = 0.25
        ("tis", "sequence", None, 2.0, [0.25, 0.25, 0.25, 1], [1, 1, 1, 1]),
        ("icepop", "sequence", 0.5, 2.0, [0, 0, 0, 1], [0, 0, 0, 1]),
        # its geometric mean 0.25^(1/3) = 0.63
        ("mis", "geometric", None, 2.0, [0.25 ** (1 / 3)] * 3 + [1], [1, 1, 1, 1]),
        ("reject", "geometric", 0.7, 1.5, [0, 0, 0, 1], [0, 0, 0, 1]),
        ("reject", "geometric", 0.6, 1.5, [1, 1, 1, 1], [1, 1, 1, 1]),
    ],
)
def test_by_hand(
    kind: str,
    level: str,
    lower: float | None,
    upper: float,
    weight: list[float],
    mask: list[int],
) -> None:
    found = correction_weights(config(kind, level, lower, upper), RATIO.log(), ROW)
    assert (
        found.weight.tolist() == pytest.approx(weight)
        and found.weight.dtype == torch.float32
    )
    assert found.mask.tolist() == [bool(one) for one in mask]


def metrics(found: Any) -> dict[str, float]:
    means = {name: float(values.mean()) for name, values in found.means.items()}
    return correction_metrics(
        means, {name: float(values.max()) for name, values in found.maxima.items()}
    )


def test_metrics_by_hand() -> None:
    found = metrics(
        correction_weights(config("icepop", "token", 0.25, 2.0), RATIO.log(), ROW)
    )  # weights 0, 0.5, 0, 1
    assert found == pytest.approx({
        "rollout_corr/rollout_is_mean": 1.5 / 4,
        "rollout_corr/rollout_is_std": math.sqrt(1.25 / 4 - 0.375**2),
        "rollout_corr/rollout_is_min": 0.0,
        "rollout_corr/rollout_is_max": 1.0,
        "rollout_corr/rollout_is_eff_sample_size": 1.5**2 / (4 * 1.25),
        "rollout_corr/rollout_is_ratio_fraction_high": 0.25,
        "rollout_corr/rollout_is_ratio_fraction_low": 0.25,
        "rollout_corr/rollout_rs_masked_fraction": 0.5,
        "rollout_corr/ratio_mean": 5.625 / 4,
        "rollout_corr/ratio_max": 4.0,
        "rollout_corr/ratio_min": 0.125,
        # Of the two responses: mean weights 0.5 / 3 and 1, mean ratios 4.625 / 3 and 1.
        "rollout_corr/rollout_is_seq_mean": 3.5 / 6,
        "rollout_corr/rollout_is_seq_std": 2.5 / 6,
        "rollout_corr/rollout_is_seq_max": 1.0,
        "rollout_corr/rollout_is_seq_min": 1 / 6,
        "rollout_corr/rollout_is_seq_max_deviation": 5 / 6,
        "rollout_corr/rollout_is_seq_fraction_high": 0.0,
        "rollout_corr/rollout_is_seq_fraction_low": 0.0,
    })  # fmt: skip
    low = metrics(
        correction_weights(config("tis", "token", None, 2.0), RATIO.log(), ROW)
    )
    assert low["rollout_corr/rollout_is_ratio_fraction_low"] == 0.25  # below 1 / upper
    truncated = [
        low[f"rollout_corr/rollout_is_{name}"] for name in ("mean", "max", "min")
    ]
    assert truncated == [3.625 / 4, 2.0, 0.125]  # of 4, 0.5, 0.125 and 1, at most 2
    nothing = metrics(
        correction_weights(
            config("reject", "token", 0.9, 1.0), torch.full((4,), 3.0), ROW
        )
    )
    assert nothing["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert nothing["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert correction_metrics({"actor/entropy": 1.0}, {}) == {}


def test_fractions_of_whole_responses_count_responses() -> None:
    """The products are 0.25 over three tokens and 1 over one.

    Of two responses one is low, but of four tokens three are.
    """
    found = metrics(
        correction_weights(config("tis", "sequence", None, 2.0), RATIO.log(), ROW)
    )
    assert found["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(0.5)
    assert found["rollout_corr/rollout_is_mean"] == pytest.approx((3 * 0.25 + 1) / 4)
    assert found["rollout_corr/rollout_is_seq_mean"] == pytest.approx((0.25 + 1) / 2)
    assert found["rollout_corr/rollout_is_seq_fraction_low"] == pytest.approx(0.5)
    # The means of the ratios, 4.625 / 3 and 1, are beyond a bound of 1.5 or 1.1.
    for upper, lower in ((1.5, None), (1.1, 0.5)):
        kind = "tis" if lower is None else "icepop"
        high = metrics(
            correction_weights(config(kind, "token", lower, upper), RATIO.log(), ROW)
        )
        assert high["rollout_corr/rollout_is_seq_fraction_high"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("level", "largest", "smallest"),
    [("sequence", 16, 0.5), ("geometric", 4, 0.5**0.5)],
)
@pytest.mark.parametrize("kind", ["tis", "icepop"])
def test_extremes_of_whole_responses_are_those_before_truncation(
    kind: str, level: str, largest: float, smallest: float
) -> None:
    """The products are 4 * 4 and 0.5 * 1."""
    correction = config(kind, level, 0.9 if kind == "icepop" else None, 1.2)
    log_ratio = torch.tensor([4.0, 4.0, 0.5, 1.0]).log()
    found = metrics(
        correction_weights(correction, log_ratio, torch.tensor([0, 0, 1, 1]))
    )
    for of in ("rollout_is", "ratio"):
        assert found[f"rollout_corr/{of}_max"] == pytest.approx(largest)
        assert found[f"rollout_corr/{of}_min"] == pytest.approx(smallest)
    assert found["rollout_corr/rollout_is_mean"] <= 1.2


@pytest.mark.parametrize("level", tuple(LEVELS))
@pytest.mark.parametrize("kind", tuple(CORRECTIONS))
def test_a_ratio_of_nan_is_kept_and_seen(kind: str, level: str) -> None:
    """If it were left out, a row without numbers would be dropped silently."""
    correction = config(kind, level, 0.5 if CORRECTIONS[kind].two_sided else None, 2.0)
    found = correction_weights(
        correction, torch.tensor([0.0, math.nan, 0.0]), torch.tensor([0, 1, 2])
    )
    assert found.mask.all() and found.weight.isnan().tolist() == [False, True, False]


def test_the_spread_of_weights_near_one_is_no_rounding() -> None:
    near = torch.full((1000,), 1e-6) * torch.tensor([1.0, -1.0]).repeat(500)
    found = metrics(
        correction_weights(config("tis", "token", None, 2.0), near, torch.arange(1000))
    )
    assert found["rollout_corr/rollout_is_std"] == pytest.approx(
        1e-6, rel=0.1
    )  # 1 + 1e-6 has 8 steps of float32


@pytest.mark.parametrize("level", tuple(LEVELS))
@pytest.mark.parametrize("kind", tuple(CORRECTIONS))
def test_far_policies_give_finite_weights_without_gradients_and_without_waiting(
    kind: str, level: str
) -> None:
    settings_of = config(kind, level, 0.5 if CORRECTIONS[kind].two_sided else None, 2.0)
    found = correction_weights(
        settings_of,
        torch.tensor([500.0, 500.0, -500.0], requires_grad=True),
        torch.tensor([0, 0, 1]),
    )
    everything = (found.weight, *found.means.values(), *found.maxima.values())
    assert not any(
        values.requires_grad or bool(values.isnan().any()) for values in everything
    )
    assert all(
        bool(values.isfinite().all())
        for values in (found.weight, *found.means.values())
    )
    correction_weights(
        settings_of,
        torch.zeros(3, device="meta"),
        torch.zeros(3, dtype=torch.int64, device="meta"),
    )


# ---------------------------------------------------------- in the loss of a mini-batch


class _Rows:
    """Ragged rows with the log-probs of a trainer, of its old policy and of a sampler."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.arange(sum(lengths)).split(lengths)
        columns = torch.randn(5, sum(lengths), generator=generator) * 0.5 - 2
        self.log_probs, self.old, self.sampler, self.reference, self.advantages = (
            columns
        )
        self.log_probs.requires_grad_()
        self.weight = torch.rand(len(lengths), generator=generator)

    def share(
        self, rows: list[int], objective: PolicyObjective
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return what a micro-batch of these rows contributes.

        This is the loss, the gradient, and the sums of the metrics.
        """
        token = torch.cat([self.tokens[row] for row in rows])
        row = torch.cat(
            [torch.full_like(self.tokens[one], place) for place, one in enumerate(rows)]
        )
        given = LossInputs(
            row, rollout_log_probs=self.sampler[token], old_log_probs=self.old[token],
            ref_log_probs=self.reference[token], advantages=self.advantages[token],
        )  # fmt: skip
        found = objective(
            TokenOutputs(
                log_probs=self.log_probs[token], entropy=-self.log_probs[token]
            ),
            given,
        )
        loss = aggregate(found.loss, row, self.weight[rows])
        (grad,) = torch.autograd.grad(loss, self.log_probs)
        return (
            loss.detach(),
            grad,
            {name: values.sum() for name, values in found.metrics.items()},
        )


def objective_of(form: str, kind: str, level: str, policy_loss: str) -> PolicyObjective:
    clip = 0.2 if policy_loss == "ppo_clip" else None
    return PolicyObjective(AlgorithmConfig.model_validate({
        "name": "test", "advantage": "grpo", "gamma": None, "lam": None, "whiten_advantages": False,
        "policy_loss": policy_loss, "clip_low": clip, "clip_high": clip, "dual_clip": None, "aggregation": "token_mean",
        "aggregation_horizon": None, "entropy_coefficient": 0.1,
        "kl": KLConfig(importance_weighted=False, place="loss", estimator="k3", coefficient=0.1, controller="fixed", target=None, horizon=None),
        "value_loss": None, "critic_warmup_steps": 0, "mismatch": NO_LIMIT, "truncated": "score", "sequence": "row",
        "correction": CorrectionConfig(
            normalise=False, rejections=None, form=form, kind=kind, level=level, lower=0.6 if CORRECTIONS[kind].two_sided else None, upper=1.5
        ),
    }), 1.0, 0.1)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=10).filter(any),
    seed=st.integers(0, 1000),
    form=st.sampled_from(["two_policy", "three_policy"]),
    kind=st.sampled_from(tuple(CORRECTIONS)),
    level=st.sampled_from(tuple(LEVELS)),
    policy_loss=st.sampled_from(["ppo_clip", "reinforce"]),
    data=st.data(),
)
def test_loss_gradient_and_metrics_do_not_depend_on_micro_batches_ranks_or_order(
    lengths: list[int],
    seed: int,
    form: str,
    kind: str,
    level: str,
    policy_loss: str,
    data: st.DataObject,
) -> None:
    rows, objective = _Rows(lengths, seed), objective_of(form, kind, level, policy_loss)
    everything = list(range(len(lengths)))
    order = data.draw(st.permutations(everything))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=4)))
    parts = [
        order[a:b]
        for a, b in zip([0, *cuts], [*cuts, len(lengths)], strict=True)
        if b > a
    ]
    loss, grad, sums = rows.share(everything, objective)
    shares = [rows.share(part, objective) for part in parts]
    torch.testing.assert_close(
        sum(share[0] for share in shares), loss, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        sum(share[1] for share in shares), grad, rtol=1e-4, atol=1e-5
    )
    for name, expected in sums.items():
        torch.testing.assert_close(
            sum(share[2][name] for share in shares), expected, rtol=1e-4, atol=1e-4
        )


def test_the_denominators_count_what_is_left_out() -> None:
    """Leaving out one token leaves the others' terms as they are."""
    rows = _Rows([3, 2], 0)
    rows.old = rows.sampler.clone()
    rows.old[1] += 1  # a ratio of e, beside ratios of 1
    algorithm = objective_of("three_policy", "mis", "token", "ppo_clip").algorithm
    grads = []
    for upper in (3.0, 2.0):
        changed = algorithm.model_copy(
            update={"correction": config("mis", "token", None, upper)}
        )
        grads.append(rows.share([0, 1], PolicyObjective(changed, 1.0, 0.1))[1])
    assert grads[0][1] != 0 and grads[1][1] == 0
    assert torch.equal(*(grad[[0, 2, 3, 4]] for grad in grads))


# -------------------------------------------------------------------------- rejections

THREE_ROWS = torch.tensor([0, 0, 1, 1, 2])
RATIOS = torch.tensor([0.5, 2.0, 1.0, 1.2, 3.0])


def left_out(**bounds: tuple[float | None, float | None]) -> dict[str, list[bool]]:
    found = rejections(bounds, RATIOS.log(), THREE_ROWS)
    return {name: values.tolist() for name, values in found.items()}


def test_rejections_by_hand() -> None:
    found = left_out(
        token_k1=(0.6, 2.5), token_k2=(None, 0.25), token_k3=(None, 0.2), seq_sum_k1=(None, 1.1),
        seq_mean_k1=(0.99, 1.05), seq_sum_k2=(None, 0.3), seq_mean_k3=(None, 0.24), seq_max_k2=(None, 0.3),
        seq_max_k3=(None, 0.3),
    )  # fmt: skip
    assert found == {
        "token_k1": [True, False, False, False, True],
        # Half of log(2)^2 is 0.24, of log(3)^2 0.60.
        "token_k2": [False, False, False, False, True],
        # 0.5 - 1 + log 2 = 0.193; 2 - 1 - log 2 = 0.307; 3 - 1 - log 3 = 0.901
        "token_k3": [False, True, False, False, True],
        # Products 1, 1.2 and 3; geometric means 1, 1.095 and 3.
        "seq_sum_k1": [False, False, True, True, True],
        "seq_mean_k1": [False, False, True, True, True],
        "seq_sum_k2": [True, True, False, False, True],
        # (0.193 + 0.307) / 2 = 0.25
        "seq_mean_k3": [True, True, False, False, True],
        "seq_max_k2": [False, False, False, False, True],
        "seq_max_k3": [True, True, False, False, True],
    }


def test_rejections_combine_with_weights() -> None:
    """Token weights up to 1.5, and a mask of rows by their geometric mean."""
    combined = CorrectionConfig(
        normalise=False, form="three_policy", kind="tis", level="token", lower=0.8, upper=1.5,
        rejections={"seq_mean_k1": (0.9, 1.05), "token_k3": (None, 0.3)},
    )  # fmt: skip
    found = correction_weights(combined, RATIOS.log(), THREE_ROWS)
    assert found is not None
    assert found.weight.tolist() == pytest.approx([0.8, 1.5, 1.0, 1.2, 1.5])
    assert found.mask.tolist() == [True, False, False, False, False]
    means = {name: float(values.mean()) for name, values in found.means.items()}
    maxima = {name: float(values.max()) for name, values in found.maxima.items()}
    metrics = correction_metrics(means, maxima)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(0.8)
    assert metrics["rollout_corr/rollout_rs_seq_mean_k1_masked_fraction"] == (
        pytest.approx(0.6)
    )
    assert metrics["rollout_corr/rollout_rs_token_k3_masked_fraction"] == (
        pytest.approx(0.4)
    )


def test_rejections_need_no_weights() -> None:
    alone = CorrectionConfig(
        normalise=False, form="two_policy", kind=None, level=None, lower=None, upper=None,
        rejections={"token_k1": (0.6, None)},
    )  # fmt: skip
    found = correction_weights(alone, RATIOS.log(), THREE_ROWS)
    assert found is not None and found.weight.tolist() == [1] * 5
    assert found.mask.tolist() == [False, True, True, True, True]
    metrics = correction_metrics(
        {name: float(values.float().mean()) for name, values in found.means.items()}, {}
    )
    assert metrics == {
        "rollout_corr/rollout_rs_masked_fraction": pytest.approx(0.2),
        "rollout_corr/rollout_rs_token_k1_masked_fraction": pytest.approx(0.2),
    }


def test_a_ratio_of_nan_is_beyond_no_bound() -> None:
    log_ratio = torch.tensor([math.nan, 0.0])
    bounds = dict.fromkeys(REJECTIONS, (None, 1.5))
    for is_beyond in rejections(bounds, log_ratio, torch.tensor([0, 1])).values():
        assert not is_beyond.any()
