"""Sequence parallelism by exchanging heads (DeepSpeed-Ulysses, arXiv:2309.14509): outside of attention each rank has a
slice of all tokens and every head; inside it has all tokens and a slice of the heads.

Invariant: log-probs, losses and the sum of gradients over all ranks are those of one rank that has everything. Peers
that were given the same rows compute the same loss from the same gathered outputs, those with rows of their own a part
of it; each gradient flows back only to the rank whose slice it came from, so the sum over ranks, which the engine takes
anyway, counts everything once. Deviation from the paper: with fewer key-value heads than ranks, each is sent to several
ranks. Deliberately not here: attention itself (`models/attention`), and what it calls (`exchange`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.data.batch import Int64, offsets_of
from verl_ray.errors import EngineError
from verl_ray.ops.outputs import TokenOutputs
from verl_ray.parallel.exchange import HeadExchange
from verl_ray.parallel.sharding_manager import PackedTokens, ShardingManager

ROW_OUTPUTS = ("scores",)
"""Outputs with one number per row; all others have one per token that is read."""


@dataclass(frozen=True)
class Slicing:
    """What `preprocess` did: whose outputs are whose. Bounds are int64 [ranks + 1], per token that is read and per row:
    rank r has those from bounds[r] to bounds[r + 1]."""

    exchange: HeadExchange
    computed: dict[str, Int64]
    given: dict[str, Int64] | None  # None: every rank gave all of them


class UlyssesManager(ShardingManager):
    """Each rank of `group` takes a run of consecutive tokens of the packed rows, of equal length but for padding.

    `same_rows`: all ranks of the group are given the same rows, and each gets the outputs of all. Otherwise each is
    given rows of its own, which are gathered first (one collective for the sizes and one for the rows, over host
    tensors), and gets the outputs of its own. Which it is has to be known: it is not looked for in the rows.
    """

    def __init__(self, group: dist.ProcessGroup, *, same_rows: bool = True) -> None:
        self._group, self._same_rows = group, same_rows
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._slicing: Slicing | None = None
        self._outer: list[Slicing | None] = []  # that of each block around, as it was entered

    def __enter__(self) -> Self:
        self._outer.append(self._slicing)
        return self

    def __exit__(self, *reason: Any) -> None:
        self._slicing = self._outer.pop()

    @property
    def exchange(self) -> HeadExchange | None:
        return self._slicing.exchange if self._slicing else None

    def preprocess(self, rows: PackedTokens) -> PackedTokens:
        if not self._outer:
            raise EngineError("rows are sliced inside `with manager:`, so that what was sliced is put together again")
        given = None
        if not self._same_rows:
            rows, given = self._rows_of_all(rows)
        share = -(-len(rows.tokens) // self._size)
        first = self._rank * share
        bounds = np.arange(self._size + 1) * share
        reads, ends = np.searchsorted(rows.before, bounds), np.searchsorted(rows.ends, bounds)
        exchange = HeadExchange(self._group, self._size, len(rows.tokens))
        self._slicing = Slicing(exchange, {"token": reads, "row": ends}, given)
        read, end = (slice(at[self._rank], at[self._rank + 1]) for at in (reads, ends))
        return PackedTokens(
            tokens=_run(rows.tokens, first, share),
            positions=_run(rows.positions, first, share),
            before=rows.before[read] - first,
            targets=rows.targets[read],
            ends=rows.ends[end] - first,
            offsets=rows.offsets,
        )

    def postprocess(self, outputs: TokenOutputs) -> TokenOutputs:
        if self._slicing is None:
            raise EngineError("outputs were to be put together, but no rows have been sliced")
        whole: dict[str, Any] = {}
        for field in dataclasses.fields(outputs):
            value = getattr(outputs, field.name)
            if value is not None:
                whole[field.name] = self._put_together(value, "row" if field.name in ROW_OUTPUTS else "token")
        return dataclasses.replace(outputs, **whole)

    def _put_together(self, value: Tensor, kind: str) -> Tensor:
        assert self._slicing is not None
        if value.dtype == torch.bool:
            return self._put_together(value.to(torch.uint8), kind).bool()
        computed = self._slicing.computed[kind]
        if self._slicing.given is not None:
            return _deal(value, computed, self._slicing.given[kind], self._group)
        gathered: Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
            value, np.diff(computed).tolist(), self._rank, self._group
        )
        return gathered

    def _rows_of_all(self, rows: PackedTokens) -> tuple[PackedTokens, dict[str, Int64]]:
        """The rows of all ranks, one rank's behind the other's, and which of their outputs are whose."""
        own = (rows.tokens, rows.positions, rows.before, rows.targets, rows.ends, np.diff(rows.offsets))
        sizes = self._of_all(np.array([len(part) for part in own]))
        flat = np.concatenate(own).astype(np.int64)
        everyone = self._of_all(_run(flat, 0, int(sizes.sum(axis=1).max())))
        # [rank][part], the padding left out
        parts = [np.split(values, np.cumsum(size))[:-1] for values, size in zip(everyone, sizes, strict=True)]
        tokens, positions, before, targets, ends, lengths = (np.concatenate(part) for part in zip(*parts, strict=True))
        first, read, rows_of_each = sizes[:, 0].cumsum() - sizes[:, 0], sizes[:, 2], sizes[:, 4]
        whole = PackedTokens(
            tokens=tokens,
            positions=positions,
            before=before + first.repeat(read),
            targets=targets,
            ends=ends + first.repeat(rows_of_each),
            offsets=offsets_of(lengths),
        )
        return whole, {"token": offsets_of(read), "row": offsets_of(rows_of_each)}

    def _of_all(self, own: Int64) -> Int64:
        """What each rank has of these, [ranks, n]."""
        everyone = torch.empty(self._size * len(own), dtype=torch.int64)
        dist.all_gather_into_tensor(everyone, torch.from_numpy(own), group=self._group)
        return everyone.view(self._size, -1).numpy()


def _run(values: Int64, first: int, count: int) -> Int64:
    """`count` values from `first` on, zeros behind the last."""
    part = values[first : first + count]
    return np.pad(part, (0, count - len(part)))


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


def _deal(own: Tensor, held: Int64, wanted: Int64, group: dist.ProcessGroup) -> Tensor:
    """Of a column that is cut over the ranks at the bounds `held`, this rank's part when it is cut at `wanted`."""
    dealt: Tensor = _Deal.apply(own, held, wanted, group)  # type: ignore[no-untyped-call]
    return dealt


class _Deal(torch.autograd.Function):
    """Every value goes to the one rank whose loss reads it, so what comes back from there is the sum of its gradients
    over all ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, held: Int64, wanted: Int64, group: dist.ProcessGroup) -> Tensor:
        ctx.held, ctx.wanted, ctx.group = held, wanted, group
        rank = dist.get_rank(group)
        sent, received = _common(held, wanted, rank), _common(wanted, held, rank)
        out = own.new_empty(sum(received))
        dist.all_to_all_single(out, own.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _deal(gradients[0], ctx.wanted, ctx.held, ctx.group), None, None, None  # its own inverse, turned round


def _common(mine: Int64, theirs: Int64, rank: int) -> list[int]:
    """How much of this rank's part under the bounds `mine` lies in each rank's part under `theirs`."""
    counts: list[int] = np.diff(np.clip(theirs, mine[rank], mine[rank + 1])).tolist()
    return counts
