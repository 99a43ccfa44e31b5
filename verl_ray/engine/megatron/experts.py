"""Layers with experts whose routers see only slices of tokens, and their balance over
the micro-batches and ranks of a call.

Invariant: the balance is that of `models/role_model.py`, of whole rows. Each slice
adds its part, and the parts of all ranks add up to the whole. Routers are on all stages
while the loss is on the last, so the gradient of the balance enters at the router.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from verl_ray.engine.base import LossReport
from verl_ray.engine.megatron.layout import Axis, ParallelLayout
from verl_ray.engine.megatron.weight_map import share
from verl_ray.engine.micro_batches import MicroBatch
from verl_ray.models.role_model import sum_by_row
from verl_ray.ops.outputs import RequestedOutputs

if not moe_utils.HAVE_TE:
    # megatron-core 0.16.1 reads this name, with or without a GPU, but only defines it
    # if TransformerEngine is installed.
    moe_utils.te_general_gemm = None


class RouterSums(NamedTuple):
    """Results of one router for a micro-batch, from this rank's tokens.

    Attributes:
        load: float32 [experts], how many choices fell on each expert.
        counted: float32 scalar, the balance as metrics count it.
        weighted: float32 scalar, the balance as it is added to the loss.
    """

    load: Tensor
    counted: Tensor
    weighted: Tensor


@dataclass(frozen=True)
class RoutedRows:
    """The rows of a micro-batch that is learned from, as this rank's routers see them.

    Attributes:
        row: int64 [tokens of this rank], the row of each token; the number of rows for
            tokens that belong to none.
        length: float32 [rows, 1], tokens of each row.
        weight: float32 [rows], the weight in the loss of a row's balance, which is a
            mean over layers.
        counted: float32 [rows], losses of the row that metrics count.
        group: The ranks that see the other tokens.
        layers: Number of layers with experts in the whole model.
        sums: The results of this rank's routers, by the number of the layer, from 1. A
            layer that is computed again replaces its results by equal ones.
    """

    row: Tensor
    length: Tensor
    weight: Tensor
    counted: Tensor
    group: dist.ProcessGroup
    layers: int
    sums: dict[int, RouterSums] = field(default_factory=dict)


class Router(TopKRouter):
    """A router that adds the gradient of its rows' balance."""

    rows: RoutedRows | None = None
    """The rows of the next call; None in a pass that nothing is learned from."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        weights, chosen = super().routing(logits, padding_mask=padding_mask)
        rows = self.rows
        if rows is None:
            return weights, chosen

        num_experts = logits.shape[-1]
        num_rows = len(rows.length)

        # Choices of whole rows: those of the other ranks' tokens are added.
        picked = sum_by_row(chosen.float(), rows.row, num_rows)
        load = picked.sum(0)
        if dist.get_world_size(rows.group) > 1:
            dist.all_reduce(picked, group=rows.group)

        # Probabilities stay those of this rank's tokens: the balance is linear in them,
        # so the ranks' parts add up.
        probabilities = torch.softmax(logits.view(-1, num_experts).float(), -1)
        mass = sum_by_row(probabilities, rows.row, num_rows)
        squared_length = rows.length[:, 0] ** 2
        balance = num_experts * (picked * mass).sum(-1) / squared_length / rows.layers
        loss = (rows.weight * balance).sum()

        counted = (balance.detach() * rows.counted).sum()
        rows.sums[self.layer_number] = RouterSums(load, counted, loss.detach())
        return MoEAuxLossAutoScaler.apply(weights, loss), chosen


class ExpertLayer(TransformerLayer):
    """A layer that passes the rows of a call on to its router.

    It does so as well when it is computed again for the backward pass, which may be
    after another micro-batch's forward pass.
    """

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        self.mlp.router.rows = packed_seq_params.routed
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


# -------------------------------------------------------------------- balance of a call

# Invariant: what is reported is summed over the ranks of one copy of the model, so all
# of them report the same.


@dataclass(frozen=True)
class BalanceTotals:
    """Results of a call's routers, over the ranks of one copy of the model.

    Attributes:
        load: float64 [layers with experts, experts], on the host: choices per expert.
        counted: The balance as metrics count it.
        loss: What the balance added to the loss.
    """

    load: Tensor
    counted: float
    loss: float


class ExpertBalance:
    """The rows that a call gives to this rank's routers, and their report.

    Args:
        layout: The layout of the model.
        layers: The numbers of all layers with experts, from 1.
        num_experts: Number of experts per layer.
        coefficient: The weight of the balance in the loss.
        metric: Name of the balance in reports.
        sliced_tokens: True if each tensor-parallel rank has a slice of the tokens.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        layers: Sequence[int],
        num_experts: int,
        *,
        coefficient: float,
        metric: str,
        sliced_tokens: bool,
    ) -> None:
        self._groups = layout.groups
        self._token_axis = layout.tp if sliced_tokens else Axis(1, 0)
        self._layers = layers
        self._num_experts = num_experts
        self._coefficient = coefficient
        self._metric = metric
        self._batches: list[RoutedRows] = []

    def begin(self) -> None:
        """Forget the micro-batches of the previous call."""
        self._batches.clear()

    def rows_of(self, batch: MicroBatch, outputs: RequestedOutputs) -> RoutedRows:
        """Return a micro-batch's rows for the routers, and keep them for the report."""
        assert batch.row_weights is not None
        last_tokens = batch.packed.last_tokens
        num_rows = len(last_tokens)
        num_tokens = batch.packed.input_ids.shape[1]

        # The row of each token; tokens behind the last row get the number of rows.
        tokens = torch.arange(num_tokens, device=last_tokens.device)
        own = share(num_tokens, self._token_axis)
        row = torch.bucketize(tokens, last_tokens)[own]

        before_first = last_tokens.new_full((1,), -1)
        length = torch.diff(last_tokens, prepend=before_first).float()
        losses = torch.bincount(batch.row_of_loss(outputs), minlength=num_rows).float()

        rows = RoutedRows(
            row=row,
            length=length[:, None],
            weight=self._coefficient * batch.row_weights * losses,
            counted=(batch.row_weights != 0) * losses,
            group=self._groups.tp,
            layers=len(self._layers),
        )
        self._batches.append(rows)
        return rows

    def complete(self, report: LossReport) -> LossReport:
        """Return the report of a call with the balance and the load of its experts."""
        totals = self._totals()
        return dataclasses.replace(
            report,
            loss=report.loss + totals.loss,
            sums=report.sums | {self._metric: totals.counted},
            expert_load=totals.load.numpy(),
        )

    def _totals(self) -> BalanceTotals:
        """Return the sums over micro-batches and the ranks of one copy. Collective."""
        load = torch.zeros(len(self._layers), self._num_experts, dtype=torch.float64)
        scalars = torch.zeros(2, dtype=torch.float64)

        indices: list[int] = []
        flat_sums: list[Tensor] = []
        for batch in self._batches:
            for number, sums in batch.sums.items():
                indices.append(self._layers.index(number))
                flat_sums.append(
                    torch.cat([sums.load, sums.counted[None], sums.weighted[None]])
                )

        if flat_sums:
            # One copy to the host for all layers and micro-batches.
            table = torch.stack(flat_sums).double().cpu()
            load.index_add_(0, torch.tensor(indices), table[:, :-2])
            scalars += table[:, -2:].sum(0)

        flat = torch.cat([load.flatten(), scalars])
        group = self._groups.mp
        if dist.get_world_size(group) > 1:
            dist.all_reduce(flat, group=group)

        return BalanceTotals(
            load=flat[:-2].view_as(load), counted=float(flat[-2]), loss=float(flat[-1])
        )
