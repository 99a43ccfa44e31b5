"""Rules of the models that a run holds: their ranks, mini- and micro-batches, optimizers.

Invariant: rows and ranks divide without a remainder, and settings of a model that the run does not have, or does not
train, are refused. Deliberately not here: whether the machine has the devices (`verl_ray/preflight/resources.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.config.rules.rule import Overridden, ignored
from verl_ray.config.schema import Config
from verl_ray.config.suggest import either, nearest_divisors
from verl_ray.errors import Problem

if TYPE_CHECKING:  # which name these rules
    from verl_ray.config.drawing import DrawingConfig
    from verl_ray.config.tasks.rl import RLConfig


def micro_batch_holds_the_longest_row(config: Config, _: Overridden) -> Iterator[Problem]:
    longest, sizes = config.longest_row
    together = config.rows_per_unit
    if together > 1:
        longest, sizes = together * longest, f"{together} x {sizes}: rows that are compared stay together"
    for name, role in config.model_roles.items():
        if role.grades:
            continue  # its tokenizer decides; rows that are too long get no score, and are counted
        cap, slices = role.backend.micro_batch_tokens_per_rank, role.backend.token_slices
        if cap * slices < longest:
            least = -(-longest // slices)
            shared = f", which {slices} ranks share" if slices > 1 else ""
            yield Problem(
                f"{name}.backend.micro_batch_tokens_per_rank",
                cap,
                f"a row may have {longest} tokens ({sizes}) and must fit into one micro-batch{shared}",
                f"The nearest value that works is {least}; or shorten the rows.",
            )


def mini_batches_divide_the_rows(config: DrawingConfig, _: Overridden) -> Iterator[Problem]:
    prompts, group_size = config.data.prompts_per_step, config.rollout.group_size
    rows = config.rows_per_step
    for name, role in config.learners.items():
        size = role.rows_per_update(rows)
        if rows % size:
            nearest = nearest_divisors(rows, size)
            yield Problem(
                f"{name}.mini_batch_size",
                size,
                f"it must divide the {rows} rows of a step, "
                f"data.prompts_per_step={prompts} x rollout.group_size={group_size}",
                f"The nearest that do are {either(nearest)}; null takes all rows at once.",
            )


def offloading_frees_shared_devices(config: DrawingConfig, _: Overridden) -> Iterator[Problem]:
    kind, offload = config.placement.kind, config.placement.offload
    if kind != "colocated" and offload in ("all", "optimizer"):
        rule = f"with placement={kind} trainers share their devices with no rollout engine"
        yield Problem("placement.offload", offload, rule, "Leave it out, or use placement=colocated.")


def shared_processes_have_equal_ranks(config: Config, _: Overridden) -> Iterator[Problem]:
    """Colocated roles on one kind of backend share a process per rank."""
    if not config.shares_processes:
        return
    leads: dict[str, str] = {}
    for name, role in config.model_roles.items():
        lead = leads.setdefault(role.backend.kind, name)
        expected = config.model_roles[lead].num_ranks
        if role.num_ranks != expected:
            yield Problem(
                f"{name}.num_ranks",
                role.num_ranks,
                f"colocated roles on one backend share a process per rank, and {lead}.num_ranks={expected}",
                f"Use {name}.num_ranks={expected}, {lead}.num_ranks={role.num_ranks}, placement=separate, "
                f"or another backend for one of them (backend@{name}.backend=...).",
            )


def critic_settings_are_used(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if config.has_critic:
        if config.algorithm.critic_warmup_steps >= config.run.total_steps:
            yield Problem(
                "algorithm.critic_warmup_steps",
                config.algorithm.critic_warmup_steps,
                f"the actor would never learn in the {config.run.total_steps} steps of run.total_steps",
                f"Use at most {config.run.total_steps - 1}.",
            )
        return
    reason = f"algorithm={config.algorithm.name} makes no critic"
    yield from ignored(overridden.under("critic"), config, reason)
    if config.algorithm.critic_warmup_steps:
        fix = "Set it to 0, or choose algorithm=ppo."
        yield Problem("algorithm.critic_warmup_steps", config.algorithm.critic_warmup_steps, reason, fix)


def reference_settings_are_used(config: RLConfig, overridden: Overridden) -> Iterator[Problem]:
    if config.has_reference:
        return
    reason, keys = "algorithm.kl.place=none makes no reference", overridden.under("reference")
    if config.reference_is_base:
        reason = f"with actor.lora.rank={config.actor.lora.rank} the reference is the actor without its adapter"
        keys = [key for key in keys if key != "reference.model.path"]  # which is the actor's, or there would be one
    yield from ignored(keys, config, reason)


def adapter_settings_are_used(config: Config, overridden: Overridden) -> Iterator[Problem]:
    for name, role in config.learners.items():
        if role.adapter is None:
            keys = overridden.under(f"{name}.lora.alpha") + overridden.under(f"{name}.lora.targets")
            reason = f"{name}.lora.rank=0 makes no adapter"
            yield from ignored(keys, config, reason, f"Set {name}.lora.rank, 16 for example; or leave it out.")


def schedule_settings_are_used(config: Config, overridden: Overridden) -> Iterator[Problem]:
    for key, optimizer in config.optimizers.items():
        if optimizer.schedule == "constant":
            reason = f"{key}.schedule=constant has no end to decay to"
            yield from ignored(overridden.under(f"{key}.min_lr_fraction"), config, reason)
