"""The rules that only reinforcement learning has.

Deliberately not here: the rules themselves, in a module per noun.
"""

from __future__ import annotations

from verl_ray.config.rules.algorithm import (
    algorithm_is_chosen_as_a_group,
    bootstrapping_needs_values,
    critic_matches_the_advantage,
    group_baseline_has_a_group,
    kl_controller_is_complete,
    kl_in_the_loss_has_a_gradient,
    kl_is_complete,
    losses_without_a_ratio_update_once,
    settings_are_read,
    value_losses_have_no_horizon,
)
from verl_ray.config.rules.correction import (
    correction_is_complete,
    mismatch_is_complete,
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
from verl_ray.config.rules.rule import TaskRule
from verl_ray.config.rules.run import (
    greedy_evaluation_needs_one_response,
    held_out_deadline_is_used,
)

RL_RULES: tuple[TaskRule, ...] = (
    group_baseline_has_a_group,
    settings_are_read,
    critic_matches_the_advantage,
    critic_settings_are_used,
    reference_settings_are_used,
    kl_is_complete,
    kl_in_the_loss_has_a_gradient,
    losses_without_a_ratio_update_once,
    kl_controller_is_complete,
    value_losses_have_no_horizon,
    bootstrapping_needs_values,
    algorithm_is_chosen_as_a_group,
    correction_is_complete,
    weights_are_not_applied_twice,
    mismatch_is_complete,
    temperature_is_not_too_low,
    greedy_evaluation_needs_one_response,
    held_out_deadline_is_used,
    normalised_scores_matter,
    mixed_rewards_have_weights,
    inputs_are_prepared_or_provided,
    prepared_data_exists,
    prepared_model_is_possible,
    warm_start_leaves_something_to_gain,
)
