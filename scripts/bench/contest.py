"""Ways of training that take turns on the same rows: plain PyTorch and the backends.

Invariant: every contender computes the log-probs of the same rows of mixed lengths with
the same model in the same run, in its own processes. Their losses are printed, so that
a reader sees that they agree. Contenders take turns in rounds, so that a slow minute of
the machine does not count against one of them alone. A pass begins when all ranks are
ready and ends when its results are there. One-time set-up is not timed, and memory is
not sampled while a pass is timed.

Plain PyTorch pads the rows of a micro-batch to its longest and attends causally without
a mask, its fastest way: padding comes after the tokens, which do not see it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.bench.inputs import MODELS, Size, made_apart, with_layers
from scripts.bench.memory import TreeMemorySampler
from scripts.bench.processes import run_processes
from scripts.bench.raw import padded
from scripts.bench.suite import progress
from verl_ray.columns.batch import Int64
from verl_ray.profiling.flops import (
    ModelShape,
    forward_flops,
    peak_flops_per_s,
    training_flops,
)
from verl_ray.profiling.memory import GIB, device_memory

if TYPE_CHECKING:
    import torch

    from verl_ray.columns.stages import TrainingBatch

    Passes = dict[str, Callable[[], object]]

PLAIN = "plain"
"""The contender that is plain PyTorch, on rows in the order of the batch."""
SORTED = "plain_sorted"
"""The contender that is plain PyTorch, on rows sorted by length."""
PASSES = ("forward", "forward_backward", "step")
SHORTEST = 32
LONGEST = 512
_SAMPLE_S = 0.02

Rounds = list[list[dict[str, Any]]]
"""The reports of a contender: one list per round, with one report per rank."""


@dataclass(frozen=True)
class Contender:
    """A way of training: plain PyTorch or a backend, on `world` ranks.

    Attributes:
        name: The name in the figures.
        kind: `PLAIN`, `SORTED` or the name of a backend.
        world: The number of ranks.
        settings: Settings of the backend, `key=value`.
        by_default: Whether it takes part without being named.
    """

    name: str
    kind: str
    world: int
    settings: tuple[str, ...] = ()
    by_default: bool = True


@dataclass(frozen=True)
class ContenderTask:
    """The work of one process of a contender.

    `rendezvous` is a file through which the ranks find each other; for the others see
    `Contender` and the flags.
    """

    kind: str
    rank: int
    world: int
    device: str
    dtype: str
    model: str
    rendezvous: str
    rows: int
    threads: int
    micro_batch_tokens: int
    settings: tuple[str, ...] = ()


def row_lengths(count: int) -> Int64:
    """Return lengths from 32 to 512 tokens, the same in every run; int64 [count]."""
    return np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, count)


def padded_batches(lengths: Int64, max_tokens: int, by_length: bool) -> list[Int64]:
    """Return the rows of each padded micro-batch.

    Each has as many rows as `max_tokens` can hold at the greatest length, in the order
    of the batch or from the shortest to the longest.
    """
    if by_length:
        order = np.argsort(lengths, kind="stable")
    else:
        order = np.arange(len(lengths))
    count = max_tokens // LONGEST
    return [order[first : first + count] for first in range(0, len(order), count)]


# -------------------------------------------------------------------------- the contest


def measure(
    contenders: Sequence[Contender], options: argparse.Namespace
) -> tuple[dict[str, Rounds], ModelShape]:
    """Let the contenders take turns.

    Args:
        contenders: Those that take part.
        options: The flags of the suite.

    Returns:
        The reports of each contender, by name, and the shape of the model.
    """
    cores = len(os.sched_getaffinity(0))
    rounds: dict[str, Rounds] = {contender.name: [] for contender in contenders}

    with tempfile.TemporaryDirectory() as folder:
        model = made_apart(_size(options), f"{folder}/model")
        model_config = json.loads((Path(model) / "config.json").read_text())

        for turn, chosen in product(range(options.repeats), contenders):
            progress(f"round {turn + 1}: {chosen.name} ...")
            task = ContenderTask(
                kind=chosen.kind,
                rank=0,
                world=chosen.world,
                device=options.device,
                dtype=options.dtype,
                model=model,
                rendezvous=f"{folder}/{turn}-{chosen.name}",
                rows=options.rows,
                threads=max(1, cores // chosen.world),
                micro_batch_tokens=options.micro_batch_tokens,
                settings=chosen.settings,
            )
            tasks = [asdict(replace(task, rank=rank)) for rank in range(chosen.world)]
            # The module's name is written out: `__name__` may be `__main__`.
            reports = run_processes("scripts.bench.contest", tasks, task.threads)
            rounds[chosen.name].append(reports)

    return rounds, ModelShape.from_config(model_config)


def _size(options: argparse.Namespace) -> Size:
    """Return the size of the model that is trained."""
    size = MODELS[options.model]
    return size if options.layers is None else with_layers(size, options.layers)


def figures_of(rounds: Rounds, lengths: Int64) -> dict[str, Any]:
    """Return the figures of one contender.

    The time of a pass is that of its slowest rank. The fastest round counts, because
    other work on the machine only makes a round slower. Memory is the sum of the ranks'
    peaks.
    """
    tokens = int(lengths.sum())
    seconds = {}
    for name in PASSES:
        slowest = [max(rank["seconds"][name] for rank in ranks) for ranks in rounds]
        seconds[name] = min(slowest)
    peaks = [sum(rank["peak_bytes"] for rank in ranks) for ranks in rounds]

    return {
        "tokens_per_s": {
            name: round(tokens / value) for name, value in seconds.items()
        },
        "best_s": {name: round(value, 4) for name, value in seconds.items()},
        "peak_memory_gib": round(max(peaks) / GIB, 3),
        "loss": sum(rank["loss"] for rank in rounds[0]),
    }


def compare(
    figures: dict[str, Any],
    worlds: dict[str, int],
    shape: ModelShape,
    lengths: Int64,
    peak: float | None,
) -> None:
    """Add the model FLOPs utilization to each contender, and its speed beside `PLAIN`
    if that has taken part.

    Args:
        figures: The figures by contender; changed in place.
        worlds: The number of ranks of each contender.
        shape: The sizes of the model.
        lengths: Tokens of each row, int64 [rows].
        peak: FLOPs per second of one device, or None where they are unknown.
    """
    forward = forward_flops(shape, lengths)
    training = training_flops(shape, lengths)
    flops = {"forward": forward, "forward_backward": training, "step": training}
    plain_s = figures[PLAIN]["best_s"] if PLAIN in figures else None

    for name, contender_figures in figures.items():
        best_s = contender_figures["best_s"]
        if plain_s is not None:
            contender_figures["times_plain"] = {
                key: round(plain_s[key] / value, 3) for key, value in best_s.items()
            }

        utilization: dict[str, float] | None = None
        if peak is not None:
            available = peak * worlds[name]
            utilization = {
                key: round(flops[key] / (best_s[key] * available), 4) for key in flops
            }
        contender_figures["model_flops_utilization"] = utilization


def device_peak(kind: str, dtype: str) -> tuple[str, float | None]:
    """Return the name of the device and its peak in FLOPs per second, where known."""
    if kind == "cpu":
        return kind, None
    import torch

    return torch.cuda.get_device_name(), peak_flops_per_s(torch.device(kind), dtype)


# ------------------------------------------------------------- a process of a contender


def contend(task: ContenderTask) -> dict[str, Any]:
    """Time a forward pass, forward and backward, and a whole step.

    Returns:
        Their seconds, the peak of memory in bytes, and the first loss.
    """
    import torch
    import torch.distributed as dist

    from scripts.bench.processes import joined

    with joined(
        task.rank,
        task.world,
        task.rendezvous,
        device=task.device,
        threads=task.threads,
    ) as device:
        is_plain = task.kind in (PLAIN, SORTED)
        passes = (_padded_passes if is_plain else _engine_passes)(task, device)

        def timed(name: str) -> tuple[float, object]:
            dist.barrier()
            start = time.perf_counter()
            result = passes[name]()
            if task.device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start, result

        # The first step does the one-time set-up, and its loss is that of an untrained
        # model, which all contenders share.
        _, loss = timed("step")
        peak = _peak_bytes(lambda: timed("step"), task.device)
        # The step comes before the pass that leaves gradients behind.
        order = ("forward", "step", "forward_backward")
        seconds = {name: timed(name)[0] for name in order}
    return {"seconds": seconds, "peak_bytes": peak, "loss": loss}


def _peak_bytes(run: Callable[[], object], device: str) -> int:
    """Return the peak of memory while `run` runs, in bytes.

    On a GPU it is that of torch's allocator. On a CPU it is that of this process's
    proportional set, whose sampling takes time.
    """
    if device == "cuda":
        device_memory(reset_peak=True)
        run()
        memory = device_memory()
        assert memory is not None
        return memory.peak_allocated_bytes

    with TreeMemorySampler(interval_s=_SAMPLE_S) as sampler:
        run()
    return sampler.peak_bytes


def _engine_passes(task: ContenderTask, device: torch.device) -> Passes:
    """Return the passes of a training backend, on packed micro-batches."""
    from scripts.bench.processes import learner, training_rows
    from verl_ray.columns.packing import balance
    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine
    from verl_ray.learning.objectives import SupervisedObjective
    from verl_ray.ops.outputs import RequestedOutputs

    settings = (
        f"dtype={task.dtype}",
        f"micro_batch_tokens_per_rank={task.micro_batch_tokens}",
        *task.settings,
    )
    overrides = [f"actor.num_ranks={task.world}"]
    overrides += [f"actor.backend.{setting}" for setting in settings]
    role = learner(task.kind, task.model, LONGEST, overrides)
    spec = EngineSpec(
        "actor", task.model, "policy", role.backend, role.optimizer, 1000, seed=0
    )
    engine = build_engine(spec, device=device, rank=task.rank, world_size=task.world)
    topology = engine.topology
    rows = training_rows(row_lengths(task.rows), engine.vocab_size)
    parts = balance(rows.lengths, topology.dp_size)
    own_rows = rows.select(parts[topology.dp_rank])
    objective = SupervisedObjective()

    def step() -> float:
        report = engine.forward_backward(own_rows, objective)
        engine.optimizer_step()
        return report.loss if topology.returns_results else 0.0

    return {
        "forward": lambda: engine.forward(own_rows, RequestedOutputs(log_probs=True)),
        "forward_backward": lambda: engine.forward_backward(own_rows, objective),
        "step": step,
    }


def _padded_passes(task: ContenderTask, device: torch.device) -> Passes:
    """Return the passes of a Hugging Face model on padded micro-batches."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from scripts.bench.processes import training_rows

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    rows = training_rows(row_lengths(task.rows), model.config.vocab_size)
    row_indices = padded_batches(
        rows.lengths, task.micro_batch_tokens, by_length=task.kind == SORTED
    )
    batches = [_padded_batch(rows.select(index), device) for index in row_indices]

    def run(learn: bool) -> float:
        total = torch.zeros((), device=device)
        for tokens, weight in batches:
            # A plain loop holds its logits until the next micro-batch has its own.
            loss, _logits = _padded_loss(model, tokens, weight, task.dtype, learn)
            if learn:
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return float(total)

    def step() -> float:
        loss = run(learn=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return {
        "forward": lambda: run(learn=False),
        "forward_backward": lambda: run(learn=True),
        "step": step,
    }


def _padded_batch(
    rows: TrainingBatch, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids, int64, and weights, float32, both [rows, longest row]."""
    import torch

    tokens = padded(rows.lengths, rows.tokens.astype(np.int64))
    weight = rows.response_mask * rows.loss_weight[rows.row_of_token]
    padded_weight = padded(rows.lengths, weight.astype(np.float32))
    return (
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(padded_weight).to(device),
    )


def _padded_loss(
    model: Any, tokens: torch.Tensor, weight: torch.Tensor, dtype: str, learn: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum of negative log-probs, and the logits."""
    import torch

    mixed = torch.autocast(
        tokens.device.type, torch.bfloat16, enabled=dtype == "bfloat16"
    )
    with mixed, torch.set_grad_enabled(learn):
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]

    all_log_probs = torch.log_softmax(logits.float(), -1)
    log_probs = all_log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return -(log_probs * weight[:, 1:]).sum(), logits


if __name__ == "__main__":
    print(json.dumps(contend(ContenderTask(**json.loads(sys.argv[1])))))
