"""Rules of the section `algorithm.correction`, and of the limit on the mismatch.

Invariant: as in `algorithm.py`: no rule names an algorithm, and no token is weighed
twice. Deliberately not here: the settings themselves (`algorithm.py`), and rules that
also read rollouts or the actor (`tasks/rl.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from verl_ray.algorithms.correction import CORRECTIONS, REJECTIONS
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.config.algorithm import (
    USUAL_MISMATCH,
    AlgorithmConfig,
    CorrectionConfig,
    MismatchConfig,
)
from verl_ray.errors import Problem
from verl_ray.settings.section import set_exactly_when
from verl_ray.suggest import either

_CORRECTION = "algorithm.correction"
_MISMATCH = "algorithm.mismatch"


def correction_problems(
    algorithm: AlgorithmConfig, *, may_be_stale: bool
) -> Iterator[Problem]:
    """Yield the problems of the correction and of the limit on the mismatch.

    Args:
        algorithm: The settings.
        may_be_stale: Whether tokens may be older than the policy.
    """
    yield from kind_matches_the_form(algorithm, may_be_stale=may_be_stale)
    yield from correction_is_complete(algorithm.correction)
    yield from rejections_have_bounds(algorithm.correction)
    yield from weights_are_not_applied_twice(algorithm)
    yield from rows_are_corrected_as_a_whole(algorithm)
    yield from mismatch_is_complete(algorithm.mismatch)
    yield from mismatch_has_a_correction(algorithm)


def kind_matches_the_form(
    algorithm: AlgorithmConfig, *, may_be_stale: bool
) -> Iterator[Problem]:
    """Yield a problem unless there is a kind exactly when the form needs one.

    Args:
        algorithm: The settings.
        may_be_stale: Whether tokens may be older than the policy.
    """
    form = algorithm.correction.form
    kind = algorithm.correction.kind
    policy_loss = algorithm.policy_loss
    key = f"{_CORRECTION}.kind"
    because = f"{_CORRECTION}.form={form}"

    if form == "none":
        # Where tokens are older, the form itself is refused.
        if not may_be_stale:
            yield from set_exactly_when(False, key, kind, because, None)
        return

    if form == "two_policy":
        # The loss's own ratio to the sampler's policy is correction enough.
        if POLICY_LOSSES[policy_loss].has_ratio:
            return
        because += f" with algorithm.policy_loss={policy_loss}"

    yield from set_exactly_when(True, key, kind, because, "tis")


def correction_is_complete(correction: CorrectionConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of the correction that is missing or unused."""
    kind = correction.kind

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


def rejections_have_bounds(correction: CorrectionConfig) -> Iterator[Problem]:
    """Yield a problem for each rejection without effect, or with wrong bounds."""
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


def weights_are_not_applied_twice(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield a problem if both the loss and the correction weigh by the same ratio."""
    correction = algorithm.correction
    policy_loss = algorithm.policy_loss
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


def rows_are_corrected_as_a_whole(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield a problem for each correction of single tokens under a loss per row."""
    correction = algorithm.correction
    loss = POLICY_LOSSES[algorithm.policy_loss]
    if not loss.is_per_row or correction.form == "none":
        return

    rule = (
        f"{loss.name} has one loss per row, and weights or masks that differ within a"
        " row would make another loss of it"
    )
    if correction.kind is not None and correction.level == "token":
        fix = "Use geometric, the mean that the ratio of the loss is, or sequence."
        yield Problem(f"{_CORRECTION}.level", "token", rule, fix)

    for name, bounds in (correction.rejections or {}).items():
        if name.startswith("token"):
            fix = f"Use {name.replace('token', 'seq_mean')}, which judges rows."
            yield Problem(f"{_CORRECTION}.rejections.{name}", [*bounds], rule, fix)


def mismatch_is_complete(mismatch: MismatchConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of the limit that is missing or not used."""
    has_limit = mismatch.limit is not None
    because = f"{_MISMATCH}.limit={mismatch.limit if has_limit else 'null'}"

    key_of_metric = f"{_MISMATCH}.metric"
    yield from set_exactly_when(
        has_limit, key_of_metric, mismatch.metric, because, USUAL_MISMATCH
    )
    key = f"{_MISMATCH}.then"
    yield from set_exactly_when(has_limit, key, mismatch.then, because, "stop")


def mismatch_has_a_correction(algorithm: AlgorithmConfig) -> Iterator[Problem]:
    """Yield a problem if a mismatch is to turn on a correction that there is not."""
    mismatch = algorithm.mismatch
    if mismatch.then == "correct" and algorithm.correction.form == "none":
        rule = "there is no correction to turn on: algorithm.correction.form is none"
        fix = (
            "Set algorithm.correction (form=three_policy, kind=tis, level=token,"
            " upper=2.0), or use stop."
        )
        yield Problem(f"{_MISMATCH}.then", "correct", rule, fix)
