"""The time model: estimated seconds of each phase of a step on a described machine.

Invariant: a pure function of a resolved configuration, the sizes of its models and the
machine. Every figure is an estimate; what they stand on is in `assumptions.py`.

Not counted: scoring, the driver and its messages, rows of uneven length on different
ranks, experts of uneven load, prompts of a group that an engine reads once, and
evaluations and checkpoints between steps. Deliberately not here: which settings are
tried (`search.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_ray.config.tasks.rl import RLConfig
from verl_ray.planning.assumptions import (
    DISK_BYTES_PER_S,
    HOST_BROADCAST_BYTES_PER_S,
    HOST_MEMORY_BYTES_PER_S,
    MEAN_LENGTH_SHARE,
    PROCESS_COPY_BYTES_PER_S,
)
from verl_ray.planning.generation_time import ResponseLengths, generation_s
from verl_ray.planning.links import Links
from verl_ray.planning.training_time import RowLengths, pass_s
from verl_ray.preflight.footprints import trained_parameters
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.model_sizes import ModelSize, size_of
from verl_ray.preflight.role_memory import (
    PHASES,
    Phase,
    model_size,
    offloaded_parts,
    sent_bytes,
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
        """Share of the step in which no engine generates."""
        return 1 - self.seconds["generate"] / self.total_s

    @property
    def idle_share_of_gpus(self) -> float:
        """Share of the step in which a GPU computes nothing, in the mean."""
        engine_gpu_s = self.engine_gpus * self.seconds["generate"]
        gpus = self.trainer_gpus + self.engine_gpus
        if self.shares_gpus:
            gpus = max(self.trainer_gpus, self.engine_gpus)
        return 1 - (self.trainer_gpu_s + engine_gpu_s) / (gpus * self.total_s)


def step_time(config: RLConfig, machine: Machine) -> StepTime:
    """Return the estimated time of a step.

    Args:
        config: Resolved configuration, whose models have a shape (`ModelSize.shape`)
            and whose rewards use no GPU.
        machine: Described machine with GPUs.
    """
    links = Links.of(machine)
    measure: dict[str, float] = {}
    learn: dict[str, float] = {}
    for name, role in config.model_roles.items():
        size = model_size(name, role, config)
        measures = name != "actor" or config.needs_old_log_probs(
            corrects=config.corrects_mismatch
        )
        if measures:
            rows = _row_lengths(config, size, config.rows_per_step)
            measure[name] = pass_s(role, size, rows, links, learns=False)

        learner = role.as_learner
        if learner is not None:
            per_update = learner.rows_per_update(config.rows_per_step)
            rows = _row_lengths(config, size, per_update)
            update_s = pass_s(role, size, rows, links, learns=True)
            learn[name] = learner.updates_per_step(config.rows_per_step) * update_s

    # Roles on the same GPUs take turns, others work at the same time.
    shares_gpus = config.shares_processes
    together = sum if shares_gpus else max
    move_s = _offloaded_bytes(config) / links.host if shares_gpus else 0.0
    seconds: dict[Phase, float] = {
        "generate": _generate_s(config, links),
        "measure": together([0.0, *measure.values()]) + move_s,
        "learn": together([0.0, *learn.values()]),
        "publish": _publish_s(config, machine, links) + move_s,
    }

    ranks = {name: role.num_ranks for name, role in config.model_roles.items()}
    busy = sum(ranks[name] * time for name, time in [*measure.items(), *learn.items()])
    return StepTime(
        seconds={phase: seconds[phase] for phase in PHASES},
        trainer_gpus=max(ranks.values()) if shares_gpus else sum(ranks.values()),
        engine_gpus=config.engines["rollout"].ranks,
        shares_gpus=shares_gpus,
        trainer_gpu_s=busy,
    )


# ------------------------------------------------------------------------------ lengths


@functools.lru_cache(maxsize=64)
def _mean_row(shape: ModelShape, prompt: int, longest: int) -> tuple[float, float]:
    """Return the mean tokens of rows, and the mean FLOPs of a forward pass over them.

    Lengths of responses are spread evenly from 0 to the longest.
    """
    shares = (np.arange(_LENGTHS) + 0.5) / _LENGTHS
    lengths = (prompt + shares * longest).astype(np.int64)
    return float(lengths.mean()), forward_flops(shape, lengths) / _LENGTHS


def _row_lengths(config: RLConfig, size: ModelSize, rows: int) -> RowLengths:
    """Return the rows of a pass: prompts of the mean length, responses of all."""
    assert size.shape is not None, "models without a shape are refused before"
    prompt = int(MEAN_LENGTH_SHARE * config.data.max_prompt_tokens)
    longest = config.rollout.max_response_tokens
    return RowLengths(rows, *_mean_row(size.shape, prompt, longest))


def _generate_s(config: RLConfig, links: Links) -> float:
    """Return the seconds in which engines generate the responses of a step."""
    size = size_of(config.actor.model.folder, config, "policy")
    assert size.shape is not None, "models without a shape are refused before"
    longest = config.rollout.max_response_tokens
    prompt = MEAN_LENGTH_SHARE * config.data.max_prompt_tokens
    lengths = ResponseLengths(
        rows=config.rows_per_step,
        mean_prompt=prompt,
        mean_response=MEAN_LENGTH_SHARE * longest,
        longest_response=longest,
        prompt_flops=_mean_row(size.shape, int(prompt), 0)[1],
    )
    return generation_s(config.rollout, size, lengths, links)


# ---------------------------------------------------------------------- moves and wires


def _offloaded_bytes(config: RLConfig) -> int:
    """Return the bytes of a rank that go to the host, and come back, in each step."""
    total = 0
    for name, role in config.model_roles.items():
        size = model_size(name, role, config)
        trained = trained_parameters(role, size)
        memory = role.backend.rank_memory(role.num_ranks, size, trained)
        if not role.backend.stays_on_host:
            parts = offloaded_parts(memory.persistent, config)
            total += sum(memory.persistent[part] for part in parts)
    return total


def _publish_s(config: RLConfig, machine: Machine, links: Links) -> float:
    """Return the seconds in which new weights reach all engines.

    Buckets follow each other, so the slowest of writing, sending and loading counts.
    """
    sent = sent_bytes(config)
    ranks = config.actor.num_ranks
    engine_ranks = config.engines["rollout"].ranks
    # All processes of a node share its memory.
    readers = min(engine_ranks, machine.gpus)
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
