"""The exchange of slices of tokens for slices of heads, around attention.

Invariant: `to_tokens` undoes `to_heads`, and gradients flow back to the rank that the
values came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class HeadExchange:
    """The exchange of slices of tokens for slices of heads in one group of ranks."""

    group: dist.ProcessGroup

    size: int
    """Number of ranks in the group."""

    tokens: int
    """Number of tokens of all ranks without padding."""

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange this rank's tokens, with all heads, for its heads of all tokens.

        Where there are fewer heads than ranks, heads are repeated.

        Args:
            x: [tokens / size, heads, *].

        Returns:
            [tokens, heads / size, *].
        """
        num_heads = x.shape[1]
        if num_heads < self.size:
            x = x.repeat_interleave(self.size // num_heads, dim=1)

        # [ranks, tokens / size, heads / size, *]
        parts = x.view(len(x), self.size, -1, *x.shape[2:]).transpose(0, 1)
        all_tokens = _swap(parts, self.group).flatten(0, 1)
        return all_tokens[: self.tokens]

    def own_heads(self, x: Tensor) -> Tensor:
        """Return this rank's part of what each head of the queries has, [heads]."""
        return x.chunk(self.size)[dist.get_rank(self.group)]

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange this rank's heads of all tokens for its tokens, with all heads.

        Args:
            x: [tokens, heads / size, *].

        Returns:
            [tokens / size, heads, *], padded to the same length on every rank.
        """
        missing = -len(x) % self.size
        if missing:
            x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])

        # [ranks, tokens / size, heads / size, *]
        parts = x.view(self.size, -1, *x.shape[1:])
        return _swap(parts, self.group).transpose(0, 1).flatten(1, 2)


def _swap(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part r of [ranks, ...] to rank r, and return what rank r sent as part r."""
    swapped: Tensor = _Swap.apply(parts, group)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(torch.autograd.Function):
    """An all-to-all exchange of equal parts."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # The exchange is its own inverse, and so its own transpose.
        return _swap(gradients[0], ctx.group), None
