"""The language-model head by itself, compared with its formula: log-probs and entropy,
forward and backward.

Invariant: both sides compute the same from the same numbers, in separate processes.
Memory is the peak of a process above what it held with the inputs and all code loaded.
Deliberately not here: the transformer under the head.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import psutil

from controllers.bench.processes import run_processes
from verl_ray.profiling.memory import device_memory, own_peak_bytes

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {"cpu": (2048, 256, 65_536), "cuda": (8192, 896, 151_936)}
"""Tokens, hidden size and vocabulary by device.

Whole float32 logits are 0.5 GiB on a CPU and 4.6 GiB on a GPU.
"""
_LOADING_TOKENS = 8
"""Tokens of the pass that only loads code."""


@dataclass(frozen=True)
class HeadTask:
    """The work of one process.

    `kind` is "chunked" for `verl_ray.ops.log_probs`, or "naive" for the formula on
    whole logits.
    """

    kind: str
    device: str
    dtype: str
    tokens: int
    hidden_size: int
    vocabulary: int
    threads: int


def measure(
    device: str, dtype: str, repeats: int, threads: int, tokens: int | None = None
) -> dict[str, Any]:
    """Return seconds and bytes of both sides, and how they compare.

    `tokens` is the number of tokens; None takes that of `SIZES`.
    """
    default_tokens, hidden_size, vocabulary = SIZES[device]
    tokens = tokens or default_tokens
    rounds: dict[str, list[dict[str, Any]]] = {"naive": [], "chunked": []}

    # They take turns, so that a slow minute of the machine does not hit one side only.
    for _, kind in product(range(repeats), rounds):
        task = HeadTask(kind, device, dtype, tokens, hidden_size, vocabulary, threads)
        rounds[kind] += run_processes(__name__, [asdict(task)], threads)

    figures = {kind: _figures(reports) for kind, reports in rounds.items()}
    naive = figures["naive"]
    chunked = figures["chunked"]
    return {
        "tokens": tokens,
        "hidden_size": hidden_size,
        "vocabulary": vocabulary,
        "whole_logits_bytes": 4 * tokens * vocabulary,
        **figures,
        "speedup": round(naive["best_s"] / chunked["best_s"], 3),
        "memory_fraction": round(chunked["peak_bytes"] / naive["peak_bytes"], 4),
    }


def _figures(reports: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "best_s": round(min(report["seconds"] for report in reports), 4),
        "peak_bytes": max(report["peak_bytes"] for report in reports),
        "outputs_sum": reports[0]["outputs_sum"],
    }


# -------------------------------------------------------------------------- one process


def contend(task: HeadTask) -> None:
    """Time one of the two sides, and print its seconds, bytes and sum as JSON."""
    import torch

    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    hidden = _random_matrix(task.tokens, task)
    weight = _random_matrix(task.vocabulary, task)
    targets = torch.randint(task.vocabulary, (task.tokens,), device=task.device)
    compute = {"naive": _naive, "chunked": _chunked}[task.kind]

    def run(count: int) -> float:
        hidden.grad = None
        weight.grad = None
        scaled = hidden[:count] / task.hidden_size**0.5
        log_probs, entropy = compute(scaled, weight, targets[:count])
        total = (log_probs + entropy).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    run(_LOADING_TOKENS)
    hidden.grad = None
    weight.grad = None
    if task.device == "cuda":
        memory = device_memory(reset_peak=True)
        assert memory is not None
        before_bytes = memory.allocated_bytes
    else:
        before_bytes = psutil.Process().memory_info().rss

    run(task.tokens)  # does the one-time set-up, which is not timed
    start = time.perf_counter()
    total = run(task.tokens)
    if task.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start

    if task.device == "cuda":
        memory = device_memory()
        assert memory is not None
        peak_bytes = memory.peak_allocated_bytes
    else:
        peak_bytes = own_peak_bytes()
    report = {
        "seconds": seconds,
        "peak_bytes": peak_bytes - before_bytes,
        "outputs_sum": total,
    }
    print(json.dumps(report))


def _random_matrix(rows: int, task: HeadTask) -> Tensor:
    import torch

    matrix = torch.randn(rows, task.hidden_size, device=task.device)
    return matrix.to(getattr(torch, task.dtype)).requires_grad_()


def _naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from verl_ray.ops.log_probs import head_log_probs

    outputs = head_log_probs(hidden, weight, targets, with_entropy=True)
    assert outputs.entropy is not None
    return outputs.log_probs, outputs.entropy


if __name__ == "__main__":
    contend(HeadTask(**json.loads(sys.argv[1])))
