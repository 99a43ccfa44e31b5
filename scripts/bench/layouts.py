"""The suite `layouts`: differences between megatron and the plain engine, in every
layout.

Invariant: both compute the same weights and rows in float32. The benchmark compares
log-probs (or values) before and after optimizer steps, losses and gradient norms. Each
difference is a fraction of the largest number of its kind. A model that is written
before the first step has the tensors of its directory, bit by bit.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from scripts.bench.processes import PATIENCE_S, fork, joined, learner, run_processes
from scripts.bench.suite import Flags, markdown, print_json, progress
from scripts.configuration import compose
from verl_ray.columns.batch import offsets_of
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.load import parse, to_tree
from verl_ray.config.tasks.rl import RLConfig

if TYPE_CHECKING:
    from verl_ray.config.algorithm import AlgorithmConfig
    from verl_ray.config.roles import SupervisedRole
    from verl_ray.engine.base import Engine, LossReport


# ---------------------------------------------------------------------------- the cases

# A case is one model on so many ranks with settings of the megatron backend, and two
# cases never differ in anything else.

Settings = dict[str, int | str | bool]
Head = Literal["policy", "value"]

MOE = "qwen3_moe"
"""The model of the layouts of experts."""

_SHORT_NAMES = {
    "tensor_parallel": "tp",
    "context_parallel": "cp",
    "pipeline_parallel": "pp",
    "virtual_stages": "vpp",
    "expert_parallel": "ep",
    "expert_tensor_parallel": "etp",
}


@dataclass(frozen=True)
class Case:
    """One model in one layout."""

    world: int
    settings: Settings
    model: str = "qwen3"
    head: Head = "policy"

    @property
    def name(self) -> str:
        """The layout in the papers' notation, such as "tp2 sp pp2".

        The remaining ranks are data-parallel, written as dp.
        """
        parts = [
            f"{_SHORT_NAMES[key]}{size}"
            for key, size in self.settings.items()
            if key in _SHORT_NAMES
        ]
        if "sequence_parallel" in self.settings:
            parts.append("sp")
        if "recompute" in self.settings:
            parts.append(f"recompute {self.settings['recompute']}")

        dp_size = self.world
        for key in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
            dp_size //= int(self.settings.get(key, 1))
        if dp_size > 1:
            parts.append(f"dp{dp_size}")

        return " ".join(parts) or "one rank"


_TP: Settings = {"tensor_parallel": 2}
_SP: Settings = {"tensor_parallel": 2, "sequence_parallel": True}
_PP: Settings = {"pipeline_parallel": 2}
_VPP: Settings = {"pipeline_parallel": 2, "virtual_stages": 2}
_CP: Settings = {"context_parallel": 2}
_EP: Settings = {"expert_parallel": 2}
_ETP: Settings = {"expert_tensor_parallel": 2}
_RECOMPUTE: Settings = {"recompute": "full"}

CASES = (
    Case(1, {}),
    Case(1, _RECOMPUTE),
    Case(1, {"recompute": "selective"}),
    Case(1, {}, "llama"),
    Case(1, {}, "qwen2"),
    Case(1, {}, MOE),
    Case(1, {}, "qwen3", "value"),
    Case(2, {}),
    Case(2, _TP),
    Case(2, _SP),
    Case(2, _SP | _RECOMPUTE),
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
    Case(2, _SP, MOE),
    Case(2, _ETP, MOE),
    Case(2, _EP, MOE),
    Case(2, _SP | _EP, MOE),
    Case(2, _SP | _ETP, MOE),
    Case(2, _PP | _RECOMPUTE, MOE),
    Case(4, _SP),
    Case(4, _PP),
    Case(4, _CP),
    Case(4, {"pipeline_parallel": 4}),
    Case(4, _SP | _PP),
    Case(4, _TP | _VPP),
    Case(4, _SP | _CP),
    Case(4, _PP | _CP),
    Case(4, {"expert_parallel": 4}, MOE),
    Case(4, _PP | _EP, MOE),
    Case(4, _SP | _EP | _ETP, MOE),
    # Windows and YaRN; scaled embeddings and norms of 1 + weight; caps and norms behind
    # layers; positions by kind of layer.
    *(
        Case(world, layout, model)
        for model in ("mistral", "gemma", "gemma2", "gemma3_text")
        for world, layout in ((1, {}), (2, _SP), (2, _PP))
    ),
    Case(2, _CP, "mistral"),
    Case(2, _SP | _RECOMPUTE, "gemma2"),
    Case(2, _PP, "gemma3_text", "value"),
    # Experts of other routers and names, shared experts, latent attention.
    *(
        Case(world, layout, model)
        for model in ("mixtral", "qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3")
        for world, layout in ((1, {}), (2, _SP), (2, _PP), (2, _EP), (2, _SP | _EP))
    ),
    Case(1, {"recompute": "selective"}, "deepseek_v3"),
    Case(2, _SP | _RECOMPUTE, "deepseek_v3"),
    Case(4, _SP | _PP | _EP, "deepseek_v3"),
    Case(2, _PP, "deepseek_v3", "value"),
)


# ------------------------------------------------------------------------ the benchmark


STEPS = 3
COMPARED_STEPS = (0, 1, STEPS)
"""Numbers of optimizer steps after which log-probs are compared."""
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LATENT: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 20,
}
_UNTIED = {"tie_word_embeddings": False}
_TIED = {"tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": _UNTIED,
    "llama": _TIED,
    "qwen2": _TIED | {"head_dim": 16},
    MOE: _UNTIED,
    "mistral": _UNTIED | {"rope_parameters": _YARN},
    "mixtral": _UNTIED,
    "qwen2_moe": _UNTIED | {"decoder_sparse_step": 2},
    "glm4_moe": _UNTIED | {"attention_bias": True, "use_qk_norm": True},
    "gemma": _TIED,
    "gemma2": _TIED | _WINDOWS,
    "gemma3_text": _TIED | _WINDOWS,
    "deepseek_v2": _UNTIED
    | _LATENT
    | {
        "topk_method": "group_limited_greedy",
        "q_lora_rank": None,
        "n_shared_experts": 2,
    },
    "deepseek_v3": _UNTIED
    | _LATENT
    | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
}
"""Models that are made, and their settings beside those of `tiny_families.py`."""
_WITH_EXPERTS = (
    *(MOE, "mixtral", "qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"),
)
_SHARED_IMPORTS = (
    "scripts.configuration",
    "transformers.modeling_utils",
    "verl_ray.engine.plain",
)
"""Modules that every rank needs; they are imported once, before ranks are forked."""
_VOCABULARY = "0123456789+=-"
_LENGTHS = (3, 4, 9, 17, 40, 5, 12, 33, 7, 2, 21, 6)


@dataclass(frozen=True)
class RankTask:
    """The work of one rank: all cases with its number of ranks."""

    rank: int
    world: int
    kind: str
    folder: str
    cases: Sequence[Case]


@dataclass
class RankReport:
    """The measurements of one rank in one case.

    Attributes:
        outputs: Log-probs or values of all rows at `COMPARED_STEPS`; empty on ranks
            that return no results.
        losses: The rank's part of the loss of each step.
        norms: The gradient norm of each step.
        unwritten: The tensors that were not written as they were read.
    """

    outputs: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Compare all layouts and print the differences, as JSON or as a table.

    Returns:
        The exit code, 0.
    """
    flags = Flags("layouts", "Compare megatron in every layout with the plain engine.")
    flags.table()
    options = flags.parse_args(argv)

    differences = measure()
    if options.table:
        print(_table(differences))
    else:
        print_json(differences)
    return 0


