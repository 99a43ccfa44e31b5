"""The partition of a micro-batch's tokens over the ranks that compute it together.

Invariant: `postprocess` undoes `preprocess`. A loss sees complete rows, however their
tokens were partitioned in between, and gradients flow back through it. A manager leaves
nothing in the process: what a layer must know travels with its input. The base class
partitions nothing, for ranks that compute their rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.data.batch import Int64
from verl_ray.ops.outputs import TokenOutputs


@dataclass(frozen=True)
class PackedTokens:
    """Rows one behind the other, or one rank's slice of them. All columns are int64.

    The selected tokens are those whose outputs are read. A token is predicted by the
    hidden state of its predecessor, the token before it in its row.
    """

    tokens: Int64
    """[tokens]: token ids."""

    positions: Int64
    """[tokens]: position of each token within its row."""

    predecessors: Int64
    """[selected]: index of the token before each selected token, ascending."""

    targets: Int64
    """[selected]: ids of the selected tokens."""

    last_tokens: Int64
    """[rows]: index of the last token of each row, ascending."""

    offsets: Int64
    """[all rows + 1]: index of each row's first token among the tokens of all ranks,
    then the total. Attention is planned from these, in a slice too."""

    def padded_to_multiple(self, multiple: int) -> Self:
        """Return the rows with tokens appended until their number is a multiple.

        The appended tokens form a row without selected tokens.
        """
        missing = -len(self.tokens) % multiple
        if not missing:
            return self
        return replace(
            self,
            tokens=np.pad(self.tokens, (0, missing)),
            positions=np.concatenate([self.positions, np.arange(missing)]),
            offsets=np.append(self.offsets, len(self.tokens) + missing),
        )


class ShardingManager:
    """A context around the forward and backward passes of micro-batches.

    `preprocess` comes before a forward pass and `postprocess` after it. Blocks may be
    nested: an inner one restores the state of the outer one.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def preprocess(self, rows: PackedTokens) -> PackedTokens:
        """Return the part of the rows that this rank computes."""
        return rows

    def postprocess(self, outputs: TokenOutputs) -> TokenOutputs:
        """Return the outputs of all rows passed to `preprocess`, in their order.

        Args:
            outputs: The outputs of the part that this rank computed.
        """
        return outputs

    @property
    def exchange(self) -> HeadExchange | None:
        """The exchange through which attention sees the peers' tokens.

        None where this rank has all tokens.
        """
        return None


# ----------------------------------------------------------------------------- exchange

# Invariant: `to_tokens` undoes `to_heads`, and gradients flow back to the rank that the
# values came from.


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
