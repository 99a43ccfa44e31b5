"""`verl-ray bench step`: whole training steps of a small GRPO run, beside the floor of the same work.

Invariant: the steps are those of `train` (real Ray, vLLM, scores, weight sync), and each block of steps is followed by
its floor on the very same rows, so that a slow minute of the machine slows both. Memory is sampled during further
steps, since sampling takes time. Deliberately not here: evaluation, checkpoints and trackers, which no step contains.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil

from controllers.bench.floor import Floor
from controllers.compose.composition import compose
from controllers.rollouts.producer import Producer
from controllers.run.preparation import prepare
from controllers.system.build import Shape, System, resolve_on, start
from controllers.trainers.rl import Trainer
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.cluster.store import read
from verl_ray.config.load import parse, to_tree
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.arithmetic import ALPHABET, write_arithmetic
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.prompts import PromptSource
from verl_ray.data.stages import Prompts, Rollouts
from verl_ray.data.tokenizers import character_tokenizer, load_tokenizer
from verl_ray.models.tiny import make_tiny_qwen3
from verl_ray.preflight.findings import INPUTS_COMPLETE
from verl_ray.profiling.memory import GIB, TreeMemorySampler
from verl_ray.profiling.timers import Timers
from verl_ray.rollout.vllm_core import installed_version
from workers.rollout import Generation

BLOCK = 5  # steps between two visits to the floor
MEMORY_STEPS = 2  # of each kind while memory is sampled


def shown_versions() -> dict[str, str | None]:
    """What the figures of a benchmark depend on."""
    found = {name: version(name) for name in ("torch", "ray", "transformers")}
    return {"python": platform.python_version(), "vllm": installed_version(), **found}


def _sizes(
    hidden: int, layers: int, heads: int, kv_heads: int, head_size: int, intermediate: int, cache_gib: float = 1.0
) -> tuple[str, ...]:
    sizes = {
        "hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads,
        "head_size": head_size, "intermediate_size": intermediate,
    }  # fmt: skip
    return (*(f"prepare.model.{name}={size}" for name, size in sizes.items()), f"rollout.kv_cache_gib={cache_gib}")


MODELS: dict[str, tuple[str, ...]] = {
    "1m": (),
    "100m": _sizes(768, 12, 12, 12, 64, 2304),
    "400m": _sizes(1280, 19, 20, 20, 64, 3840),
    "0.5b": _sizes(1024, 32, 16, 8, 128, 3072),
    "1.5b": _sizes(1536, 32, 12, 2, 128, 8960),
    "8b": _sizes(4096, 42, 32, 8, 128, 12288),
}
"""Sizes as overrides. The small one is warm-started as quickstart's is; large ones stay as they were drawn, since their
speed depends on how many tokens it says and not on which."""

WORK = (
    "algorithm=grpo",
    "data.prompts_per_step=16",
    "rollout.group_size=8",
    "rollout.max_response_tokens=32",
    "actor.mini_batch_size=null",
    "run.total_steps=1000",
    "run.evaluate_every=0",
    "prepare.min_gain=0",
    "run.checkpoint_every=0",
    "tracking.wandb.mode=disabled",
)


class Drawing(Producer):
    """Draws responses with natural stops or all to the limit, and remembers what it drew."""

    forced = False
    last: Experience

    def training(self) -> Generation:
        what = super().training()
        return replace(what, sampling=replace(what.sampling, stop_token_ids=())) if self.forced else what

    def take(self, prompts: Prompts, buffer: RolloutBuffer, policy_version: int, timers: Timers) -> Experience:
        self.last = super().take(prompts, buffer, policy_version, timers)
        return self.last


class Bench:
    """A running system that makes one step after another."""

    def __init__(self, config: RLConfig, system: System) -> None:
        assert system.rollout is not None
        prompts = PromptSource(config.data.train_path, load_tokenizer(config.actor.model.path), config.data, 0)
        self._trainer = Trainer(config, system, prompts, None)
        self._drawing = self._trainer.producer = Drawing(config, system.rollout, system.graders)
        self._stall_s = config.run.stall_s
        self._done = 0
        self._trainer.publish(0)

    def steps(self, count: int, *, forced: bool) -> tuple[list[dict[str, float]], list[Rollouts]]:
        """The metrics and the rollouts of `count` steps."""
        self._drawing.forced = forced
        metrics, drawn = [], []
        for _ in range(count):
            self._done += 1
            metrics.append(self._trainer.step(self._done))
            drawn.append(self._drawing.last.rollouts)
        return metrics, [read(rollouts, self._stall_s) for rollouts in drawn]


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; returns 0."""
    given = _parser().parse_args(argv)
    launched_s = time.time() - psutil.Process().create_time()  # interpreter and imports
    warm_up = given.warmup if given.warmup is not None else 5 if given.model == "1m" else 1
    steps = given.steps if given.steps is not None else 20 if given.model == "1m" else 4
    config = configuration(given.model, given.backend, Path(given.dir), given.overrides)
    with contextlib.redirect_stdout(sys.stderr):  # what is printed there is JSON
        make_inputs(config, warm_start=given.model == "1m")

    began = time.perf_counter()
    with Session.open(config.ray.address) as session:
        stop_on_signals()  # again: Ray's own handler exits without a message
        config = resolve_on(config, Shape.of(session))
        threads = max(config.run.threads["trainers"], config.run.threads["engines"])
        with start(config, session) as system:
            bench = Bench(config, system)
            bench.steps(1, forced=False)
            first_s = launched_s + time.perf_counter() - began
            with Floor(config, threads) as floor:
                figures = {
                    name: measure(bench, floor, steps, warm_up, forced=name == "forced")
                    for name in ("natural", "forced")
                }
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


