"""The balance of experts: of a row as part of its loss, of a step by biases.

Invariant: the balance of a row is weighted as the losses of the row are, and biases
follow the load of all rows of a step, so they depend neither on the micro-batch size
nor on the number of ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.columns.packing import Float64
from verl_ray.engine.base import (
    EngineSpec,
)
from verl_ray.engine.micro_batches import MicroBatch
from verl_ray.errors import EngineError
from verl_ray.models.role_model import RoleModel
from verl_ray.models.routing import RouterWatch
from verl_ray.ops.outputs import Routing
from verl_ray.settings.config_json import balance_weight


def balance_coefficient(spec: EngineSpec, model: RoleModel) -> float:
    """Return the weight of the balance loss, 0 for a model whose routers are not seen.

    Raises:
        EngineError: A setting does not fit a model with, or without, experts.
    """
    configured = spec.expert_balance

    watch = model.router_watch
    if watch is None:
        if configured is not None:
            raise EngineError(
                f"{spec.role}.expert_balance = {configured}: {spec.model_path} has no"
                " experts, or its routers return no choice; set it to null"
            )
        return 0.0

    # The balance of a row is computed from all tokens of the row.
    backend = spec.backend
    if backend.token_slices > 1:
        key = f"{spec.role}.backend.{backend.token_slices_key}"
        raise EngineError(
            f"{key} = {backend.token_slices}: {spec.model_path} has experts, whose rows"
            " are not cut; set it to 1"
        )

    if configured is None:
        # Biases that can be moved take the place of a loss (DeepSeek-V3). A family
        # without either is balanced by other means, or not at all.
        return 0.0 if watch.biases else balance_weight(model.hf.config.to_dict())
    return float(configured)


class BiasUpdate:
    """The update of the biases of experts by their load, without a gradient.

    After an optimizer step, the bias of an expert with fewer tokens than the mean of
    its layer grows by the rate, and that of one with more tokens shrinks by it
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """

    def __init__(self, rate: float, watch: RouterWatch, *, world_size: int) -> None:
        self._rate = rate
        self._watch = watch
        self._world_size = world_size
        self._load: Float64 | None = None

    @classmethod
    def of(cls, spec: EngineSpec, model: RoleModel, *, world_size: int) -> BiasUpdate:
        """Return the update that an engine's description asks for.

        Raises:
            EngineError: The model has no such biases.
        """
        watch = model.router_watch
        if watch is None or not watch.biases:
            raise EngineError(
                f"{spec.role}.expert_bias_update = {spec.expert_bias_update}: the"
                f" routers of {spec.model_path} have no biases that can be moved; set"
                " it to 0"
            )
        return cls(spec.expert_bias_update, watch, world_size=world_size)

    def count(self, load: Float64 | None) -> None:
        """Add the load of some rows of this rank, [layers, experts]."""
        if load is not None:
            self._load = load if self._load is None else self._load + load

    def forget(self) -> None:
        """Forget the load, since its step was skipped."""
        self._load = None

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases by the load since the last step. Collective."""
        biases = self._watch.biases
        load = torch.zeros(len(biases), len(biases[0]), dtype=torch.float64)
        if self._load is not None:
            load += torch.from_numpy(self._load)
        self.forget()
        if self._world_size > 1:
            # Whole numbers, whose sum has no order. A host tensor goes over gloo.
            dist.all_reduce(load)

        signs = torch.sign(load.mean(1, keepdim=True) - load)
        for bias, sign in zip(biases, signs, strict=True):
            bias.add_(self._rate * sign.to(bias))


def balance_per_loss(routing: Routing, batch: MicroBatch) -> Tensor:
    """Return the balance of each row at each of its losses, float32 [losses].

    Added to all losses of a row and weighted like them, it adds up to the mean over
    rows. A loss of a unit has the mean of the unit's rows. The balance of a row of
    weight 0 does not count, like everything else of that row (`without_uncounted`).
    """
    row_weights, losses = batch.row_weights, batch.losses_of_rows
    assert row_weights is not None and losses is not None
    assert batch.row_of_loss is not None
    balance = routing.balance.masked_fill(row_weights == 0, 0)
    if batch.unit is not None and batch.level == "unit":
        means = balance.new_zeros(len(batch.row_of_loss))
        return means.index_add(0, batch.unit, balance * losses)
    return balance.index_select(0, batch.row_of_loss)
