"""`verl-ray bench fsdp`: tokens per second and memory of the training backends, beside plain PyTorch on the same rows.

Invariant: every contender computes the log-probs of the same rows of mixed lengths with the same model in the same run,
in processes of its own, one contender after another. Plain PyTorch pads the rows of a micro-batch to its longest, which
is what the packed rows of the engines are measured against. Deliberately not here: generation, and any Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from verl_ray.config.schema import RLConfig, TinyModelConfig
from verl_ray.data.batch import offsets_of
from verl_ray.data.stages import TrainingBatch
from verl_ray.errors import VerlRayError
from verl_ray.profiling.memory import GIB, TreeMemorySampler

CONTENDERS = (("plain", 1), ("engine", 1), ("fsdp", 1), ("fsdp", 2))
MODELS = {
    "1m": TinyModelConfig(
        hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=384,
        tie_embeddings=True,
    ),
    "20m": TinyModelConfig(
        hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, head_size=64, intermediate_size=1408,
        tie_embeddings=True,
    ),
}  # fmt: skip
SHORTEST, LONGEST = 32, 512
MICRO_BATCH_TOKENS = 4096
_PATIENCE_S = 500.0


@dataclass(frozen=True)
class Work:
    """What one process of a contender does."""

    kind: str
    rank: int
    world: int
    model: str
    meeting: str
    rows: int
    repeats: int
    threads: int
    dtype: str


def main(argv: list[str]) -> int:
    """Run the suite and print its figures; returns 0."""
    given = _parser().parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = _model(given.model, Path(folder))
        for kind, world in CONTENDERS:
            work = Work(
                kind, 0, world, str(model), f"{folder}/{kind}-{world}", given.rows, given.repeats,
                max(1, cores // world), given.dtype,
            )  # fmt: skip
            print(f"{kind} on {world} ...", file=sys.stderr, flush=True)
            figures[f"{kind}_{world}"] = _measure(work)
    plain = figures["plain_1"]["tokens_per_s"]
    for one in figures.values():
        one["times_plain"] = {name: round(value / plain[name], 3) for name, value in one["tokens_per_s"].items()}
    lengths = row_lengths(given.rows)
    result = {
        **figures,
        "rows": {"count": given.rows, "tokens": int(lengths.sum()), "shortest": SHORTEST, "longest": LONGEST},
        "cores": cores,
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }
    print(json.dumps(result, indent=2))
    return 0


def row_lengths(count: int) -> np.ndarray:
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


def _measure(work: Work) -> dict[str, Any]:
    """Start the contender's processes and wait for what rank 0 says; memory is the sum of their peaks."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "controllers.bench.fsdp", json.dumps(asdict(work) | {"rank": rank})],
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL if rank else None,
            env={**os.environ, "OMP_NUM_THREADS": str(work.threads), "HF_HUB_OFFLINE": "1"},
        )
        for rank in range(work.world)
    ]
    try:
        with contextlib.ExitStack() as watched:
            memory = [watched.enter_context(TreeMemorySampler(rank.pid, interval_s=0.1)) for rank in ranks]
            said, _ = ranks[0].communicate(timeout=_PATIENCE_S)
            codes = [rank.wait(_PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise VerlRayError(f"a process that measures {work.kind} on {work.world} ended with {codes}; see above")
    seconds: dict[str, list[float]] = json.loads(said)
    tokens = int(row_lengths(work.rows).sum())
    return {
        "tokens_per_s": {name: round(tokens / median(times)) for name, times in seconds.items()},
        "peak_memory_gib": round(sum(one.peak_bytes for one in memory) / GIB, 3),
    }


def _model(name: str, folder: Path) -> Path:
    from verl_ray.data.arithmetic import ALPHABET
    from verl_ray.data.tokenizers import character_tokenizer
    from verl_ray.models.tiny import make_tiny_qwen3

    character_tokenizer(folder / "tokenizer", ALPHABET)
    return make_tiny_qwen3(folder / "model", folder / "tokenizer", MODELS[name], seed=0)


# ------------------------------------------------------------------------------------------- one process of a contender


def contend(work: Work) -> None:
    """Time forward, forward and backward, and whole steps; rank 0 prints the seconds of each repeat."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(work.threads)
    if work.kind != "plain":
        meeting, patience = f"file://{work.meeting}", timedelta(seconds=_PATIENCE_S)
        dist.init_process_group("gloo", init_method=meeting, rank=work.rank, world_size=work.world, timeout=patience)
    passes = _plain_passes(work) if work.kind == "plain" else _engine_passes(work)
    seconds: dict[str, list[float]] = {}
    for name, run in passes.items():
        run()  # what is set up once
        for _ in range(work.repeats):
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
            run()
            seconds.setdefault(name, []).append(time.perf_counter() - began)
    if dist.is_initialized():
        dist.destroy_process_group()
    if work.rank == 0:
        print(json.dumps(seconds))


def _engine_passes(work: Work) -> dict[str, Callable[[], object]]:
    import torch

    from controllers.composition import compose
    from verl_ray.algorithms.objectives import SupervisedObjective
    from verl_ray.data.packing import balance
    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine
    from verl_ray.models.role_model import Outputs

    cap = f"backend.micro_batch_tokens_per_rank={MICRO_BATCH_TOKENS}"
    config = compose("quickstart", [f"backend={work.kind}", f"backend.dtype={work.dtype}", cap])
    assert isinstance(config, RLConfig)
    spec = EngineSpec("actor", work.model, "policy", config.actor.backend, config.actor.optimizer, 1000, seed=0)
    engine = build_engine(spec, device=torch.device("cpu"), rank=work.rank, world_size=work.world)
    rows = rows_of(work.rows, engine.vocab_size)
    mine = rows.select(balance(rows.lengths, work.world)[work.rank])
    objective = SupervisedObjective()

    def step() -> None:
        engine.forward_backward(mine, objective)
        engine.optimizer_step()

    return {
        "forward": lambda: engine.forward(mine, Outputs(log_probs=True)),
        "forward_backward": lambda: engine.forward_backward(mine, objective),
        "step": step,
    }


def _plain_passes(work: Work) -> dict[str, Callable[[], object]]:
    """A Hugging Face model on padded micro-batches, in the order of the rows."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = rows_of(work.rows, model.config.vocab_size)
    batches = []
    for first in range(0, work.rows, max(1, MICRO_BATCH_TOKENS // LONGEST)):
        part = rows.select(np.arange(first, min(work.rows, first + MICRO_BATCH_TOKENS // LONGEST)))
        inside = np.arange(part.lengths.max()) < part.lengths[:, None]
        tokens = np.zeros(inside.shape, np.int64)
        tokens[inside] = part.tokens
        batches.append((torch.from_numpy(tokens), torch.from_numpy(inside.astype(np.int64))))

    def forward(learn: bool) -> None:
        for tokens, inside in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16"), torch.set_grad_enabled(learn):
                logits = model(input_ids=tokens, attention_mask=inside, use_cache=False).logits[:, :-1]
            log_probs = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            if learn:
                (-(log_probs * inside[:, 1:]).sum() / rows.num_tokens).backward()  # type: ignore[no-untyped-call]

    def step() -> None:
        forward(True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"forward": lambda: forward(False), "forward_backward": lambda: forward(True), "step": step}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray bench fsdp",
        description="Tokens per second of forward, forward and backward, and whole optimizer steps, and peak memory: "
        "plain padded PyTorch, the engine backend, and fsdp on 1 and 2 ranks, on rows of "
        f"{SHORTEST} to {LONGEST} tokens.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="1m", help="parameters of the policy (1m)")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="rows of a batch (64)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="times that count (5)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation (float32)"
    )
    return parser


if __name__ == "__main__":
    contend(Work(**json.loads(sys.argv[1])))
