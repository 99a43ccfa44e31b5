"""`verl-ray bench layouts`: whether megatron computes what the plain engine computes, in every layout.

Invariant: the same weights and rows, in float32; what is compared are log-probs (or values) before and after optimizer
steps, losses and gradient norms, each difference as a fraction of the largest number of its kind. Deliberately not
here: speed (`megatron.py`).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from controllers.bench.processes import PATIENCE_S, ask, fork
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.batch import offsets_of
from verl_ray.data.stages import TrainingBatch

if TYPE_CHECKING:
    from verl_ray.config.algorithm import AlgorithmConfig
    from verl_ray.config.roles import SupervisedRole
    from verl_ray.engine.base import LossReport

Settings = dict[str, int | str | bool]
Head = Literal["policy", "value"]
STEPS = 3
LOOKED = (0, 1, STEPS)
"""After how many optimizer steps log-probs are compared."""
MODELS = {"qwen3": False, "llama": True, "qwen2": True, "qwen3_moe": False}
"""What is made, and whether its embeddings are tied."""
_SHARED = ("controllers.compose.composition", "transformers.modeling_utils", "verl_ray.engine.plain")
"""What every rank has use for, whose ways part before it chooses an engine."""
_VOCABULARY = "0123456789+=-"
_LENGTHS = (3, 4, 9, 17, 40, 5, 12, 33, 7, 2, 21, 6)


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    world: int
    settings: Settings
    model: str = "qwen3"
    head: Head = "policy"

    @property
    def name(self) -> str:
        """As in papers: "tp2 sp pp2"; dp stands for the ranks that are left."""
        short = {
            "tensor_parallel": "tp", "context_parallel": "cp", "pipeline_parallel": "pp", "virtual_stages": "vpp",
            "expert_parallel": "ep", "expert_tensor_parallel": "etp",
        }  # fmt: skip
        parts = [f"{short[key]}{size}" for key, size in self.settings.items() if key in short]
        parts += ["sp"] if "sequence_parallel" in self.settings else []
        parts += [f"recompute {self.settings['recompute']}"] if "recompute" in self.settings else []
        rows = self.world
        for key in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
            rows //= int(self.settings.get(key, 1))
        return " ".join([*parts, *([f"dp{rows}"] if rows > 1 else [])]) or "one rank"


_TP: Settings = {"tensor_parallel": 2}
_SP: Settings = {"tensor_parallel": 2, "sequence_parallel": True}
_PP: Settings = {"pipeline_parallel": 2}
_VPP: Settings = {"pipeline_parallel": 2, "virtual_stages": 2}
_CP: Settings = {"context_parallel": 2}
_EP: Settings = {"expert_parallel": 2}
_ETP: Settings = {"expert_tensor_parallel": 2}
_AGAIN: Settings = {"recompute": "full"}
_MOE = "qwen3_moe"
CASES = (
    Case(1, {}),
    Case(1, _AGAIN),
    Case(1, {"recompute": "selective"}),
    Case(1, {}, "llama"),
    Case(1, {}, "qwen2"),
    Case(1, {}, _MOE),
    Case(1, {}, "qwen3", "value"),
    Case(2, {}),
    Case(2, _TP),
    Case(2, _SP),
    Case(2, _SP | _AGAIN),
    Case(2, _PP),
    Case(2, _VPP),
    Case(2, _CP),
    Case(2, _TP, "llama"),
    Case(2, _PP, "llama"),
    Case(2, _SP, "qwen2"),
    Case(2, _PP, "qwen2"),
    Case(2, _SP, "qwen3", "value"),
    Case(2, _PP, "qwen3", "value"),
    Case(2, _CP, "qwen3", "value"),
    Case(2, _SP, _MOE),
    Case(2, _ETP, _MOE),
    Case(2, _EP, _MOE),
    Case(2, _SP | _EP, _MOE),
    Case(2, _SP | _ETP, _MOE),
    Case(2, _PP | _AGAIN, _MOE),
    Case(4, _SP),
    Case(4, _PP),
    Case(4, _CP),
    Case(4, {"pipeline_parallel": 4}),
    Case(4, _SP | _PP),
    Case(4, _TP | _VPP),
    Case(4, _SP | _CP),
    Case(4, _PP | _CP),
    Case(4, {"expert_parallel": 4}, _MOE),
    Case(4, _PP | _EP, _MOE),
    Case(4, _SP | _EP | _ETP, _MOE),
)


@dataclass(frozen=True)
class Work:
    """What one rank does: all cases of its number of ranks."""

    rank: int
    world: int
    kind: str
    folder: str
    cases: Sequence[Case]

    @property
    def found(self) -> Path:
        """Where it leaves what it found."""
        return Path(self.folder) / f"{self.kind}-{self.world}-{self.rank}.json"


@dataclass
class Found:
    """What one rank knows of a case; its part of the sums."""

    outputs: list[list[float]] = field(default_factory=list)  # at LOOKED, of all rows; empty where another answers
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Compare all layouts and print the differences, as JSON or as a table; returns 0."""
    parser = argparse.ArgumentParser(prog="verl-ray bench layouts", description=__doc__, allow_abbrev=False)
    parser.add_argument("--table", action="store_true", help="a table in Markdown in place of JSON")
    given = parser.parse_args(argv)
    found = measure()
    print(_table(found) if given.table else json.dumps(found, indent=2))
    return 0


