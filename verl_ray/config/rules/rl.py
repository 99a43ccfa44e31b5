"""The rules that only reinforcement learning has.

Deliberately not here: the rules themselves, in a module per noun.
"""

from __future__ import annotations

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
from verl_ray.config.rules.curriculum import curriculum_is_possible
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
    greedy_evaluation_truncates_nothing,
    held_out_deadline_is_used,
)
from verl_ray.config.rules.schedule import stale_tokens_are_corrected
from verl_ray.config.rules.score_shaping import (
    length_rewards_have_a_group,
    own_shaping_reads_its_settings,
)
from verl_ray.config.rules.sequences import (
    sequences_are_weighted_as_such,
    trajectories_are_judged,
)
from verl_ray.config.rules.spread import (
    dynamic_sampling_is_possible,
    replay_is_possible,
)

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
