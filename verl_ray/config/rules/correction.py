"""Rules of the correction for what sampler and trainer disagree on, and of the limit on it.

Invariant: each bound has a value exactly when its formula reads it, and no token is weighed twice. Deliberately not
here: the formulas (`verl_ray.algorithms`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.config.rules.rule import Overridden, iff
from verl_ray.config.schema import RLConfig
from verl_ray.errors import Problem

TWO_SIDED = frozenset({"icepop", "reject"})
"""Kinds of correction with a lower bound."""


def correction_is_complete(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    correction, key = config.algorithm.correction, "algorithm.correction"
    form, kind = correction.form, correction.kind
    if form == "none" and kind is not None:
        yield from iff(False, f"{key}.kind", kind, f"{key}.form=none", None)
    bare = form == "two_policy" and config.algorithm.policy_loss == "ppo_clip"
    if form != "none" and kind is None and not bare:
        loss = f" with algorithm.policy_loss={config.algorithm.policy_loss}" if form == "two_policy" else ""
        yield from iff(True, f"{key}.kind", kind, f"{key}.form={form}{loss}", "tis")
    because = f"{key}.kind={'null' if kind is None else kind}"
    yield from iff(kind is not None, f"{key}.level", correction.level, because, "token")
    yield from iff(kind in TWO_SIDED, f"{key}.lower", correction.lower, because, 0.5)
    yield from iff(kind is not None, f"{key}.upper", correction.upper, because, 2.0)


def weights_are_not_applied_twice(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    correction = config.algorithm.correction
    if (correction.form, correction.kind, config.algorithm.policy_loss) == ("two_policy", "tis", "ppo_clip"):
        rule = "in the two-policy form the ratio of ppo_clip is the weight already, and clip_high truncates it"
        fix = "Use null; mis, icepop or reject to leave tokens out; or algorithm.correction.form=three_policy."
        yield Problem("algorithm.correction.kind", "tis", rule, fix)


def mismatch_is_complete(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    mismatch, key = config.algorithm.mismatch, "algorithm.mismatch"
    limited = mismatch.limit is not None
    because = f"{key}.limit={mismatch.limit if limited else 'null'}"
    yield from iff(limited, f"{key}.metric", mismatch.metric, because, "rollout_corr/k3_kl")
    yield from iff(limited, f"{key}.then", mismatch.then, because, "stop")
    if mismatch.then == "correct" and config.algorithm.correction.form == "none":
        rule = "there is no correction to turn on: algorithm.correction.form is none"
        fix = "Set algorithm.correction (form=three_policy, kind=tis, level=token, upper=2.0), or use stop."
        yield Problem(f"{key}.then", "correct", rule, fix)
