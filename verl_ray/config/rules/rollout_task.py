"""The rules of every task that learns from rollouts of its own policy.

Deliberately not here: the rules themselves, in a module per noun.
"""

from __future__ import annotations

from verl_ray.config.rules.roles import (
    mini_batches_divide_the_rows,
    offloading_frees_shared_devices,
)
from verl_ray.config.rules.rollout import (
    endpoint_settings_are_used,
    endpoints_have_an_address,
    sampling_is_what_the_trainer_sees,
)
from verl_ray.config.rules.rule import TaskRule
from verl_ray.config.rules.schedule import (
    open_rows_survive_a_turn,
    schedule_is_consistent,
)
from verl_ray.config.rules.vllm_args import vllm_args_are_free
from verl_ray.config.rules.weight_sync import (
    adapters_can_be_sent_alone,
    transport_fits_the_placement,
)

ROLLOUT_TASK_RULES: tuple[TaskRule, ...] = (
    mini_batches_divide_the_rows,
    schedule_is_consistent,
    open_rows_survive_a_turn,
    offloading_frees_shared_devices,
    sampling_is_what_the_trainer_sees,
    vllm_args_are_free,
    adapters_can_be_sent_alone,
    transport_fits_the_placement,
    endpoint_settings_are_used,
    endpoints_have_an_address,
)
