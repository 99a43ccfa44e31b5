"""One process of a contender (`contest.py`): the same passes over the same rows, by one
way of training.

Invariant: for every contender a pass begins when all ranks are ready and ends when its
results are there. One-time set-up is not timed, and memory is not sampled while a pass
is timed. Plain PyTorch pads the rows of a micro-batch to its longest and attends
causally without a mask, its fastest way: padding comes after the tokens, which do not
see it. Deliberately not here: the comparison (`contest.py`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from controllers.bench.processes import PATIENCE_S
from verl_ray.data.batch import Int64, offsets_of
from verl_ray.data.stages import TrainingBatch
from verl_ray.profiling.memory import TreeMemorySampler, device_memory
from verl_ray.shell import override_of

if TYPE_CHECKING:
    import torch

PLAIN = "plain"
"""The contender that is plain PyTorch, on rows in the order of the batch."""
SORTED = "plain_sorted"
"""The contender that is plain PyTorch, on rows sorted by length."""
SHORTEST = 32
LONGEST = 512
_SAMPLE_S = 0.02


@dataclass(frozen=True)
class ContenderTask:
    """The work of one process of a contender.

    Attributes:
        kind: `PLAIN`, `SORTED` or the name of a backend.
        rendezvous: A file through which the ranks find each other.
        settings: Settings of the backend, `key=value`.
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


def rows_of(count: int, vocab_size: int) -> TrainingBatch:
    """Return rows of random tokens; all but the first of each are learned from."""
    lengths = row_lengths(count)
    offsets = offsets_of(lengths)
    mask = np.ones(int(offsets[-1]), np.bool_)
    mask[offsets[:-1]] = False

    random = np.random.default_rng(1)
    tokens = random.integers(0, vocab_size, len(mask)).astype(np.int32)
    weight = np.full(count, 1 / mask.sum(), np.float32)
    return TrainingBatch(
        offsets=offsets, tokens=tokens, response_mask=mask, loss_weight=weight
    )


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


def contend(task: ContenderTask) -> None:
    """Time a forward pass, forward and backward, and a whole step.

    Prints their seconds, the peak of memory and the first loss as JSON.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(task.threads)
    on_gpu = task.device == "cuda"
    device = torch.device("cuda", task.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    if task.kind in (PLAIN, SORTED):
        passes = _padded_passes(task, device)
    else:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=f"file://{task.rendezvous}",
            rank=task.rank,
            world_size=task.world,
            timeout=timedelta(seconds=PATIENCE_S),
            device_id=device if on_gpu else None,
        )
        passes = _engine_passes(task, device)

    def timed(name: str) -> tuple[float, object]:
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        result = passes[name]()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start, result

    # The first step does the one-time set-up, and its loss is that of an untrained
    # model, which all contenders share.
    _, loss = timed("step")
    peak = _peak_bytes(lambda: timed("step"), on_gpu)

    # The step comes before the pass that leaves gradients behind.
    seconds = {}
    for name in ("forward", "step", "forward_backward"):
        seconds[name] = timed(name)[0]

    if dist.is_initialized():
        dist.destroy_process_group()
    print(json.dumps({"seconds": seconds, "peak_bytes": peak, "loss": loss}))


def _peak_bytes(run: Callable[[], object], on_gpu: bool) -> int:
    """Return the peak of memory while `run` runs, in bytes.

    On a GPU it is that of torch's allocator. On a CPU it is that of this process's
    proportional set, whose sampling takes time.
    """
    if on_gpu:
        device_memory(reset_peak=True)
        run()
        memory = device_memory()
        assert memory is not None
        return memory.peak_allocated_bytes

    with TreeMemorySampler(interval_s=_SAMPLE_S) as sampler:
        run()
    return sampler.peak_bytes


def _engine_passes(
    task: ContenderTask, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return the passes of a training backend, on packed micro-batches."""
    from controllers.bench.shipped import as_on_a_cpu
    from controllers.compose.composition import compose
    from verl_ray.algorithms.objectives import SupervisedObjective
    from verl_ray.data.packing import balance
    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine
    from verl_ray.ops.outputs import RequestedOutputs

    overrides = [
        "run.dir=none",
        "data.train_path=none",
        "data.validation_path=null",
        "run.evaluate_every=0",
        override_of("model.path", str(task.model)),
        f"actor.num_ranks={task.world}",
        f"sft.max_tokens={LONGEST}",
        f"backend={task.kind}",
        f"actor.backend.dtype={task.dtype}",
        f"actor.backend.micro_batch_tokens_per_rank={task.micro_batch_tokens}",
    ]
    overrides += [f"actor.backend.{setting}" for setting in task.settings]
    role = as_on_a_cpu(compose("sft", overrides)).learners["actor"]

    spec = EngineSpec(
        "actor", task.model, "policy", role.backend, role.optimizer, 1000, seed=0
    )
    engine = build_engine(spec, device=device, rank=task.rank, world_size=task.world)
    topology = engine.topology
    rows = rows_of(task.rows, engine.vocab_size)
    parts = balance(rows.lengths, topology.dp_size)
    own_rows = rows.select(parts[topology.dp_rank])
    objective = SupervisedObjective()

    def forward() -> object:
        return engine.forward(own_rows, RequestedOutputs(log_probs=True))

    def forward_backward() -> object:
        return engine.forward_backward(own_rows, objective)

    def step() -> float:
        report = engine.forward_backward(own_rows, objective)
        engine.optimizer_step()
        return report.loss if topology.returns_results else 0.0

    return {"forward": forward, "forward_backward": forward_backward, "step": step}


def _padded_passes(
    task: ContenderTask, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Return the passes of a Hugging Face model on padded micro-batches."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    rows = rows_of(task.rows, model.config.vocab_size)
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

    inside = np.arange(rows.lengths.max()) < rows.lengths[:, None]
    tokens = np.zeros(inside.shape, np.int64)
    tokens[inside] = rows.tokens
    weight = np.zeros(inside.shape, np.float32)
    weight[inside] = rows.response_mask * rows.loss_weight[rows.row_of_token]
    return torch.from_numpy(tokens).to(device), torch.from_numpy(weight).to(device)


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
    contend(ContenderTask(**json.loads(sys.argv[1])))
