"""The algorithm: advantages, losses, and the divergence from the reference policy.

Invariant: names, and the settings that formulas read, are those that
`verl_ray/algorithms` declares. Deliberately not here: the functions behind the names,
and which settings fit together (`rules/algorithm.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.catalogue import (
    CORRECTIONS,
    KL_ESTIMATORS,
    LEVELS,
    POLICY_LOSSES,
    declared_settings,
)
from verl_ray.algorithms.row_weights import AGGREGATIONS
from verl_ray.config.section import (
    NonNegative,
    NonNegativeFloat,
    OneOf,
    Positive,
    PositiveFloat,
    Section,
)

AdvantageName = Annotated[str, OneOf(ADVANTAGES)]
PolicyLossName = Annotated[str, OneOf(POLICY_LOSSES)]
AggregationName = Annotated[str, OneOf(AGGREGATIONS)]
KLEstimator = Annotated[str, OneOf(KL_ESTIMATORS)]
CorrectionKind = Annotated[str, OneOf(CORRECTIONS)]
CorrectionLevel = Annotated[str, OneOf(LEVELS)]
MismatchMetric = Literal[
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_token",
    "rollout_corr/chi2_seq",
]


class KLConfig(Section):
    """The penalty for divergence from the reference policy."""

    place: Literal["none", "reward", "loss"]
    """Place where the divergence is charged; none = no reference role is created."""
    estimator: KLEstimator | None
    """Estimator of the divergence per token."""
    coefficient: NonNegativeFloat | None
    """The coefficient, or its first value under the adaptive controller."""
    controller: Literal["fixed", "adaptive"] | None
    """Whether the coefficient stays, or follows the divergence that is measured."""
    target: PositiveFloat | None
    """Adaptive controller: the divergence per response that it steers to."""
    horizon: Positive | None
    """Adaptive controller: rollouts over which it acts."""


class ValueLossConfig(Section):
    """The loss of the critic."""

    clip: PositiveFloat | None
    """Clip the new value to within this of the old one; null = no clipping."""
    aggregation: AggregationName
    """How token losses become one number."""


class CorrectionConfig(Section):
    """The correction for tokens sampled from another policy than the trainer computes.

    Such tokens are stale, or the sampler computes otherwise than the trainer.
    """

    form: Literal["none", "two_policy", "three_policy"]
    """Which policy is the old one of the loss.

    two_policy: the sampler's, so the policy that learns is compared with it directly.
    three_policy: the trainer's, and its ratio to the sampler's weighs the loss.
    """
    kind: CorrectionKind | None
    """Use of the ratio to the sampler's policy.

    tis: weights up to upper. mis: tokens above upper are left out. icepop: tokens below
    lower are left out as well. reject: the same without weights. null with two_policy:
    only the ratio is used, which ppo_clip bounds.
    """
    level: CorrectionLevel | None
    """The ratio that is bounded: of each token, of the response as a whole, or the
    geometric mean over its tokens."""
    lower: Annotated[float, Field(gt=0, lt=1)] | None
    """Lower bound of the ratio, for icepop and reject."""
    upper: Annotated[float, Field(ge=1)] | None
    """Upper bound of the ratio."""


class MismatchConfig(Section):
    """A limit on how far sampler and trainer may be apart."""

    metric: MismatchMetric | None
    """The metric that is limited."""
    limit: PositiveFloat | None
    """The largest value of the metric; null = no limit."""
    then: Literal["stop", "correct"] | None
    """Consequence above the limit: the run stops before it publishes its policy, or
    algorithm.correction, which waits until then, applies from the next step on."""


# A setting is null where the YAML of an algorithm does not mention it, because none of
# that algorithm's formulas reads it.
_FIELDS: dict[str, Any] = {
    setting.name: (setting.kind | None, Field(None, description=setting.meaning))
    for setting in declared_settings()
}
_ReadByFormulas = create_model("_ReadByFormulas", __base__=Section, **_FIELDS)


class AlgorithmConfig(_ReadByFormulas):
    """The algorithm, with a field for every setting that is declared.

    Declared settings (`Declaration.reads`) are null where the chosen algorithm does not
    read them.
    """

    name: str
    """Label of the algorithm, which changes nothing."""
    advantage: AdvantageName
    """How rewards become advantages."""
    whiten_advantages: bool
    """Shift and scale the advantages of a step to mean 0 and standard deviation 1 over
    all response tokens."""
    policy_loss: PolicyLossName
    """The loss of the actor."""
    aggregation: AggregationName
    """How token losses become one number."""
    entropy_coefficient: NonNegativeFloat
    """Weight of the entropy that is subtracted from the loss."""
    kl: KLConfig
    value_loss: ValueLossConfig | None
    """The loss of the critic; null = no critic is created."""
    critic_warmup_steps: NonNegative
    """Steps in which only the critic learns."""
    correction: CorrectionConfig
    mismatch: MismatchConfig
    truncated: Literal["score", "bootstrap", "mask"]
    """Treatment of a response that was cut at the length limit: scored as it is, with
    its value bootstrapped (gae), or left out of the loss."""
