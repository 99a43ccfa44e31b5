"""The suite `peaks`: the most memory of passes on a CPU, compared with the plan.

Invariant: a peak is exact. torch's profiler reports every allocation and release of the
CPU allocator, temporary memory of kernels included, so nothing depends on what the C
library keeps. The peak of ranks is that of the rank with most. Memory outside of torch,
such as gloo's, is not in it.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from scripts.bench.inputs import Size, make_model
from scripts.bench.processes import (
    PATIENCE_S,
    as_on_a_cpu,
    fork,
    joined,
    run_processes,
    training_rows,
)
from scripts.bench.suite import MIB, Flags, markdown, print_json, progress
from verl_ray.columns.packing import balance
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.preparation import TinyModelConfig

if TYPE_CHECKING:
    from verl_ray.config.roles import ModelRole
    from verl_ray.config.tasks.rl import RLConfig
    from verl_ray.engine.base import Engine
    from verl_ray.learning.objectives import Objective

PASSES = ("forward", "update")
"""A pass without gradients, and an optimizer step."""

_SHARED_IMPORTS = (
    "scripts.configuration",
    "torch.profiler",
    "transformers.modeling_utils",
    "verl_ray.engine.plain",
    "verl_ray.preflight.footprints",
)
"""Modules that every rank needs; they are imported once, before ranks are forked."""

_TEMPERATURE = 0.8
_MARK_BYTES = 1_234_567
"""Size of a tensor that marks a moment among allocations; no other has it."""
_ROW_TOKENS = 256

_MODEL = Size(
    vocab_size=4096,
    layers=TinyModelConfig(
        hidden_size=256,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        head_size=32,
        intermediate_size=768,
        tie_embeddings=False,
    ),
)


@dataclass(frozen=True)
class PeakCase:
    """A backend that computes rows of one length, and the model's head.

    Attributes:
        backend: Kind of the backend.
        world: Number of ranks.
        settings: Settings of the backend that differ from the shipped ones.
        head: Head of the model.
        adapter: Whether an adapter learns in place of the model.
        rows: Number of rows of a micro-batch.
        batches: Number of micro-batches of a call.
    """

    backend: str
    world: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    head: Literal["policy", "value"] = "policy"
    adapter: bool = False
    rows: int = 4
    batches: int = 2

    @property
    def name(self) -> str:
        """The case in words."""
        parts = [f"{self.backend} on {self.world}"]
        parts += [f"{key}={value}" for key, value in self.settings.items()]
        if self.head == "value":
            parts.append("value head")
        if self.adapter:
            parts.append("adapter")
        return ", ".join(parts)


_NARROW: Mapping[str, Any] = {"dtype": "bfloat16"}
_AGAIN: Mapping[str, Any] = {"activation_checkpointing": True}
_FULL: Mapping[str, Any] = {"recompute": "full"}
_TP: Mapping[str, Any] = {"tensor_parallel": 2}
_SP: Mapping[str, Any] = {"tensor_parallel": 2, "sequence_parallel": True}
_PP: Mapping[str, Any] = {"pipeline_parallel": 2}

TESTED = (
    PeakCase("engine"),
    PeakCase("engine", 1, {**_NARROW, **_AGAIN}),
    PeakCase("fsdp", 1, _NARROW),
    PeakCase("megatron"),
    PeakCase("megatron", 1, {**_NARROW, **_FULL}),
    PeakCase("megatron_fsdp", 1, _NARROW),
    PeakCase("megatron", 2, _SP),
)
"""The cases of the test, which is fast."""

CASES = (
    *TESTED,
    PeakCase("engine", 1, _NARROW),
    PeakCase("engine", 1, _AGAIN),
    PeakCase("engine", 1, _NARROW, head="value"),
    PeakCase("engine", 1, _NARROW, adapter=True),
    PeakCase("engine", 2),
    PeakCase("fsdp"),
    PeakCase("fsdp", 1, _AGAIN, rows=8, batches=1),
    PeakCase("fsdp", 1, {**_NARROW, **_AGAIN}),
    PeakCase("fsdp", 1, _NARROW, adapter=True),
    PeakCase("fsdp", 2, _NARROW),
    PeakCase("fsdp", 2, {"sequence_parallel": 2}),
    PeakCase("megatron", 1, _NARROW),
    PeakCase("megatron", 1, _FULL),
    PeakCase("megatron", 1, {"recompute": "selective"}),
    PeakCase("megatron", 2, {**_NARROW, **_TP}),
    PeakCase("megatron", 2, _PP, batches=4),
    PeakCase("megatron_fsdp"),
    PeakCase("megatron_fsdp", 1, _AGAIN),
    PeakCase("megatron_fsdp", 1, {**_NARROW, **_AGAIN}),
    PeakCase("megatron_fsdp", 2, _NARROW),
)


def main(argv: list[str]) -> int:
    """Measure, print the figures as JSON or as a table, and return the exit code 0."""
    flags = Flags(
        "peaks", "Measure the most memory of passes, compared with the memory plan."
    )
    backends = list(dict.fromkeys(case.backend for case in CASES))
    flags.only(backends, "of the backends")
    flags.table()
    options = flags.parse_args(argv)

    chosen = options.only or backends
    figures = measure([case for case in CASES if case.backend in chosen])
    if options.table:
        print(_table(figures))
    else:
        print_json(figures)
    return 0


def measure(cases: Sequence[PeakCase]) -> dict[str, dict[str, dict[str, int]]]:
    """Return what is predicted and measured of each case, by its name.

    Both are bytes by the names in `PASSES`.
    """
    with tempfile.TemporaryDirectory() as folder:
        task = {"folder": folder, "cases": [asdict(case) for case in cases]}
        # One process loads torch, and all ranks are forks of it.
        (figures,) = run_processes(__name__, [task], 1, patience_s=4 * PATIENCE_S)
    return figures


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes by which torch's memory on the CPU grows in a second `run`.

    The profiler cannot tell the size of what was allocated before it started, so it
    watches the first run too.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
        torch.empty(_MARK_BYTES, dtype=torch.uint8)
        run()

    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    changed_bytes = [event.nbytes() for event in changes]
    # The second run begins when the mark has been released.
    second = changed_bytes[changed_bytes.index(-_MARK_BYTES) + 1 :]
    return int(np.cumsum(second).max(initial=0))


def _table(figures: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    columns = ["backend"]
    for passing in PASSES:
        columns += [f"{passing}: predicted", "measured", "ratio"]
    rows = []
    for name, case in figures.items():
        cells = [name]
        for passing in PASSES:
            predicted = case["predicted"][passing]
            measured = case["measured"][passing]
            ratio = predicted / measured
            cells += [f"{predicted / MIB:.0f}", f"{measured / MIB:.0f}", f"{ratio:.2f}"]
        rows.append(cells)
    return markdown(columns, rows)


def _measure(folder: str, cases: Sequence[PeakCase]) -> dict[str, Any]:
    """Measure the cases one after another, in forks of this process."""
    for name in _SHARED_IMPORTS:
        importlib.import_module(name)

    figures: dict[str, Any] = {}
    for number, case in enumerate(cases):
        progress(f"{case.name} ...")
        own_folder = Path(folder) / str(number)
        fork(make_model, [[_MODEL, str(own_folder)]])
        tasks = [[case, rank, str(own_folder)] for rank in range(case.world)]
        ranks = fork(_run_rank, tasks)
        figures[case.name] = {
            kind: {name: max(rank[kind][name] for rank in ranks) for name in PASSES}
            for kind in ("predicted", "measured")
        }
    return figures


# ----------------------------------------------------------------------------- one rank


def _run_rank(case: PeakCase, rank: int, folder: str) -> dict[str, dict[str, int]]:
    import torch.distributed as dist

    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine

    config = _configuration(case, folder)
    role = config.actor if case.head == "policy" else config.critic
    spec = EngineSpec(
        "actor", folder, case.head, role.backend, role.optimizer, 10, seed=0
    )
    spec = replace(spec, lora=role.adapter)

    with joined(rank, case.world, f"{folder}/rendezvous") as device:
        engine = build_engine(spec, device=device, rank=rank, world_size=case.world)
        figures = {
            "predicted": _predicted(case, role, config, folder),
            "measured": _measured(case, config, engine),
        }
        dist.barrier()
    return figures


def _configuration(case: PeakCase, folder: str) -> RLConfig:
    from scripts.configuration import compose
    from verl_ray.config.tasks.rl import RLConfig
    from verl_ray.shell import override_of

    overrides = [
        f"backend={case.backend}",
        f"actor.num_ranks={case.world}",
        override_of("model.path", str(folder)),
        f"data.max_prompt_tokens={_ROW_TOKENS // 2}",
        f"rollout.max_response_tokens={_ROW_TOKENS // 2}",
        # The gradient of the entropy takes memory of its own.
        "algorithm.entropy_coefficient=0.01",
        *(f"data.{kind}_path=none" for kind in ("train", "validation")),
        f"backend.micro_batch_tokens_per_rank={case.rows * _ROW_TOKENS}",
        *(f"backend.{key}={value}" for key, value in case.settings.items()),
        f"actor.lora.rank={8 if case.adapter else 0}",
    ]
    config = as_on_a_cpu(compose("ppo", overrides))
    assert isinstance(config, RLConfig)
    return config


def _predicted(
    case: PeakCase, role: ModelRole, config: RLConfig, folder: str
) -> dict[str, int]:
    from verl_ray.preflight.footprints import Workload, footprint
    from verl_ray.preflight.model_files import size_of

    tokens = case.rows * _ROW_TOKENS
    work = Workload(tokens, logit_tokens=tokens // 2, batches=case.batches)
    adapted = () if role.adapter is None else role.adapter.targets
    size = size_of(folder, config, case.head, adapted)
    own = footprint(role, size, work, work, "cpu")
    return {
        "forward": sum(own.forward.values()),
        "update": sum(own.update.values()),
    }


def _measured(case: PeakCase, config: RLConfig, engine: Engine) -> dict[str, int]:
    from verl_ray.learning.objectives import ValueObjective
    from verl_ray.learning.policy_objective import PolicyObjective
    from verl_ray.ops.outputs import RequestedOutputs

    is_policy = case.head == "policy"
    outputs = RequestedOutputs(
        log_probs=is_policy,
        entropy=is_policy,
        values=not is_policy,
        temperature=_TEMPERATURE,
    )
    objective: Objective = PolicyObjective(config.algorithm, _TEMPERATURE, 0.0)
    if not is_policy:
        assert config.algorithm.value_loss is not None
        objective = ValueObjective(config.algorithm.value_loss)

    topology = engine.topology
    # Peers that share the tokens of a row have as many more rows.
    slices = config.actor.backend.token_slices
    rows = _rows(case.rows * case.batches * slices * topology.dp_size)
    rows = rows.select(balance(rows.lengths, topology.dp_size)[topology.dp_rank])

    def update() -> None:
        engine.forward_backward(rows, objective)
        engine.optimizer_step()

    # What is allocated once does not count.
    update()
    forward = peak_bytes(lambda: engine.forward(rows, outputs))
    return {"forward": forward, "update": peak_bytes(update)}


def _rows(count: int) -> TrainingBatch:
    """Return rows of equal length, whose second halves are responses."""
    lengths = [_ROW_TOKENS] * count
    rows = training_rows(lengths, _MODEL.vocab_size, prompt_tokens=_ROW_TOKENS // 2)
    random = np.random.default_rng(7)

    def column() -> npt.NDArray[np.float32]:
        return random.uniform(-2, 2, rows.num_tokens).astype(np.float32)

    return replace(
        rows,
        old_log_probs=column(),
        advantages=column(),
        old_values=column(),
        returns=column(),
    )


if __name__ == "__main__":
    given_task = json.loads(sys.argv[1])
    requested_cases = [PeakCase(**fields) for fields in given_task["cases"]]
    print(json.dumps(_measure(given_task["folder"], requested_cases)))
