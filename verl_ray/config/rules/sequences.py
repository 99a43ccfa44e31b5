"""Rules of sequences: what is judged as a whole, and how it is summed.

Invariant: a sequence has one weight, and whoever names sequences judges them.
Deliberately not here: the formulas (`verl_ray/algorithms`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.algorithms.policy_loss_choices import POLICY_LOSSES
from verl_ray.algorithms.row_weights import AGGREGATIONS
from verl_ray.config.rules.rule import OverriddenKeys
from verl_ray.errors import Problem

if TYPE_CHECKING:  # it imports this module
    from verl_ray.config.tasks.rl import RLConfig


def sequences_are_weighted_as_such(
    config: RLConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if a loss per sequence is summed token by token over all rows."""
    loss = POLICY_LOSSES[config.algorithm.policy_loss]
    aggregation = config.algorithm.aggregation
    if not loss.is_per_row or AGGREGATIONS[aggregation].is_over_rows:
        return

    rule = (
        f"{loss.name} has one loss per row, and {aggregation} would weight rows by"
        " their length"
    )
    fix = "Use seq_mean_token_mean; seq_mean_token_sum weights by length on purpose."
    yield Problem("algorithm.aggregation", aggregation, rule, fix)


def trajectories_are_judged(config: RLConfig, _: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem if trajectories are to be sequences and nothing judges these."""
    algorithm = config.algorithm
    correction = algorithm.correction
    rejects = any(not name.startswith("token") for name in correction.rejections or ())
    if (
        not algorithm.judges_trajectories
        or POLICY_LOSSES[algorithm.policy_loss].sequence == "row"
        or AGGREGATIONS[algorithm.aggregation].is_over_rows
        or correction.level not in (None, "token")
        or rejects
        or algorithm.negative_drift is not None
    ):
        return

    rule = (
        f"{algorithm.policy_loss}, {algorithm.aggregation} and the correction judge"
        " each token by itself"
    )
    fix = "Use row, or a loss, an aggregation or a correction of sequences."
    yield Problem("algorithm.sequence", "trajectory", rule, fix)
