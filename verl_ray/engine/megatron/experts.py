"""Layers with experts whose routers see only slices of tokens.

Invariant: the balance is that of `models/role_model.py`, of whole rows. Each slice
adds its part, and the parts of all ranks add up to the whole. Routers are on all stages
while the loss is on the last, so the gradient of the balance enters at the router.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from verl_ray.models.routing import router_probabilities, sum_by_row
from verl_ray.models.routing_replay import RecordedRouting

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


@dataclass(frozen=True)
class RoutingRule:
    """How a family's routers choose experts, and weigh them.

    Attributes:
        chosen: Number of experts of a token.
        sigmoid: Whether scores are the sigmoids of the logits, and not their softmax.
        normalized: Whether the weights of a token's experts add up to 1.
        factor: Factor of the weights.
        biased: Whether each expert has a bias that counts in the choice alone.
        groups: Number of groups of experts.
        chosen_groups: Number of groups that a token's experts come from.
        best_of_group: How many best scores of a group are added up to its own.
    """

    chosen: int
    sigmoid: bool
    normalized: bool
    factor: float
    biased: bool
    groups: int = 1
    chosen_groups: int = 1
    best_of_group: int = 1

    def choose(
        self,
        logits: Tensor,
        bias: Tensor | None,
        replayed: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token.

        Args:
            logits: [tokens, experts].
            bias: float32 [experts], added to the scores in the choice; None for none.
            replayed: Returns the experts to take in the place of those chosen; None =
                these.

        Returns:
            The weights of the chosen experts, float32 [tokens, chosen], and their
            indices.
        """
        logits = logits.float()
        scores = torch.sigmoid(logits) if self.sigmoid else torch.softmax(logits, -1)

        ranking = scores if bias is None else scores + bias
        if self.groups > 1:
            grouped = ranking.unflatten(-1, (self.groups, -1))
            best = grouped.topk(self.best_of_group, -1).values.sum(-1)
            groups = best.topk(self.chosen_groups, -1).indices
            is_excluded = torch.ones_like(best, dtype=torch.bool)
            is_excluded = is_excluded.scatter(-1, groups, False)
            grouped = grouped.masked_fill(is_excluded[..., None], -torch.inf)
            ranking = grouped.flatten(-2)
        experts = ranking.topk(self.chosen, -1).indices
        if replayed is not None:
            experts = replayed(experts)

        weights = scores.gather(-1, experts)
        if self.normalized:
            # Sigmoids may all be 0.
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.factor, experts


class Router(TopKRouter):
    """A router that chooses as its family does, and adds its rows' balance."""

    rows: RoutedRows | None = None
    """The rows of the next call; None in a pass that nothing is learned from."""

    recorded: RecordedRouting | None = None
    """What the next call chooses, of this rank's tokens; None = what it chooses."""

    def __init__(
        self, config: TransformerConfig, pg_collection: Any, *, rule: RoutingRule
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._rule = rule
        self.selection_bias: Tensor | None
        bias = torch.zeros(self.num_experts) if rule.biased else None
        self.register_buffer("selection_bias", bias)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        flat = logits.view(-1, logits.shape[-1])
        replayed = None
        if self.recorded is not None:
            replayed = functools.partial(self.recorded.choice, self.layer_number - 1)
        own_weights, experts = self._rule.choose(flat, self.selection_bias, replayed)
        nothing = torch.zeros_like(flat)
        weights = nothing.scatter(1, experts, own_weights.type_as(flat))
        chosen = nothing.bool().scatter(1, experts, True)
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
        sigmoid = self._rule.sigmoid and self._rule.chosen > 1
        probabilities = router_probabilities(flat, sigmoid=sigmoid)
        mass = sum_by_row(probabilities, rows.row, num_rows)
        squared_length = rows.length[:, 0] ** 2
        balance = num_experts * (picked * mass).sum(-1) / squared_length / rows.layers
        loss = (rows.weight * balance).sum()

        counted = (balance.detach() * rows.counted).sum()
        rows.sums[self.layer_number] = RouterSums(load, counted, loss.detach())
        return MoEAuxLossAutoScaler.apply(weights, loss), chosen
