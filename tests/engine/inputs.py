"""Settings, rows and objectives of the engine tests, and what their ranks do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scripts.bench import layouts
from scripts.tiny_families import tiny_config
from tests.algorithms.distillation import distill_config
from tests.algorithms.preferences import preference_objective, unpaired_objective
from tests.corrections import NO_CORRECTION, NO_LIMIT
from verl_ray.algorithms.catalogue import declared_settings
from verl_ray.algorithms.distillation import DIVERGENCES
from verl_ray.algorithms.losses import TokenLoss
from verl_ray.algorithms.policy_losses import POLICY_LOSSES
from verl_ray.backends import BACKENDS
from verl_ray.columns.batch import offsets_of
from verl_ray.columns.packing import assignment_of_units, balance
from verl_ray.columns.stages import TrainingBatch
from verl_ray.config.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    KLConfig,
    ValueLossConfig,
)
from verl_ray.config.optimizers import (
    AdafactorConfig,
    AdamWConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
)
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.config.roles import LoraConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.engine.base import Engine, EngineSpec, LossReport, StepReport
from verl_ray.engine.build import build_engine
from verl_ray.errors import DataError, EngineError, ModelError
from verl_ray.learning.objectives import (
    Level,
    LossInputs,
    Objective,
    PreferenceObjective,
    SupervisedObjective,
    ValueObjective,
)
from verl_ray.learning.policy_objective import PolicyObjective
from verl_ray.models.role_model import HeadKind
from verl_ray.models.tiny import make_tiny
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs
from verl_ray.proofs.cut_model import random_model

MODELS = {
    "qwen3": False,
    "llama": True,
    "qwen2": True,
    "gemma": True,
    "qwen3_moe": False,
}
"""Name and whether the embeddings are tied."""
DEADLINE_S = 600
LENGTHS = (3, 4, 9, 17, 40, 5, 12, 33, 7, 2, 21, 6)
CLIP, DUAL, ENTROPY, KL, TEMPERATURE = 0.2, 3.0, 0.01, 0.05, 0.8
OPTIMIZER = AdamWConfig(
    kind="adamw",
    lr=2e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    max_grad_norm=0.3,
    schedule="cosine",
    warmup_steps=2,
    decay_fraction=0.1,
    min_lr_fraction=0.1,
)
_COMMON = OPTIMIZER.model_dump(exclude={"kind", "betas", "eps"})
OTHERS: dict[str, OptimizerConfig] = {
    "muon": MuonConfig(
        **_COMMON, kind="muon", momentum=0.9, betas=(0.9, 0.95), eps=1e-8
    ),
    "sgd": SgdConfig(**_COMMON | {"lr": 0.5}, kind="sgd", momentum=0.9),
    "adafactor": AdafactorConfig(**_COMMON | {"lr": 0.05}, kind="adafactor"),
}
"""Optimizers beside AdamW, by name."""
STEPS = 10
ENGINE: dict[str, Any] = {
    "kind": "engine", "dtype": "float32", "micro_batch_tokens_per_rank": 64, "activation_checkpointing": False,
}  # fmt: skip
FSDP: dict[str, Any] = ENGINE | {
    "kind": "fsdp", "sharding": "full", "shard_size": None, "accumulate": "whole",
    "prefetch_layers": 0, "host_parameters": False,
    "embedding_units": False, "read_weights": "every_rank", "activation_offload": False, "sequence_parallel": 1,
}  # fmt: skip
MEGATRON: dict[str, Any] = {
    "kind": "megatron", "dtype": "float32", "micro_batch_tokens_per_rank": 64, "tensor_parallel": 1,
    "sequence_parallel": False, "pipeline_parallel": 1, "virtual_stages": 1, "context_parallel": 1,
    "expert_parallel": 1, "expert_tensor_parallel": 1, "recompute": "none",
}  # fmt: skip
MEGATRON_FSDP: dict[str, Any] = ENGINE | {
    "kind": "megatron_fsdp", "sharding": "all", "shard_size": None, "outer_sharding": "none",
    "overlap_param_gather": True, "overlap_grad_reduce": True, "bucket_size": None, "reduce_in_float32": True,
    "double_buffer": False,
}  # fmt: skip
SETTINGS = {
    "engine": ENGINE,
    "fsdp": FSDP,
    "megatron": MEGATRON,
    "megatron_fsdp": MEGATRON_FSDP,
}
"""The settings of every backend."""
ALGORITHM = AlgorithmConfig(
    name="test",
    advantage="grpo",
    gamma=None,
    lam=None,
    whiten_advantages=False,
    policy_loss="ppo_clip",
    clip_low=CLIP,
    clip_high=CLIP,
    dual_clip=DUAL,
    aggregation="token_mean",
    aggregation_horizon=None,
    entropy_coefficient=ENTROPY,
    kl=KLConfig(
        importance_weighted=False,
        place="loss",
        estimator="k3",
        coefficient=KL,
        controller="fixed",
        target=None,
        horizon=None,
    ),
    value_loss=None,
    critic_warmup_steps=0,
    correction=NO_CORRECTION,
    mismatch=NO_LIMIT,
    truncated="score",
    sequence="row",
)
MIXED, DISTILLED = 0.3, 0.5
TEACHER = distill_config(divergence="jsd", weight=DISTILLED, top_k=3, beta=MIXED)
POLICY = PolicyObjective(ALGORITHM, TEMPERATURE, KL, distill=TEACHER)
UPPER = 1.0  # between the geometric means of the rows
CORRECTED = PolicyObjective(
    ALGORITHM.model_copy(update={
        "policy_loss": "reinforce",
        "correction": CorrectionConfig(normalise=False, rejections=None, form="two_policy", kind="mis", level="geometric", lower=None, upper=UPPER),
    }),
    TEMPERATURE,
    KL,
)  # fmt: skip
VALUE_CLIP = 0.2
SMOOTHING = 0.1
BALANCE = 0.1
ADAPTER = LoraConfig(
    rank=4, alpha=8, targets=("q_proj", "v_proj", "gate_proj", "down_proj")
)
PREFERENCE = PreferenceObjective(SMOOTHING)
BETA = 0.2
RPO = 0.3
RESPONSES = preference_objective("sigmoid", beta=BETA, rpo_alpha=RPO)
DIVERGENCE, UNDESIRABLE = 0.7, 1.5
LABELS = unpaired_objective(
    "kto", kl=DIVERGENCE, beta=BETA, undesirable_weight=UNDESIRABLE
)
VALUE = ValueObjective(ValueLossConfig(clip=VALUE_CLIP, aggregation="token_mean"))


def write_models(root: Path) -> None:
    """Write tiny models of every family, by name, and wider ones of two families."""
    character_tokenizer(root / "tokenizer", "0123456789+=")
    for name, tied in MODELS.items():
        # all but one have fewer key heads than the ranks that share out a row
        heads, key_heads, size = (4, 2, 16) if name == "qwen3" else (2, 1, 32)
        sizes = TinyModelConfig(
            hidden_size=64, num_layers=2, num_heads=heads, num_kv_heads=key_heads, head_size=size,
            intermediate_size=96, tie_embeddings=tied,
        )  # fmt: skip
        make_tiny(name, root / name, root / "tokenizer", sizes, seed=1)  # type: ignore[arg-type]
    for family, tied, layers in (
        ("qwen2", True, 4),
        ("qwen3_moe", False, 2),
    ):  # with key heads for two ranks
        sizes = TinyModelConfig(
            hidden_size=64, num_layers=layers, num_heads=4, num_kv_heads=2, head_size=16, intermediate_size=96,
            tie_embeddings=tied,
        )  # fmt: skip
        make_tiny(family, root / f"wide_{family}", root / "tokenizer", sizes, seed=1)  # type: ignore[arg-type]
    for family in ("gemma3_text", "mixtral", "deepseek_v3"):
        layouts.write_model(root / family, family, "0123456789+=")
    random_model(tiny_config("glm4_moe"), seed=1).save_pretrained(root / "glm4_moe")
    config = (
        root / "llama" / "config.json"
    )  # the other name of the activation that all but gemma have
    config.write_text(config.read_text().replace('"silu"', '"swish"'))


def rows_of(lengths: tuple[int, ...] = LENGTHS) -> TrainingBatch:
    """Return rows of mixed lengths with response tokens and every loss column."""
    random = np.random.default_rng(7)
    offsets = offsets_of(lengths)
    tokens = int(offsets[-1])
    mask = random.random(tokens) < 0.6
    mask[offsets[1:] - 1] = True
    mask[offsets[:-1]] = False

    def column(low: float, high: float) -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.uniform(low, high, tokens).astype(np.float32)

    rows = TrainingBatch(
        offsets=offsets,
        tokens=random.integers(0, 14, tokens).astype(np.int32),
        response_mask=mask,
        loss_weight=random.uniform(0.5, 1.5, len(lengths)).astype(np.float32)
        / np.float32(mask.sum()),
        old_log_probs=column(-3, -2),
        ref_log_probs=column(-3, -2),
        advantages=column(-2, 2),
        old_values=column(-1, 1),
        returns=column(-1, 1),
        rollout_log_probs=column(-3, -2),
        selected=(column(0, 1) < 0.5).astype(np.float32),
    )
    # Three tokens each, and what a teacher leaves to all others.
    order = random.random((tokens, 14)).argsort(-1)
    teacher = random.dirichlet(np.ones(4), tokens)[:, :3]
    return rows.replace(
        candidates=order[:, :3].astype(np.int32),
        teacher_log_probs=np.log(teacher).astype(np.float32),
    )


def routed_rows() -> TrainingBatch:
    """Return the same rows with experts that no router chose: 2 of 4, in 2 layers."""
    rows = rows_of()
    random = np.random.default_rng(5)
    order = random.random((rows.num_tokens, 2, 4)).argsort(-1)
    return rows.replace(routed_experts=order[..., :2].astype(np.int16))


def sequences_of(lengths: tuple[int, ...] = LENGTHS) -> TrainingBatch:
    """Return the same rows as sequences of two rows each, which are no neighbours."""
    rows = rows_of(lengths)
    sequence = np.arange(rows.num_rows) % -(-rows.num_rows // 2)
    weight = np.linspace(0.5, 1.5, rows.num_rows, dtype=np.float32)[sequence]
    return rows.replace(
        unit=sequence, loss_weight=weight / np.float32(rows.response_mask.sum())
    )


def responses_in_pairs() -> TrainingBatch:
    """Return the same rows as pairs whose responses are compared."""
    rows, pairs = rows_of(), pairs_of()
    learned = -np.random.default_rng(11).uniform(2, 3, rows.num_rows)
    lengths = np.bincount(rows.row_of_token[rows.response_mask])
    return pairs.replace(
        response_mask=rows.response_mask, ref_log_prob=learned * lengths, margin=None
    )


def responses_with_labels() -> TrainingBatch:
    """Return the same rows as responses of which every second one is desirable."""
    rows = responses_in_pairs()
    return rows.replace(unit=None, desirable=np.arange(rows.num_rows) % 2 == 0)


def pairs_of() -> TrainingBatch:
    """Return the same rows as pairs of a chosen and a rejected row.

    Only their last tokens are read, and each pair has another weight.
    """
    rows = rows_of()
    pairs = rows.num_rows // 2
    weight = np.arange(1, pairs + 1, dtype=np.float32) / pairs
    return TrainingBatch(
        offsets=rows.offsets,
        tokens=rows.tokens,
        response_mask=np.zeros(rows.num_tokens, np.bool_),
        loss_weight=np.repeat(weight, 2),
        unit=np.repeat(np.arange(pairs), 2),
        margin=np.repeat(np.linspace(0, 0.5, pairs, dtype=np.float32), 2),
    )


@dataclass
class EveryLoss:
    """The sum of all losses of the policy, each reported as a term.

    They compare with the old policy, and are weighted by their place in the table.
    """

    level: Level = "token"
    outputs: RequestedOutputs = POLICY.outputs

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        terms = {}
        for name, choice in POLICY_LOSSES.items():
            settings = {
                setting.name: NARROW.get(setting.name, usual)
                for setting, usual in choice.reads.items()
            }
            algorithm = ALGORITHM.model_copy(
                update={
                    **NOTHING_SET, **settings, "policy_loss": name, "entropy_coefficient": 0.0,
                    "kl": ALGORITHM.kl.model_copy(update={"place": "none"}),
                }
            )  # fmt: skip
            terms[name] = PolicyObjective(algorithm, TEMPERATURE, 0.0)(outputs, inputs)
        for name in DIVERGENCES:
            distill = distill_config(divergence=name, weight=1.0, top_k=3, beta=None)
            objective = PolicyObjective(algorithm, TEMPERATURE, 0.0, distill=distill)
            terms[name] = objective(outputs, inputs)
        loss = sum((1 + place) * term.loss for place, term in enumerate(terms.values()))
        assert isinstance(loss, torch.Tensor)
        return TokenLoss(
            loss, {}, terms={name: term.loss.detach() for name, term in terms.items()}
        )


NOTHING_SET = {setting.name: None for setting in declared_settings()}
NARROW = {"clip_low": 0.2, "clip_high": 0.3}
"""Bounds that some rows keep."""


@dataclass
class Noisy:
    """A supervised objective with random token weights.

    It shows where an engine's random numbers come from.
    """

    level: Level = "token"
    outputs: RequestedOutputs = SupervisedObjective().outputs

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs) -> TokenLoss:
        assert outputs.log_probs is not None
        return TokenLoss(-outputs.log_probs * torch.rand(outputs.log_probs.shape), {})


@dataclass(frozen=True)
class Ranks:
    """This process as one of several ranks."""

    rank: int
    world: int
    folder: Path

    def spec(
        self,
        kind: str,
        model: str = "qwen3",
        head: HeadKind = "policy",
        optimizer: OptimizerConfig | None = OPTIMIZER,
        *,
        lora: LoraConfig | None = None,
        expert_balance: float | None = None,
        expert_bias_update: float = 0.0,
        replays_routing: bool = False,
        average_decay: float | None = None,
        **settings: Any,
    ) -> EngineSpec:
        if kind == "megatron" and settings.pop("activation_checkpointing", False):
            settings["recompute"] = "full"
        backend = BACKENDS[kind](**SETTINGS[kind] | settings)
        path = str(self.folder / model)
        return EngineSpec(
            "actor",
            path,
            head,
            backend,
            optimizer,
            STEPS,
            seed=3,
            lora=lora,
            expert_balance=expert_balance,
            expert_bias_update=expert_bias_update,
            replays_routing=replays_routing,
            average_decay=average_decay,
        )

    def engine(self, kind: str, *what: Any, **settings: Any) -> Engine:
        """Build the engine of a specification by `spec`."""
        spec = self.spec(kind, *what, **settings)
        return build_engine(
            spec, device=torch.device("cpu"), rank=self.rank, world_size=self.world
        )

    def mine(self, rows: TrainingBatch) -> np.ndarray[Any, np.dtype[np.int64]]:
        return balance(rows.lengths, self.world)[self.rank]

    def of(self, engine: Engine, rows: TrainingBatch) -> TrainingBatch:
        """Return the rows of this rank, which peers have too."""
        place = engine.topology
        return rows.select(balance(rows.lengths, place.dp_size)[place.dp_rank])

    @functools.cached_property
    def group(self) -> dist.ProcessGroup:
        """A group for collectives that run in the background of the training."""
        return dist.new_group(backend="gloo")

    def my_units(self, rows: TrainingBatch) -> TrainingBatch:
        assert rows.unit is not None
        parts = functools.partial(balance, parts=self.world)
        return rows.select(
            assignment_of_units(parts, rows.lengths, rows.unit)[self.rank]
        )

    def everyone(self, value: Any) -> list[Any]:
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def total(self, report: LossReport) -> LossReport:
        return sum(self.everyone(report), LossReport())

    def step(
        self, engine: Engine, rows: TrainingBatch, objective: Objective
    ) -> tuple[LossReport, StepReport]:
        """Take one optimizer step; the rows are those of this rank."""
        report = engine.forward_backward(rows, objective)
        return self.total(
            report if engine.topology.returns_results else LossReport()
        ), engine.optimizer_step()

    def train(
        self, engine: Engine, rows: TrainingBatch, objective: Objective, steps: int = 3
    ) -> dict[str, list[float]]:
        found = [self.step(engine, rows, objective) for _ in range(steps)]
        return {
            "loss": [report.loss for report, _ in found],
            "norm": [step.grad_norm for _, step in found],
            "lr": [step.lr for _, step in found],
            "terms": [report.terms for report, _ in found],
        }

    def weights(
        self, engine: Engine, *, separate_adapter: bool = False
    ) -> dict[str, torch.Tensor]:
        """Assemble all parameters from what the ranks own.

        Each element must have one owner.
        """
        sent = engine.manifest(separate_adapter=separate_adapter).sent
        names = [parameter.name for parameter in sent]
        owned = self.everyone(
            [
                (place, value.clone())
                for place, value in engine.shards(
                    names, separate_adapter=separate_adapter
                )
            ]
        )
        full = {p.name: torch.zeros(p.shape) for p in sent}
        count = {p.name: torch.zeros(p.shape) for p in sent}
        for place, value in (part for parts in owned for part in parts):
            box = tuple(
                slice(start, start + size)
                for start, size in zip(place.start, place.shape, strict=True)
            )
            full[place.name][box] = value
            count[place.name][box] += 1
        assert all(bool((times == 1).all()) for times in count.values())
        return full

    def forward(
        self, engine: Engine, rows: TrainingBatch, outputs: RequestedOutputs
    ) -> dict[str, Any]:
        """Return the columns of all rows, from the ranks that computed them."""
        index = self.mine(rows)
        found = vars(engine.forward(rows.select(index), outputs))
        order = np.argsort(np.concatenate(self.everyone(index)), kind="stable")
        columns = {}
        for name, mine in found.items():
            if mine is None:
                continue
            sizes = (
                np.ones(len(index), int) if name == "scores" else rows.lengths[index]
            )
            flat = [
                row
                for part in self.everyone(np.split(mine, np.cumsum(sizes)[:-1]))
                for row in part
            ]
            columns[name] = np.concatenate([flat[i] for i in order])
        return columns


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (DataError, EngineError, ModelError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
