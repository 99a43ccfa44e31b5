"""The balance of experts over the micro-batches and ranks of a call.

Invariant: what is reported is summed over the ranks of one copy of the model, so all
of them report the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.engine.base import LossReport
from verl_ray.engine.megatron.experts import RoutedRows
from verl_ray.engine.megatron.layout import Axis, ParallelLayout
from verl_ray.engine.megatron.weight_map import share
from verl_ray.engine.micro_batches import MicroBatch


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

    def rows_of(self, batch: MicroBatch) -> RoutedRows:
        """Return a micro-batch's rows for the routers, and keep them for the report."""
        losses = batch.losses_of_rows
        assert batch.row_weights is not None and losses is not None
        last_tokens = batch.packed.last_tokens
        num_tokens = batch.packed.input_ids.shape[1]

        # The row of each token; tokens behind the last row get the number of rows.
        tokens = torch.arange(num_tokens, device=last_tokens.device)
        own = share(num_tokens, self._token_axis)
        row = torch.bucketize(tokens, last_tokens)[own]

        before_first = last_tokens.new_full((1,), -1)
        length = torch.diff(last_tokens, prepend=before_first).float()

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