def measure(cases: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """Return the largest differences of each case from the plain engine."""
    with tempfile.TemporaryDirectory() as folder:
        task = {"folder": folder, "cases": [asdict(case) for case in cases]}
        # One process loads torch, and all ranks are forks of it.
        (report,) = run_processes(__name__, [task], 1, patience_s=4 * PATIENCE_S)

    differences: list[dict[str, Any]] = report["compared"]
    return differences


def _compare(folder: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    for name in _SHARED_IMPORTS:
        importlib.import_module(name)
    fork(_make_models, [[folder]])

    progress("the plain engine ...")
    models = list(dict.fromkeys((case.model, case.head) for case in cases))
    plain_cases = [Case(1, {}, model, head) for model, head in models]
    (plain_reports,) = _reports("engine", plain_cases, folder)
    expected = dict(zip(models, plain_reports, strict=True))

    differences = []
    for world in sorted({case.world for case in cases}):
        progress(f"layouts of {world} ranks ...")
        same_world = [case for case in cases if case.world == world]
        reports = _reports("megatron", same_world, folder)
        for case, *ranks in zip(same_world, *reports, strict=True):
            plain = expected[case.model, case.head]
            differences.append(_differences(case, ranks, plain))
    return differences


def _reports(kind: str, cases: Sequence[Case], folder: str) -> list[list[RankReport]]:
    """Measure the cases, and return for each rank one report per case."""
    world = cases[0].world
    tasks = [RankTask(rank, world, kind, folder, cases) for rank in range(world)]
    return fork(_run_rank, [[task] for task in tasks])


def _differences(
    case: Case, ranks: list[RankReport], plain: RankReport
) -> dict[str, Any]:
    report = next(rank for rank in ranks if rank.outputs)
    losses_by_step = zip(*(rank.losses for rank in ranks), strict=True)
    losses = [sum(parts) for parts in losses_by_step]
    outputs = [
        _relative_difference(values, expected)
        for values, expected in zip(report.outputs, plain.outputs, strict=True)
    ]

    return {
        "model": case.model,
        "head": case.head,
        "ranks": case.world,
        "layout": case.name,
        "outputs": dict(zip(map(str, COMPARED_STEPS), outputs, strict=True)),
        "loss": _relative_difference(losses, plain.losses),
        "grad_norm": max(
            _relative_difference(rank.norms, plain.norms) for rank in ranks
        ),
        "unwritten": ranks[0].unwritten,
    }


def _relative_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    largest = np.abs(np.array(values) - expected).max()
    return float(largest / np.abs(expected).max())


def _table(differences: list[dict[str, Any]]) -> str:
    columns = ["model", "ranks", "layout", "before", "after 1 step", "after 3 steps"]
    columns += ["loss", "gradient norm"]
    rows = []
    for case in differences:
        head = "" if case["head"] == "policy" else ", value head"
        figures = [*case["outputs"].values(), case["loss"], case["grad_norm"]]
        cells = [f"{case['model']}{head}", str(case["ranks"]), case["layout"]]
        rows.append(cells + [f"{figure:.0e}" for figure in figures])
    return markdown(columns, rows)


def _make_models(folder: str) -> None:
    for family in MODELS:
        write_model(Path(folder, family), family, _VOCABULARY)


def write_model(directory: Path, family: str, alphabet: str) -> None:
    """Write a tiny untrained model of a family of `MODELS`, and a tokenizer.

    Args:
        directory: The directory to write.
        family: The value of model_type.
        alphabet: The characters of the tokenizer.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from scripts.tiny_families import tiny_config
    from verl_ray.data.tokenizers import character_tokenizer

    words = len(character_tokenizer(directory, alphabet))
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "head_dim": 16}
    config = tiny_config(family, vocab_size=words, **sizes | MODELS[family])
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, buffer in model.named_buffers():
        # A new model has biases of 0.
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(directory)


# ----------------------------------------------------------------------------- one rank


def _rows() -> TrainingBatch:
    """Rows of mixed lengths, with every column that a loss reads."""
    random = np.random.default_rng(7)
    offsets = offsets_of(_LENGTHS)
    tokens = int(offsets[-1])

    mask = random.random(tokens) < 0.6
    mask[offsets[1:] - 1] = True  # every row has a token that is learned from
    mask[offsets[:-1]] = False  # a first token has no log-prob

    def column(low: float, high: float) -> npt.NDArray[np.float32]:
        return random.uniform(low, high, tokens).astype(np.float32)

    token_ids = random.integers(0, len(_VOCABULARY), tokens).astype(np.int32)
    weights = random.uniform(0.5, 1.5, len(_LENGTHS)).astype(np.float32)
    return TrainingBatch(
        offsets=offsets,
        tokens=token_ids,
        response_mask=mask,
        loss_weight=weights / np.float32(mask.sum()),
        old_log_probs=column(-3, -2),
        advantages=column(-2, 2),
        old_values=column(-1, 1),
        returns=column(-1, 1),
    )


def _run_rank(task: RankTask) -> list[RankReport]:
    rendezvous = f"{task.folder}/{task.kind}-{task.world}"
    with joined(task.rank, task.world, rendezvous):
        return [_measure_case(task, case) for case in task.cases]


@functools.cache
def _configuration(kind: str) -> tuple[SupervisedRole, AlgorithmConfig]:
    """Return a role on a backend of this kind, and the algorithm of both heads.

    The layout of the backend is set by each case.
    """
    overrides = [
        "actor.backend.micro_batch_tokens_per_rank=88",
        "actor.optimizer.lr=1e-4",
        "actor.optimizer.max_grad_norm=0.3",
        "actor.optimizer.weight_decay=0.1",
    ]
    ppo = parse(to_tree(compose("quickstart", ["algorithm=ppo"])), RLConfig)
    return learner(kind, "none", max(_LENGTHS), overrides), ppo.algorithm


def _measure_case(task: RankTask, case: Case) -> RankReport:
    from verl_ray.columns.packing import balance
    from verl_ray.learning.objectives import ValueObjective
    from verl_ray.learning.policy_objective import PolicyObjective
    from verl_ray.ops.outputs import RequestedOutputs

    _, algorithm = _configuration(task.kind)
    assert algorithm.value_loss is not None
    is_policy = case.head == "policy"
    objective: PolicyObjective | ValueObjective
    if is_policy:
        objective = PolicyObjective(algorithm, 0.8, 0.0)
    else:
        objective = ValueObjective(algorithm.value_loss)

    engine = _engine(task, case)
    topology = engine.topology
    rows = _rows()
    parts = balance(rows.lengths, topology.dp_size)
    own_rows = rows.select(parts[topology.dp_rank])
    requested = RequestedOutputs(
        log_probs=is_policy, values=not is_policy, temperature=0.8
    )
    rank_report = RankReport()

    def record_outputs() -> None:
        outputs = engine.forward(rows, requested)
        if topology.returns_results and topology.dp_rank == 0:
            values = outputs.log_probs if is_policy else outputs.values
            assert values is not None
            rank_report.outputs.append(values.tolist())

    record_outputs()
    rank_report.unwritten = _unwritten(engine, task, case)
    for step in range(1, STEPS + 1):
        report: LossReport = engine.forward_backward(own_rows, objective)
        rank_report.losses.append(report.loss if topology.returns_results else 0.0)
        rank_report.norms.append(engine.optimizer_step().grad_norm)
        if step in COMPARED_STEPS:
            record_outputs()
    return rank_report


def _unwritten(engine: Engine, task: RankTask, case: Case) -> list[str]:
    """Return the tensors that the engine does not write as they were read."""
    from safetensors.torch import load_file

    directory = Path(task.folder, f"written-{task.kind}-{task.world}")
    engine.export(str(directory))
    if task.rank > 0:
        return []

    source = load_file(Path(task.folder, case.model, "model.safetensors"))
    written = load_file(directory / "model.safetensors")
    if case.head == "value":
        source.pop("lm_head.weight", None)
        written.pop("score.weight")
    return sorted(
        name
        for name in source.keys() | written.keys()
        if name not in source
        or name not in written
        or not source[name].equal(written[name])
    )


def _engine(task: RankTask, case: Case) -> Engine:
    import torch

    from verl_ray.engine.base import EngineSpec
    from verl_ray.engine.build import build_engine

    role, _ = _configuration(task.kind)
    settings = role.backend.model_dump() | case.settings
    spec = EngineSpec(
        "actor",
        f"{task.folder}/{case.model}",
        case.head,
        type(role.backend).model_validate(settings),
        role.optimizer,
        100,
        seed=3,
        expert_balance=0.1 if case.model in _WITH_EXPERTS else None,
    )
    device = torch.device("cpu")
    return build_engine(spec, device=device, rank=task.rank, world_size=task.world)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    chosen_cases = [Case(**case) for case in arguments["cases"]]
    print(json.dumps({"compared": _compare(arguments["folder"], chosen_cases)}))
