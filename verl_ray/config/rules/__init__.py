"""The rules over several fields, one small function each, in a module per noun; here is the list of all.

Invariant: every rule runs, and every problem is reported at once with its key, its value, the rule and what would be
right. A setting that another one makes meaningless is refused, never ignored. Deliberately not here: rules of a single
field (`verl_ray.config`), and what only the machine knows, such as files and memory
(`verl_ray/preflight/findings.py`).
"""

from __future__ import annotations

from collections.abc import Collection

from verl_ray.config.rules.algorithm import (
    algorithm_name_is_its_group,
    bootstrapping_needs_values,
    critic_is_needed_and_there,
    group_baseline_has_a_group,
    kl_controller_is_complete,
    kl_in_the_loss_has_a_gradient,
    kl_is_complete,
    losses_without_a_ratio_update_once,
    settings_are_read,
    value_losses_have_no_horizon,
)
from verl_ray.config.rules.backends import (
    adapters_have_a_backend,
    frozen_models_do_not_learn,
    ranks_can_share_models_out,
)
from verl_ray.config.rules.correction import (
    correction_is_complete,
    mismatch_is_complete,
    weights_are_not_applied_twice,
)
from verl_ray.config.rules.preparation import (
    inputs_are_made_or_given,
    prepared_data_exists,
    prepared_model_is_possible,
    warm_start_leaves_room,
)
from verl_ray.config.rules.reward import (
    graders_keep_the_deadline_of_calls,
    judges_can_be_asked,
    mixed_rewards_have_weights,
    normalised_scores_matter,
    requests_end_before_their_batch,
    rewards_have_a_function,
)
from verl_ray.config.rules.roles import (
    adapter_settings_are_used,
    critic_settings_are_used,
    micro_batch_holds_the_longest_row,
    mini_batches_divide_the_rows,
    offloading_frees_shared_devices,
    reference_settings_are_used,
    schedule_settings_are_used,
    shared_processes_have_equal_ranks,
)
from verl_ray.config.rules.rollout import (
    adapters_can_be_sent_alone,
    endpoint_settings_are_used,
    endpoints_have_an_address,
    rollouts_are_of_the_policy_that_learns,
    sampling_is_what_the_trainer_sees,
    temperature_is_not_too_low,
    vllm_args_are_free,
    wires_can_join_the_ends,
)
from verl_ray.config.rules.rule import Overridden, Rule, TaskRule
from verl_ray.config.rules.run import (
    checkpoints_are_kept,
    evaluation_has_data,
    evaluation_is_used,
    greedy_evaluation_needs_one_response,
    held_out_deadline_is_used,
    resume_is_a_choice_or_a_path,
    run_has_a_name,
    stopping_is_measured,
    wandb_settings_are_used,
)
from verl_ray.config.schema import Config, RLConfig, SFTConfig
from verl_ray.errors import Problem


def broken(config: Config, overridden: Collection[str] = (), *, evaluates: bool = False) -> list[Problem]:
    """Every rule that `config` breaks; `overridden` are the dotted keys set on the command line, and `evaluates` says
    that the command is one evaluation instead of training."""
    keys = Overridden(overridden, evaluates)
    rules: tuple[TaskRule, ...] = (*RULES, *OF_TASK.get(type(config), ()), *config.own_rules)
    return [problem for rule in rules for problem in rule(config, keys)]


RULES: tuple[Rule, ...] = (
    run_has_a_name,
    resume_is_a_choice_or_a_path,
    evaluation_has_data,
    evaluation_is_used,
    checkpoints_are_kept,
    wandb_settings_are_used,
    schedule_settings_are_used,
    micro_batch_holds_the_longest_row,
    ranks_can_share_models_out,
    frozen_models_do_not_learn,
    adapter_settings_are_used,
    adapters_have_a_backend,
)

OF_RL: tuple[TaskRule, ...] = (
    mini_batches_divide_the_rows,
    group_baseline_has_a_group,
    rollouts_are_of_the_policy_that_learns,
    shared_processes_have_equal_ranks,
    offloading_frees_shared_devices,
    settings_are_read,
    critic_is_needed_and_there,
    critic_settings_are_used,
    reference_settings_are_used,
    kl_is_complete,
    kl_in_the_loss_has_a_gradient,
    losses_without_a_ratio_update_once,
    kl_controller_is_complete,
    value_losses_have_no_horizon,
    bootstrapping_needs_values,
    algorithm_name_is_its_group,
    correction_is_complete,
    weights_are_not_applied_twice,
    mismatch_is_complete,
    sampling_is_what_the_trainer_sees,
    temperature_is_not_too_low,
    greedy_evaluation_needs_one_response,
    vllm_args_are_free,
    adapters_can_be_sent_alone,
    wires_can_join_the_ends,
    endpoint_settings_are_used,
    endpoints_have_an_address,
    rewards_have_a_function,
    held_out_deadline_is_used,
    graders_keep_the_deadline_of_calls,
    normalised_scores_matter,
    mixed_rewards_have_weights,
    judges_can_be_asked,
    requests_end_before_their_batch,
    inputs_are_made_or_given,
    prepared_data_exists,
    prepared_model_is_possible,
    warm_start_leaves_room,
)

OF_TASK: dict[type[Config], tuple[TaskRule, ...]] = {RLConfig: OF_RL, SFTConfig: (stopping_is_measured,)}
"""The rules of one task alone; a task in a file of its own has them in `own_rules`."""
