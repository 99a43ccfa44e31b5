"""Rules of data.curriculum, which chooses prompts by the scores of their groups.

Deliberately not here: the choice (`verl_ray/data/curriculum.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.config.rules.rule import OverriddenKeys
from verl_ray.errors import Problem

if TYPE_CHECKING:  # it imports this module
    from verl_ray.config.tasks.rl import RLConfig


def curriculum_is_possible(
    config: RLConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that prompts cannot be chosen with."""
    curriculum = config.data.curriculum
    if not curriculum.is_on:
        for name in ("hard_to", "easy_from"):
            if overridden.under(f"data.curriculum.{name}"):
                rule = "every prompt is drawn in each epoch, whatever its score"
                fix = (
                    "Leave it out, or set data.curriculum.hard_share, easy_share or"
                    " solved_from."
                )
                value = getattr(curriculum, name)
                yield Problem(f"data.curriculum.{name}", value, rule, fix)
        return

    hard_to = curriculum.hard_to
    is_hard = f"a prompt with this score is hard: data.curriculum.hard_to={hard_to:g}"
    if curriculum.easy_from <= hard_to:
        fix = "Set it above data.curriculum.hard_to."
        yield Problem("data.curriculum.easy_from", curriculum.easy_from, is_hard, fix)
    solved_from = curriculum.solved_from
    if solved_from is not None and solved_from <= hard_to:
        fix = "Set it above data.curriculum.hard_to, or to null."
        yield Problem("data.curriculum.solved_from", solved_from, is_hard, fix)
    easy_share = curriculum.easy_share
    if (
        solved_from is not None
        and solved_from <= curriculum.easy_from
        and easy_share < 1
    ):
        rule = "a prompt with data.curriculum.easy_from is solved, so none is ever easy"
        fix = "Set it to 1, or data.curriculum.solved_from above easy_from."
        yield Problem("data.curriculum.easy_share", easy_share, rule, fix)

    epochs = config.run.total_epochs
    if epochs is not None:
        rule = "with data.curriculum an epoch does not use each prompt"
        fix = "Set run.total_epochs=null and run.total_steps to the number of steps."
        yield Problem("run.total_epochs", epochs, rule, fix)

    draws = config.algorithm.dynamic_sampling
    if draws is not None and config.rollout.staleness:
        rule = (
            "data.curriculum chooses prompts by the scores before them, and with"
            " rollout.staleness > 0 it depends on the order of completion which batch a"
            " group that is drawn again belongs to"
        )
        fix = (
            "Choose schedule=synchronous, or set algorithm.dynamic_sampling=null, or"
            " both shares of data.curriculum to 1 and its solved_from to null."
        )
        yield Problem("algorithm.dynamic_sampling", draws, rule, fix)
