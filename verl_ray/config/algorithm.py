"""The algorithm: advantages, losses, and the divergence from the reference policy.

Invariant: names, and the settings that formulas read, are those that
`verl_ray/algorithms` declares, and a rule names no algorithm. Each bound has a value
exactly when its formula reads it, and no token is weighed twice. Deliberately not here:
the functions behind the names, rules of the correction
(`verl_ray/config/correction.py`), and rules that also read rollouts or the actor
(`tasks/rl.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    create_model,
)
from pydantic_core import PydanticCustomError

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.catalogue import CHOICES, KL_ESTIMATORS, declared_settings
from verl_ray.algorithms.correction import CORRECTIONS, LEVELS, REJECTIONS
from verl_ray.algorithms.own_functions import OwnFunctionMistake, is_own
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.algorithms.reward_shaping import (
    LENGTH_REWARDS,
    LENGTH_SETTINGS,
    OWN_SHAPINGS,
)
from verl_ray.algorithms.row_weights import AGGREGATIONS, HORIZON
from verl_ray.config.paths import (
    UNKNOWN_PART,
    function_here,
    function_setting,
    function_text,
)
from verl_ray.errors import Problem
from verl_ray.settings.section import (
    NonNegative,
    NonNegativeFloat,
    OneOf,
    OverriddenKeys,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
    set_exactly_when,
)


def own_function_of(
    choices: Mapping[str, object],
) -> Callable[[str], str | None]:
    """Return what reads a function of the user's in place of a choice.

    It is `path/to/file.py:function`, or a table of this and its arguments.
    """

    def read(value: str) -> str | None:
        if not is_own(value):
            return None
        spec = function_here(value)
        try:
            choices[spec]
        except OwnFunctionMistake as mistake:
            context = {"rule": mistake.rule, "fix": mistake.fix}
            raise PydanticCustomError(UNKNOWN_PART, "{rule}", context) from None
        return spec

    return read


def own_function_alone(choices: Mapping[str, object]) -> AfterValidator:
    """Return what reads a function of the user's where there is no other choice."""
    read = own_function_of(choices)

    def require(value: str) -> str:
        spec = read(value)
        if spec is None:
            context = {
                "rule": f"{value} names no function",
                "fix": "Expected path/to/file.py:function, or null.",
            }
            raise PydanticCustomError(UNKNOWN_PART, "{rule}", context)
        return spec

    return AfterValidator(require)


FUNCTION_AS_TEXT = BeforeValidator(function_text), PlainSerializer(function_setting)
"""How a function of the user's is read and written where a choice has a name."""

AdvantageName = Annotated[
    str, OneOf(ADVANTAGES, own_function_of(ADVANTAGES)), *FUNCTION_AS_TEXT
]
PolicyLossName = Annotated[
    str, OneOf(POLICY_LOSSES, own_function_of(POLICY_LOSSES)), *FUNCTION_AS_TEXT
]
OwnShapingName = Annotated[str, own_function_alone(OWN_SHAPINGS), *FUNCTION_AS_TEXT]
AggregationName = Annotated[str, OneOf(AGGREGATIONS)]
KLEstimator = Annotated[str, OneOf(KL_ESTIMATORS)]
CorrectionKind = Annotated[str, OneOf(CORRECTIONS)]
CorrectionLevel = Annotated[str, OneOf(LEVELS)]
RejectionName = Annotated[str, OneOf(REJECTIONS)]
MismatchMetric = Literal[
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_token",
    "rollout_corr/chi2_seq",
    "staleness/fresh_kl",
    "staleness/fresh_k3_kl",
    "staleness/fresh_probs_diff_mean",
]

USUAL_MISMATCH: MismatchMetric = "rollout_corr/k3_kl"
"""The metric that messages recommend to limit."""

_STEP_OF_BFLOAT16 = 2**-8
"""Half the distance between 1 and the next number."""


