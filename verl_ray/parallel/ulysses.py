"""Sequence parallelism by exchanging heads (DeepSpeed-Ulysses, arXiv:2309.14509): outside of attention each rank has a
slice of all tokens and every head; inside it has all tokens and a slice of the heads.

Invariant: log-probs, losses and the sum of gradients over all ranks are those of one rank that has everything. Peers
compute the same loss from the same gathered outputs, and each gradient flows back only to the rank whose slice it came
from, so the sum over ranks, which the engine takes anyway, counts everything once. Deviation from the paper: with fewer
key-value heads than ranks, each is sent to several ranks. Deliberately not here: attention itself (`models/attention`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.data.batch import Int64
from verl_ray.errors import EngineError
from verl_ray.parallel.sharding_manager import PackedTokens, ShardingManager

if TYPE_CHECKING:
    from verl_ray.models.role_model import TokenOutputs

ROW_OUTPUTS = ("scores",)
"""Outputs with one number per row; all others have one per token that is read."""


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


class UlyssesManager(ShardingManager):
    """Each rank of `group` takes a run of consecutive tokens of the packed rows, of equal length but for padding."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._counts: dict[str, list[int]] | None = None
        self._exchange: HeadExchange | None = None

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        if not self._depth:
            self._counts = self._exchange = None

    @property
    def exchange(self) -> HeadExchange | None:
        return self._exchange

    def preprocess(self, rows: PackedTokens) -> PackedTokens:
        if not self._depth:
            raise EngineError("rows are sliced inside `with manager:`, so that what was sliced is put together again")
        share = -(-len(rows.tokens) // self._size)
        first = self._rank * share
        bounds = np.arange(self._size + 1) * share
        reads, ends = np.searchsorted(rows.before, bounds), np.searchsorted(rows.ends, bounds)
        self._counts = {"token": np.diff(reads).tolist(), "row": np.diff(ends).tolist()}
        self._exchange = HeadExchange(self._group, self._size, len(rows.tokens))
        read, end = (slice(at[self._rank], at[self._rank + 1]) for at in (reads, ends))
        return PackedTokens(
            tokens=_run(rows.tokens, first, share),
            positions=_run(rows.positions, first, share),
            before=rows.before[read] - first,
            targets=rows.targets[read],
            ends=rows.ends[end] - first,
        )

    def postprocess(self, outputs: TokenOutputs) -> TokenOutputs:
        if self._counts is None:
            raise EngineError("outputs were to be put together, but no rows have been sliced")
        whole: dict[str, Any] = {}
        for field in dataclasses.fields(outputs):
            value = getattr(outputs, field.name)
            if value is not None:
                counts = self._counts["row" if field.name in ROW_OUTPUTS else "token"]
                whole[field.name] = self._gather(value, counts)
        return dataclasses.replace(outputs, **whole)

    def _gather(self, value: Tensor, counts: list[int]) -> Tensor:
        if value.dtype == torch.bool:
            return self._gather(value.to(torch.uint8), counts).bool()
        gathered: Tensor = _Gather.apply(value, counts, self._rank, self._group)  # type: ignore[no-untyped-call]
        return gathered


def _run(values: Int64, first: int, count: int) -> Int64:
    """`count` values from `first` on, zeros behind the last."""
    part = values[first : first + count]
    return np.pad(part, (0, count - len(part)))


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


class _Gather(torch.autograd.Function):
    """The values of all ranks, one behind the other. Every rank has the same gradient of them, so each takes its own
    part of it."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int], rank: int, group: dist.ProcessGroup) -> Tensor:
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        most = max(counts)
        if not most:
            return own.clone()
        padded = torch.nn.functional.pad(own, (0, most - len(own)))
        everyone = padded.new_empty(len(counts) * most)
        dist.all_gather_into_tensor(everyone, padded.contiguous(), group=group)
        return torch.cat([part[:count] for part, count in zip(everyone.view(len(counts), most), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0][ctx.own], None, None, None
