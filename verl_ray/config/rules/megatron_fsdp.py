"""Rules of the `megatron_fsdp` backend: which of its settings go together.

Invariant: every setting does something, or is refused with the one that it depends on. Deliberately not here: rules
that hold for any backend (`roles.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.config.backends import MegatronFsdpBackend
from verl_ray.config.roles import SupervisedRole
from verl_ray.config.rules.rule import Overridden, ignored
from verl_ray.config.schema import Config
from verl_ray.config.suggest import either
from verl_ray.errors import Problem

OF_GRADIENTS = ("overlap_grad_reduce", "reduce_in_float32")


def groups_of_megatron_fsdp_divide_the_ranks(config: Config, _: Overridden) -> Iterator[Problem]:
    for name, ranks, backend in _roles(config):
        size, key = backend.shard_size, f"{name}.backend.shard_size"
        sizes = [size for size in range(2, ranks) if ranks % size == 0]
        if size is not None and backend.sharding == "none":
            rule = f"this setting would be ignored: {name}.backend.sharding=none shares nothing out"
            yield Problem(key, size, rule, "Set it to null, or choose another sharding.")
        elif size is not None and size not in sizes:
            rule = f"{name}.num_ranks={ranks} ranks are cut into several groups of this size, of more than one rank"
            fix = f"Use {either(sizes)}, or null for one group." if sizes else "Set it to null: one group."
            yield Problem(key, size, rule, fix)
        if backend.outer_sharding != "none" and (size is None or backend.sharding != "all"):
            rule = "groups that hold copies (shard_size) can share out the optimizer's state once sharding=all"
            fix = f"Set it to none, or {name}.backend.sharding=all and {name}.backend.shard_size."
            yield Problem(f"{name}.backend.outer_sharding", backend.outer_sharding, rule, fix)


def megatron_fsdp_overlaps_what_it_can(config: Config, _: Overridden) -> Iterator[Problem]:
    for name, _ranks, backend in _roles(config):
        held = f"{name}.backend.sharding={backend.sharding}"
        gathers, sharded_gradients = backend.sharding != "none", backend.sharding in ("optimizer_gradients", "all")
        if not backend.overlap_param_gather and (backend.sharding == "all" or not gathers):
            why = "gathers each layer when it computes" if gathers else "gathers nothing"
            rule, fix = f"{held} {why}", "Set it to true, or use sharding=optimizer or optimizer_gradients."
            yield Problem(f"{name}.backend.overlap_param_gather", False, rule, fix)
        if not backend.overlap_grad_reduce and sharded_gradients:
            rule = f"{held} has no room for all gradients, so they are summed as they come"
            fix = "Set it to true, or use sharding=none or optimizer."
            yield Problem(f"{name}.backend.overlap_grad_reduce", False, rule, fix)
        if backend.double_buffer and backend.sharding != "all":
            rule = f"this setting would be ignored: {held} gathers no layer by itself"
            yield Problem(f"{name}.backend.double_buffer", True, rule, "Set it to false, or use sharding=all.")


def frozen_models_have_no_gradients(config: Config, overridden: Overridden) -> Iterator[Problem]:
    for name, role in config.model_roles.items():
        if not isinstance(role, SupervisedRole) and isinstance(role.backend, MegatronFsdpBackend):
            keys = [key for field in OF_GRADIENTS for key in overridden.under(f"{name}.backend.{field}")]
            yield from ignored(keys, config, "this model does not learn, so it has no gradients")


def _roles(config: Config) -> Iterator[tuple[str, int, MegatronFsdpBackend]]:
    """Those on this backend, with their ranks."""
    for name, role in config.model_roles.items():
        if isinstance(role.backend, MegatronFsdpBackend):
            yield name, role.num_ranks, role.backend