def measure(cases: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """The largest differences of each case from the plain engine."""
    with tempfile.TemporaryDirectory() as folder:
        work = {"folder": folder, "cases": [asdict(case) for case in cases]}
        (told,) = ask(__name__, [work], 1, patience_s=4 * PATIENCE_S)  # it loads torch, and all ranks are copies of it
    compared: list[dict[str, Any]] = told["compared"]
    return compared


def _compare(folder: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    for name in _SHARED:
        importlib.import_module(name)
    fork(_make_models, [[folder]])
    print("the plain engine ...", file=sys.stderr, flush=True)
    of_plain = list({(case.model, case.head): Case(1, {}, case.model, case.head) for case in cases}.values())
    (told,) = _found("engine", of_plain, folder)
    expected = {(case.model, case.head): one for case, one in zip(of_plain, told, strict=True)}
    compared = []
    for world in sorted({case.world for case in cases}):
        print(f"layouts of {world} ranks ...", file=sys.stderr, flush=True)
        chosen = [case for case in cases if case.world == world]
        for case, *ranks in zip(chosen, *_found("megatron", chosen, folder), strict=True):
            compared.append(_compared(case, ranks, expected[case.model, case.head]))
    return compared


def _found(kind: str, cases: Sequence[Case], folder: str) -> list[list[Found]]:
    """Per rank, per case."""
    works = [Work(rank, cases[0].world, kind, folder, cases) for rank in range(cases[0].world)]
    fork(_rank, [[work] for work in works])
    return [[Found(**one) for one in json.loads(work.found.read_text())] for work in works]


def _compared(case: Case, ranks: list[Found], plain: Found) -> dict[str, Any]:
    answer = next(one for one in ranks if one.outputs)
    losses = [sum(parts) for parts in zip(*(one.losses for one in ranks), strict=True)]

    def apart(found: Sequence[float], expected: Sequence[float]) -> float:
        return float(np.abs(np.array(found) - expected).max() / np.abs(expected).max())

    outputs = [apart(found, expected) for found, expected in zip(answer.outputs, plain.outputs, strict=True)]
    return {
        "model": case.model,
        "head": case.head,
        "ranks": case.world,
        "layout": case.name,
        "outputs": dict(zip(map(str, LOOKED), outputs, strict=True)),
        "loss": apart(losses, plain.losses),
        "grad_norm": max(apart(one.norms, plain.norms) for one in ranks),
    }


def _table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| model | ranks | layout | before | after 1 step | after 3 steps | loss | gradient norm |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        head = "" if one["head"] == "policy" else ", value head"
        figures = [*one["outputs"].values(), one["loss"], one["grad_norm"]]
        cells = [f"{one['model']}{head}", str(one["ranks"]), one["layout"], *(f"{figure:.0e}" for figure in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _make_models(folder: str) -> None:
    from verl_ray.data.tokenizers import character_tokenizer
    from verl_ray.models.tiny import make_tiny

    root = Path(folder)
    character_tokenizer(root / "tokenizer", _VOCABULARY)
    for name, tied in MODELS.items():
        sizes = TinyModelConfig(
            hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_size=16, intermediate_size=96,
            tie_embeddings=tied,
        )  # fmt: skip
        make_tiny(name, root / name, root / "tokenizer", sizes, seed=1)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ one rank


def _rows() -> TrainingBatch:
    """Rows of mixed lengths, with every column that a loss reads."""
    random = np.random.default_rng(7)
    offsets = offsets_of(_LENGTHS)
    tokens = int(offsets[-1])
    mask = random.random(tokens) < 0.6
    mask[offsets[1:] - 1], mask[offsets[:-1]] = True, False

    def column(low: float, high: float) -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.uniform(low, high, tokens).astype(np.float32)

    return TrainingBatch(
        offsets=offsets,
        tokens=random.integers(0, len(_VOCABULARY), tokens).astype(np.int32),
        response_mask=mask,
        loss_weight=random.uniform(0.5, 1.5, len(_LENGTHS)).astype(np.float32) / np.float32(mask.sum()),
        old_log_probs=column(-3, -2),
        advantages=column(-2, 2),
        old_values=column(-1, 1),
        returns=column(-1, 1),
    )


def _rank(work: Work) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{work.folder}/{work.kind}-{work.world}", rank=work.rank, world_size=work.world,
        timeout=timedelta(seconds=PATIENCE_S),
    )  # fmt: skip
    work.found.write_text(json.dumps([asdict(_measured(work, case)) for case in work.cases]))
    dist.destroy_process_group()


@functools.cache
def _configured(kind: str) -> tuple[SupervisedRole, AlgorithmConfig]:
    """A role on a backend of this kind, whose layout is each case's own, and the algorithm of both heads."""
    from controllers.compose.composition import compose
    from verl_ray.config.load import parse, to_tree
    from verl_ray.config.tasks.rl import RLConfig

    settings = ["actor.backend.micro_batch_tokens_per_rank=88", f"sft.max_tokens={max(_LENGTHS)}"]
    settings += ["actor.optimizer.lr=1e-4", "actor.optimizer.max_grad_norm=0.3", "actor.optimizer.weight_decay=0.1"]
    settings += ["run.dir=none", "data.train_path=none", "data.validation_path=null", "model.path=none"]
    role = compose("sft", [f"backend={kind}", "run.evaluate_every=0", *settings]).learners["actor"]
    return role, parse(to_tree(compose("quickstart", ["algorithm=ppo"])), RLConfig).algorithm


def _measured(work: Work, case: Case) -> Found:
    import torch

    from verl_ray.algorithms.objectives import PolicyObjective, ValueObjective
    from verl_ray.data.packing import balance
    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine
    from verl_ray.ops.outputs import Outputs

    role, algorithm = _configured(work.kind)
    assert algorithm.value_loss is not None
    backend = type(role.backend).model_validate(role.backend.model_dump() | case.settings)
    spec = EngineSpec(
        "actor", f"{work.folder}/{case.model}", case.head, backend, role.optimizer, 100, seed=3,
        expert_balance=0.1 if case.model == _MOE else None,
    )  # fmt: skip
    engine = build_engine(spec, device=torch.device("cpu"), rank=work.rank, world_size=work.world)
    rows, place = _rows(), engine.topology
    mine = rows.select(balance(rows.lengths, place.row_count)[place.row_index])
    policy = case.head == "policy"
    objective = PolicyObjective(algorithm, 0.8, 0.0) if policy else ValueObjective(algorithm.value_loss)
    found = Found()

    def look() -> None:
        told = engine.forward(rows, Outputs(log_probs=policy, values=not policy, temperature=0.8))
        if place.answers and place.row_index == 0:
            values = told.log_probs if policy else told.values
            assert values is not None
            found.outputs.append(values.tolist())

    look()
    for step in range(1, STEPS + 1):
        report: LossReport = engine.forward_backward(mine, objective)
        found.losses.append(report.loss if place.answers else 0.0)
        found.norms.append(engine.optimizer_step().grad_norm)
        if step in LOOKED:
            look()
    return found


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    compared = _compare(given["folder"], [Case(**case) for case in given["cases"]])
    print(json.dumps({"compared": compared}))
