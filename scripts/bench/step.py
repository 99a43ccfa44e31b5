"""The suite `step`: whole training steps of a small GRPO run, compared with the
floor of the same work.

Invariant: the steps are those of `train`, with real Ray, vLLM, scores and weight sync.
Each block of steps is followed by its floor on the same rows, so that a slow minute of
the machine slows both. Memory is sampled during further steps, because sampling takes
time.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from statistics import median

import psutil

from controllers.rollouts.producer import Producer
from controllers.system.build import System, start
from controllers.system.plan import resolve_on
from controllers.trainers.rl import Trainer
from scripts.bench.inputs import POLICIES, run_with_inputs
from scripts.bench.memory import TreeMemorySampler
from scripts.bench.raw import RawProcess, RawSpec
from scripts.bench.running import cluster
from scripts.bench.suite import (
    Flags,
    circumstances,
    medians,
    print_json,
    progress,
)
from verl_ray.cluster.process_setup import thread_environment
from verl_ray.cluster.waiting import read
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Rollouts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.tokenizers import policy_tokenizer
from verl_ray.profiling.memory import GIB
from verl_ray.profiling.phases import Timers
from verl_ray.rollout.vllm_environment import environment
from verl_ray.settings.section import resolved
from workers.generation import Generation

BLOCK = 5
"""Steps after which the floor works on the same rows."""
MEMORY_STEPS = 2
"""Steps of each kind while memory is sampled."""


class RecordingProducer(Producer):
    """A producer that remembers the last rollouts.

    Responses stop naturally, or all of them have the greatest length.
    """

    forced = False
    last: Experience

    def training_generation(self) -> Generation:
        """Return the settings of generation, without stop tokens where `forced`."""
        settings = super().training_generation()
        if not self.forced:
            return settings
        sampling = replace(settings.sampling, stop_token_ids=())
        return replace(settings, sampling=sampling)

    def take(
        self,
        ordinals: Int64,
        buffer: RolloutBuffer,
        policy_version: int,
        timers: Timers,
    ) -> Experience:
        """Take the rollouts of a step, and remember them."""
        self.last = super().take(ordinals, buffer, policy_version, timers)
        return self.last


class Bench:
    """A running system that makes one step after another."""

    def __init__(self, config: RLConfig, system: System) -> None:
        assert system.rollout is not None
        tokenizer = policy_tokenizer(config)
        prompts = PromptSource(config.data.train_sets, tokenizer, config.data, 0)
        self._trainer = Trainer(config, system, prompts, None)
        self._producer = RecordingProducer(config, system.rollout, system.graders)
        self._trainer.supply.producer = self._producer
        self._stall_s = config.run.stall_s
        self._finished_steps = 0
        self._trainer.publish(0)

    def steps(
        self, count: int, *, forced: bool
    ) -> tuple[list[dict[str, float]], list[Rollouts]]:
        """Make `count` steps, and return their metrics and their rollouts."""
        self._producer.forced = forced
        metrics = []
        references = []

        for _ in range(count):
            self._finished_steps += 1
            metrics.append(self._trainer.step(self._finished_steps))
            references.append(self._producer.last.rollouts)

        return metrics, [read(rollouts, self._stall_s) for rollouts in references]


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; return the exit code, 0."""
    options = _flags().parse_args(argv)
    launched_s = time.time() - psutil.Process().create_time()  # interpreter and imports
    # Large models stay untrained, and take their time.
    is_small = options.model == "1m"
    warm_up = (5 if is_small else 1) if options.warmup is None else options.warmup
    steps = (20 if is_small else 4) if options.steps is None else options.steps
    config = run_with_inputs(
        options.model,
        options.dir,
        options.overrides,
        backend=options.backend,
        trained=is_small,
    )

    start_s = time.perf_counter()
    with cluster(config) as (session, shape):
        config = resolve_on(config, shape)
        threads = max(config.run.threads["trainers"], config.run.threads["engines"])

        with start(config, session) as system:
            bench = Bench(config, system)
            bench.steps(1, forced=False)
            first_s = launched_s + time.perf_counter() - start_s

            with RawProcess(_floor(config, threads)) as floor:
                figures = {
                    kind: measure(bench, floor, steps, max(1, warm_up), kind)
                    for kind in ("natural", "forced")
                }
            with TreeMemorySampler() as memory:
                for forced in (False, True):
                    bench.steps(MEMORY_STEPS, forced=forced)

    result = {
        **figures,
        "peak_memory_gib": round(memory.peak_bytes / GIB, 3),
        "start_to_first_step_s": round(first_s, 2),
        "threads_per_rank": threads,
        **circumstances(),
    }
    print_json(result)
    return 0


