"""`verl-ray bench megatron_fsdp_memory`: memory of a rank under each sharding strategy,
compared with the formula.

Invariant: every strategy is measured in fresh processes that first built and trained a
small model, so that one-time set-up does not count. The steps have few tokens, so
activations count for little. Deliberately not here: the formula
(`verl_ray/backends/megatron_fsdp.py`).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from controllers.bench.inputs import MODELS, make_model
from controllers.bench.processes import PATIENCE_S, run_processes
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
    "all, groups of 2, outer optimizer": {
        "sharding": "all",
        "shard_size": 2,
        "outer_sharding": "optimizer",
    },
}
"""Further strategies of four ranks."""
MIB = 1 << 20
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Variables under which the C library returns larger pieces as soon as they are freed.

Otherwise a peak would count memory that the library keeps.
"""


@dataclass(frozen=True)
class MemoryTask:
    """The work of one process.

    Attributes:
        model: The model that is measured.
        small: The model that is trained first.
        rendezvous: A file through which the ranks find each other.
        backend: The settings of the backend.
    """

    rank: int
    world: int
    model: str
    small: str
    rendezvous: str
    backend: dict[str, Any]


def main(argv: list[str]) -> int:
    """Measure, and print the figures as JSON or as a table."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=str(__doc__).partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--model",
        choices=list(MODELS),
        default="20m",
        help="parameters of the policy (20m)",
    )
    parser.add_argument(
        "--ranks", type=int, choices=(2, 4), default=2, help="of every strategy (2)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of computation (float32)",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*STRATEGIES, *HYBRID],
        help="of the strategies (all)",
    )
    parser.add_argument(
        "--table",
        action="store_true",
        help="print a table in Markdown, in MiB, in place of JSON",
    )
    options = parser.parse_args(argv)

    figures = measure(options.model, options.ranks, options.dtype, options.only)

    print(table(figures) if options.table else json.dumps(figures, indent=2))
    return 0


def measure(
    model: str, ranks: int, dtype: str, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the formula's prediction and the measurement of each strategy, in bytes.

    A measurement is that of the rank with the most memory. `names` are the strategies
    to measure; None takes all.
    """
    strategies = STRATEGIES | (HYBRID if ranks == 4 else {})
    figures: dict[str, Any] = {}

    with tempfile.TemporaryDirectory() as folder:
        # Another process makes the models, because this one may not load torch.
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawning) as executor:
            large = executor.submit(
                make_model, MODELS[model], f"{folder}/{model}"
            ).result()
            small = executor.submit(make_model, MODELS["1m"], f"{folder}/1m").result()
            counts = ParameterCounts(**executor.submit(_elements, large).result())

        for name in strategies if names is None else names:
            print(f"{name} on {ranks} ...", file=sys.stderr, flush=True)
            backend = _backend(dtype, counts.largest_layer, strategies[name])
            rendezvous = f"{folder}/{name.replace(' ', '_')}"
            settings = backend.model_dump()
            tasks = [
                asdict(MemoryTask(rank, ranks, large, small, rendezvous, settings))
                for rank in range(ranks)
            ]
            # The module's name is written out, because this one may be `__main__`.
            module = "controllers.bench.megatron_fsdp_memory"
            reports = run_processes(module, tasks, 1, EXACT)

            formula = backend.memory_per_rank(ranks, counts)
            predicted = asdict(formula) | {"between_steps": formula.between_steps}
            measured = {
                key: max(report[key] for report in reports) for key in reports[0]
            }
            figures[name] = {"formula": predicted, "measured": measured}

    return {
        "model": model,
        "parameters": counts.parameters,
        "ranks": ranks,
        "dtype": dtype,
        "strategies": figures,
    }


def table(figures: dict[str, Any]) -> str:
    """Return the figures in Markdown, in MiB per rank."""
    lines = [
        "| ranks | dtype | shared out | weights | main weights | gradients |"
        " moments | sum | measured | in flight at most | measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    parts = ("weights", "main_weights", "gradients", "moments", "between_steps")

    for name, strategy in figures["strategies"].items():
        formula = strategy["formula"]
        measured = strategy["measured"]
        row = [formula[key] for key in parts]
        row += [measured["between_steps"], formula["in_flight"], measured["in_flight"]]
        cells = " | ".join(f"{value / MIB:.0f}" for value in row)
        lines.append(f"| {figures['ranks']} | {figures['dtype']} | {name} | {cells} |")

    return "\n".join(lines)


def _backend(
    dtype: str, bucket_size: int, settings: dict[str, Any]
) -> MegatronFsdpBackend:
    defaults: dict[str, Any] = {
        "kind": "megatron_fsdp",
        "dtype": dtype,
        "micro_batch_tokens_per_rank": 4096,
        "activation_checkpointing": False,
        "shard_size": None,
        "outer_sharding": "none",
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
        "bucket_size": bucket_size,
        "reduce_in_float32": True,
        "double_buffer": False,
    }
    return MegatronFsdpBackend(**defaults | settings)


def _elements(path: str) -> dict[str, int]:
    from verl_ray.models.tensor_sources import CheckpointReader

    layers: dict[str, int] = {}
    outside_layers = 0
    for name, (shape, _) in CheckpointReader(path).header.items():
        size = math.prod(shape)
        if name.startswith("model.layers."):
            number = name.split(".")[2]
            layers[number] = layers.get(number, 0) + size
        else:
            outside_layers += size

    in_layers = sum(layers.values())
    return {
        "parameters": in_layers + outside_layers,
        "in_experts": 0,
        "in_layers": in_layers,
        "largest_layer": max(layers.values()),
    }


def measure_rank(task: MemoryTask) -> dict[str, int]:
    """Return the bytes that one rank holds between steps, and the additional bytes
    while a step computes.
    """
    import torch
    import torch.distributed as dist

    from verl_ray.algorithms.objectives import SupervisedObjective

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.rendezvous}",
        rank=task.rank,
        world_size=task.world,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    rows = _rows()
    objective = SupervisedObjective()

    def step(engine: Engine) -> None:
        engine.forward_backward(rows, objective)
        engine.optimizer_step()

    # The small model brings all one-time set-up into memory before the first reading.
    small = _engine(task, task.small)
    step(small)
    del small
    before = _settled_bytes()

    engine = _engine(task, task.model)
    step(engine)
    between_steps = _settled_bytes() - before
    with AnonymousGrowth() as growth:
        step(engine)

    dist.barrier()
    dist.destroy_process_group()
    return {"between_steps": between_steps, "in_flight": growth.peak_bytes}


def _engine(task: MemoryTask, path: str) -> Engine:
    import torch

    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine

    optimizer = OptimizerConfig(
        lr=1e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        max_grad_norm=1.0,
        schedule="constant",
        warmup_steps=0,
        min_lr_fraction=0.1,
    )
    backend = MegatronFsdpBackend(**task.backend)
    spec = EngineSpec("actor", path, "policy", backend, optimizer, 10, seed=0)
    device = torch.device("cpu")
    return build_engine(spec, device=device, rank=task.rank, world_size=task.world)


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


def _settled_bytes() -> int:
    """Return the bytes of this process once everything unused was given back."""
    gc.collect()
    malloc_trim()
    return anonymous_bytes()


if __name__ == "__main__":
    task = MemoryTask(**json.loads(sys.argv[1]))
    print(json.dumps(measure_rank(task)))
