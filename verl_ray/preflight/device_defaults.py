"""The values of `auto` that depend on the memory of a device.

Invariant: of all levels, the fastest is taken whose predicted memory leaves a tenth of
the device free. On a CPU the values are constants. Deliberately not here: the memory
itself (`memory_plan.py`), and every other `auto` (`resolve.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeVar, get_args

from verl_ray.config.algebra import row_tokens_per_rank
from verl_ray.config.load import parse, to_tree
from verl_ray.config.rollout import VLLM_BATCHED_REQUESTS, ServedModel
from verl_ray.config.schema import Config
from verl_ray.preflight.engine_models import row_cache_bytes
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import MemoryPlan, memory_plan
from verl_ray.preflight.model_files import settings_of
from verl_ray.preflight.model_sizes import remembered_sizes

USED_SHARE = 0.9
"""Share of a device that a prediction may fill.

The rest is for what is not predicted: CUDA graphs, fragments between tensors, and
errors of the estimates.
"""

CPU_MICRO_BATCH_TOKENS = 8192
CPU_KV_CACHE_GIB = 2.0

MICRO_BATCH_TOKENS = (32768, 16384, 8192, 4096, 2048)
"""Sizes of micro-batches on GPUs. Fewer, larger ones gather a layer's weights less
often."""

LEAST_KV_CACHE_GIB = 0.25
"""A cache of fewer GiB saves nothing worth having."""

NO_KV_CACHE_GIB = 2.0**-10
"""A cache that is too small to count, for plans of everything else."""

CACHE_PER_ROW = 1.02
"""Cache that a row takes in blocks, for each byte that its tokens take."""

UNKNOWN_KV_CACHE_GIB = 8.0
"""The most where a device's memory, or the size of a row, is not known."""

CACHED_SHARE = 0.5
"""Share of the rows' greatest length that a cache should hold; few are as long."""

C = TypeVar("C", bound=Config)
Offload = Literal["none", "optimizer", "all"]
Accumulate = Literal["whole", "sharded"]
Changes = Mapping[str, object]
"""Values by dotted key."""

DeviceValue = tuple[str, object, str]
"""The key of an `auto`, the value that it becomes, and why."""


@dataclass(frozen=True)
class Level:
    """Values of the settings that trade time for memory, the same for every role."""

    recompute: bool
    offload: Offload
    accumulate: Accumulate
    tokens: int
    """Micro-batch tokens per rank, where a row is not longer."""

    def changes(self, config: Config, keys: Iterable[str]) -> dict[str, object]:
        """Return what settings become on this level, by key."""
        return {key: self._value(key, config) for key in keys}

    def _value(self, key: str, config: Config) -> object:
        section, _, name = key.rpartition(".")
        if name == "offload":
            return self.offload if config.shares_processes else "none"
        if name == "accumulate":
            return self.accumulate

        role = section.removesuffix(".backend")
        if name == "micro_batch_tokens_per_rank":
            return max(self.tokens, row_tokens_per_rank(config, role))

        # A model that does not learn keeps no activations.
        recompute = self.recompute and role in config.learners
        if name == "recompute":
            return "full" if recompute else "none"
        return recompute


ON_CPU = Level(False, "none", "whole", CPU_MICRO_BATCH_TOKENS)

LEVELS = tuple(
    Level(recompute, offload, accumulate, tokens)
    for recompute, offload, accumulate, tokens in product(
        (False, True),
        get_args(Offload),
        get_args(Accumulate),
        MICRO_BATCH_TOKENS,
    )
)
"""From the fastest to the one that needs least memory.

To compute every layer again costs a third of an update. Offloading costs two copies of
the state per step. Sharded sums of gradients, and smaller micro-batches, cost exchanges
that mostly hide behind computation.
"""

LEVEL_SETTINGS = (
    "micro_batch_tokens_per_rank",
    "accumulate",
    "activation_checkpointing",
    "recompute",
)
"""The settings of a backend that a level has a value for."""


@dataclass(frozen=True)
class Device:
    """The kind of device that a run computes on."""

    is_gpu: bool
    memory_bytes: int | None
    """Memory of the smallest GPU; None for a CPU, or if it is not known."""


def device_values(config: Config, device: Device) -> Iterator[DeviceValue]:
    """Yield every `auto` that depends on the memory of a device.

    Args:
        config: Configuration in which no other setting is `auto`.
        device: Device that the run computes on.
    """
    level_keys = list(_level_keys(config))
    engines = {
        name: engine
        for name, engine in config.engines.items()
        if engine.config.kv_cache_gib == "auto"
    }

    level = ON_CPU
    caches = [CPU_KV_CACHE_GIB] * len(engines)
    because = "the run computes on a CPU"
    if device.is_gpu:
        search = _Search(config, device, level_keys, engines)
        # Plans of all levels are of the same models.
        with remembered_sizes():
            level, caches, because = search.fastest()

    for key, value in level.changes(config, level_keys).items():
        yield key, value, because

    for engine, cache_gib in zip(engines.values(), caches, strict=True):
        _, most = _cache_bounds(engine, config)
        if device.is_gpu:
            size = "as much as its rows of a step can use" if cache_gib >= most else ""
            because = size or f"all its rows could use {most:.1f}, and no more is free"
        yield f"{engine.section}.kv_cache_gib", cache_gib, because


