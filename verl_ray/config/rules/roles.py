"""Rules of the models that a run holds: their ranks, batches and optimizers.

Invariant: rows and ranks divide without a remainder, and settings of a model that the
run does not have, or does not train, are refused. Deliberately not here: whether the
machine has the devices (`verl_ray/preflight/resources.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_ray.config.rules.rule import OverriddenKeys, ignored_settings
from verl_ray.config.schema import Config
from verl_ray.config.suggest import either, nearest_divisors
from verl_ray.errors import Problem
from verl_ray.hub.names import is_hub_id

if TYPE_CHECKING:  # they import this module
    from verl_ray.config.rollout_task import RolloutTaskConfig
    from verl_ray.config.tasks.rl import RLConfig


# ----------------------------------------------------------------------- rows and ranks


def micro_batch_holds_the_longest_row(
    config: Config, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each role whose micro-batch is shorter than a row may be."""
    longest, source = config.longest_row
    rows_per_unit = config.rows_per_unit
    if rows_per_unit > 1:
        longest = rows_per_unit * longest
        source = f"{rows_per_unit} x {source}: rows that are compared stay together"

    for name, role in config.model_roles.items():
        # A model that scores counts the tokens of its own tokenizer; rows that are too
        # long get no score, and are counted.
        if role.scores_rollouts:
            continue

        backend = role.backend
        tokens_per_rank = backend.micro_batch_tokens_per_rank
        slices = backend.token_slices
        # What auto becomes holds the longest row.
        if tokens_per_rank == "auto" or tokens_per_rank * slices >= longest:
            continue

        shared = f", which {slices} ranks share" if slices > 1 else ""
        rule = (
            f"a row may have {longest} tokens ({source}) and must fit into one"
            f" micro-batch{shared}"
        )
        least = -(-longest // slices)
        fix = f"The nearest value that works is {least}; or shorten the rows."
        key = f"{name}.backend.micro_batch_tokens_per_rank"
        yield Problem(key, tokens_per_rank, rule, fix)


def mini_batches_divide_the_rows(
    config: RolloutTaskConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each role whose mini-batches leave a remainder of rows."""
    prompts = config.data.prompts_per_step
    group_size = config.rollout.group_size
    rows = config.rows_per_step

    for name, role in config.learners.items():
        size = role.rows_per_update(rows)
        if rows % size == 0:
            continue

        rule = (
            f"it must divide the {rows} rows of a step,"
            f" data.prompts_per_step={prompts} x rollout.group_size={group_size}"
        )
        nearest = either(nearest_divisors(rows, size))
        fix = f"The nearest that do are {nearest}; null takes all rows at once."
        yield Problem(f"{name}.mini_batch_size", size, rule, fix)


def shared_processes_have_equal_ranks(
    config: Config, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each colocated role with another number of ranks.

    Colocated roles on one kind of backend share a process per rank.
    """
    if not config.shares_processes:
        return

    # The first role on each kind of backend sets the number of ranks.
    first_roles: dict[str, str] = {}

    for name, role in config.model_roles.items():
        first = first_roles.setdefault(role.backend.kind, name)
        expected = config.model_roles[first].num_ranks
        if role.num_ranks == expected:
            continue

        rule = (
            "colocated roles on one backend share a process per rank, and"
            f" {first}.num_ranks={expected}"
        )
        fix = (
            f"Use {name}.num_ranks={expected}, {first}.num_ranks={role.num_ranks},"
            " placement=separate, or another backend for one of them"
            f" (backend@{name}.backend=...)."
        )
        yield Problem(f"{name}.num_ranks", role.num_ranks, rule, fix)


# ------------------------------------------------------ settings that would have no use


def offloading_frees_shared_devices(
    config: RolloutTaskConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem if trainers offload and share no device with rollout engines."""
    kind = config.placement.kind
    offload = config.placement.offload

    # Separate trainers have their devices to themselves.
    if kind != "colocated" and offload in ("all", "optimizer"):
        rule = (
            f"with placement={kind} trainers share their devices with no rollout engine"
        )
        fix = "Leave it out, or use placement=colocated."
        yield Problem("placement.offload", offload, rule, fix)


def critic_settings_are_used(
    config: RLConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of a critic that the run does not have.

    Also refuse a warm-up of the critic that would leave the actor no step.
    """
    key = "algorithm.critic_warmup_steps"
    warmup_steps = config.algorithm.critic_warmup_steps
    total_steps = config.run.total_steps

    # A critic that exists uses its settings, so only its warm-up can be wrong.
    if config.has_critic:
        # The steps of run.total_epochs are known, and compared, when the data are read.
        if total_steps is not None and warmup_steps >= total_steps:
            rule = (
                f"the actor would never learn in the {total_steps} steps of"
                " run.total_steps"
            )
            fix = f"Use at most {total_steps - 1}."
            yield Problem(key, warmup_steps, rule, fix)
        return

    reason = f"algorithm={config.algorithm.name} makes no critic"
    yield from ignored_settings(overridden.under("critic"), config, reason)

    if warmup_steps:
        fix = "Set it to 0, or choose algorithm=ppo."
        yield Problem(key, warmup_steps, reason, fix)


def reference_settings_are_used(
    config: RLConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of a reference that the run does not have."""
    if config.has_reference:
        return

    keys = overridden.under("reference")
    reason = "algorithm.kl.place=none makes no reference"

    if config.reference_is_base:
        rank = config.actor.lora.rank
        reason = (
            f"with actor.lora.rank={rank} the reference is the actor without its"
            " adapter"
        )

        # The path equals the actor's, or there would be a reference of its own.
        keys = [key for key in keys if key != "reference.model.path"]

    yield from ignored_settings(keys, config, reason)


def revisions_are_of_the_hub(
    config: Config, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each revision of a model that is a folder."""
    models = {"model": config.model}
    for name, role in config.model_roles.items():
        models[f"{name}.model"] = role.model
    for name, judge in config.judges.items():
        models[f"{name}.model"] = judge.model

    for key, model in models.items():
        if model.revision is not None and not is_hub_id(model.path):
            keys = overridden.under(f"{key}.revision")
            reason = f"{key}.path is a folder, and only models of the hub have commits"
            yield from ignored_settings(keys, config, reason)


def adapter_settings_are_used(
    config: Config, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of an adapter that a role does not have."""
    for name, role in config.learners.items():
        if role.adapter is not None:
            continue

        keys = overridden.under(f"{name}.lora.alpha")
        keys += overridden.under(f"{name}.lora.targets")
        reason = f"{name}.lora.rank=0 makes no adapter"
        fix = f"Set {name}.lora.rank, 16 for example; or leave it out."
        yield from ignored_settings(keys, config, reason, fix)


def schedule_settings_are_used(
    config: Config, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each last learning rate of a schedule that does not decay."""
    for section, optimizer in config.optimizers.items():
        if optimizer.schedule == "constant":
            keys = overridden.under(f"{section}.min_lr_fraction")
            reason = f"{section}.schedule=constant has no end to decay to"
            yield from ignored_settings(keys, config, reason)
