"""The time model: estimated seconds of each phase of a step on GPUs.

Invariant: a pure function of a resolved configuration, the sizes of its models and the
links of the GPUs. Every figure is an estimate; what they stand on is in
`assumptions.py`.

Not counted: scoring, the driver and its messages, rows of uneven length on different
ranks, experts of uneven load, prompts of a group that an engine reads once, and
evaluations and checkpoints between steps. Deliberately not here: which settings are
tried (`verl_ray/preflight/device_defaults.py`, `verl_ray/planning`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_ray.backends.base import FLOAT32
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.rollout import RolloutEngineConfig
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.section import resolved
from verl_ray.preflight.engine_models import cache_bytes_per_token
from verl_ray.preflight.footprints import trained_parameters
from verl_ray.preflight.gpus import GIB
from verl_ray.preflight.model_sizes import ModelSize, model_size, size_of
from verl_ray.preflight.role_memory import ROLLOUT, Phase, offloaded_parts, phases_of
from verl_ray.preflight.state_copies import sent_bytes
from verl_ray.preflight.time_model.assumptions import (
    DECODE_BANDWIDTH_SHARE,
    DECODE_STEP_S,
    DISK_BYTES_PER_S,
    EXCHANGE_LATENCY_S,
    HOST_BROADCAST_BYTES_PER_S,
    HOST_MEMORY_BYTES_PER_S,
    MEAN_LENGTH_SHARE,
    PREFILL_EFFICIENCY,
    PROCESS_COPY_BYTES_PER_S,
)
from verl_ray.preflight.time_model.links import Links
from verl_ray.preflight.time_model.training_time import (
    RowLengths,
    experts_per_token,
    flops_per_s,
    pass_s,
)
from verl_ray.profiling.flops import ModelShape, forward_flops

_LENGTHS = 16
"""Number of different lengths that stand for those of all responses."""


@dataclass(frozen=True)
class StepTime:
    """Estimated seconds of a step, and how long each pool of GPUs works in it."""

    seconds: Mapping[Phase, float]
    trainer_gpus: int
    engine_gpus: int
    shares_gpus: bool
    """Whether trainers and engines are on the same GPUs."""
    trainer_gpu_s: float
    """GPU-seconds in which trainers compute."""
    engine_gpu_s: float
    """GPU-seconds in which engines generate."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())

    @property
    def idle_share_of_trainers(self) -> float:
        """Share of the step in which a GPU of the trainers computes nothing for them,
        in the mean."""
        return 1 - self.trainer_gpu_s / (self.trainer_gpus * self.total_s)

    @property
    def idle_share_of_engines(self) -> float:
        """Share of the step in which a GPU of the engines generates nothing, in the
        mean."""
        return 1 - self.engine_gpu_s / (self.engine_gpus * self.total_s)

    @property
    def used_gpus(self) -> int:
        """Number of GPUs that trainers and engines have."""
        if self.shares_gpus:
            return max(self.trainer_gpus, self.engine_gpus)
        return self.trainer_gpus + self.engine_gpus

    def idle_share_of(self, gpus: int) -> float:
        """Return the share of the step in which a GPU computes nothing, in the mean.

        Args:
            gpus: Number of all GPUs of a machine, used or not.
        """
        return 1 - (self.trainer_gpu_s + self.engine_gpu_s) / (gpus * self.total_s)


def step_time(config: Config, links: Links) -> StepTime:
    """Return the estimated time of a step.

    Args:
        config: Resolved configuration, whose models have a shape (`ModelSize.shape`).
        links: Links of the GPUs.
    """
    measure: dict[str, float] = {}
    learn: dict[str, float] = {}
    for name, role in config.model_roles.items():
        size = model_size(name, role, config)
        if _measures(name, role, config):
            rows = _row_lengths(config, size, config.rows_per_step)
            measure[name] = pass_s(role, size, rows, links, learns=False)

        if isinstance(role, SupervisedRole):
            per_update = role.rows_per_update(config.rows_per_step)
            rows = _row_lengths(config, size, per_update)
            update_s = pass_s(role, size, rows, links, learns=True)
            learn[name] = role.updates_per_step(config.rows_per_step) * update_s

    # Roles on the same GPUs take turns, others work at the same time.
    shares_gpus = config.shares_processes
    together = sum if shares_gpus else max
    seconds: dict[Phase, float] = {
        "measure": together([0.0, *measure.values()]),
        "learn": together([0.0, *learn.values()]),
    }
    engine_gpus = 0
    engine_gpu_s = 0.0
    if isinstance(config, RolloutTaskConfig):
        move_s = _offloaded_bytes(config) / links.host if shares_gpus else 0.0
        seconds["generate"], engine_gpu_s = _generate_s(config, links)
        seconds["measure"] += move_s
        seconds["publish"] = _publish_s(config, links) + move_s
        engine_gpus = config.engines[ROLLOUT].ranks

    ranks = {name: role.num_ranks for name, role in config.model_roles.items()}
    busy = sum(ranks[name] * time for name, time in [*measure.items(), *learn.items()])
    return StepTime(
        seconds={phase: seconds[phase] for phase in phases_of(config)},
        trainer_gpus=max(ranks.values()) if shares_gpus else sum(ranks.values()),
        engine_gpus=engine_gpus,
        shares_gpus=shares_gpus,
        trainer_gpu_s=busy,
        engine_gpu_s=engine_gpu_s,
    )


