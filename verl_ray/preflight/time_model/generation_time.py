"""Estimated seconds in which a replica generates its share of a step's responses.

Invariant: pure arithmetic over the settings of an engine, the size of its model, the
lengths of rows, and the figures of a machine. Deliberately not here: the memory that a
cache may take (`verl_ray/preflight/remaining_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ray.backends.base import FLOAT32
from verl_ray.config.rollout import RolloutEngineConfig
from verl_ray.config.section import resolved
from verl_ray.preflight.engine_models import cache_bytes_per_token
from verl_ray.preflight.gpus import GIB
from verl_ray.preflight.model_sizes import ModelSize
from verl_ray.preflight.time_model.assumptions import (
    DECODE_BANDWIDTH_SHARE,
    DECODE_STEP_S,
    EXCHANGE_LATENCY_S,
    PREFILL_EFFICIENCY,
)
from verl_ray.preflight.time_model.links import Links
from verl_ray.preflight.time_model.training_time import experts_per_token, flops_per_s
from verl_ray.profiling.flops import ModelShape

_TAIL_POINTS = 8
"""Points at which the steps of the long tail are computed."""


@dataclass(frozen=True)
class ResponseLengths:
    """The lengths of rows in the mean and at most, in tokens."""

    mean_prompt: float
    mean_response: float
    longest_response: int
    prompt_flops: float
    """FLOPs of a forward pass over a prompt, in the mean."""


@dataclass(frozen=True)
class _Decoder:
    """One rank of an engine while it decodes."""

    settings: RolloutEngineConfig
    size: ModelSize
    shape: ModelShape
    links: Links

    @property
    def width(self) -> int:
        return FLOAT32 if resolved(self.settings.dtype) == "float32" else 2

    def step_s(self, running: float, context: float) -> float:
        """Return the time of a step in which every running response gets a token.

        Args:
            running: Number of responses.
            context: Tokens of one of them, with its prompt.
        """
        settings = self.settings
        tensor = settings.tensor_parallel
        size = self.size

        weights = size.parameters - size.in_experts
        if size.in_experts:
            # An expert is read if any of the tokens is given to it.
            chosen = experts_per_token(size) / self.shape.num_experts
            weights += int(size.in_experts * (1 - (1 - chosen) ** running))
        cache = running * context * _cache_bytes_per_token(settings, self.shape)
        bandwidth = self.links.gpu.memory_bytes_per_s * DECODE_BANDWIDTH_SHARE
        reading = (self.width * weights / tensor + cache) / bandwidth

        flops = 2 * self.shape.matmul_parameters * running / tensor
        peak = flops_per_s(self.links, resolved(settings.dtype)) * PREFILL_EFFICIENCY

        exchange = 0.0
        if tensor > 1:
            hidden = self.width * running * self.shape.hidden_size
            sums = 2 * self.shape.num_layers
            exchange = sums * self.links.sum_s(hidden, tensor)
            exchange += sums * EXCHANGE_LATENCY_S
        return max(reading, flops / peak) + exchange + DECODE_STEP_S


def generation_s(
    settings: RolloutEngineConfig,
    size: ModelSize,
    rows: int,
    lengths: ResponseLengths,
    links: Links,
) -> float:
    """Return the seconds until the last response of a replica is finished.

    Prompts are read at the speed of matrix products. Then responses are decoded: as
    many at a time as the cache holds and the engine takes. The others follow as places
    become free. While the last ones run, their number falls evenly to 0.

    Args:
        settings: Settings of the engines.
        size: Size of the model.
        rows: Number of responses of the replica.
        lengths: Their lengths.
        links: Links of the machine.
    """
    shape = size.shape
    assert shape is not None, "models without a shape are refused before"
    if rows == 0:
        return 0.0
    peak = flops_per_s(links, resolved(settings.dtype)) * PREFILL_EFFICIENCY
    prefill = rows * lengths.prompt_flops / settings.tensor_parallel / peak

    running = min(rows, _running_requests(settings, shape, lengths))
    decoder = _Decoder(settings, size, shape, links)
    # Longer responses run for longer, so those that run are at M / 3 in the mean.
    context = lengths.mean_prompt + lengths.longest_response / 3

    full_steps = (rows - running) * lengths.mean_response / running
    decode = full_steps * decoder.step_s(running, context)

    steps_per_point = lengths.longest_response / _TAIL_POINTS
    for point in range(_TAIL_POINTS):
        passed = (point + 0.5) / _TAIL_POINTS
        context = lengths.mean_prompt + passed * lengths.longest_response
        remaining = max(1.0, running * (1 - passed))
        decode += steps_per_point * decoder.step_s(remaining, context)
    return prefill + decode


def _running_requests(
    settings: RolloutEngineConfig, shape: ModelShape, lengths: ResponseLengths
) -> float:
    """Return how many requests an engine runs at a time."""
    cache_bytes = resolved(settings.kv_cache_gib) * GIB
    tokens = cache_bytes / _cache_bytes_per_token(settings, shape)
    mean_row = lengths.mean_prompt + lengths.mean_response
    return max(1.0, min(float(settings.batched_requests), tokens / mean_row))


def _cache_bytes_per_token(settings: RolloutEngineConfig, shape: ModelShape) -> int:
    """Return the bytes of a token in the key-value cache of one rank of an engine."""
    return cache_bytes_per_token(
        settings, shape.num_layers, shape.num_kv_heads, shape.head_size
    )