def measure(
    bench: Bench, floor: RawProcess, steps: int, warm_up: int, kind: str
) -> dict[str, object]:
    """Return the figures of `steps` steps after `warm_up` ones.

    The floor works on the same rows. The kind says how responses end: "natural" or
    "forced".
    """
    forced = kind == "forced"
    for rows in bench.steps(warm_up, forced=forced)[1]:
        _floor_s(floor, rows)

    metrics: list[dict[str, float]] = []
    floors: list[dict[str, float]] = []
    lengths: list[float] = []
    while len(metrics) < steps:
        count = min(BLOCK, steps - len(metrics))
        block_metrics, block_rows = bench.steps(count, forced=forced)
        metrics += block_metrics
        floors += [_floor_s(floor, rows) for rows in block_rows]
        lengths += [float(rows.response_length.mean()) for rows in block_rows]
        progress(f"{len(metrics)} of {steps} {kind} steps")

    seconds = [step["timing_s/step"] for step in metrics]
    driver_shares = [
        step["timing_s/controller"] / step["timing_s/step"] for step in metrics
    ]
    floor_s = median(sum(parts.values()) for parts in floors)
    return {
        "median_step_s": round(median(seconds), 4),
        "best_step_s": round(min(seconds), 4),
        "parts_s": medians([_parts(step) for step in metrics]),
        "floor_s": round(floor_s, 4),
        "floor_parts_s": medians(floors),
        "ratio_to_floor": round(median(seconds) / floor_s, 3),
        "driver_share": round(median(driver_shares), 4),
        "mean_response_tokens": round(sum(lengths) / len(lengths), 2),
        "steps": steps,
    }


def _floor(config: RLConfig, threads: int) -> RawSpec:
    """Return the process that does the work of a step in the most direct way."""
    rollout = config.rollout
    return RawSpec(
        environment={
            **thread_environment(threads, os.environ),
            **environment("cpu", threads),
        },
        model_path=config.actor.model.folder,
        engine={
            "dtype": resolved(rollout.dtype),
            "enforce_eager": True,
            "kv_cache_memory_bytes": int(resolved(rollout.kv_cache_gib) * 2**30),
            "max_model_len": config.data.max_prompt_tokens
            + rollout.max_response_tokens,
        },
        learning_rate=config.actor.optimizer.lr,
    )


def _floor_s(floor: RawProcess, rows: Rollouts) -> dict[str, float]:
    """Return the seconds of each part of the floor for these rows."""
    floor.send(rows)
    return floor.seconds()


def _parts(step: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each part of a step, without parts of parts."""
    prefix = "timing_s/"
    return {
        key.removeprefix(prefix): seconds
        for key, seconds in step.items()
        if key.startswith(prefix) and key.count("/") == 1 and key != f"{prefix}step"
    }


def _flags() -> Flags:
    flags = Flags(
        "step",
        "Time whole steps of GRPO on arithmetic (16 prompts x 8 rollouts, KL in the"
        " loss, one update), compared with raw vLLM and raw PyTorch on the same rows."
        " Responses stop naturally, then all of them have 32 tokens.",
    )
    flags.choice("--model", POLICIES, "parameters of the policy")
    flags.number("--steps", None, "steps that count, of each kind", "20; 4 for 100m")
    flags.number("--warmup", None, "steps before those that count", "5; 1 for 100m")
    flags.choice("--backend", ("engine", "fsdp", "megatron"), "of all roles")
    flags.folder()
    flags.overrides()
    return flags
