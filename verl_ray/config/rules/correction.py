"""Rules of the correction for what sampler and trainer disagree on, and of the limit on it.

Invariant: each bound has a value exactly when its formula reads it, and no token is weighed twice. Deliberately not
here: the formulas (`verl_ray.algorithms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.algorithms.catalogue import CORRECTIONS, POLICY_LOSSES
from verl_ray.config.rules.rule import Overridden, iff
from verl_ray.config.suggest import either
from verl_ray.errors import Problem

if TYPE_CHECKING:  # which name these rules
    from verl_ray.config.tasks.rl import RLConfig


def correction_is_complete(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    correction, key = config.algorithm.correction, "algorithm.correction"
    form, kind = correction.form, correction.kind
    if form == "none" and kind is not None:
        yield from iff(False, f"{key}.kind", kind, f"{key}.form=none", None)
    bare = form == "two_policy" and POLICY_LOSSES[config.algorithm.policy_loss].has_ratio
    if form != "none" and kind is None and not bare:
        loss = f" with algorithm.policy_loss={config.algorithm.policy_loss}" if form == "two_policy" else ""
        yield from iff(True, f"{key}.kind", kind, f"{key}.form={form}{loss}", "tis")
    because = f"{key}.kind={'null' if kind is None else kind}"
    yield from iff(kind is not None, f"{key}.level", correction.level, because, "token")
    two_sided = kind is not None and CORRECTIONS[kind].two_sided
    yield from iff(two_sided, f"{key}.lower", correction.lower, because, 0.5)
    yield from iff(kind is not None, f"{key}.upper", correction.upper, because, 2.0)


def weights_are_not_applied_twice(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    correction, loss = config.algorithm.correction, config.algorithm.policy_loss
    if correction.form != "two_policy" or correction.kind is None or not POLICY_LOSSES[loss].has_ratio:
        return
    if not CORRECTIONS[correction.kind].leaves_out:
        others = either(one.name for one in CORRECTIONS.values() if one.leaves_out)
        rule = f"in the two-policy form the ratio of {loss} is the weight already, and the loss bounds it"
        fix = f"Use null; {others} to leave tokens out; or algorithm.correction.form=three_policy."
        yield Problem("algorithm.correction.kind", correction.kind, rule, fix)


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
