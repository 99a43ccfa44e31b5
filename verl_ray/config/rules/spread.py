"""Rules of groups whose scores are all equal: drawn again, or replaced by earlier ones.

Both judge a group by its scores, so they need an estimator that learns nothing from
such a group. Deliberately not here: the choice
(`controllers/rollouts/dynamic_sampling.py`, `replay.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.config.rules.rule import OverriddenKeys, set_exactly_when
from verl_ray.errors import Problem

if TYPE_CHECKING:  # it imports this module
    from verl_ray.config.tasks.rl import RLConfig

_DYNAMIC_SAMPLING = "algorithm.dynamic_sampling"
_REPLAY = "algorithm.replay"


def dynamic_sampling_is_possible(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that groups cannot be drawn again with."""
    draws = config.algorithm.dynamic_sampling
    if draws is None:
        return

    yield from _compares_groups(config, _DYNAMIC_SAMPLING, draws)
    schedule = config.rollout.schedule
    if schedule == "one_step_off":
        rule = (
            "with algorithm.dynamic_sampling scores decide which prompts a batch holds,"
            " and with schedule=one_step_off their numbers alone do"
        )
        fix = (
            "Choose schedule=asynchronous or schedule=synchronous, or set"
            " algorithm.dynamic_sampling=null."
        )
        yield Problem("rollout.schedule", schedule, rule, fix)


def replay_is_possible(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting that groups cannot be replayed with."""
    algorithm = config.algorithm
    replay = algorithm.replay
    because = "algorithm.replay=" + ("null" if replay is None else "...")
    key = "algorithm.replay_age"
    yield from set_exactly_when(
        replay is not None, key, algorithm.replay_age, because, 4
    )
    if replay is None:
        return

    yield from _compares_groups(config, _REPLAY, replay)
    if algorithm.dynamic_sampling is not None:
        rule = (
            "algorithm.dynamic_sampling leaves no group whose scores are all equal, and"
            " earlier groups would take the place of such ones"
        )
        yield Problem(_REPLAY, replay, rule, "Set one of the two to null.")

    besides = [*_rewards_beside_scores(config)]
    if besides:
        rule = (
            "a group whose scores are all equal teaches something with"
            f" {' and '.join(besides)}, and earlier groups would take its place"
        )
        yield Problem(_REPLAY, replay, rule, "Set it to null, or leave these out.")
    for key, grader in config.graders.items():
        if grader.normalise == "running":
            rule = "the scores of an earlier group would enter its moments again"
            fix = "Use batch or none, or set algorithm.replay=null."
            yield Problem(f"{key}.normalise", "running", rule, fix)


def _compares_groups(config: RLConfig, key: str, value: int) -> Iterator[Problem]:
    """Yield a problem if a group whose scores are all equal teaches something, too."""
    advantage = ADVANTAGES[config.algorithm.advantage]
    if not advantage.needs_group:
        rule = (
            f"algorithm.advantage={advantage.name} compares no responses of a group, so"
            " it also learns from groups whose scores are all equal"
        )
        fix = "Set it to null, or choose an advantage of groups, such as grpo."
        yield Problem(key, value, rule, fix)


def _rewards_beside_scores(config: RLConfig) -> Iterator[str]:
    """Yield the settings that give responses with equal scores other rewards."""
    algorithm = config.algorithm
    for name in ("overlong_share", "brevity", "efficiency", "shaping"):
        if getattr(algorithm, name) is not None:
            yield f"algorithm.{name}"
    if algorithm.kl.place == "reward":
        yield "algorithm.kl.place=reward"
