"""The roles that run a model on a training backend, and how they learn.

Deliberately not here: how a backend computes (`verl_ray/backends`), vLLM's engines (`rollout`), and what else may score
(`reward`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_ray.backends import Backend
from verl_ray.config.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class ModelConfig(Section):
    path: str
    """Directory of a Hugging Face model: config.json, safetensors, tokenizer."""


class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101); weight decay spares norms and biases."""

    lr: NonNegativeFloat
    betas: Annotated[tuple[Fraction, Fraction], Field(examples=["[0.9,0.999]"])]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat | None
    """Clip the global gradient norm to this; null = no clipping."""
    schedule: Literal["constant", "cosine"]
    warmup_steps: NonNegative
    """Optimizer steps over which the learning rate rises linearly from 0."""
    min_lr_fraction: Fraction
    """Where a cosine schedule ends, as a fraction of lr."""


class LoraConfig(Section):
    """A low-rank adapter (arXiv:2106.09685) that learns while the model's own weights are frozen."""

    rank: NonNegative
    """Inner size of the adapter's matrices; 0 = no adapter: all parameters learn."""
    alpha: Positive
    """What the adapter adds is scaled by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1, examples=["[q_proj,v_proj]"])]
    """Names of the linear layers that get one."""


class ModelRole(Section):
    """A role that runs a model."""

    model: ModelConfig
    num_ranks: Positive
    """Ranks that share out rows and, on some backends, the model (processes; GPUs where there are any)."""
    backend: Backend

    @property
    def peers(self) -> int:
        """Ranks that are given the same rows, and compute them together."""
        return self.backend.peers

    @property
    def learning(self) -> SupervisedRole | None:
        """The role itself where its model learns; None where that is frozen."""
        return None

    @property
    def adapter(self) -> LoraConfig | None:
        """What learns in place of the model's own weights; None where these do, or nothing does."""
        return None

    @property
    def grades(self) -> bool:
        """Whether the model scores rollouts, in tokens of its own."""
        return False

    def rows_per_update(self, rows: int) -> int | None:
        """Of the `rows` of a training step, those of one optimizer step; None for a model that does not learn."""
        return None

    def updates_per_step(self, rows: int) -> int:
        """Optimizer steps on the `rows` of a training step."""
        return 0


class SupervisedRole(ModelRole):
    """The model that a supervised run trains."""

    optimizer: OptimizerConfig
    lora: LoraConfig
    expert_balance: NonNegativeFloat | None
    """Weight of the loss that spreads tokens over experts evenly; null = what the model's config.json says
    (router_aux_loss_coef). For models without experts it stays null."""

    @property
    def learning(self) -> SupervisedRole | None:
        return self

    @property
    def adapter(self) -> LoraConfig | None:
        return self.lora if self.lora.rank else None

    def rows_per_update(self, rows: int) -> int:
        return rows

    def updates_per_step(self, rows: int) -> int:
        return 1


class TrainedRole(SupervisedRole):
    """A role that learns from rollouts: the actor or the critic."""

    mini_batch_size: Positive | None
    """Rollouts per optimizer step, over all ranks; null = all rollouts of the step."""
    epochs: Positive
    """Passes over the rollouts of one step."""

    def rows_per_update(self, rows: int) -> int:
        return self.mini_batch_size or rows

    def updates_per_step(self, rows: int) -> int:
        return self.epochs * -(-rows // self.rows_per_update(rows))


class ReferenceRole(ModelRole):
    """The frozen policy that the divergence is measured from."""
