"""Rules of the megatron backend that hold for every model: its layout over the ranks, and what it cannot train.

Invariant: a layout that is refused is answered with the nearest one that is possible. Deliberately not here: what a
model's own sizes rule out (`verl_ray/preflight/megatron_models.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.config.backends import MegatronBackend
from verl_ray.config.layouts import ModelSizes, nearest_layout, obstacles, other_ranks
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.rules.rule import Overridden
from verl_ray.config.schema import Config
from verl_ray.config.suggest import either
from verl_ray.errors import Problem


def layouts_are_possible(config: Config, _: Overridden) -> Iterator[Problem]:
    for name, role in config.model_roles.items():
        yield from layout_problems(name, role, None)


def adapters_have_a_backend(config: Config, _: Overridden) -> Iterator[Problem]:
    for name, role in config.model_roles.items():
        if isinstance(role, SupervisedRole) and role.lora.rank and isinstance(role.backend, MegatronBackend):
            rule = f"{name}.backend={role.backend.kind} trains all parameters, and has no adapters"
            fix = f"Set it to 0, or choose backend@{name}.backend=fsdp or backend@{name}.backend=engine."
            yield Problem(f"{name}.lora.rank", role.lora.rank, rule, fix)


def layout_problems(name: str, role: ModelRole, sizes: ModelSizes | None) -> Iterator[Problem]:
    """What is in the way of a role's layout, for a model of these sizes where they are known."""
    backend, ranks = role.backend, role.num_ranks
    if not isinstance(backend, MegatronBackend):
        return
    found = list(obstacles(backend, ranks, sizes))
    if not found:
        return
    change = nearest_layout(backend, ranks, sizes)
    said = (f"{name}.backend.{key}={str(value).lower()}" for key, value in change.items())
    fix = f"The nearest layout that works has {' and '.join(said)}"
    elsewhere = [count for count in other_ranks(backend, ranks) if not any(obstacles(backend, count, sizes))]
    if elsewhere:
        fix += f"; this one works with {name}.num_ranks={either(elsewhere)}"
    for obstacle in found:
        yield Problem(f"{name}.backend.{obstacle.key}", getattr(backend, obstacle.key), obstacle.rule, f"{fix}.")
