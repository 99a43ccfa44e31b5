"""Rules of the correction for a mismatch of sampler and trainer, and of its limit.

Invariant: each bound has a value exactly when its formula reads it, and no token is
weighed twice. Deliberately not here: the formulas (`verl_ray.algorithms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

from verl_ray.algorithms.correction import CORRECTIONS, REJECTIONS
from verl_ray.algorithms.policy_loss_choices import POLICY_LOSSES
from verl_ray.config.rules.rule import OverriddenKeys, set_exactly_when
from verl_ray.config.suggest import either
from verl_ray.errors import Problem

if TYPE_CHECKING:  # it imports this module
    from verl_ray.config.tasks.rl import RLConfig

_CORRECTION = "algorithm.correction"
_MISMATCH = "algorithm.mismatch"


def correction_is_complete(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting of the correction that is missing or unused."""
    correction = config.algorithm.correction
    kind = correction.kind
    yield from _kind_matches_the_form(config)

    # Every kind has a level and an upper bound, and some have a lower one as well.
    has_kind = kind is not None
    has_lower = kind is not None and CORRECTIONS[kind].two_sided
    because = f"{_CORRECTION}.kind={kind if has_kind else 'null'}"

    key = f"{_CORRECTION}.level"
    yield from set_exactly_when(has_kind, key, correction.level, because, "token")
    key = f"{_CORRECTION}.lower"
    may_have_lower = kind is not None and CORRECTIONS[kind].may_have_lower
    if not may_have_lower:
        yield from set_exactly_when(has_lower, key, correction.lower, because, 0.5)
    key = f"{_CORRECTION}.upper"
    yield from set_exactly_when(has_kind, key, correction.upper, because, 2.0)


def rejections_have_bounds(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each rejection without effect, or with wrong bounds."""
    correction = config.algorithm.correction
    key = f"{_CORRECTION}.rejections"
    if correction.rejections is None:
        return

    if correction.form == "none":
        rule = f"they compare with the sampler, and {_CORRECTION}.form is none"
        fix = f"Set it to null, or {_CORRECTION}.form=three_policy."
        yield Problem(key, correction.rejections, rule, fix)

    for name, (lower, upper) in correction.rejections.items():
        bounds = [lower, upper]
        if lower is None and upper is None:
            rule = "a rejection without a bound leaves nothing out"
            yield Problem(f"{key}.{name}", bounds, rule, "Give it a bound.")
        elif not REJECTIONS[name].two_sided and (lower is not None or upper is None):
            rule = "it is never negative and 0 where the policies agree"
            fix = "Use null and an upper bound: [null, 0.1]."
            yield Problem(f"{key}.{name}", bounds, rule, fix)
        elif REJECTIONS[name].two_sided and not (lower or 0) < 1 < (upper or inf):
            rule = "it is a ratio, and 1 where the policies agree"
            fix = "Use bounds on both sides of 1: [0.5, 2.0]."
            yield Problem(f"{key}.{name}", bounds, rule, fix)


def _kind_matches_the_form(config: RLConfig) -> Iterator[Problem]:
    form = config.algorithm.correction.form
    kind = config.algorithm.correction.kind
    policy_loss = config.algorithm.policy_loss
    key = f"{_CORRECTION}.kind"
    because = f"{_CORRECTION}.form={form}"

    if form == "none":
        # Where tokens are older, the form itself is refused.
        if not config.rollout.staleness:
            yield from set_exactly_when(False, key, kind, because, None)
        return

    if form == "two_policy":
        # The loss's own ratio to the sampler's policy is correction enough.
        if POLICY_LOSSES[policy_loss].has_ratio:
            return
        because += f" with algorithm.policy_loss={policy_loss}"

    yield from set_exactly_when(True, key, kind, because, "tis")


def weights_are_not_applied_twice(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if both the loss and the correction weigh by the same ratio."""
    correction = config.algorithm.correction
    policy_loss = config.algorithm.policy_loss
    if correction.form != "two_policy" or correction.kind is None:
        return
    if not POLICY_LOSSES[policy_loss].has_ratio:
        return

    # A correction that drops tokens leaves the weight to the loss.
    if CORRECTIONS[correction.kind].drops_tokens:
        return

    rule = (
        f"in the two-policy form the ratio of {policy_loss} is the weight already, and"
        " the loss bounds it"
    )
    dropping = [name for name, choice in CORRECTIONS.items() if choice.drops_tokens]
    fix = (
        f"Use null; {either(dropping)} to leave tokens out; or"
        " algorithm.correction.form=three_policy."
    )
    yield Problem(f"{_CORRECTION}.kind", correction.kind, rule, fix)


def normalised_weights_are_known(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if there are no weights to normalise, or no mean of them."""
    correction = config.algorithm.correction
    if not correction.normalise:
        return

    key = f"{_CORRECTION}.normalise"
    three_policy = f"{_CORRECTION}.form=three_policy"
    kind = correction.kind
    loss = POLICY_LOSSES[config.algorithm.policy_loss]
    if kind is None or not CORRECTIONS[kind].weights_by_ratio:
        rule = f"there are no weights: {_CORRECTION}.kind is {kind or 'null'}"
        weighing = [name for name, it in CORRECTIONS.items() if it.weights_by_ratio]
        fix = f"Set it to false, or {_CORRECTION}.kind={either(weighing)}."
        yield Problem(key, True, rule, fix)
    elif correction.form == "two_policy" and loss.has_ratio:
        rule = (
            f"in the two-policy form the ratio of {loss.name} is the weight, and the"
            " correction has none"
        )
        yield Problem(key, True, rule, f"Set it to false, or {three_policy}.")
    elif (
        correction.form == "two_policy"
        and config.actor.updates_per_step(config.rows_per_step) > 1
    ):
        rule = (
            "the weights of later updates are those of a policy that has learned by"
            " then, whose mean over the mini-batch would need another forward pass"
        )
        fix = f"Set it to false, make one update per step, or use {three_policy}."
        yield Problem(key, True, rule, fix)
    elif config.rollout.kv == "keep":
        rule = (
            "the mean is one of log-probs from before the step, and with"
            " rollout.kv=keep no policy has those of the tokens"
        )
        fix = "Set it to false, or rollout.kv=recompute."
        yield Problem(key, True, rule, fix)


def mismatch_is_complete(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting of the limit that is missing or not used."""
    mismatch = config.algorithm.mismatch
    has_limit = mismatch.limit is not None
    because = f"{_MISMATCH}.limit={mismatch.limit if has_limit else 'null'}"

    key_of_metric = f"{_MISMATCH}.metric"
    usual = "rollout_corr/k3_kl"
    yield from set_exactly_when(
        has_limit, key_of_metric, mismatch.metric, because, usual
    )
    key = f"{_MISMATCH}.then"
    yield from set_exactly_when(has_limit, key, mismatch.then, because, "stop")

    metric = mismatch.metric or ""
    if metric.startswith("staleness/") and config.rollout.updates == "between":
        rule = (
            "it is of tokens that the present policy sampled, and there are none:"
            " rollout.updates is between"
        )
        if config.rollout.staleness == 0:
            rule = "it is measured where some tokens are older: rollout.staleness is 0"
        yield Problem(key_of_metric, metric, rule, f"Use {usual}.")

    if mismatch.then == "correct" and config.algorithm.correction.form == "none":
        rule = "there is no correction to turn on: algorithm.correction.form is none"
        fix = (
            "Set algorithm.correction (form=three_policy, kind=tis, level=token,"
            " upper=2.0), or use stop."
        )
        yield Problem(f"{_MISMATCH}.then", "correct", rule, fix)