class KLConfig(Section):
    """The penalty for divergence from the reference policy."""

    place: Literal["none", "reward", "loss"]
    """Place where the divergence is charged; none = no reference role is created.
    algorithm.kl=none sets all of the section so."""
    estimator: KLEstimator | None
    """Estimator of the divergence per token."""
    importance_weighted: bool
    """Weight the divergence in the loss by the ratio to the old policy. The gradient is
    then that of k2, whatever the estimator, and unbiased for tokens of that policy (r *
    k3 of DeepSeek-V3.2, arXiv:2512.02556)."""
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
    only the ratio is used, which losses such as ppo_clip bound.
    """
    level: CorrectionLevel | None
    """The ratio that is bounded: of each token, of the response as a whole, or the
    geometric mean over its tokens."""
    lower: Annotated[float, Field(gt=0, lt=1)] | None
    """Lower bound of the ratio, for icepop and reject."""
    upper: Annotated[float, Field(ge=1)] | None
    """Upper bound of the ratio."""
    rejections: (
        Annotated[
            dict[RejectionName, tuple[PositiveFloat | None, PositiveFloat | None]],
            Field(examples=["{seq_mean_k1: [0.99, 1.01], token_k3: [null, 0.1]}"]),
        ]
        | None
    )
    """Bounds by statistic, beyond any of which a token is left out, whatever the kind.

    token, seq_sum, seq_mean and seq_max say where the statistic is taken; k1 is the
    ratio itself, k2 and k3 are estimates of the divergence."""
    normalise: bool
    """Divide the weights by their mean over the mini-batch: over its tokens, or over
    its rows if the ratio is one of rows."""


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


class _Additions(_ReadByFormulas):
    """Settings of any loss, off where the YAML of an algorithm is silent."""

    advantage_clip: PositiveFloat | None = None
    """Bound of |advantage|, after whitening; null = none."""
    entropy_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the tokens of a mini-batch, those of the largest entropy, that bear the
    policy loss (arXiv:2506.01939, with 0.2); null = all."""
    negative_drift: PositiveFloat | None = None
    """Largest mean of log p_sampler - log p over a row's tokens at which its negative
    advantages still count (DeepSeek-V3.2, arXiv:2512.02556); null = any."""
    positive_nll: PositiveFloat | None = None
    """Weight of the negative log-likelihood of rows whose score, as it was graded, is
    positive (VAPO, arXiv:2504.05118, with 0.1); null = none."""
    entropy_target: PositiveFloat | None = None
    """Entropy per token below which the entropy bonus grows, step by step (Skywork-OR1,
    arXiv:2505.22312); null = the bonus stays as it is."""
    entropy_step: PositiveFloat | None = None
    """Change of the bonus in a training step; only with entropy_target."""
    entropy_max: PositiveFloat | None = None
    """Largest weight of the bonus; only with entropy_target."""
    dynamic_sampling: Positive | None = None
    """Draw another group for each whose scores are all equal, until the batch is full
    (DAPO, arXiv:2503.14476); at most this many groups are drawn for each that a batch
    holds (verl: 10), else the run ends. null = learn from all groups."""
    replay: Positive | None = None
    """Groups of earlier steps that are kept, those with the largest spread of scores;
    they take the place of groups whose scores are all equal. null = none."""
    replay_age: Positive | None = None
    """Policy versions that a token of such a group may be old; only with replay."""
    overlong_share: PositiveFraction | None = None
    """Last share of rollout.max_response_tokens, or of agent.max_tokens if that is set,
    in which a response loses up to 1 of its reward (DAPO, arXiv:2503.14476, with 0.2);
    null = none."""
    brevity: PositiveFloat | None = None
    """Weight of a reward for being shorter than the rest of the group, for positive
    scores only (Kimi k1.5, arXiv:2501.12599); null = none."""
    efficiency: PositiveFloat | None = None
    """Weight of a reward for responses with the group's best score that are shorter
    than these are on average (prime-rl, whose weight of 1 at most doubles a score);
    null = none."""
    shaping: OwnShapingName | None = None
    """Function of your own that makes rewards of scores, `path/to/file.py:function`, or
    a table of it and its arguments, in place of rewards of lengths; null = none."""


ADDITIONS = tuple(
    name for name in _Additions.model_fields if name not in _ReadByFormulas.model_fields
)
"""Names of the settings that go with any loss."""


