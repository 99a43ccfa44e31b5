"""The language-model head by itself, compared with its formula: log-probs and entropy,
forward and backward.

Invariant: both sides compute the same from the same numbers, in turns in one process.
Memory is the peak above the inputs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from controllers.bench.peaks import peak_bytes
from controllers.bench.processes import run_processes
from verl_ray.profiling.memory import device_memory

if TYPE_CHECKING:
    from torch import Tensor

    Compute = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

SIZES = {"cpu": (2048, 256, 65_536), "cuda": (8192, 896, 151_936)}
"""Tokens, hidden size and vocabulary by device.

Whole float32 logits are 0.5 GiB on a CPU and 4.6 GiB on a GPU.
"""


@dataclass(frozen=True)
class HeadTask:
    """The sizes that are measured, and how often."""

    device: str
    dtype: str
    tokens: int
    hidden_size: int
    vocabulary: int
    threads: int
    repeats: int


def measure(
    device: str, dtype: str, repeats: int, threads: int, tokens: int | None = None
) -> dict[str, Any]:
    """Return seconds and bytes of both sides, and how they compare.

    `tokens` is the number of tokens; None takes that of `SIZES`.
    """
    default_tokens, hidden_size, vocabulary = SIZES[device]
    task = HeadTask(
        device,
        dtype,
        tokens or default_tokens,
        hidden_size,
        vocabulary,
        threads,
        repeats,
    )
    (figures,) = run_processes("controllers.bench.head", [asdict(task)], threads)
    naive, chunked = figures["naive"], figures["chunked"]
    return {
        "tokens": task.tokens,
        "hidden_size": hidden_size,
        "vocabulary": vocabulary,
        "whole_logits_bytes": 4 * task.tokens * vocabulary,
        **figures,
        "speedup": round(naive["best_s"] / chunked["best_s"], 3),
        "memory_fraction": round(chunked["peak_bytes"] / naive["peak_bytes"], 4),
    }


def contend(task: HeadTask) -> dict[str, dict[str, float]]:
    """Return the figures of the formula on whole logits, and of ours in chunks."""
    import torch

    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, task.dtype)

    def matrix(rows: int) -> Tensor:
        values = torch.randn(rows, task.hidden_size, device=task.device)
        return values.to(dtype).requires_grad_()

    hidden = matrix(task.tokens)
    weight = matrix(task.vocabulary)
    targets = torch.randint(task.vocabulary, (task.tokens,), device=task.device)

    def run(compute: Compute) -> float:
        hidden.grad = None
        weight.grad = None
        scaled = hidden / task.hidden_size**0.5
        log_probs, entropy = compute(scaled, weight, targets)
        total = (log_probs + entropy).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    sides = {"naive": _naive, "chunked": _chunked}
    # The measurement of memory does the one-time set-up, which is not timed.
    peaks = {
        name: _peak(partial(run, side), task.device) for name, side in sides.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(task.repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            run(side)
            seconds[name].append(time.perf_counter() - start)

    return {
        name: {
            "best_s": round(min(seconds[name]), 4),
            "peak_bytes": peaks[name],
            "outputs_sum": run(side),
        }
        for name, side in sides.items()
    }


def _peak(run: Callable[[], object], device: str) -> int:
    """Return the most bytes by which memory grows while `run` runs."""
    if device == "cpu":
        return peak_bytes(run)
    before = device_memory(reset_peak=True)
    run()
    after = device_memory()
    assert before is not None and after is not None
    return after.peak_allocated_bytes - before.allocated_bytes


def _naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from verl_ray.ops.log_probs import head_log_probs

    outputs = head_log_probs(hidden, weight, targets, with_entropy=True)
    assert outputs.entropy is not None
    return outputs.log_probs, outputs.entropy


if __name__ == "__main__":
    print(json.dumps(contend(HeadTask(**json.loads(sys.argv[1])))))
