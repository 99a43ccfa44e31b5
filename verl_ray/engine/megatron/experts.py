"""Experts on the ranks of a layout: the balance loss and the load of each, from routers that see slices of tokens.

Invariant: as `models/experts.py` defines them, of whole rows; a slice adds its part, and the parts of all ranks add up
to the whole. Routers are on all stages and the loss is on the last, so the gradient of the balance enters where the
router is, and what is reported is summed over the ranks of one copy of the model.
Deliberately not here: the formula's sources, and what the balance is weighted with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from verl_ray.models.experts import by_row


@dataclass(frozen=True)
class RoutedRows:
    """The rows of a micro-batch that is learned from, as this rank's routers see them, and what they found."""

    row: Tensor  # int64 [tokens of this rank]: which row each is of; the number of rows for tokens of none
    length: Tensor  # float32 [rows, 1]
    weight: Tensor  # float32 [rows]: what a row's balance, a mean over layers, weighs in the loss
    counted: Tensor  # float32 [rows]: losses of the row that metrics count
    group: dist.ProcessGroup  # of the ranks that see the other tokens
    layers: int  # with experts, in the whole model
    found: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """By the layer's number, from 1: load [experts], and the balance as it is counted and as it is weighed. A layer
    that is computed again finds the same again."""


class Router(TopKRouter):
    """Adds the gradient of the balance of the rows that it is told of."""

    rows: RoutedRows | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        weights, chosen = super().routing(logits, padding_mask=padding_mask)
        rows = self.rows
        if rows is None:
            return weights, chosen
        number = len(rows.length)
        probabilities = torch.softmax(logits.view(-1, logits.shape[-1]).float(), -1)
        picked = by_row(chosen.float(), rows.row, number)
        load = picked.sum(0)
        if dist.get_world_size(rows.group) > 1:
            dist.all_reduce(picked, group=rows.group)
        mass = by_row(probabilities, rows.row, number)
        balance = logits.shape[-1] * (picked * mass).sum(-1) / rows.length[:, 0] ** 2 / rows.layers
        loss = (rows.weight * balance).sum()
        told = balance.detach()
        rows.found[self.layer_number] = load, (told * rows.counted).sum(), loss.detach()
        return MoEAuxLossAutoScaler.apply(weights, loss), chosen


class ExpertLayer(TransformerLayer):
    """Tells its router of the rows at hand, also when it is computed again for another micro-batch's backward pass."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        self.mlp.router.rows = packed_seq_params.routed
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


@dataclass(frozen=True)
class ExpertReport:
    """What the routers of a call found, over the ranks of one copy of the model."""

    load: Tensor  # float64 [layers with experts, experts], on the host
    counted: float  # the balance, as metrics count it
    loss: float  # what it added to the loss


def reported(batches: list[RoutedRows], numbers: list[int], experts: int, group: dist.ProcessGroup) -> ExpertReport:
    """Sum over micro-batches and the ranks of `group`. `numbers`: of the layers with experts, from 1."""
    load = torch.zeros(len(numbers), experts, dtype=torch.float64)
    sums = torch.zeros(2, dtype=torch.float64)
    found = [(number, *one) for batch in batches for number, one in batch.found.items()]
    if found:
        of_layers = torch.tensor([numbers.index(number) for number, *_ in found])
        told = torch.stack([torch.cat([one[1], one[2][None], one[3][None]]) for one in found]).double().cpu()
        load.index_add_(0, of_layers, told[:, :-2])
        sums += told[:, -2:].sum(0)
    flat = torch.cat([load.flatten(), sums])
    if dist.get_world_size(group) > 1:
        dist.all_reduce(flat, group=group)
    return ExpertReport(flat[:-2].view_as(load), float(flat[-2]), float(flat[-1]))
