"""The use of what remains of a GPU: caches, then micro-batches of some roles.

Invariant: caches and micro-batches grow into memory that nothing else needs, and no
further than is of use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TypeVar

from verl_ray.config.algebra import row_tokens_per_rank
from verl_ray.config.load import with_changes
from verl_ray.config.rollout import ServedModel
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.section import resolved
from verl_ray.preflight.engine_models import row_cache_bytes
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.model_files import settings_of
from verl_ray.preflight.role_memory import ROLLOUT

USED_SHARE = 0.9
"""Share of a device, or of a host, that a prediction may fill.

The rest is for what is not predicted: CUDA graphs, fragments between tensors, and
errors of the estimates.
"""

MICRO_BATCH_TOKENS = (32768, 16384, 8192, 4096, 2048)
"""Sizes of micro-batches on GPUs. Fewer, larger ones gather a layer's weights less
often."""

LEAST_KV_CACHE_GIB = 0.25
"""A cache of fewer GiB saves nothing worth having."""

CACHE_PER_ROW = 1.02
"""Cache that a row takes in blocks, for each byte that its tokens take."""

UNKNOWN_KV_CACHE_GIB = 8.0
"""The most where a device's memory, or the size of a row, is not known."""

C = TypeVar("C", bound=Config)


# ------------------------------------------------------------------------------- caches


def cache_bounds_gib(
    engine: ServedModel, config: Config, *, learns: bool = True
) -> tuple[float, float]:
    """Return the least and the largest useful KV cache of an engine, in GiB.

    The least holds the longest row, the largest as many of them as the engine runs at
    once.

    Args:
        engine: The engine.
        config: Configuration of the run.
        learns: Whether the job trains. False stands for an evaluation alone.
    """
    row_bytes = row_cache_bytes(engine, settings_of(engine.path, config))
    if row_bytes is None:
        return LEAST_KV_CACHE_GIB, UNKNOWN_KV_CACHE_GIB

    # vLLM counts in blocks, which hold a little more than a row.
    row_gib = CACHE_PER_ROW * row_bytes / GIB
    least = max(LEAST_KV_CACHE_GIB, _hundredths(row_gib, math.ceil))
    rows = _rows_at_once(engine, config, learns=learns)
    return least, max(least, _hundredths(rows * row_gib, math.ceil))


def _rows_at_once(engine: ServedModel, config: Config, *, learns: bool) -> int:
    """Return the most rows that an engine ever runs at once."""
    most = engine.config.batched_requests
    assert isinstance(config, RolloutTaskConfig), "engines are of rollouts"
    # Clients of an endpoint send as many requests as they like.
    if engine.section == ROLLOUT and config.rollout.endpoint.enabled:
        return most

    rows = config.rows_per_step
    if config.run.evaluate_every or not learns:
        evaluated = config.responses_per_evaluation
        # The number may be known only once the held-out problems are read.
        if evaluated is None:
            return most
        rows = max(rows, evaluated)
    return min(most, -(-rows // engine.replicas))


def with_largest_caches(
    config: C, names: Collection[str], usable_bytes: float, *, learns: bool = True
) -> C | None:
    """Return a configuration whose caches take what remains of their devices.

    Whether all else fits is not looked at.

    Args:
        config: Resolved configuration; the sizes of these caches do not matter.
        names: Names of the engines whose caches are chosen.
        usable_bytes: Bytes of a device that may be filled.
        learns: Whether the job trains. False stands for an evaluation alone.

    Returns:
        The configuration; None if some device has too little for a single row.
    """
    if not names:
        return config
    plan = memory_plan(config, on_gpus=True, learns=learns)
    caches: dict[str, object] = {}
    for name in names:
        engine = config.engines[name]
        device = plan.device_of(name)
        # An engine that sleeps has no cache.
        others = max(
            plan.bytes_by_device(phase)[device] - cache
            for phase in plan.phases
            if (cache := plan.by_role[name][phase].of("cache"))
        )
        available_gib = (usable_bytes - others) / GIB
        least, most = cache_bounds_gib(engine, config, learns=learns)
        if available_gib < least:
            return None
        largest = max(least, _hundredths(min(available_gib, most), math.floor))
        caches[f"{engine.section}.kv_cache_gib"] = largest
    return with_changes(config, caches)


def _hundredths(gib: float, rounding: Callable[[float], int]) -> float:
    return rounding(round(100 * gib, 6)) / 100


# ------------------------------------------------------------------------ micro-batches


def growing_roles(config: Config) -> list[str]:
    """Return the roles whose micro-batches take what remains.

    They do not learn, so they keep no activations. In a pipeline, stages would wait for
    larger micro-batches.
    """
    learners = config.learners
    return [
        name
        for name, role in config.model_roles.items()
        if name not in learners and getattr(role.backend, "pipeline_parallel", 1) == 1
    ]


def with_larger_batches(config: C, names: Collection[str], tokens: int) -> C:
    """Return a configuration in which roles have micro-batches of at least `tokens`."""
    changes = {
        f"{name}.backend.micro_batch_tokens_per_rank": max(
            tokens,
            row_tokens_per_rank(config, name),
            resolved(config.model_roles[name].backend.micro_batch_tokens_per_rank),
        )
        for name in names
    }
    return with_changes(config, changes)


def with_largest_batches(
    config: C, names: Collection[str], fits: Callable[[C], bool]
) -> C:
    """Return a configuration whose micro-batches take what remains of the devices.

    Args:
        config: Resolved configuration that fits.
        names: Names of growing roles, which get micro-batches of one size.
        fits: Tells whether a configuration fits the devices.
    """
    if not names:
        return config
    for tokens in MICRO_BATCH_TOKENS:
        larger = with_larger_batches(config, names, tokens)
        if fits(larger):
            return larger
    return config
