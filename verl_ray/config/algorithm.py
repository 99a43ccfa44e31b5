"""The algorithm: advantages, losses and the divergence from the reference, by the names that YAML uses.

Invariant: names, and the settings that formulas read, are those that `verl_ray/algorithms` declares. Deliberately not
here: the functions behind the names, and which settings fit together (`rules/algorithm.py`).
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
    settings,
)
from verl_ray.algorithms.row_weights import AGGREGATIONS
from verl_ray.config.section import NonNegative, NonNegativeFloat, OneOf, Positive, PositiveFloat, Section

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
    place: Literal["none", "reward", "loss"]
    """Where the divergence from the reference policy is charged; none = no reference role is created."""
    estimator: KLEstimator | None
    coefficient: NonNegativeFloat | None
    """The coefficient, or its first value under the adaptive controller."""
    controller: Literal["fixed", "adaptive"] | None
    target: PositiveFloat | None
    """Adaptive controller: the divergence per response it steers to."""
    horizon: Positive | None
    """Adaptive controller: rollouts over which it acts."""


class ValueLossConfig(Section):
    clip: PositiveFloat | None
    """Clip the new value to within this of the old one; null = no clipping."""
    aggregation: AggregationName


class CorrectionConfig(Section):
    """For tokens that were sampled from another policy than the trainer computes: stale, or computed otherwise."""

    form: Literal["none", "two_policy", "three_policy"]
    """two_policy: the sampler's policy is the old one of the loss, so what learns is compared with it directly.
    three_policy: the trainer's old policy stays the old one, and its ratio to the sampler's weighs the loss."""
    kind: CorrectionKind | None
    """tis: weights up to upper; mis: tokens above upper are left out; icepop: and those below lower; reject: the same
    without weights. null with two_policy: nothing but the ratio, which ppo_clip bounds."""
    level: CorrectionLevel | None
    """Whose ratio is bounded: each token's, the response's as a whole, or the geometric mean of its tokens'."""
    lower: Annotated[float, Field(gt=0, lt=1)] | None
    """For icepop and reject."""
    upper: Annotated[float, Field(ge=1)] | None


class MismatchConfig(Section):
    """A limit on how far sampler and trainer may be apart."""

    metric: MismatchMetric | None
    limit: PositiveFloat | None
    """null = none."""
    then: Literal["stop", "correct"] | None
    """Above it: stop the run before its policy is published, or apply algorithm.correction from the next step on, which
    waits until then."""


_FIELDS: dict[str, Any] = {one.name: (one.kind | None, Field(None, description=one.meaning)) for one in settings()}
_ReadByFormulas = create_model("_ReadByFormulas", __base__=Section, **_FIELDS)


class AlgorithmConfig(_ReadByFormulas):
    """With a field for every setting that is declared (`Declaration.reads`); it is null where an algorithm's YAML does
    not mention it, because its formulas do not read it."""

    name: str
    advantage: AdvantageName
    whiten_advantages: bool
    """Shift and scale the advantages of a step to mean 0 and standard deviation 1 over all response tokens."""
    policy_loss: PolicyLossName
    aggregation: AggregationName
    """How token losses become one number."""
    entropy_coefficient: NonNegativeFloat
    kl: KLConfig
    value_loss: ValueLossConfig | None
    """null = no critic is created."""
    critic_warmup_steps: NonNegative
    """Steps in which only the critic learns."""
    correction: CorrectionConfig
    mismatch: MismatchConfig
    truncated: Literal["score", "bootstrap", "mask"]
    """A response cut at the length limit: scored as it stands, its value bootstrapped (gae), or not in the loss."""
