"""Idle shares of trainers and rollout engines, under each schedule.

Invariant: pure arithmetic on the seconds in which each pool works in a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ray.config.rollout import ScheduleName


@dataclass(frozen=True)
class PoolTimes:
    """Seconds of a step in which each pool works.

    Attributes:
        generate_s: Generation of the responses of a step.
        train_s: All that trainers do with them.
        publish_s: The weight sync, during which neither pool works.
        origin: Where the figures come from, in words.
    """

    generate_s: float
    train_s: float
    publish_s: float
    origin: str


@dataclass(frozen=True)
class PoolUse:
    """A step as a schedule makes it."""

    step_s: float
    trainers_idle: float
    """Share of the step in which the trainers do not work."""
    engines_idle: float
    """Share of the step in which the engines do not work."""


def pool_use(schedule: ScheduleName, times: PoolTimes) -> PoolUse:
    """Return how long a step takes, and how long each pool is idle.

    Pools that overlap wait for the slower one. Where they take turns, their times add
    up; for `carry_over` this is an upper bound, since later batches are begun before.
    """
    work_s = times.generate_s + times.train_s
    if schedule in ("one_step_off", "asynchronous"):
        work_s = max(times.generate_s, times.train_s)
    step_s = work_s + times.publish_s
    return PoolUse(
        step_s,
        trainers_idle=1 - times.train_s / step_s,
        engines_idle=1 - times.generate_s / step_s,
    )
