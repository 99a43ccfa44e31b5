"""The roles that run a model on a training backend, and how they learn.

Deliberately not here: how a backend computes (`verl_ray/backends`), vLLM's engines
(`rollout`), and what else may score (`reward`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from verl_ray.backends import Backend
from verl_ray.config.paths import HubPath
from verl_ray.config.section import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)
from verl_ray.hub.names import COMMIT, is_hub_id, snapshot_of


class ModelConfig(Section):
    """The model of a role."""

    path: HubPath
    """Directory of a Hugging Face model (config.json, safetensors, tokenizer), or the
    id of one on the hub, such as Qwen/Qwen3-0.6B."""
    revision: str | None
    """Commit, tag or branch of a model on the hub; null = that of model.path where the
    path is the same, else the newest. The run records the commit."""

    @property
    def folder(self) -> str:
        """Directory of the model's files, which are in the cache if it is on the hub.

        The id itself until its commit is known.
        """
        commit = self.revision or ""
        if not is_hub_id(self.path) or COMMIT.fullmatch(commit) is None:
            return self.path
        return str(snapshot_of(self.path, commit, "model").folder)


class OptimizerConfig(Section):
    """AdamW (arXiv:1711.05101); weight decay spares norms and biases."""

    lr: NonNegativeFloat
    """Learning rate after the warm-up."""
    betas: Annotated[tuple[Fraction, Fraction], Field(examples=["[0.9,0.999]"])]
    """Decay rates of the first and the second moment."""
    eps: PositiveFloat
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat | None
    """Clip the global gradient norm to this; null = no clipping."""
    schedule: Literal["constant", "cosine"]
    """Course of the learning rate after the warm-up."""
    warmup_steps: NonNegative
    """Optimizer steps over which the learning rate rises linearly from 0."""
    min_lr_fraction: Fraction
    """End of a cosine schedule, as a fraction of lr."""


class LoraConfig(Section):
    """A low-rank adapter (arXiv:2106.09685).

    The adapter learns while the model's own weights are frozen.
    """

    rank: NonNegative
    """Inner size of the adapter's matrices; 0 = no adapter: all parameters learn."""
    alpha: Positive
    """Scale of the adapter, whose output is multiplied by alpha / rank."""
    targets: Annotated[
        tuple[str, ...], Field(min_length=1, examples=["[q_proj,v_proj]"])
    ]
    """Names of the linear layers that get an adapter."""


class ModelRole(Section):
    """A role that runs a model on a training backend."""

    model: ModelConfig
    num_ranks: Positive
    """Processes that divide the rows and, on some backends, the model between them;
    each has a GPU where there are any."""
    backend: Backend

    @property
    def peers(self) -> int:
        """Number of ranks that get the same rows and compute them together."""
        return self.backend.peers

    @property
    def as_learner(self) -> SupervisedRole | None:
        """The role itself if its model learns; None if the model is frozen."""
        return None

    @property
    def adapter(self) -> LoraConfig | None:
        """The adapter that learns in place of the model's own weights.

        None if these learn themselves, or nothing does.
        """
        return None

    @property
    def scores_rollouts(self) -> bool:
        """Whether the model scores rollouts, in tokens of its own tokenizer."""
        return False

    def rows_per_update(self, rows: int) -> int | None:
        """Return the number of rows of one optimizer step.

        None if the model does not learn.

        Args:
            rows: the number of rows of a training step.
        """
        return None

    def updates_per_step(self, rows: int) -> int:
        """Return the number of optimizer steps on the `rows` of a training step."""
        return 0


class SupervisedRole(ModelRole):
    """The role whose model a supervised run trains."""

    optimizer: OptimizerConfig
    lora: LoraConfig
    expert_balance: NonNegativeFloat | None
    """Weight of the loss that spreads tokens evenly over experts; null = the value of
    router_aux_loss_coef in the model's config.json, or a model without experts."""

    @property
    def as_learner(self) -> SupervisedRole | None:
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
        # Divide and round up: the last mini-batch may be smaller.
        updates_per_epoch = -(-rows // self.rows_per_update(rows))
        return self.epochs * updates_per_epoch


class ReferenceRole(ModelRole):
    """The frozen policy that the divergence is measured from."""
