"""The suite `megatron_fsdp_memory`: memory of a rank under each sharding strategy,
compared with the formula.

Invariant: every strategy is measured in fresh processes that first built and trained a
small model, so that one-time set-up does not count. The steps have few tokens, so
activations count for little.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from scripts.bench.inputs import MODELS, Size, made_apart, tensors_of, with_layers
from scripts.bench.memory import AnonymousGrowth, anonymous_bytes
from scripts.bench.processes import joined, learner, run_processes, training_rows
from scripts.bench.suite import MIB, Flags, markdown, print_json, progress
from verl_ray.backends.base import ParameterCounts
from verl_ray.backends.megatron_fsdp import MegatronFsdpBackend
from verl_ray.profiling.memory import malloc_trim

if TYPE_CHECKING:
    from verl_ray.config.roles import SupervisedRole
    from verl_ray.engine.base import Engine

STRATEGIES = {
    name: (f"sharding={name}",)
    for name in ("none", "optimizer", "optimizer_gradients", "all")
}
_GROUPS = ("sharding=all", "shard_size=2")
HYBRID = {
    "all, groups of 2": _GROUPS,
    "all, groups of 2, outer optimizer": (*_GROUPS, "outer_sharding=optimizer"),
}
"""Further strategies of four ranks."""
_ROW_TOKENS = 16
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
        settings: Settings of the backend, `key=value`.
    """

    rank: int
    world: int
    model: str
    small: str
    rendezvous: str
    settings: tuple[str, ...]


def main(argv: list[str]) -> int:
    """Measure, and print the figures as JSON or as a table."""
    flags = Flags(
        "megatron_fsdp_memory",
        "Measure the memory of a rank under each sharding strategy, compared with the"
        " formula.",
    )
    flags.choice("--model", MODELS, "parameters of the policy", "20m")
    flags.add_argument(
        "--ranks", type=int, choices=(2, 4), default=2, help="of every strategy (2)"
    )
    flags.choice("--dtype", ("float32", "bfloat16"), "of computation")
    flags.only([*STRATEGIES, *HYBRID], "of the strategies")
    flags.table()
    options = flags.parse_args(argv)

    figures = measure(options.model, options.ranks, options.dtype, options.only)
    if options.table:
        print(table(figures))
    else:
        print_json(figures)
    return 0


def measure(
    model: str, ranks: int, dtype: str, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the formula's prediction and the measurement of each strategy, in bytes.

    A measurement is that of the rank with the most memory. `names` are the strategies
    to measure; None takes all.
    """
    strategies = STRATEGIES | (HYBRID if ranks == 4 else {})
    size = MODELS[model]
    counts = _counts(size)
    figures: dict[str, Any] = {}

    with tempfile.TemporaryDirectory() as folder:
        large = made_apart(size, f"{folder}/{model}")
        small = made_apart(MODELS["1m"], f"{folder}/small")
        for name in strategies if names is None else names:
            progress(f"{name} on {ranks} ...")
            task = MemoryTask(
                rank=0,
                world=ranks,
                model=large,
                small=small,
                rendezvous=f"{folder}/{name.replace(' ', '_')}",
                settings=(
                    f"dtype={dtype}",
                    f"bucket_size={counts.largest_layer}",
                    *strategies[name],
                ),
            )
            tasks = [{**asdict(task), "rank": rank} for rank in range(ranks)]
            # The module's name is written out, because this one may be `__main__`.
            module = "scripts.bench.megatron_fsdp_memory"
            reports = run_processes(module, tasks, 1, EXACT)

            backend = cast(MegatronFsdpBackend, _role(task).backend)
            formula = backend.memory_per_rank(ranks, counts)
            memory = backend.rank_memory(ranks, counts, counts.parameters)
            between_steps = sum(memory.persistent.values())
            predicted = asdict(formula) | {"between_steps": between_steps}
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


def _counts(size: Size) -> ParameterCounts:
    """Return the parameters of a model, all of whose layers have the same."""
    parameters = sum(tensors_of(size))
    largest_layer = sum(tensors_of(with_layers(size, 1))) - sum(
        tensors_of(with_layers(size, 0))
    )
    return ParameterCounts(
        parameters=parameters,
        in_experts=0,
        in_layers=size.layers.num_layers * largest_layer,
        largest_layer=largest_layer,
    )


def table(figures: dict[str, Any]) -> str:
    """Return the figures in Markdown, in MiB per rank."""
    columns = ["ranks", "dtype", "shared out", "weights", "main weights", "gradients"]
    columns += ["moments", "sum", "measured", "in flight at most", "measured"]
    parts = ("weights", "main_weights", "gradients", "moments", "between_steps")
    rows = []
    for name, strategy in figures["strategies"].items():
        formula = strategy["formula"]
        measured = strategy["measured"]
        values = [formula[key] for key in parts]
        values += [measured["between_steps"], formula["in_flight"]]
        cells = [f"{value / MIB:.0f}" for value in (*values, measured["in_flight"])]
        rows.append([str(figures["ranks"]), figures["dtype"], name, *cells])
    return markdown(columns, rows)


def _role(task: MemoryTask) -> SupervisedRole:
    settings = ("activation_checkpointing=false", *task.settings)
    overrides = [
        f"actor.num_ranks={task.world}",
        *(f"actor.backend.{setting}" for setting in settings),
    ]
    return learner("megatron_fsdp", "none", _ROW_TOKENS, overrides)


def measure_rank(task: MemoryTask) -> dict[str, int]:
    """Return the bytes that one rank holds between steps, and the additional bytes
    while a step computes.
    """
    import torch.distributed as dist

    from verl_ray.learning.objectives import SupervisedObjective

    rows = training_rows([_ROW_TOKENS] * 4, vocab_size=64)
    objective = SupervisedObjective()

    def step(engine: Engine) -> None:
        engine.forward_backward(rows, objective)
        engine.optimizer_step()

    with joined(task.rank, task.world, task.rendezvous):
        # The small model does all one-time set-up before the first reading.
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
    return {"between_steps": between_steps, "in_flight": growth.peak_bytes}


def _engine(task: MemoryTask, path: str) -> Engine:
    import torch

    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine

    role = _role(task)
    spec = EngineSpec("actor", path, "policy", role.backend, role.optimizer, 10, seed=0)
    device = torch.device("cpu")
    return build_engine(spec, device=device, rank=task.rank, world_size=task.world)


def _settled_bytes() -> int:
    """Return the bytes of this process once everything unused was given back."""
    gc.collect()
    malloc_trim()
    return anonymous_bytes()


if __name__ == "__main__":
    task = MemoryTask(**json.loads(sys.argv[1]))
    print(json.dumps(measure_rank(task)))