class AlgorithmConfig(_Additions):
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
    sequence: Literal["row", "trajectory"]
    """What losses, corrections and aggregations per sequence judge as a whole: a row,
    or all rows of a trajectory, which then share a micro-batch."""
    entropy_coefficient: NonNegativeFloat
    """Weight of the entropy that is subtracted from the loss."""
    kl: KLConfig
    value_loss: ValueLossConfig | None
    """The loss of the critic; null = no critic is created."""
    critic_warmup_steps: NonNegative
    """Steps in which only the critic learns."""
    correction: CorrectionConfig
    mismatch: MismatchConfig
    truncated: Literal["score", "bootstrap", "mask", "drop"]
    """Treatment of a response that was cut at the length limit, or of an episode that
    any limit ended: scored as it is, with its value bootstrapped (gae), left out of the
    loss but not of its group's baseline (mask), or of both (drop)."""

    @property
    def chooses_tokens(self) -> bool:
        """Whether the loss treats tokens apart that log-probs from before it decide."""
        has_selection = POLICY_LOSSES[self.policy_loss].selection is not None
        return has_selection or self.entropy_share is not None

    @property
    def clips_finer_than_bfloat16(self) -> bool:
        """Whether ratios are clipped closer to 1 than bfloat16 rounds what it adds."""
        bounds = [getattr(self, name) for name in ("clip_low", "clip_high")]
        return any(bound is not None and bound < _STEP_OF_BFLOAT16 for bound in bounds)

    @property
    def judges_trajectories(self) -> bool:
        """Whether all rows of a trajectory are one sequence."""
        return self.sequence == "trajectory"

    @property
    def charges_whole_responses(self) -> bool:
        """Whether the divergence is charged before responses are compared.

        A baseline of whole responses needs their final rewards.
        """
        estimator = ADVANTAGES[self.advantage]
        return self.kl.place == "reward" and estimator.rewards_whole_trajectories

    @property
    def corrects_later(self) -> bool:
        """Whether the correction waits for a mismatch, and is not there at first."""
        return self.mismatch.then == "correct"

    @property
    def correction_weighs_updates(self) -> bool:
        """Whether the correction weighs every update by its ratio to the sampler."""
        correction = self.correction
        if correction.form != "two_policy" or self.corrects_later:
            return False
        if correction.kind is None:
            return True
        return CORRECTIONS[correction.kind].weights_by_ratio


# -------------------------------------------------------------------------------- rules


