"""Parts of `python -m scripts.bench gpu`: a training backend on this machine's device.

`python -m tests.engine.on_device '{"check": "contract", "kind": "fsdp", "device":
"cuda", "world": 1}'` prints how far the backend is from plain transformers in float64,
and exits with 1 where that is too far. The check "offload" moves the state of two ranks
to the host and back.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scripts.bench.processes import run_processes
from tests.engine.inputs import (
    POLICY,
    TEMPERATURE,
    Ranks,
    rows_of,
    write_models,
)
from tests.engine.naive import (
    by_row,
    naive_logits,
    naive_policy_loss,
    naive_training,
    reference_model,
)
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.engine.build import build_engine
from verl_ray.models.tiny import make_tiny
from verl_ray.ops.outputs import RequestedOutputs

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Of log-probs, and of losses and norms of three steps as fractions of their largest.

In bfloat16 a log-prob of -10 is itself rounded by 0.03.
"""
WAIT_S = 60


def main(task: dict[str, Any]) -> int:
    if "rank" in task:
        return on_a_rank(task)
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        write_odd_model(Path(folder))
        ranks = [
            task | {"rank": rank, "folder": folder} for rank in range(task["world"])
        ]
        if len(ranks) == 1:
            return on_a_rank(ranks[0])
        found = run_processes(__name__ if __spec__ is None else __spec__.name, ranks, 1)
        print(json.dumps({"ranks": found}))
        return 0


def write_odd_model(root: Path) -> None:
    """Write a model whose vocabulary and layers two ranks cannot share out evenly."""
    character_tokenizer(root / "odd_tokenizer", "0123456789+=abc")
    sizes = TinyModelConfig(
        hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=16, intermediate_size=97,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3", root / "odd", root / "odd_tokenizer", sizes, seed=1)


def on_a_rank(task: dict[str, Any]) -> int:
    rank, world = task["rank"], task["world"]
    on_gpu = task["device"] == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{task['folder']}/meeting", rank=rank, world_size=world,
        timeout=timedelta(seconds=WAIT_S), device_id=device if on_gpu else None,
    )  # fmt: skip
    ranks = Ranks(rank, world, Path(task["folder"]))
    found, fits = CHECKS[task["check"]](ranks, task["kind"], device)
    dist.destroy_process_group()
    print(json.dumps(found))
    return int(not fits)


def contract(
    ranks: Ranks, kind: str, device: torch.device
) -> tuple[dict[str, Any], bool]:
    found: dict[str, Any] = {}
    fits = True
    for dtype, tolerance in TOLERANCE.items():
        try:
            found[dtype] = differences(ranks, kind, device, dtype)
            fits &= all(value <= tolerance for value in found[dtype].values())
        except Exception as error:  # the other type is still of interest
            traceback.print_exc()
            found[dtype] = f"{type(error).__name__}: {error}"
            fits = False
    return found, fits


def differences(
    ranks: Ranks, kind: str, device: torch.device, dtype: str
) -> dict[str, float]:
    """Return how far an engine is from the reference: log-probs before training, then
    losses and norms of three steps as fractions of the largest.
    """
    engine = build_engine(
        ranks.spec(kind, dtype=dtype),
        device=device,
        rank=ranks.rank,
        world_size=ranks.world,
    )
    rows, model = rows_of(), reference_model(ranks.folder, "qwen3")
    outputs = RequestedOutputs(log_probs=True, temperature=TEMPERATURE)
    said = engine.forward(rows, outputs).log_probs
    worst = 0.0
    for row, read in by_row(rows):
        tokens = rows.tokens[row]
        with torch.no_grad():
            logits = naive_logits(model, tokens)[read - 1] / TEMPERATURE
        ids = torch.from_numpy(tokens.astype(np.int64))[read, None]
        exact = torch.log_softmax(logits, -1).gather(1, ids)[:, 0].numpy()
        worst = max(worst, float(np.abs(said[row][read.numpy()] - exact).max()))

    trained = ranks.train(engine, rows, POLICY)
    exact_steps = naive_training(model, rows, naive_policy_loss)
    far = {
        name: float(
            np.abs(np.subtract(trained[name], exact_steps[name])).max()
            / np.abs(exact_steps[name]).max()
        )
        for name in ("loss", "norm")
    }
    engine.close()
    return {"log_probs": worst, **far}


def offload(
    ranks: Ranks, kind: str, device: torch.device
) -> tuple[dict[str, Any], bool]:
    engine = build_engine(
        ranks.spec(kind, "odd"), device=device, rank=ranks.rank, world_size=ranks.world
    )
    mine = ranks.of(engine, rows_of())
    ranks.step(engine, mine, POLICY)
    names = [parameter.name for parameter in engine.manifest().sent]

    def held() -> list[torch.Tensor]:
        return [value.to("cpu", copy=True) for _, value in engine.shards(names)]

    before = held()
    engine.place(params="host", optimizer="host")
    on_host = held()
    engine.place(params="device", optimizer="device")
    back = held()
    _, step = ranks.step(engine, mine, POLICY)
    fits = all(map(torch.equal, before, on_host)) and all(
        map(torch.equal, before, back)
    )
    found = {
        "elements": sum(value.numel() for value in before),
        "same": fits,
        "norm": step.grad_norm,
    }
    return found, fits and not step.skipped


CHECKS = {"contract": contract, "offload": offload}

if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
