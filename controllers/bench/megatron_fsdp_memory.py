"""`verl-ray bench megatron_fsdp_memory`: memory of a rank by what ranks share out, beside the formula.

Invariant: every strategy is measured in fresh processes that have built and trained a small model before, so that what
is set up once does not count; a few tokens are trained on, so activations count for little. Deliberately not here: the
formula (`verl_ray/backends/megatron_fsdp.py`).
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from controllers.bench.contest import MODELS, make_model
from controllers.bench.processes import PATIENCE_S, ask
from verl_ray.backends.base import ParameterCounts
from verl_ray.backends.megatron_fsdp import MegatronFsdpBackend
from verl_ray.config.roles import OptimizerConfig
from verl_ray.data.batch import offsets_of
from verl_ray.data.stages import TrainingBatch
from verl_ray.profiling.memory import AnonymousGrowth, anonymous_bytes, malloc_trim

if TYPE_CHECKING:
    from verl_ray.engine.base import Engine

PROGRAM = "verl-ray bench megatron_fsdp_memory"
STRATEGIES: dict[str, dict[str, Any]] = {
    "none": {"sharding": "none"},
    "optimizer": {"sharding": "optimizer"},
    "optimizer_gradients": {"sharding": "optimizer_gradients"},
    "all": {"sharding": "all"},
}
HYBRID: dict[str, dict[str, Any]] = {
    "all, groups of 2": {"sharding": "all", "shard_size": 2},
    "all, groups of 2, outer optimizer": {"sharding": "all", "shard_size": 2, "outer_sharding": "optimizer"},
}
"""What four ranks have beside."""
MIB = 1 << 20
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""The C library gives larger pieces back as soon as they are freed; else a peak would count what it keeps."""


@dataclass(frozen=True)
class Work:
    """What one process does; `small` is trained first."""

    rank: int
    world: int
    model: str
    small: str
    meeting: str
    backend: dict[str, Any]


def main(argv: list[str]) -> int:
    """Measure, and print the figures as JSON or as a table."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=str(__doc__).partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", choices=list(MODELS), default="20m", help="parameters of the policy (20m)")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="of every strategy (2)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of computation (float32)")
    parser.add_argument("--only", nargs="+", choices=[*STRATEGIES, *HYBRID], help="of the strategies (all)")
    parser.add_argument("--table", action="store_true", help="print a table in Markdown, in MiB, in place of JSON")
    given = parser.parse_args(argv)
    found = measure(given.model, given.ranks, given.dtype, given.only)
    print(table(found) if given.table else json.dumps(found, indent=2))
    return 0


def measure(model: str, ranks: int, dtype: str, names: Collection[str] | None = None) -> dict[str, Any]:
    """Of each strategy (None: of all) what the formula says, and what the rank that held most held: in bytes."""
    strategies = STRATEGIES | (HYBRID if ranks == 4 else {})
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:  # it loads torch
            large, small = (other.submit(make_model, name, f"{folder}/{name}").result() for name in (model, "1m"))
            elements = ParameterCounts(**other.submit(_elements, large).result())
        for name in strategies if names is None else names:
            backend = _backend(dtype, elements.largest_layer, strategies[name])
            works = [
                Work(rank, ranks, large, small, f"{folder}/{name.replace(' ', '_')}", backend.model_dump())
                for rank in range(ranks)
            ]
            print(f"{name} on {ranks} ...", file=sys.stderr, flush=True)
            told = ask("controllers.bench.megatron_fsdp_memory", [asdict(work) for work in works], 1, EXACT)
            formula = backend.held(ranks, elements)
            found[name] = {
                "formula": asdict(formula) | {"between_steps": formula.between_steps},
                "measured": {key: max(one[key] for one in told) for key in told[0]},
            }
    return {"model": model, "parameters": elements.parameters, "ranks": ranks, "dtype": dtype, "strategies": found}


def table(found: dict[str, Any]) -> str:
    """The figures in Markdown, in MiB per rank."""
    lines = [
        "| ranks | dtype | shared out | weights | main weights | gradients | moments | sum | measured "
        "| in flight at most | measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found["strategies"].items():
        formula, measured = one["formula"], one["measured"]
        row = [formula[key] for key in ("weights", "main_weights", "gradients", "moments", "between_steps")]
        row += [measured["between_steps"], formula["in_flight"], measured["in_flight"]]
        figures = " | ".join(f"{value / MIB:.0f}" for value in row)
        lines.append(f"| {found['ranks']} | {found['dtype']} | {name} | {figures} |")
    return "\n".join(lines)


def _backend(dtype: str, bucket_size: int, settings: dict[str, Any]) -> MegatronFsdpBackend:
    usual: dict[str, Any] = {
        "kind": "megatron_fsdp", "dtype": dtype, "micro_batch_tokens_per_rank": 4096, "activation_checkpointing": False,
        "shard_size": None, "outer_sharding": "none", "overlap_param_gather": True, "overlap_grad_reduce": True,
        "bucket_size": bucket_size, "reduce_in_float32": True, "double_buffer": False,
    }  # fmt: skip
    return MegatronFsdpBackend(**usual | settings)


def _elements(path: str) -> dict[str, int]:
    from safetensors import safe_open

    layers: dict[str, int] = {}
    beside = 0
    with safe_open(Path(path) / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            size = int(np.prod(file.get_slice(name).get_shape()))
            if name.startswith("model.layers."):
                number = name.split(".")[2]
                layers[number] = layers.get(number, 0) + size
            else:
                beside += size
    inside = sum(layers.values())
    largest = max(layers.values())
    return {"parameters": inside + beside, "of_experts": 0, "in_layers": inside, "largest_layer": largest}


def watched(work: Work) -> dict[str, int]:
    """What one rank holds between steps, and how much more while a step computes, in bytes."""
    import torch
    import torch.distributed as dist

    from verl_ray.algorithms.objectives import SupervisedObjective

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{work.meeting}", rank=work.rank, world_size=work.world,
        timeout=timedelta(seconds=PATIENCE_S),
    )  # fmt: skip
    rows, objective = _rows(), SupervisedObjective()

    def step(engine: Engine) -> None:
        engine.forward_backward(rows, objective)
        engine.optimizer_step()

    small = _engine(work, work.small)
    step(small)
    del small
    before = _rested()
    engine = _engine(work, work.model)
    step(engine)
    between_steps = _rested() - before
    with AnonymousGrowth() as growth:
        step(engine)
    dist.barrier()
    dist.destroy_process_group()
    return {"between_steps": between_steps, "in_flight": growth.peak_bytes}


def _engine(work: Work, path: str) -> Engine:
    import torch

    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine

    optimizer = OptimizerConfig(
        lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_grad_norm=1.0, schedule="constant",
        warmup_steps=0, min_lr_fraction=0.1,
    )  # fmt: skip
    spec = EngineSpec("actor", path, "policy", MegatronFsdpBackend(**work.backend), optimizer, 10, seed=0)
    return build_engine(spec, device=torch.device("cpu"), rank=work.rank, world_size=work.world)


def _rows() -> TrainingBatch:
    """Four short rows."""
    offsets = offsets_of([16] * 4)
    mask = np.ones(64, np.bool_)
    mask[offsets[:-1]] = False
    return TrainingBatch(
        offsets=offsets,
        tokens=np.arange(64, dtype=np.int32),
        response_mask=mask,
        loss_weight=np.full(4, 1 / 60, np.float32),
    )


def _rested() -> int:
    gc.collect()
    malloc_trim()
    return anonymous_bytes()


if __name__ == "__main__":
    print(json.dumps(watched(Work(**json.loads(sys.argv[1])))))
