"""One process of a contender (`contest.py`): the same passes over the same rows, by one way of training.

Invariant: whatever the contender, a pass begins when all ranks are there and ends when its results are; what is set up
once is not timed, and memory is watched while nothing is timed. Plain PyTorch pads the rows of a micro-batch to its
longest and attends causally without a mask, its fastest way: padding is behind the tokens, which do not see it.
Deliberately not here: the comparison (`contest.py`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np

from controllers.bench.processes import PATIENCE_S
from verl_ray.data.batch import Int64, offsets_of
from verl_ray.data.stages import TrainingBatch
from verl_ray.profiling.memory import TreeMemorySampler, device_memory

if TYPE_CHECKING:
    import torch

PLAIN, SORTED = "plain", "plain_sorted"
"""The contenders that are no backend: plain PyTorch on rows in the order they come in, and sorted by length."""
SHORTEST, LONGEST = 32, 512
_SAMPLE_S = 0.02


@dataclass(frozen=True)
class Work:
    """What one process of a contender does."""

    kind: str
    rank: int
    world: int
    device: str
    dtype: str
    model: str
    meeting: str
    rows: int
    threads: int
    micro_batch_tokens: int
    settings: tuple[str, ...] = ()
    """Of the backend, key=value."""


def row_lengths(count: int) -> Int64:
    """Lengths drawn evenly from 32 to 512 tokens, the same in every run; int64 [count]."""
    return np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, count)


def rows_of(count: int, vocab_size: int) -> TrainingBatch:
    """Rows of random tokens, of which all but the first are learned."""
    lengths = row_lengths(count)
    offsets = offsets_of(lengths)
    mask = np.ones(int(offsets[-1]), np.bool_)
    mask[offsets[:-1]] = False
    tokens = np.random.default_rng(1).integers(0, vocab_size, len(mask)).astype(np.int32)
    weight = np.full(count, 1 / mask.sum(), np.float32)
    return TrainingBatch(offsets=offsets, tokens=tokens, response_mask=mask, loss_weight=weight)


def padded_batches(lengths: Int64, max_tokens: int, by_length: bool) -> list[Int64]:
    """Rows of each padded micro-batch: as many as `max_tokens` hold however long they are, in the order they come in
    or from the shortest to the longest."""
    order = np.argsort(lengths, kind="stable") if by_length else np.arange(len(lengths))
    at_once = max_tokens // LONGEST
    return [order[first : first + at_once] for first in range(0, len(order), at_once)]


def contend(work: Work) -> None:
    """Time a forward pass, forward and backward, and a whole step; print their seconds, the peak and the first loss."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(work.threads)
    gpu = work.device == "cuda"
    device = torch.device("cuda", work.rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    padded = work.kind in (PLAIN, SORTED)
    if not padded:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            init_method=f"file://{work.meeting}",
            rank=work.rank,
            world_size=work.world,
            timeout=timedelta(seconds=PATIENCE_S),
            device_id=device if gpu else None,
        )
    passes = _padded_passes(work, device) if padded else _engine_passes(work, device)

    def timed(name: str) -> tuple[float, object]:
        if dist.is_initialized():
            dist.barrier()
        began = time.perf_counter()
        found = passes[name]()
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began, found

    _, loss = timed("step")  # sets up what is set up once, and is the only one before anything is learned
    peak = _peak_bytes(lambda: timed("step"), gpu)
    seconds = {name: timed(name)[0] for name in ("forward", "step", "forward_backward")}  # a step has no gradients yet
    if dist.is_initialized():
        dist.destroy_process_group()
    print(json.dumps({"seconds": seconds, "peak_bytes": peak, "loss": loss}))


def _peak_bytes(run: Callable[[], object], gpu: bool) -> int:
    """Of the GPU's allocator, or of this process's proportional set, which takes time to sample, while it runs."""
    if gpu:
        device_memory(reset_peak=True)
        run()
        memory = device_memory()
        assert memory is not None
        return memory.peak_allocated_bytes
    with TreeMemorySampler(interval_s=_SAMPLE_S) as sampler:
        run()
    return sampler.peak_bytes


def _engine_passes(work: Work, device: torch.device) -> dict[str, Callable[[], object]]:
    from controllers.compose.composition import compose
    from verl_ray.algorithms.objectives import SupervisedObjective
    from verl_ray.data.packing import balance
    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine
    from verl_ray.ops.outputs import Outputs

    settings = [
        "run.dir=none",
        "data.train_path=none",
        "data.validation_path=null",
        "run.evaluate_every=0",
        f"model.path={work.model}",
    ]
    settings += [f"actor.num_ranks={work.world}", f"sft.max_tokens={LONGEST}", f"backend={work.kind}"]
    of_backend = (f"dtype={work.dtype}", f"micro_batch_tokens_per_rank={work.micro_batch_tokens}", *work.settings)
    role = compose("sft", [*settings, *(f"actor.backend.{setting}" for setting in of_backend)]).learners["actor"]
    spec = EngineSpec("actor", work.model, "policy", role.backend, role.optimizer, 1000, seed=0)
    engine = build_engine(spec, device=device, rank=work.rank, world_size=work.world)
    rows, place = rows_of(work.rows, engine.vocab_size), engine.topology
    mine = rows.select(balance(rows.lengths, place.row_count)[place.row_index])
    objective = SupervisedObjective()

    def step() -> float:
        report = engine.forward_backward(mine, objective)
        engine.optimizer_step()
        return report.loss if place.answers else 0.0

    return {
        "forward": lambda: engine.forward(mine, Outputs(log_probs=True)),
        "forward_backward": lambda: engine.forward_backward(mine, objective),
        "step": step,
    }


def _padded_passes(work: Work, device: torch.device) -> dict[str, Callable[[], object]]:
    """A Hugging Face model on padded micro-batches."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = rows_of(work.rows, model.config.vocab_size)
    batches = []
    for index in padded_batches(rows.lengths, work.micro_batch_tokens, by_length=work.kind == SORTED):
        part = rows.select(index)
        inside = np.arange(part.lengths.max()) < part.lengths[:, None]
        tokens, weight = np.zeros(inside.shape, np.int64), np.zeros(inside.shape, np.float32)
        tokens[inside], weight[inside] = part.tokens, part.response_mask * part.loss_weight[part.row_of_token]
        batches.append([torch.from_numpy(table).to(device) for table in (tokens, weight)])

    def passed(learn: bool) -> float:
        total = torch.zeros((), device=device)
        for tokens, weight in batches:
            with (
                torch.autocast(device.type, torch.bfloat16, enabled=work.dtype == "bfloat16"),
                torch.set_grad_enabled(learn),
            ):
                logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
            log_probs = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            loss = -(log_probs * weight[:, 1:]).sum()
            if learn:
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return float(total)

    def step() -> float:
        loss = passed(learn=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return {"forward": lambda: passed(False), "forward_backward": lambda: passed(True), "step": step}


if __name__ == "__main__":
    contend(Work(**json.loads(sys.argv[1])))
