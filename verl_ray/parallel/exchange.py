"""Tokens for heads, and back: what attention calls where other ranks hold the other tokens.

Invariant: `to_tokens` undoes `to_heads`, and gradients flow back to the rank that the values came from. Deliberately
not here: which tokens are whose (`ulysses`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class HeadExchange:
    """Slices of tokens for slices of heads, and back, over the ranks of one group."""

    group: dist.ProcessGroup
    size: int
    tokens: int  # of all ranks, padding left out

    def to_heads(self, x: Tensor) -> Tensor:
        """[tokens / size, heads, *] of this rank's tokens -> [tokens, heads / size, *] of its heads."""
        if x.shape[1] < self.size:
            x = x.repeat_interleave(self.size // x.shape[1], dim=1)
        parts = x.view(len(x), self.size, -1, *x.shape[2:]).transpose(0, 1)
        return _swap(parts, self.group).flatten(0, 1)[: self.tokens]

    def to_tokens(self, x: Tensor) -> Tensor:
        """[tokens, heads / size, *] of this rank's heads -> [tokens / size, heads, *] of its tokens."""
        missing = -len(x) % self.size
        if missing:
            x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
        parts = x.view(self.size, -1, *x.shape[1:])
        return _swap(parts, self.group).transpose(0, 1).flatten(1, 2)


def _swap(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: part r goes to rank r, and what comes from rank r is part r."""
    swapped: Tensor = _Swap.apply(parts, group)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _swap(gradients[0], ctx.group), None  # its own inverse
