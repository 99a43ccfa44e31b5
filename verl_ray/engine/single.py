"""The plain engine of a model in this process, without a run."""

from __future__ import annotations

from pathlib import Path

import torch

from verl_ray.backends.engine import EngineBackend
from verl_ray.config.optimizers import AdamWConfig
from verl_ray.config.roles import LoraConfig
from verl_ray.engine.base import EngineSpec
from verl_ray.engine.plain import PlainEngine
from verl_ray.models.role_model import HeadKind

_OPTIMIZER = AdamWConfig(
    kind="adamw",
    lr=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
    schedule="constant",
    warmup_steps=0,
    decay_fraction=0.1,
    min_lr_fraction=0.0,
)


def plain_engine(
    folder: Path,
    head: HeadKind = "policy",
    *,
    tokens: int,
    balance: float | None,
    packs_rows: bool = True,
    on_gpu: bool = False,
    checkpointing: bool = False,
    adapter: LoraConfig | None = None,
) -> PlainEngine:
    """Build the plain engine of a model that learns.

    Args:
        folder: The model's directory.
        head: Its head.
        tokens: The most tokens of a micro-batch.
        balance: Weight of the balance of experts; None for a model without experts.
        packs_rows: Whether rows are packed.
        on_gpu: Whether it computes in bfloat16 on a GPU, and not in float32 on the CPU.
        checkpointing: Whether layers are computed again for the backward pass.
        adapter: The adapter that learns in place of the weights.
    """
    backend = EngineBackend(
        kind="engine",
        dtype="bfloat16" if on_gpu else "float32",
        micro_batch_tokens_per_rank=tokens,
        activation_checkpointing=checkpointing,
    )
    spec = EngineSpec(
        "actor",
        str(folder),
        head,
        backend,
        _OPTIMIZER,
        1,
        seed=0,
        lora=adapter,
        packs_rows=packs_rows,
        # A proof writes its directories itself, with code only where it was trusted.
        trusts_code=True,
        expert_balance=balance,
    )
    device = torch.device("cuda" if on_gpu else "cpu")
    return PlainEngine(spec, device=device, rank=0, world_size=1)
