"""The cheapest change of settings with which a run fits its GPUs.

Invariant: the change obeys every rule, and the memory plan of the changed configuration
fits. Deliberately not here: the values of `auto`, which fit already
(`device_defaults.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from verl_ray.config.algebra import row_tokens_per_rank
from verl_ray.config.rules import rule_violations
from verl_ray.config.schema import Config
from verl_ray.config.section import resolved
from verl_ray.preflight.device_defaults import Changes, least_cache_gib, with_changes
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import memory_plan


def cheapest_change(config: Config, memory_bytes: int) -> Changes | None:
    """Return the settings to change so that the prediction fits, by key.

    A single kind of change is preferred, then as few as possible of them together, in
    the order of `SAVINGS`.

    Args:
        config: Resolved configuration of the run.
        memory_bytes: Memory of a GPU.

    Returns:
        The changes; None if no combination fits.
    """
    savings = [
        changes for saving in SAVINGS if (changes := dict(saving(config, memory_bytes)))
    ]

    for changes in savings:
        if _fits(config, changes, memory_bytes):
            return changes

    together: dict[str, object] = {}
    for changes in savings:
        together |= changes
    if not _fits(config, together, memory_bytes):
        return None

    # The dearest ones go first where the others are enough.
    for changes in reversed(savings):
        fewer = {key: together[key] for key in together if key not in changes}
        if _fits(config, fewer, memory_bytes):
            together = fewer
    return together


def single_rows(config: Config) -> Changes:
    """Return the changes that make micro-batches as small as the longest row."""
    changes = {}
    for name, role in config.model_roles.items():
        longest = row_tokens_per_rank(config, name)
        if role.backend.micro_batch_tokens_per_rank != longest:
            changes[f"{name}.backend.micro_batch_tokens_per_rank"] = longest
    return changes


def in_words(changes: Changes) -> str:
    """Return changes as overrides; roles that share a value share an override."""
    shared: dict[tuple[str, object], list[str]] = {}
    for key, value in changes.items():
        _, separator, setting = key.partition(".backend.")
        name = f"backend.{setting}" if separator else key
        shared.setdefault((name, value), []).append(key)

    words = []
    for (name, value), keys in shared.items():
        # A single role keeps its own key.
        key = name if len(keys) > 1 else keys[0]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        words.append(f"{key}={text}")
    return " ".join(words)


def _fits(config: Config, changes: Changes, memory_bytes: int) -> bool:
    changed = with_changes(config, changes)
    if set(map(str, rule_violations(changed))) - set(map(str, rule_violations(config))):
        return False
    _, needed = memory_plan(changed, on_gpus=True).fullest(on_device=True)
    return needed <= memory_bytes


# ----------------------------------------------------- changes, the cheapest ones first


def _sharded_sums(config: Config, _: int) -> Iterator[tuple[str, object]]:
    for name in config.learners:
        if getattr(config.model_roles[name].backend, "accumulate", None) == "whole":
            yield f"{name}.backend.accumulate", "sharded"


def _smaller_micro_batches(config: Config, _: int) -> Iterator[tuple[str, object]]:
    yield from single_rows(config).items()


def _smaller_caches(config: Config, memory_bytes: int) -> Iterator[tuple[str, object]]:
    """Yield the largest caches that fit; a small one leaves few rows at a time."""
    plan = memory_plan(config, on_gpus=True)
    for name, engine in config.engines.items():
        needed = max(
            plan.bytes_by_device(phase)[plan.device_of(name)]
            for phase in plan.phases
            if plan.by_role[name][phase].of("cache")
        )
        cache_gib = resolved(engine.config.kv_cache_gib)
        excess_gib = math.ceil(100 * (needed - memory_bytes) / GIB) / 100
        smaller = round(cache_gib - excess_gib, 2)
        if excess_gib > 0 and smaller >= least_cache_gib(engine, config):
            yield f"{engine.section}.kv_cache_gib", smaller


def _offloading(config: Config, _: int) -> Iterator[tuple[str, object]]:
    task = config.rollout_task
    if task is not None and task.shares_processes and task.placement.offload != "all":
        yield "placement.offload", "all"


def _recomputation(config: Config, _: int) -> Iterator[tuple[str, object]]:
    for name in config.learners:
        backend = config.model_roles[name].backend
        if getattr(backend, "activation_checkpointing", None) is False:
            yield f"{name}.backend.activation_checkpointing", True
        if getattr(backend, "recompute", "full") != "full":
            yield f"{name}.backend.recompute", "full"


def _bfloat16(config: Config, _: int) -> Iterator[tuple[str, object]]:
    for name, role in config.model_roles.items():
        if role.backend.dtype == "float32":
            yield f"{name}.backend.dtype", "bfloat16"
    for engine in config.engines.values():
        if engine.config.dtype == "float32":
            yield f"{engine.section}.dtype", "bfloat16"


def _parameters_on_the_host(config: Config, _: int) -> Iterator[tuple[str, object]]:
    for name, role in config.model_roles.items():
        if getattr(role.backend, "host_parameters", None) is False:
            yield f"{name}.backend.host_parameters", True


Saving = Callable[[Config, int], Iterator[tuple[str, object]]]
"""Takes the resolved configuration, and the memory of a GPU in bytes."""

SAVINGS: tuple[Saving, ...] = (
    _sharded_sums,
    _smaller_micro_batches,
    _smaller_caches,
    _offloading,
    _recomputation,
    _bfloat16,
    _parameters_on_the_host,
)
"""Kinds of changes. The first ones cost little time; the type of the computation is
changed late, since it changes numbers; an optimizer on the host costs most."""
