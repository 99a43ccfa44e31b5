"""Rules of the correction for a mismatch of sampler and trainer, and of its limit.

Invariant: each bound has a value exactly when its formula reads it, and no token is
weighed twice. Deliberately not here: the formulas (`verl_ray.algorithms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.algorithms.catalogue import CORRECTIONS, POLICY_LOSSES
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
    yield from set_exactly_when(has_lower, key, correction.lower, because, 0.5)
    key = f"{_CORRECTION}.upper"
    yield from set_exactly_when(has_kind, key, correction.upper, because, 2.0)


def _kind_matches_the_form(config: RLConfig) -> Iterator[Problem]:
    form = config.algorithm.correction.form
    kind = config.algorithm.correction.kind
    policy_loss = config.algorithm.policy_loss
    key = f"{_CORRECTION}.kind"
    because = f"{_CORRECTION}.form={form}"

    if form == "none":
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


def mismatch_is_complete(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting of the limit that is missing or not used."""
    mismatch = config.algorithm.mismatch
    has_limit = mismatch.limit is not None
    because = f"{_MISMATCH}.limit={mismatch.limit if has_limit else 'null'}"

    key = f"{_MISMATCH}.metric"
    usual = "rollout_corr/k3_kl"
    yield from set_exactly_when(has_limit, key, mismatch.metric, because, usual)
    key = f"{_MISMATCH}.then"
    yield from set_exactly_when(has_limit, key, mismatch.then, because, "stop")

    if mismatch.then == "correct" and config.algorithm.correction.form == "none":
        rule = "there is no correction to turn on: algorithm.correction.form is none"
        fix = (
            "Set algorithm.correction (form=three_policy, kind=tis, level=token,"
            " upper=2.0), or use stop."
        )
        yield Problem(f"{_MISMATCH}.then", "correct", rule, fix)
