"""The rules of every task that draws rollouts from its own policy.

Deliberately not here: the rules themselves, in a module per noun.
"""

from __future__ import annotations

from verl_ray.config.rules.roles import mini_batches_divide_the_rows, offloading_frees_shared_devices
from verl_ray.config.rules.rollout import (
    adapters_can_be_sent_alone,
    endpoint_settings_are_used,
    endpoints_have_an_address,
    rollouts_are_of_the_policy_that_learns,
    sampling_is_what_the_trainer_sees,
    vllm_args_are_free,
    wires_can_join_the_ends,
)
from verl_ray.config.rules.rule import TaskRule

DRAWING_RULES: tuple[TaskRule, ...] = (
    mini_batches_divide_the_rows,
    rollouts_are_of_the_policy_that_learns,
    offloading_frees_shared_devices,
    sampling_is_what_the_trainer_sees,
    vllm_args_are_free,
    adapters_can_be_sent_alone,
    wires_can_join_the_ends,
    endpoint_settings_are_used,
    endpoints_have_an_address,
)
