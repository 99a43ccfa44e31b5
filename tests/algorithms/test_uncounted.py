"""Rows that are not learned from affect neither a loss nor a gradient nor a metric."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.preferences import preference_objective
from tests.corrections import NO_CORRECTION, NO_LIMIT
from verl_ray.algorithms.aggregation import aggregate
from verl_ray.algorithms.catalogue import KL_ESTIMATORS, declared_settings
from verl_ray.algorithms.correction import CORRECTIONS, LEVELS
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.algorithms.preference_losses import PREFERENCE_LOSSES
from verl_ray.algorithms.row_weights import AGGREGATIONS, row_weights
from verl_ray.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    ValueLossConfig,
)
from verl_ray.engine.base import LossAccumulator, LossReport
from verl_ray.learning.objectives import (
    LossInputs,
    Objective,
    PreferenceObjective,
    SupervisedObjective,
    ValueObjective,
    without_uncounted,
)
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.learning.preference_objective import PolicyPreferenceObjective
from verl_ray.ops.outputs import TokenOutputs

BAD = (math.nan, math.inf, -math.inf)
OUTPUTS = ("log_probs", "entropy", "values", "scores")
INPUTS = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "advantages",
    "old_values",
    "returns",
    "margin",
    "selected",
    "uncertain",
    "nll_weight",
)

BY_ROW = ("scores", "margin", "ref_log_prob")
"""What has one value per row."""


def policy_objective(
    policy_loss: str, estimator: str, correction: CorrectionConfig
) -> PolicyObjective:
    read = {
        one.name: 3.0 if usual is None else usual
        for one, usual in POLICY_LOSSES[policy_loss].reads.items()
    }
    kl = KLConfig(
        importance_weighted=False,
        place="loss",
        estimator=estimator,
        coefficient=0.1,
        controller="fixed",
        target=None,
        horizon=None,
    )
    return PolicyObjective(AlgorithmConfig.model_validate({
        **{setting.name: read.get(setting.name) for setting in declared_settings()},
        "name": "test", "advantage": "grpo", "whiten_advantages": False, "policy_loss": policy_loss,
        "aggregation": "token_mean", "entropy_coefficient": 0.1, "kl": kl,
        "value_loss": None, "critic_warmup_steps": 0, "mismatch": NO_LIMIT, "truncated": "score", "sequence": "row",
        "correction": correction,
    }), 1.0, 0.1)  # fmt: skip


CORRECTIONS_OF_ALL_KINDS = [NO_CORRECTION] + [
    CorrectionConfig(
        normalise=False,
        rejections=None,
        form=form,
        kind=kind,
        level=level,
        lower=0.6 if CORRECTIONS[kind].two_sided else None,
        upper=1.5,
    )
    for form in ("two_policy", "three_policy")
    for kind in CORRECTIONS
    for level in LEVELS
]
OBJECTIVES: list[Objective] = [
    *(
        policy_objective(loss, estimator, correction)
        for loss in POLICY_LOSSES
        for estimator in KL_ESTIMATORS
        for correction in CORRECTIONS_OF_ALL_KINDS
    ),
    ValueObjective(ValueLossConfig(clip=0.2, aggregation="token_mean")),
    ValueObjective(ValueLossConfig(clip=None, aggregation="token_mean")),
    SupervisedObjective(),
    PreferenceObjective(label_smoothing=0.1),
    *(preference_objective(loss, rpo_alpha=0.5) for loss in PREFERENCE_LOSSES),
]


def one_micro_batch(
    objective: Objective,
    lengths: list[int],
    counted_rows: list[bool],
    mode: str,
    bad: float | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor], LossReport]:
    """Return the loss, the outputs' gradients and the report of a micro-batch.

    They are computed as an engine does it. Rows that do not count hold `bad`; None:
    numbers like the others.
    """
    lengths = [1] * len(lengths) if objective.outputs.scores else lengths
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    filled = torch.tensor(lengths) * torch.tensor(counted_rows)
    weights = torch.from_numpy(row_weights(
        mode, filled.numpy(), total_tokens=int(filled.sum()), total_rows=int((filled > 0).sum()), horizon=7
    ))  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    columns = {
        name: torch.randn(len(row), generator=generator) * 0.5 - 1
        for name in (*OUTPUTS, *INPUTS)
    }
    for name in BY_ROW:
        columns[name] = torch.randn(len(weights), generator=generator)
    if bad is not None:
        at_tokens = (weights != 0).index_select(0, row)
        columns = {
            name: values.where(weights != 0 if name in BY_ROW else at_tokens, bad)
            for name, values in columns.items()
        }

    model_outputs = {name: columns[name].requires_grad_() for name in OUTPUTS}
    outputs = TokenOutputs(**model_outputs, greedy=columns["returns"] > 0)
    unit = torch.arange(len(weights)) // 2 if objective.level == "unit" else None
    names = (*INPUTS, "ref_log_prob")
    inputs = LossInputs(row, unit, **{name: columns[name] for name in names})
    found = objective(*without_uncounted(outputs, inputs, weights != 0))
    if objective.level == "unit":
        row = torch.arange(0, len(weights), 2)
    loss = aggregate(found.loss, row, weights)
    gradients = torch.autograd.grad(
        loss, list(model_outputs.values()), allow_unused=True
    )

    accumulator = LossAccumulator()
    accumulator.add(loss, found, weights.index_select(0, row), None)
    known_gradients = {
        name: one
        for name, one in zip(model_outputs, gradients, strict=True)
        if one is not None
    }
    return loss.detach(), known_gradients, accumulator.report()


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=5
    ).filter(lambda rows: any(counted for _, counted in rows)),
    objective=st.sampled_from(OBJECTIVES),
    mode=st.sampled_from(tuple(AGGREGATIONS)),
    bad=st.sampled_from(BAD),
)
def test_rows_that_weigh_nothing_may_hold_anything(
    rows: list[tuple[int, bool]], objective: Objective, mode: str, bad: float
) -> None:
    pairs = [row for row in rows for _ in range(1 + (objective.level == "unit"))]
    lengths, counted = [length for length, _ in pairs], [one for _, one in pairs]
    loss, gradients, report = one_micro_batch(objective, lengths, counted, mode, None)
    bad_loss, bad_gradients, bad_report = one_micro_batch(
        objective, lengths, counted, mode, bad
    )

    assert bad_loss.isfinite() and torch.equal(bad_loss, loss)
    for name, gradient in gradients.items():
        assert torch.equal(bad_gradients[name], gradient), name
    assert bad_report == report
    assert not any(
        math.isnan(value) for value in (*report.sums.values(), *report.terms.values())
    )


@pytest.mark.parametrize(
    "objective", [OBJECTIVES[0], *OBJECTIVES[1:25], *OBJECTIVES[-14:-9]]
)
def test_a_nan_that_counts_is_seen(objective: Objective) -> None:
    """A NaN of the model or the sampler in a row that is learned from is not dropped."""
    row = torch.tensor([0, 1])
    for name in (
        "log_probs",
        "values",
        "scores",
        "rollout_log_probs",
        "advantages",
        "returns",
        "ref_log_prob",
    ):
        columns = {
            one: torch.full((2,), -0.5) for one in (*OUTPUTS, *INPUTS, "ref_log_prob")
        }
        columns[name][0] = math.nan
        outputs = TokenOutputs(
            **{one: columns[one] for one in OUTPUTS}, greedy=torch.tensor([True, True])
        )
        unit = torch.tensor([0, 0]) if objective.level == "unit" else None
        inputs = LossInputs(
            row, unit, **{one: columns[one] for one in (*INPUTS, "ref_log_prob")}
        )
        found = objective(
            *without_uncounted(outputs, inputs, torch.tensor([True, True]))
        )
        read = {
            PolicyObjective: {"log_probs", "advantages"},
            ValueObjective: {"values", "returns"},
            SupervisedObjective: {"log_probs"},
            PreferenceObjective: {"scores"},
            PolicyPreferenceObjective: {"log_probs", "ref_log_prob"},
        }[type(objective)]
        if (
            isinstance(objective, PolicyObjective)
            and objective.algorithm.correction.form != "none"
        ):
            read = read | {"rollout_log_probs"}
        if name in read:
            assert not aggregate(found.loss, row, torch.ones(2)).isfinite(), name


def test_what_a_correction_leaves_out_has_no_gradient() -> None:
    """A token that the policy excludes (log-prob -inf) is left out.

    The gradient of k2 alone would be 0 times infinity.
    """
    correction = CorrectionConfig(
        normalise=False,
        rejections=None,
        form="three_policy",
        kind="icepop",
        level="token",
        lower=0.5,
        upper=2.0,
    )
    log_probs = torch.tensor([-1.0, -math.inf], requires_grad=True)
    outputs = TokenOutputs(log_probs=log_probs, entropy=torch.tensor([0.5, 0.5]))
    old, sampler = torch.tensor([-1.0, -9.0]), torch.tensor([-1.0, -1.0])
    inputs = LossInputs(
        torch.tensor([0, 1]), rollout_log_probs=sampler, old_log_probs=old, ref_log_probs=sampler,
        advantages=torch.ones(2),
    )  # fmt: skip
    found = policy_objective("ppo_clip", "k2", correction)(outputs, inputs)
    (gradient,) = torch.autograd.grad(found.loss.sum(), log_probs)
    assert found.loss.tolist() == pytest.approx([-1.0 - 0.1 * 0.5, 0.0])
    assert gradient.tolist() == pytest.approx([-1.0, 0.0])


def test_no_report_sees_what_weighs_nothing() -> None:
    values = torch.tensor([2.0, math.nan, 4.0])
    accumulator = LossAccumulator()
    weights = torch.tensor([0.5, 0.0, 0.25])
    accumulator.add(
        torch.zeros(()),
        TokenLoss(values, {"m": values}, {"p": values}, {"t": values}),
        weights,
        None,
    )
    assert accumulator.report() == LossReport(
        2, 0.0, {"m": 6.0}, {"p": 4.0}, None, {"t": 2.0}
    )


def test_terms_are_aggregated_as_the_loss_is() -> None:
    """Terms and metrics by hand, in one micro-batch and in two.

    The rows have three tokens and one, and the aggregation is a sum per row.
    """
    objective = policy_objective("reinforce", "k1", NO_CORRECTION)
    log_probs, reference = (
        torch.tensor([-1.0, -2.0, -3.0, -4.0]),
        torch.tensor([-1.5, -2.0, -4.0, -2.0]),
    )
    entropy, advantages = (
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        torch.tensor([2.0, 2.0, 2.0, -1.0]),
    )
    weights = torch.tensor([0.5, 0.5])  # seq_mean_token_sum over two rows
    row = torch.tensor([0, 0, 0, 1])
    reports = []
    for parts in ([slice(0, 4)], [slice(0, 3), slice(3, 4)]):
        accumulator = LossAccumulator()
        for part in parts:
            inputs = LossInputs(
                row[part],
                old_log_probs=log_probs[part],
                ref_log_probs=reference[part],
                advantages=advantages[part],
            )
            found = objective(
                TokenOutputs(log_probs=log_probs[part], entropy=entropy[part]), inputs
            )
            accumulator.add(
                aggregate(found.loss, row[part], weights),
                found,
                weights[row[part]],
                None,
            )
        reports.append(accumulator.report())
    for report in reports:
        assert report.terms == pytest.approx({
            "actor/pg_loss": (2 + 4 + 6 - 4) / 2, "actor/entropy": (1 + 2 + 3 + 4) / 2,
            "actor/kl_loss": (0.5 + 0 + 1 - 2) / 2,
        })  # fmt: skip
        assert report.loss == pytest.approx(4 - 0.1 * 5 + 0.1 * -0.25)
        assert report.tokens == 4 and report.means()["actor/ppo_kl"] == 0


def test_the_largest_of_reports_is_nan_if_one_is() -> None:
    sane, sick = (
        LossReport(1, maxima={"peak": 2.0}),
        LossReport(1, maxima={"peak": math.nan}),
    )
    assert math.isnan((sane + sick).maxima["peak"]) and math.isnan(
        (sick + sane).maxima["peak"]
    )
    assert (sane + LossReport()).maxima == {"peak": 2.0}
