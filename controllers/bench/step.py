"""`verl-ray bench step`: whole training steps of a small GRPO run, compared with the
floor of the same work.

Invariant: the steps are those of `train`, with real Ray, vLLM, scores and weight sync.
Each block of steps is followed by its floor on the same rows, so that a slow minute of
the machine slows both. Memory is sampled during further steps, because sampling takes
time. Deliberately not here: evaluation, checkpoints and trackers, which are outside of
a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil

from controllers.bench.floor import Floor
from controllers.bench.inputs import POLICIES, run_with_inputs
from controllers.rollouts.producer import Producer
from controllers.system.build import System, start
from controllers.system.plan import ClusterShape, resolve_on
from controllers.trainers.rl import Trainer
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.cluster.store import read
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.batch import Int64
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.chat_templates import policy_tokenizer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.stages import Rollouts
from verl_ray.profiling.memory import GIB, TreeMemorySampler
from verl_ray.profiling.timers import Timers
from verl_ray.rollout.vllm_core import installed_version
from workers.rollout import Generation

BLOCK = 5
"""Steps after which the floor works on the same rows."""
MEMORY_STEPS = 2
"""Steps of each kind while memory is sampled."""


def shown_versions() -> dict[str, str | None]:
    """Return the versions on which the figures of a benchmark depend."""
    versions = {name: version(name) for name in ("torch", "ray", "transformers")}
    return {
        "python": platform.python_version(),
        "vllm": installed_version(),
        **versions,
    }


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
    options = _parser().parse_args(argv)
    launched_s = time.time() - psutil.Process().create_time()  # interpreter and imports
    is_small = options.model == "1m"
    warm_up = options.warmup
    if warm_up is None:
        warm_up = 5 if is_small else 1
    steps = options.steps
    if steps is None:
        steps = 20 if is_small else 4

    config = run_with_inputs(
        options.model,
        options.dir,
        options.overrides,
        backend=options.backend,
        trained=is_small,
    )

    start_s = time.perf_counter()
    log_dir = Path(config.run.dir) / "logs"
    with Session.open(config.ray.address, log_dir=log_dir) as session:
        stop_on_signals()  # again: Ray's own handler exits without a message
        config = resolve_on(config, ClusterShape.of(session))
        threads = max(config.run.threads["trainers"], config.run.threads["engines"])

        with start(config, session) as system:
            bench = Bench(config, system)
            bench.steps(1, forced=False)
            first_s = launched_s + time.perf_counter() - start_s

            figures = {}
            with Floor(config, threads) as floor:
                for name in ("natural", "forced"):
                    forced = name == "forced"
                    figures[name] = measure(bench, floor, steps, warm_up, forced=forced)

            with TreeMemorySampler() as memory:
                for forced in (False, True):
                    bench.steps(MEMORY_STEPS, forced=forced)

    result = {
        **figures,
        "peak_memory_gib": round(memory.peak_bytes / GIB, 3),
        "start_to_first_step_s": round(first_s, 2),
        "threads_per_rank": threads,
        "cores": len(os.sched_getaffinity(0)),
        "versions": shown_versions(),
    }
    print(json.dumps(result, indent=2))
    return 0


def measure(
    bench: Bench, floor: Floor, steps: int, warm_up: int, *, forced: bool
) -> dict[str, object]:
    """Return the figures of `steps` steps after `warm_up` ones.

    The floor works on the same rows.
    """
    _, warm_up_rows = bench.steps(max(1, warm_up), forced=forced)
    for rows in warm_up_rows:
        floor.step(rows)

    kind = "forced" if forced else "natural"
    metrics: list[dict[str, float]] = []
    floors: list[dict[str, float]] = []
    lengths: list[float] = []
    while len(metrics) < steps:
        count = min(BLOCK, steps - len(metrics))
        block_metrics, block_rows = bench.steps(count, forced=forced)
        metrics += block_metrics
        floors += [floor.step(rows) for rows in block_rows]
        lengths += [float(rows.response_length.mean()) for rows in block_rows]
        print(f"{len(metrics)} of {steps} {kind} steps", file=sys.stderr, flush=True)

    seconds = [step["timing_s/step"] for step in metrics]
    driver_shares = [
        step["timing_s/controller"] / step["timing_s/step"] for step in metrics
    ]
    floor_s = median(sum(parts.values()) for parts in floors)
    return {
        "median_step_s": round(median(seconds), 4),
        "best_step_s": round(min(seconds), 4),
        "parts_s": _part_medians(metrics),
        "floor_s": round(floor_s, 4),
        "floor_parts_s": {
            name: round(median(parts[name] for parts in floors), 4)
            for name in floors[0]
        },
        "ratio_to_floor": round(median(seconds) / floor_s, 3),
        "driver_share": round(median(driver_shares), 4),
        "mean_response_tokens": round(sum(lengths) / len(lengths), 2),
        "steps": steps,
    }


def _part_medians(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each part of a step, without parts of parts."""
    prefix = "timing_s/"
    medians = {}
    for key in metrics[0]:
        is_part = key.startswith(prefix) and key.count("/") == 1
        if is_part and key != "timing_s/step":
            value = median(step[key] for step in metrics)
            medians[key.removeprefix(prefix)] = round(value, 4)
    return medians


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray bench step",
        description=(
            "Time whole steps of GRPO on arithmetic (16 prompts x 8 rollouts, KL in the"
            " loss, one update), compared with raw vLLM and raw PyTorch on the same"
            " rows. Responses stop naturally, then all of them have 32 tokens."
        ),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        choices=list(POLICIES),
        default="1m",
        help="parameters of the policy (1m)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="steps that count, of each kind (20; 4 for 100m)",
    )
    parser.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="steps before those that count (5; 1 for 100m)",
    )
    parser.add_argument(
        "--backend",
        choices=("engine", "fsdp"),
        default="engine",
        help="of all roles (engine)",
    )
    parser.add_argument(
        "--dir",
        default="outputs/bench",
        help="where its inputs are kept (outputs/bench)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides of the configuration",
    )
    return parser