def with_changes(config: C, changes: Changes) -> C:
    """Return the configuration with other values."""
    tree: Any = to_tree(config)
    for key, value in changes.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[name] = value
    return parse(tree, type(config))


def _level_keys(config: Config) -> Iterator[str]:
    """Yield the keys of the settings of a level that are `auto`."""
    task = config.rollout_task
    if task is not None and task.placement.offload == "auto":
        yield "placement.offload"

    for name, role in config.model_roles.items():
        for setting in LEVEL_SETTINGS:
            if getattr(role.backend, setting, None) == "auto":
                yield f"{name}.backend.{setting}"


class _Search:
    """The search for the fastest level that fits a GPU."""

    def __init__(
        self,
        config: Config,
        device: Device,
        level_keys: Sequence[str],
        engines: Mapping[str, ServedModel],
    ) -> None:
        self._config = config
        self._device = device
        self._level_keys = level_keys
        self._engines = engines

    def fastest(self) -> tuple[Level, list[float], str]:
        """Return the level, the KV cache of each engine in GiB, and why."""
        if self._device.memory_bytes is None:
            because = "the memory of the GPUs is not known"
            return LEVELS[-1], self._small_caches(), because

        usable = USED_SHARE * self._device.memory_bytes
        size = f"the {self._device.memory_bytes / GIB:.0f} GiB of a GPU"
        # Many rows at a time are worth more than any setting of a level.
        for share in (CACHED_SHARE, 0.0):
            for level in LEVELS:
                caches = self._caches_on(level, usable, share)
                if caches is not None:
                    return level, caches, f"the fastest that fits {size}"

        because = f"nothing fits {size}, and this needs least"
        return LEVELS[-1], self._small_caches(), because

    def _caches_on(
        self, level: Level, usable: float, share: float
    ) -> list[float] | None:
        """Return the KV caches that a level leaves room for, in GiB, or None.

        Args:
            usable: Bytes of a device that may be filled.
            share: Least share of the largest useful cache.
        """
        plan = self._plan(level)
        used = {phase: plan.bytes_by_device(phase) for phase in plan.phases}
        if any(size > usable for sizes in used.values() for size in sizes.values()):
            return None

        caches = []
        for name, engine in self._engines.items():
            device = plan.device_of(name)
            # An engine that sleeps has no cache.
            cached = [
                used[phase][device]
                for phase in plan.phases
                if plan.by_role[name][phase].of("cache")
            ]
            available_gib = (usable - max(cached)) / GIB
            least, most = _cache_bounds(engine, self._config)
            if available_gib < max(least, share * most):
                return None
            caches.append(max(least, math.floor(100 * min(available_gib, most)) / 100))
        return caches

    def _plan(self, level: Level) -> MemoryPlan:
        """Return the memory plan on a level, with caches of nearly nothing."""
        changes = level.changes(self._config, self._level_keys)
        for engine in self._engines.values():
            changes[f"{engine.section}.kv_cache_gib"] = NO_KV_CACHE_GIB
        return memory_plan(with_changes(self._config, changes), on_gpus=True)

    def _small_caches(self) -> list[float]:
        """Return caches in GiB that hold a row, and no more than is modest."""
        engines = self._engines.values()
        bounds = [_cache_bounds(engine, self._config) for engine in engines]
        return [max(least, min(most, UNKNOWN_KV_CACHE_GIB)) for least, most in bounds]


def least_cache_gib(engine: ServedModel, config: Config) -> float:
    """Return the smallest KV cache of an engine that holds a row, in GiB."""
    least, _ = _cache_bounds(engine, config)
    return least


def _cache_bounds(engine: ServedModel, config: Config) -> tuple[float, float]:
    """Return the least and the largest useful KV cache of an engine, in GiB."""
    row_bytes = row_cache_bytes(engine, settings_of(engine.path, config))
    if row_bytes is None:
        return LEAST_KV_CACHE_GIB, UNKNOWN_KV_CACHE_GIB

    rows = -(-config.rows_per_step // engine.replicas)
    at_once = min(rows, VLLM_BATCHED_REQUESTS)
    # vLLM counts in blocks, which hold a little more than a row.
    row_gib = CACHE_PER_ROW * row_bytes / GIB
    least = max(LEAST_KV_CACHE_GIB, _rounded_up(row_gib))
    return least, max(least, _rounded_up(at_once * row_gib))


def _rounded_up(gib: float) -> float:
    return math.ceil(100 * gib) / 100
