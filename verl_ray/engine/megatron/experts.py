"""Layers with experts whose routers see only slices of tokens.

Invariant: the balance is that of `models/role_model.py`, of whole rows. Each slice
adds its part, and the parts of all ranks add up to the whole. Routers are on all stages
while the loss is on the last, so the gradient of the balance enters at the router.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from verl_ray.models.routing import sum_by_row

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
