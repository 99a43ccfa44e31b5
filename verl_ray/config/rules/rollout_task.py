"""The rules of every task that learns from rollouts of its own policy.

Deliberately not here: the rules of single sections, in a module per noun.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.config.rollout import HEAD, VLLM_LORA_RANKS
from verl_ray.config.rules.roles import (
    mini_batches_divide_the_rows,
    offloading_frees_shared_devices,
)
from verl_ray.config.rules.rollout import (
    endpoint_settings_are_used,
    endpoints_have_an_address,
    sampling_is_what_the_trainer_sees,
)
from verl_ray.config.rules.rule import OverriddenKeys, TaskRule, ignored_settings
from verl_ray.config.rules.schedule import (
    open_rows_survive_a_turn,
    schedule_is_consistent,
)
from verl_ray.config.rules.vllm_args import vllm_args_are_free
from verl_ray.errors import Problem

if TYPE_CHECKING:
    from verl_ray.config.rollout_task import RolloutTaskConfig


# -------------------------------------------------------------------------- weight sync

# Rules of weight syncs: over which wire weights are sent, and how adapters are.
#
# Invariant: a setting of a wire that is not used is refused.

_SYNC = "rollout.sync"

# Wires on which sending less saves more time than comparing costs.
_SLOW_WIRES = ("broadcast", "host_broadcast", "disk")


def transport_fits_the_placement(
    config: RolloutTaskConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting that does not go with the chosen wire."""
    sync = config.rollout.sync

    if sync.delta and sync.transport not in _SLOW_WIRES:
        verb = "may be" if sync.transport == "auto" else "is"
        rule = (
            f"changes are for slow wires, and transport={sync.transport} {verb} memory"
            " that both sides see: finding changes there costs more than copying all"
        )
        fix = f"Use false, or {_SYNC}.transport=broadcast or disk."
        yield Problem(f"{_SYNC}.delta", True, rule, fix)

    # Only this wire writes files.
    if sync.transport != "disk":
        keys = overridden.under(f"{_SYNC}.folder")
        reason = f"{_SYNC}.transport={sync.transport} has no files"
        yield from ignored_settings(keys, config, reason)

    if sync.transport == "cuda_ipc":
        yield from _cuda_ipc_problems(config)


def _cuda_ipc_problems(config: RolloutTaskConfig) -> Iterator[Problem]:
    key = f"{_SYNC}.transport"
    placement = config.placement.kind
    replicas = config.rollout.num_replicas
    actor_ranks = config.actor.num_ranks

    # A handle of GPU memory can be opened only on the same GPU.
    if placement != "colocated":
        rule = (
            f"it joins processes on one GPU, and placement={placement} gives each role"
            " its own"
        )
        fix = "Use auto or host_broadcast, or placement=colocated."
        yield Problem(key, "cuda_ipc", rule, fix)
    elif replicas != "auto" and replicas > actor_ranks:
        rule = (
            "every rollout engine must share the GPU of a rank of the actor, and"
            f" rollout.num_replicas={replicas} are more than"
            f" actor.num_ranks={actor_ranks}"
        )
        fix = "Use auto, or as many ranks as replicas."
        yield Problem(key, "cuda_ipc", rule, fix)


def adapters_can_be_sent_alone(
    config: RolloutTaskConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if an adapter cannot be sent in the way that the user chose."""
    key = f"{_SYNC}.adapter"
    choice = config.rollout.sync.adapter
    lora = config.actor.lora

    if choice == "auto":
        return

    if lora.rank == 0:
        # Without an adapter, auto resolves to merged, so a configuration that another
        # run has saved may hold that value.
        if choice == "alone" or overridden.under(key):
            rule = "with actor.lora.rank=0 there is no adapter"
            fix = "Leave it out, or set actor.lora.rank."
            yield Problem(key, choice, rule, fix)
        return

    # Merged weights go with every setting.
    if choice == "merged":
        return

    if config.rollout.sleep == "weights":
        rule = "rollout.sleep=weights frees the model that the adapter is for"
        fix = "Use merged, or rollout.sleep=kv_cache."
        yield Problem(key, choice, rule, fix)
    elif lora.rank > VLLM_LORA_RANKS[-1]:
        rule = (
            f"vLLM takes adapters up to rank {VLLM_LORA_RANKS[-1]}, and actor.lora.rank"
            f" is {lora.rank}"
        )
        fix = "Use merged, or a smaller rank."
        yield Problem(key, choice, rule, fix)
    elif HEAD in lora.targets:
        rule = (
            "vLLM has no log-probs of prompts, which verify a sync, with an adapter on"
            f" {HEAD}"
        )
        fix = f"Use merged, or take {HEAD} from actor.lora.targets."
        yield Problem(key, choice, rule, fix)


# ---------------------------------------------------------------- the rules of the task


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