def settings_are_read(
    algorithm: AlgorithmConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each declared setting that is set and not read, or not set.

    A setting is read when one of the algorithm's choices declares it.
    """
    chosen = {key: table[getattr(algorithm, key)] for key, table in CHOICES.items()}

    for setting, choice_keys in declared_settings().items():
        key = f"algorithm.{setting.name}"
        value = getattr(algorithm, setting.name)
        readers = [name for name in choice_keys if setting in chosen[name].reads]

        # A refusal names the choices that read the setting, or those that could.
        because = " and ".join(
            f"algorithm.{name}={chosen[name].name}" for name in readers or choice_keys
        )

        if not readers:
            yield from set_exactly_when(False, key, value, because, None)
            continue

        # No usual value means that null is a choice, too.
        usual = chosen[readers[0]].reads[setting]
        if usual is not None:
            recommended = overridden.follow_reference(usual)
            yield from set_exactly_when(True, key, value, because, recommended)


def shared_bounds_are_of_the_loss(
    algorithm: AlgorithmConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each bound that a loss was given by the one it replaces.

    Losses share settings, and the usual values differ by orders of magnitude.
    """
    key_of_loss = "algorithm.policy_loss"
    loss = POLICY_LOSSES[algorithm.policy_loss]
    replaced = overridden.replaced(key_of_loss)
    # Nothing is published about a function of the user's own.
    if replaced is None or is_own(loss.name):
        return

    for setting, usual in loss.reads.items():
        key = f"algorithm.{setting.name}"
        value = getattr(algorithm, setting.name)
        if usual is None or value in (None, usual) or overridden.under(key):
            continue
        rule = f"it is what {replaced} had, and {key_of_loss}={loss.name} reads it, too"
        fix = f"Set it; {usual} is usual for {loss.name} ({loss.paper})."
        yield Problem(key, value, rule, fix)


def bounds_leave_a_range(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield a problem for each bound of a ratio or a covariance that leaves nothing."""
    values = {
        setting.name: getattr(algorithm, setting.name)
        for setting in POLICY_LOSSES[algorithm.policy_loss].reads
    }
    ratio_rule = "it bounds the ratio itself, which is 1 where the policies agree"

    smallest = values.get("ratio_min")
    if smallest is not None and smallest >= 1:
        fix = "Use a number below 1, or null."
        yield Problem("algorithm.ratio_min", smallest, ratio_rule, fix)

    largest = values.get("ratio_max")
    if largest is not None and largest <= 1:
        key = "algorithm.ratio_max"
        fix = (
            f"Use a number above 1, such as 5.0; {largest:g} as a distance from 1 is"
            f" {key}={1 + largest:g}."
        )
        yield Problem(key, largest, ratio_rule, fix)

    cov_min, cov_max = values.get("cov_min"), values.get("cov_max")
    if cov_min is not None and cov_max is not None and cov_min >= cov_max:
        rule = f"no covariance is above it and below algorithm.cov_max={cov_max:g}"
        fix = "Use a smaller one, or a larger algorithm.cov_max; 1.0 and 5.0 are usual."
        yield Problem("algorithm.cov_min", cov_min, rule, fix)


def critic_matches_the_advantage(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield a problem unless there is a value loss exactly when a critic is needed."""
    key = "algorithm.value_loss"
    advantage = algorithm.advantage
    value_loss = algorithm.value_loss
    needs_critic = ADVANTAGES[advantage].needs_critic
    because = f"algorithm.advantage={advantage}"

    if needs_critic and value_loss is None:
        rule = f"{because} needs a critic, which learns by it"
        fix = (
            "Set algorithm.value_loss={clip: 0.2, aggregation: token_mean}, or another"
            " algorithm.advantage."
        )
        yield Problem(key, None, rule, fix)

    if not needs_critic and value_loss is not None:
        rule = f"{because} uses no critic"
        fix = "Set algorithm.value_loss=null, or algorithm=ppo."
        yield Problem(key, value_loss.model_dump(), rule, fix)


def kl_is_complete(kl: KLConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of the penalty that is missing or not used."""
    because = f"algorithm.kl.place={kl.place}"
    usual_values: dict[str, object] = {
        "estimator": "k3",
        "coefficient": 0.001,
        "controller": "fixed",
    }

    for field, usual in usual_values.items():
        key = f"algorithm.kl.{field}"
        value = getattr(kl, field)
        if kl.place != "none":
            yield from set_exactly_when(True, key, value, because, usual)
        elif value is not None:
            fix = "Set it to null, as algorithm.kl=none does with all of them."
            yield Problem(key, value, f"{because} does not use it", fix)

    if kl.place != "none" and kl.coefficient == 0:
        rule = "it charges nothing, and a reference would be loaded and computed for it"
        fix = "Turn the divergence off with algorithm.kl=none, or use 0.001."
        yield Problem("algorithm.kl.coefficient", kl.coefficient, rule, fix)


def kl_in_the_loss_has_a_gradient(kl: KLConfig) -> Iterator[Problem]:
    """Yield a problem if the estimator of a KL loss has no gradient in expectation."""
    if kl.place != "loss" or kl.estimator is None:
        return

    if not KL_ESTIMATORS[kl.estimator].has_gradient:
        rule = (
            f"as a loss, the expected gradient of {kl.estimator} is zero: it would only"
            " add noise"
        )
        fix = "Use k2 or k3, or algorithm.kl.place=reward."
        yield Problem("algorithm.kl.estimator", kl.estimator, rule, fix)


def kl_in_the_reward_has_no_gradient(kl: KLConfig) -> Iterator[Problem]:
    """Yield a problem for each choice that only changes the gradient of a KL loss."""
    if kl.place == "loss":
        return

    because = f"algorithm.kl.place={kl.place} has no gradient, which alone this changes"
    if kl.importance_weighted:
        fix = "Set it to false, or use algorithm.kl.place=loss."
        yield Problem("algorithm.kl.importance_weighted", True, because, fix)

    if kl.estimator is not None:
        same_values = KL_ESTIMATORS[kl.estimator].reward_form
        if same_values is not None:
            fix = f"Use {same_values}, which has the same values."
            yield Problem("algorithm.kl.estimator", kl.estimator, because, fix)


def own_shaping_reads_its_settings(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of lengths that the function does not read.

    And for each that it needs and that is null.
    """
    if algorithm.shaping is None:
        return

    because = f"algorithm.shaping={algorithm.shaping}"
    reads = OWN_SHAPINGS[algorithm.shaping].reads
    for setting, usual in LENGTH_SETTINGS.items():
        key = f"algorithm.{setting.name}"
        value = getattr(algorithm, setting.name)
        if setting not in reads:
            yield from set_exactly_when(False, key, value, because, None)
        elif reads[setting] is not None:
            yield from set_exactly_when(True, key, value, because, usual)


def entropy_control_is_complete(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield a problem for each missing or unused setting of the adaptive bonus."""
    has_target = algorithm.entropy_target is not None
    because = "algorithm.entropy_target=" + ("..." if has_target else "null")
    key = "algorithm.entropy_step"
    yield from set_exactly_when(has_target, key, algorithm.entropy_step, because, 0.005)
    key = "algorithm.entropy_max"
    yield from set_exactly_when(has_target, key, algorithm.entropy_max, because, 1.0)


def sequences_are_weighted_as_such(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield a problem if a loss per sequence is summed token by token over all rows."""
    loss = POLICY_LOSSES[algorithm.policy_loss]
    aggregation = algorithm.aggregation
    if not loss.is_per_row or AGGREGATIONS[aggregation].is_over_rows:
        return

    rule = (
        f"{loss.name} has one loss per row, and {aggregation} would weight rows by"
        " their length"
    )
    fix = "Use seq_mean_token_mean; seq_mean_token_sum weights by length on purpose."
    yield Problem("algorithm.aggregation", aggregation, rule, fix)


def trajectories_are_judged(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield a problem if trajectories are to be sequences and nothing judges these."""
    correction = algorithm.correction
    rejects = any(not name.startswith("token") for name in correction.rejections or ())
    if (
        not algorithm.judges_trajectories
        or POLICY_LOSSES[algorithm.policy_loss].sequence == "row"
        or correction.level not in (None, "token")
        or rejects
        or algorithm.negative_drift is not None
    ):
        return

    rule = f"{algorithm.policy_loss} and the correction judge each token by itself"
    fix = "Use row, or a loss or a correction of sequences."
    yield Problem("algorithm.sequence", "trajectory", rule, fix)


def length_rewards_have_a_group(
    algorithm: AlgorithmConfig, group_size: int
) -> Iterator[Problem]:
    """Yield a problem if lengths are to be compared and a group has one response."""
    # A function of the user's own does with its settings what it likes.
    if algorithm.shaping is not None or group_size > 1:
        return

    for name in LENGTH_REWARDS:
        weight = getattr(algorithm, name)
        if weight is not None:
            rule = (
                "it compares the lengths of responses to one prompt, and"
                " rollout.group_size is 1"
            )
            fix = "Set it to null, or rollout.group_size=8."
            yield Problem(f"algorithm.{name}", weight, rule, fix)


def kl_controller_is_complete(kl: KLConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of the controller that is missing or unused."""
    is_adaptive = kl.controller == "adaptive"

    if is_adaptive and kl.place == "loss":
        rule = (
            "the adaptive controller steers a penalty in the reward, not one in the"
            " loss"
        )
        fix = "Use fixed, or algorithm.kl.place=reward."
        yield Problem("algorithm.kl.controller", kl.controller, rule, fix)

    controller = "null" if kl.controller is None else kl.controller
    because = f"algorithm.kl.controller={controller}"
    key = "algorithm.kl.target"
    yield from set_exactly_when(is_adaptive, key, kl.target, because, 6.0)
    key = "algorithm.kl.horizon"
    yield from set_exactly_when(is_adaptive, key, kl.horizon, because, 10_000)


def value_losses_have_no_horizon(value_loss: ValueLossConfig) -> Iterator[Problem]:
    """Yield a problem if the value loss is aggregated by a horizon."""
    aggregation = value_loss.aggregation
    if HORIZON in AGGREGATIONS[aggregation].reads:
        key = "algorithm.value_loss.aggregation"
        rule = "the value loss has no horizon to normalise by"
        fix = "Use token_mean or seq_mean_token_mean."
        yield Problem(key, aggregation, rule, fix)


def bootstrapping_needs_values(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield a problem if cut responses are bootstrapped and there is no critic."""
    advantage = algorithm.advantage
    if algorithm.truncated != "bootstrap":
        return

    if not ADVANTAGES[advantage].needs_critic:
        rule = (
            "a cut response is bootstrapped from a critic, and"
            f" algorithm.advantage={advantage} has none"
        )
        fix = "Use score or mask, or algorithm=ppo."
        yield Problem("algorithm.truncated", "bootstrap", rule, fix)


def algorithm_is_chosen_as_a_group(
    algorithm: AlgorithmConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if the user set the algorithm's name instead of choosing it."""
    # The name comes with the YAML file of the choice.
    if overridden.under("algorithm.name"):
        name = algorithm.name
        rule = "the name is a label and changes nothing"
        fix = f"Choose an algorithm with algorithm={name}."
        yield Problem("algorithm.name", name, rule, fix)
