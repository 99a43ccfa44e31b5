"""The rules that only reinforcement learning has.

Deliberately not here: the rules of single sections, in a module per noun.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.length_shaping import LENGTH_REWARDS
from verl_ray.algorithms.own_shaping import LENGTH_SETTINGS, OWN_SHAPINGS
from verl_ray.algorithms.policy_loss_choices import POLICY_LOSSES
from verl_ray.algorithms.row_weights import AGGREGATIONS
from verl_ray.config.rules.algorithm import (
    algorithm_is_chosen_as_a_group,
    bootstrapping_needs_values,
    critic_matches_the_advantage,
    entropy_control_is_complete,
    estimators_have_probabilities,
    group_baseline_has_a_group,
    kl_controller_is_complete,
    kl_in_the_loss_has_a_gradient,
    kl_in_the_reward_has_no_gradient,
    kl_is_complete,
    losses_without_a_ratio_update_once,
    ratios_are_not_one,
    selections_have_log_probs,
    settings_are_read,
    value_losses_have_no_horizon,
)
from verl_ray.config.rules.correction import (
    correction_is_complete,
    mismatch_is_complete,
    normalised_weights_are_known,
    rejections_have_bounds,
    weights_are_not_applied_twice,
)
from verl_ray.config.rules.preparation import (
    inputs_are_prepared_or_provided,
    prepared_data_exists,
    prepared_model_is_possible,
    warm_start_leaves_something_to_gain,
)
from verl_ray.config.rules.reward import (
    mixed_rewards_have_weights,
    normalised_scores_matter,
)
from verl_ray.config.rules.roles import (
    critic_settings_are_used,
    reference_settings_are_used,
)
from verl_ray.config.rules.rollout import temperature_is_not_too_low
from verl_ray.config.rules.rule import OverriddenKeys, TaskRule, set_exactly_when
from verl_ray.config.rules.run import (
    greedy_evaluation_needs_one_response,
    greedy_evaluation_truncates_nothing,
    held_out_deadline_is_used,
)
from verl_ray.config.rules.schedule import stale_tokens_are_corrected
from verl_ray.errors import Problem

if TYPE_CHECKING:
    from verl_ray.config.tasks.rl import RLConfig


# ---------------------------------------------------------------- groups without spread

# Rules of groups whose scores are all equal: drawn again, or replaced by earlier
# ones.
#
# Both judge a group by its scores, so they need an estimator that learns nothing from
# such a group.

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


# ---------------------------------------------------------------------------- sequences

# Rules of sequences: what is judged as a whole, and how it is summed.
#
# Invariant: a sequence has one weight, and whoever names sequences judges them.


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


# -------------------------------------------------------------------- shaping of scores

# Rules of what is added to scores: rewards of lengths, and a user's own shaping.
#
# Invariant: a length has a reward in one place, the package's or the user's.


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


# ----------------------------------------------------------------------- the curriculum

# Rules of data.curriculum, which chooses prompts by the scores of their groups.


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


# ---------------------------------------------------------------- the rules of the task


RL_RULES: tuple[TaskRule, ...] = (
    group_baseline_has_a_group,
    settings_are_read,
    critic_matches_the_advantage,
    critic_settings_are_used,
    reference_settings_are_used,
    kl_is_complete,
    kl_in_the_loss_has_a_gradient,
    kl_in_the_reward_has_no_gradient,
    losses_without_a_ratio_update_once,
    own_shaping_reads_its_settings,
    ratios_are_not_one,
    length_rewards_have_a_group,
    dynamic_sampling_is_possible,
    curriculum_is_possible,
    replay_is_possible,
    estimators_have_probabilities,
    selections_have_log_probs,
    entropy_control_is_complete,
    sequences_are_weighted_as_such,
    trajectories_are_judged,
    kl_controller_is_complete,
    value_losses_have_no_horizon,
    bootstrapping_needs_values,
    algorithm_is_chosen_as_a_group,
    correction_is_complete,
    rejections_have_bounds,
    normalised_weights_are_known,
    weights_are_not_applied_twice,
    mismatch_is_complete,
    stale_tokens_are_corrected,
    temperature_is_not_too_low,
    greedy_evaluation_needs_one_response,
    greedy_evaluation_truncates_nothing,
    held_out_deadline_is_used,
    normalised_scores_matter,
    mixed_rewards_have_weights,
    inputs_are_prepared_or_provided,
    prepared_data_exists,
    prepared_model_is_possible,
    warm_start_leaves_something_to_gain,
)