def _measures(name: str, role: ModelRole, config: Config) -> bool:
    """Return whether a role computes log-probs or values before others learn."""
    if not isinstance(role, SupervisedRole):
        return not role.scores_rollouts
    if not isinstance(config, RolloutTaskConfig):
        return False
    if name != config.evaluated_role:
        return True
    return config.needs_old_log_probs(corrects=config.corrects_mismatch)


# ------------------------------------------------------------------------------ lengths


@functools.lru_cache(maxsize=64)
def _mean_row(shape: ModelShape, prompt: int, longest: int) -> tuple[float, float]:
    """Return the mean tokens of rows, and the mean FLOPs of a forward pass over them.

    Lengths of responses are spread evenly from 0 to the longest.
    """
    shares = (np.arange(_LENGTHS) + 0.5) / _LENGTHS
    lengths = (prompt + shares * longest).astype(np.int64)
    return float(lengths.mean()), forward_flops(shape, lengths) / _LENGTHS


def _row_lengths(config: Config, size: ModelSize, rows: int) -> RowLengths:
    """Return the rows of a pass: prompts of the mean length, responses of all.

    Rows of a task without rollouts are responses alone.
    """
    assert size.shape is not None, "models without a shape are refused before"
    longest_row, _ = config.longest_row
    longest = config.longest_response
    prompt = int(MEAN_LENGTH_SHARE * (longest_row - longest))
    return RowLengths(rows, *_mean_row(size.shape, prompt, longest))


def _generate_s(config: RolloutTaskConfig, links: Links) -> tuple[float, float]:
    """Return the seconds in which engines generate the responses of a step.

    With them, the GPU-seconds in which they do: some replicas may have a row less than
    others, or none.
    """
    size = size_of(config.actor.model.folder, config, "policy")
    assert size.shape is not None, "models without a shape are refused before"
    longest = config.rollout.max_response_tokens
    prompt = MEAN_LENGTH_SHARE * config.data.max_prompt_tokens
    lengths = ResponseLengths(
        mean_prompt=prompt,
        mean_response=MEAN_LENGTH_SHARE * longest,
        longest_response=longest,
        prompt_flops=_mean_row(size.shape, int(prompt), 0)[1],
    )

    replicas = resolved(config.rollout.num_replicas)
    fewer, fuller_replicas = divmod(config.rows_per_step, replicas)

    def replica_s(rows: int) -> float:
        return generation_s(config.rollout, size, rows, lengths, links)

    if fuller_replicas == 0:
        seconds = replica_s(fewer)
        busy_s = replicas * seconds
    else:
        seconds = replica_s(fewer + 1)
        busy_s = fuller_replicas * seconds
        busy_s += (replicas - fuller_replicas) * replica_s(fewer)
    return seconds, config.rollout.tensor_parallel * busy_s


# ---------------------------------------------------------------------- moves and wires


def _offloaded_bytes(config: RolloutTaskConfig) -> int:
    """Return the bytes of a rank that go to the host, and come back, in each step."""
    total = 0
    for name, role in config.model_roles.items():
        size = model_size(name, role, config)
        trained = trained_parameters(role, size)
        memory = role.backend.rank_memory(role.num_ranks, size, trained)
        if not role.backend.stays_on_host and not role.scores_rollouts:
            parts = offloaded_parts(memory.persistent, config)
            total += sum(memory.persistent[part] for part in parts)
    return total


def _publish_s(config: RolloutTaskConfig, links: Links) -> float:
    """Return the seconds in which new weights reach all engines.

    Buckets follow each other, so the slowest of writing, sending and loading counts.
    """
    sent = sent_bytes(config)
    ranks = config.actor.num_ranks
    engine_ranks = config.engines[ROLLOUT].ranks
    # All processes of a node share its memory.
    readers = min(engine_ranks, links.gpus_per_node)
    load = max(
        sent / PROCESS_COPY_BYTES_PER_S, sent * readers / HOST_MEMORY_BYTES_PER_S
    )

    wire = config.rollout.sync.wire
    if wire == "shared_memory":
        write = sent / min(ranks * PROCESS_COPY_BYTES_PER_S, HOST_MEMORY_BYTES_PER_S)
        return max(write, load)
    if wire == "disk":
        return sent / DISK_BYTES_PER_S + load
    if wire == "host_broadcast":
        # Ranks reduce a bucket to the first one, which broadcasts it.
        return max(2 * sent / HOST_BROADCAST_BYTES_PER_S, load)
    if wire == "cuda_ipc":
        return links.sum_s(sent, ranks)
    return 2 * sent / links.node


# --------------------------------------------------------------------------- generation

# Estimated seconds in which a replica generates its share of a step's responses.
#
# Invariant: pure arithmetic over the settings of an engine, the size of its model,
# the lengths of rows, and the figures of a machine.

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
