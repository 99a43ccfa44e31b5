"""Rules of the schedule: the order of rollouts and training, and how old tokens may be.

Invariant: a token that may be older than the policy that learns from it is corrected
for. Deliberately not here: the corrections (`rules/correction.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_ray.config.rules.rule import OverriddenKeys, set_exactly_when
from verl_ray.errors import Problem

if TYPE_CHECKING:  # they import this module
    from verl_ray.config.rollout_task import RolloutTaskConfig
    from verl_ray.config.tasks.rl import RLConfig

_CORRECTION = "algorithm.correction"
_REPLAY_AGE = "algorithm.replay_age"


@dataclass(frozen=True)
class _Needs:
    """Needs of a schedule."""

    updates: Literal["between", "in_flight"]
    placement: Literal["colocated", "separate"] | None
    """None where it does not matter."""


_SCHEDULES: Mapping[str, _Needs] = {
    "synchronous": _Needs("between", None),
    "one_step_off": _Needs("between", "separate"),
    "asynchronous": _Needs("in_flight", "separate"),
    "carry_over": _Needs("in_flight", "colocated"),
}


def schedule_is_consistent(
    config: RolloutTaskConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that does not fit rollout.schedule."""
    rollout = config.rollout
    schedule = rollout.schedule
    needs = _SCHEDULES[schedule]
    choice = f"schedule={schedule}"

    if schedule == "synchronous" and rollout.staleness:
        rule = f"with {choice} a step learns from its own rollouts alone"
        fix = (
            "Set it to 0, or choose schedule=carry_over, or with placement=separate"
            " schedule=one_step_off or schedule=asynchronous."
        )
        yield Problem("rollout.staleness", rollout.staleness, rule, fix)
    if schedule != "synchronous" and not rollout.staleness:
        rule = f"with {choice} rollouts are older than the policy that learns from them"
        fix = "Use at least 1, or choose schedule=synchronous."
        yield Problem("rollout.staleness", 0, rule, fix)

    if rollout.updates != needs.updates:
        under = (
            "also under open rows" if needs.updates == "in_flight" else "between rows"
        )
        rule = f"with {choice} replicas take new weights {under}"
        fix = f"Leave it out: {choice} sets it to {needs.updates}."
        yield Problem("rollout.updates", rollout.updates, rule, fix)
        return

    because = f"rollout.updates={rollout.updates}"
    has_open_rows = rollout.updates == "in_flight"
    yield from set_exactly_when(
        has_open_rows, "rollout.kv", rollout.kv, because, "recompute"
    )

    placement = config.placement.kind
    if needs.placement is not None and placement != needs.placement:
        fix = f"Use placement={needs.placement}"
        if needs.placement == "separate":
            rule = f"with {choice} trainers and rollout engines work at the same time"
            fix += ", or schedule=carry_over, in which they take turns."
        else:
            rule = f"with {choice} trainers and rollout engines take turns on devices"
            fix += ", or schedule=asynchronous, in which they work at the same time."
        yield Problem("placement", placement, rule, fix)


def open_rows_survive_a_turn(
    config: RolloutTaskConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if trainers need the memory that open rows would keep."""
    rollout = config.rollout
    if rollout.schedule == "carry_over" and rollout.kv == "keep":
        rule = "with schedule=carry_over the trainers use the memory of the cache"
        yield Problem("rollout.kv", "keep", rule, "Use recompute.")


def stale_tokens_are_corrected(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if older tokens would be taken for those of the policy."""
    rollout = config.rollout
    algorithm = config.algorithm
    # A synchronous run with older tokens is refused already.
    staleness = 0 if rollout.schedule == "synchronous" else rollout.staleness
    replay_age = algorithm.replay_age or 0
    if not max(staleness, replay_age):
        return

    age, key = max((staleness, "rollout.staleness"), (replay_age, _REPLAY_AGE))
    rule = (
        f"tokens may be {age} policy versions old ({key}), and nothing corrects for it"
    )
    if algorithm.correction.form == "none":
        fix = (
            "Use two_policy with algorithm.correction.kind=icepop level=token lower=0.5"
            " upper=5.0, which the group schedule sets; or three_policy with kind=tis."
        )
        yield Problem(f"{_CORRECTION}.form", "none", rule, fix)
    if algorithm.mismatch.then == "correct":
        fix = "Use stop, or set algorithm.mismatch.limit=null."
        rule += " until the mismatch exceeds its limit"
        yield Problem("algorithm.mismatch.then", "correct", rule, fix)

    # Tokens that are sampled over an old cache are of no version's policy.
    if rollout.kv == "keep" and algorithm.correction.form == "three_policy":
        rule = (
            "with rollout.kv=keep no version of the policy has the log-probs of later"
            " tokens, so none can be computed again"
        )
        fix = f"Use rollout.kv=recompute, or {_CORRECTION}.form=two_policy."
        yield Problem("rollout.kv", "keep", rule, fix)
