"""Rules of what is added to scores: rewards of lengths, and a user's own shaping.

Invariant: a length has a reward in one place, the package's or the user's. Deliberately
not here: the formulas (`verl_ray/algorithms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.algorithms.length_shaping import LENGTH_REWARDS
from verl_ray.algorithms.own_shaping import LENGTH_SETTINGS, OWN_SHAPINGS
from verl_ray.config.rules.rule import OverriddenKeys, set_exactly_when
from verl_ray.errors import Problem

if TYPE_CHECKING:  # it imports this module
    from verl_ray.config.tasks.rl import RLConfig


def length_rewards_have_a_group(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if lengths are to be compared and a group has one response."""
    algorithm = config.algorithm
    # A function of the user's own does with its settings what it likes.
    if algorithm.shaping is not None or config.rollout.group_size > 1:
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


def own_shaping_reads_its_settings(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of lengths that the function does not read.

    And for each that it needs and that is null.
    """
    algorithm = config.algorithm
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
