"""The language-model head by itself: log-probs and entropy, forward and backward, beside the formula as it is written.

Invariant: both compute the same from the same numbers, in processes of their own; memory is the most that a process
held, above what it held with the inputs and all code loaded. Deliberately not here: the transformer under the head.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import psutil

from controllers.bench.processes import ask
from verl_ray.profiling.memory import device_memory, own_peak_bytes

if TYPE_CHECKING:
    from torch import Tensor

SIZES = {"cpu": (2048, 256, 65_536), "cuda": (8192, 896, 151_936)}
"""Tokens, hidden size and vocabulary by device: whole float32 logits are 0.5 GiB and 4.6 GiB."""
_FEW = 8  # tokens of the pass that loads code


@dataclass(frozen=True)
class Work:
    """What one process does: "chunked" is `verl_ray.ops.log_probs`, "naive" the formula on whole logits."""

    kind: str
    device: str
    dtype: str
    tokens: int
    hidden_size: int
    vocabulary: int
    threads: int


def measure(device: str, dtype: str, repeats: int, threads: int, tokens: int | None = None) -> dict[str, Any]:
    """Seconds and bytes of both on so many tokens (None: as many as SIZES has), and how they compare."""
    most, hidden_size, vocabulary = SIZES[device]
    tokens = tokens or most
    told: dict[str, list[dict[str, Any]]] = {"naive": [], "chunked": []}
    for _, kind in product(range(repeats), told):  # in turns: a slow minute of the machine is not one's alone
        work = Work(kind, device, dtype, tokens, hidden_size, vocabulary, threads)
        told[kind] += ask(__name__, [asdict(work)], threads)
    found = {
        kind: {
            "best_s": round(min(one["seconds"] for one in rounds), 4),
            "peak_bytes": max(one["peak_bytes"] for one in rounds),
            "outputs_sum": rounds[0]["outputs_sum"],
        }
        for kind, rounds in told.items()
    }
    return {
        "tokens": tokens,
        "hidden_size": hidden_size,
        "vocabulary": vocabulary,
        "whole_logits_bytes": 4 * tokens * vocabulary,
        **found,
        "speedup": round(found["naive"]["best_s"] / found["chunked"]["best_s"], 3),
        "memory_fraction": round(found["chunked"]["peak_bytes"] / found["naive"]["peak_bytes"], 4),
    }


# ------------------------------------------------------------------------------------------------------- one process


def contend(work: Work) -> None:
    """Time one of the two, and print what it took."""
    import torch

    torch.set_num_threads(work.threads)
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(count, work.hidden_size, device=work.device).to(getattr(torch, work.dtype)).requires_grad_()
        for count in (work.tokens, work.vocabulary)
    )
    targets = torch.randint(work.vocabulary, (work.tokens,), device=work.device)
    compute = {"naive": _naive, "chunked": _chunked}[work.kind]

    def run(count: int) -> float:
        hidden.grad = weight.grad = None
        log_probs, entropy = compute(hidden[:count] / work.hidden_size**0.5, weight, targets[:count])
        total = (log_probs + entropy).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return float(total.detach())

    run(_FEW)
    hidden.grad = weight.grad = None
    device = device_memory(reset_peak=True) if work.device == "cuda" else None
    before = psutil.Process().memory_info().rss if device is None else device.allocated_bytes
    run(work.tokens)  # what is set up once is not timed
    began = time.perf_counter()
    total = run(work.tokens)
    if device is not None:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    device = device and device_memory()
    peak = own_peak_bytes() if device is None else device.peak_allocated_bytes
    print(json.dumps({"seconds": seconds, "peak_bytes": peak - before, "outputs_sum": total}))


def _naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from verl_ray.ops.log_probs import head_log_probs

    found = head_log_probs(hidden, weight, targets, with_entropy=True)
    assert found.entropy is not None
    return found.log_probs, found.entropy


if __name__ == "__main__":
    contend(Work(**json.loads(sys.argv[1])))