def configuration(model: str, backend: str, folder: Path, overrides: Sequence[str]) -> RLConfig:
    """The run to measure: quickstart's task and model family under GRPO; `overrides` come last."""
    run = (f"run.dir={folder / model}", f"run.name=bench-{model}", f"backend={backend}")
    return parse(to_tree(compose("quickstart", (*WORK, *MODELS[model], *run, *overrides))), RLConfig)


def make_inputs(config: RLConfig, *, warm_start: bool) -> None:
    """Problems, tokenizer and model under run.dir/inputs, unless they are there already."""
    folder = Path(config.run.dir) / "inputs"
    if (folder / INPUTS_COMPLETE).exists():
        return
    if warm_start:
        with Session.open(config.ray.address) as session:
            prepare(resolve_on(config, Shape.of(session)), session)
        return
    wanted = config.prepare
    assert wanted is not None
    counts = {"num_train": wanted.num_train, "num_validation": wanted.num_validation}
    write_arithmetic(folder, max_operand=wanted.max_operand, **counts, seed=config.run.seed)
    character_tokenizer(folder / "tokenizer", ALPHABET)
    make_tiny_qwen3(folder / "model", folder / "tokenizer", wanted.model, config.run.seed)
    (folder / INPUTS_COMPLETE).touch()


def measure(bench: Bench, floor: Floor, steps: int, warm_up: int, *, forced: bool) -> dict[str, object]:
    """The figures of `steps` steps after `warm_up` ones, and those of the floor on the same rows."""
    for rows in bench.steps(max(1, warm_up), forced=forced)[1]:
        floor.step(rows)
    metrics: list[dict[str, float]] = []
    floors: list[dict[str, float]] = []
    lengths: list[float] = []
    while len(metrics) < steps:
        taken, drawn = bench.steps(min(BLOCK, steps - len(metrics)), forced=forced)
        metrics += taken
        floors += [floor.step(rows) for rows in drawn]
        lengths += [float(rows.response_length.mean()) for rows in drawn]
        print(f"{len(metrics)} of {steps} {'forced' if forced else 'natural'} steps", file=sys.stderr, flush=True)
    seconds = [one["timing_s/step"] for one in metrics]
    names = [name for name in metrics[0] if name.count("/") == 1 and name.startswith("timing_s/")]
    names.remove("timing_s/step")
    parts = {name.removeprefix("timing_s/"): median(one[name] for one in metrics) for name in names}
    floor_s = median(sum(one.values()) for one in floors)
    figures: dict[str, object] = {
        "median_step_s": round(median(seconds), 4),
        "best_step_s": round(min(seconds), 4),
        "parts_s": {name: round(value, 4) for name, value in parts.items()},
        "floor_s": round(floor_s, 4),
        "floor_parts_s": {name: round(median(one[name] for one in floors), 4) for name in floors[0]},
        "ratio_to_floor": round(median(seconds) / floor_s, 3),
        "driver_share": round(median(one["timing_s/controller"] / one["timing_s/step"] for one in metrics), 4),
        "mean_response_tokens": round(sum(lengths) / len(lengths), 2),
        "steps": steps,
    }
    return figures


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray bench step",
        description="Time whole steps of GRPO on arithmetic (16 prompts x 8 rollouts, KL in the loss, one update): "
        "with natural stops, then with all 32 tokens drawn; beside raw vLLM and raw PyTorch on the same rows.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=list(MODELS), default="1m", help="parameters of the policy (1m)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps that count, of each kind (20; 4 for 100m)")
    parser.add_argument("--warmup", type=int, metavar="N", help="steps before those that count (5; 1 for 100m)")
    parser.add_argument("--backend", choices=("engine", "fsdp"), default="engine", help="of all roles (engine)")
    parser.add_argument("--dir", default="outputs/bench", help="where its inputs are kept (outputs/bench)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the configuration")
    return parser
