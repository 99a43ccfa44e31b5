"""What routers decide: the load of each expert, and a loss that keeps it balanced.

Invariant: the balance of a row depends on that row alone, so the loss depends neither on the micro-batch size nor on
the number of ranks. That is the deviation from Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, equations 4 to
6), which takes fractions over a batch; per row it is the sequence-wise balance of DeepSeek-V3 (arXiv:2412.19437,
equations 17 to 20), in Switch's scale: top_k where experts are used evenly, up to the number of experts where they are
not. Deliberately not here: what the loss is weighted with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl_ray.ops.outputs import Routing


class RouterWatch:
    """Listens to a model's routers: modules that return logits [tokens, experts], weights and choices [tokens, k]."""

    def __init__(self, model: nn.Module) -> None:
        self._said: list[tuple[Tensor, Tensor]] | None = None
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self._hear)

    def _hear(self, module: nn.Module, given: Any, said: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._said is not None:  # nobody listens when a checkpointed layer is computed again
            self._said.append((said[0], said[2]))

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """What each router says inside: its logits and what it chose, in the order of the layers."""
        said: list[tuple[Tensor, Tensor]] = []
        self._said = said
        try:
            yield said
        finally:
            self._said = None


def routing(said: list[tuple[Tensor, Tensor]], ends: Tensor) -> Routing:
    """The routing of packed rows that end at these tokens, int64 [rows]; tokens behind the last row are nobody's."""
    tokens, experts = said[0][0].shape
    rows = len(ends)
    row = torch.bucketize(torch.arange(tokens, device=ends.device), ends)  # [tokens]: `rows` behind the last
    length = torch.bincount(row, minlength=rows + 1)[:rows, None].float()
    balances, loads = [], []
    for logits, chosen in said:
        probabilities = torch.softmax(logits.float(), -1)
        picks = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)  # 1 where a token goes
        picked, mass = (by_row(values, row, rows) / length for values in (picks, probabilities))
        balances.append(experts * (picked * mass).sum(-1))
        loads.append((picked.detach() * length).sum(0))
    return Routing(torch.stack(balances).mean(0), torch.stack(loads))


def by_row(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """Sums of [tokens, experts] over the tokens of each row, [rows, experts]."""
    return values.new_zeros(rows + 1, values.shape[1]).index_add(0, row, values)[:rows]
