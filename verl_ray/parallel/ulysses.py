"""Sequence parallelism by exchanging heads (DeepSpeed-Ulysses, arXiv:2309.14509).

Outside of attention, each rank has a slice of all tokens and every head; inside, it has
all tokens and a slice of the heads. Deviation from the paper: with fewer key-value
heads than ranks, each head is sent to several ranks.

Invariant: log-probs, losses and the sum of gradients over all ranks are those of a
single rank that has everything. Peers with the same rows compute the same loss from the
same gathered outputs; peers with different rows compute a part of the loss each. Each
gradient flows back only to the rank whose slice it came from, so the sum over ranks,
which the engine computes in any case, counts everything once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.columns.batch import Int64, offsets_of
from verl_ray.errors import EngineError
from verl_ray.ops.outputs import TokenOutputs
from verl_ray.parallel.head_exchange import HeadExchange
from verl_ray.parallel.sharding import PackedTokens, ShardingManager

ROW_OUTPUTS = ("scores",)
"""Outputs with one number per row. All others have one per selected token."""

TOKEN = "token"
ROW = "row"

Bounds = dict[str, Int64]
"""Which rank has which outputs, int64 [ranks + 1], for `TOKEN` and for `ROW`.

Rank r has those from bounds[r] to bounds[r + 1].
"""


@dataclass(frozen=True)
class Slicing:
    """How `preprocess` sliced the rows, which `postprocess` reverses."""

    exchange: HeadExchange

    computed: Bounds
    """The outputs that each rank computes."""

    passed: Bounds | None
    """The outputs of the rows that each rank passed to `preprocess`. None if every rank
    passed all rows."""


class UlyssesManager(ShardingManager):
    """A partition of the packed tokens into one run of consecutive tokens per rank.

    The runs have equal length; the last ones may contain padding.
    """

    def __init__(self, group: dist.ProcessGroup, *, same_rows: bool = True) -> None:
        """Take the group of ranks that compute together.

        Args:
            group: The ranks.
            same_rows: All ranks pass the same rows, and each gets the outputs of all of
                them. Otherwise each passes its own rows and gets the outputs of those.
                The rows are then gathered first, with one collective for their sizes
                and one for the rows, over host tensors. This is never inferred from the
                rows.
        """
        self._group = group
        self._same_rows = same_rows
        self._size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._slicing: Slicing | None = None

        # The slicing at the start of each enclosing block, the innermost last.
        self._enclosing: list[Slicing | None] = []

    def __enter__(self) -> Self:
        self._enclosing.append(self._slicing)
        return self

    def __exit__(self, *reason: Any) -> None:
        self._slicing = self._enclosing.pop()

    @property
    def exchange(self) -> HeadExchange | None:
        if self._slicing is None:
            return None
        return self._slicing.exchange

    def preprocess(self, rows: PackedTokens) -> PackedTokens:
        if not self._enclosing:
            raise EngineError(
                "rows are sliced inside `with manager:`, so that what was sliced is put"
                " together again"
            )

        passed = None
        if not self._same_rows:
            rows, passed = self._gather_rows(rows)

        # Rank r computes the tokens from bounds[r] to bounds[r + 1]. A selected token
        # belongs to the rank of its predecessor, whose hidden state predicts it.
        length = -(-len(rows.tokens) // self._size)
        bounds = np.arange(self._size + 1) * length
        token_bounds = np.searchsorted(rows.predecessors, bounds)
        row_bounds = np.searchsorted(rows.last_tokens, bounds)

        self._slicing = Slicing(
            exchange=HeadExchange(self._group, self._size, len(rows.tokens)),
            computed={TOKEN: token_bounds, ROW: row_bounds},
            passed=passed,
        )

        if rows.experts is not None:
            raise EngineError(
                "rollout.routing_replay: rows are cut on this backend, and their"
                " experts are not; set it to false"
            )
        first = self._rank * length
        own_selected = self._own_slice(token_bounds)
        own_rows = self._own_slice(row_bounds)
        return PackedTokens(
            tokens=_padded_run(rows.tokens, first, length),
            positions=_padded_run(rows.positions, first, length),
            predecessors=rows.predecessors[own_selected] - first,
            targets=rows.targets[own_selected],
            last_tokens=rows.last_tokens[own_rows] - first,
            offsets=rows.offsets,
            candidates=None
            if rows.candidates is None
            else rows.candidates[own_selected],
        )

    def _own_slice(self, bounds: Int64) -> slice:
        return slice(bounds[self._rank], bounds[self._rank + 1])

    def postprocess(self, outputs: TokenOutputs) -> TokenOutputs:
        if self._slicing is None:
            raise EngineError(
                "outputs were to be put together, but no rows have been sliced"
            )

        complete: dict[str, Any] = {}
        for field in dataclasses.fields(outputs):
            value = getattr(outputs, field.name)
            if value is not None:
                kind = ROW if field.name in ROW_OUTPUTS else TOKEN
                complete[field.name] = self._complete(value, kind, self._slicing)
        return dataclasses.replace(outputs, **complete)

    def _complete(self, value: Tensor, kind: str, slicing: Slicing) -> Tensor:
        """Complete one output with the parts that the peers computed."""
        # Collectives do not carry booleans.
        if value.dtype == torch.bool:
            return self._complete(value.to(torch.uint8), kind, slicing).bool()

        computed = slicing.computed[kind]
        if slicing.passed is not None:
            return _repartition(value, computed, slicing.passed[kind], self._group)

        counts = np.diff(computed).tolist()
        gathered: Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
            value, counts, self._rank, self._group
        )
        return gathered

    def _gather_rows(self, rows: PackedTokens) -> tuple[PackedTokens, Bounds]:
        """Gather the rows of all ranks, in the order of the ranks.

        Returns:
            The rows, and which of their outputs belong to which rank.
        """
        candidates = rows.candidates
        columns = (
            rows.tokens,
            rows.positions,
            rows.predecessors,
            rows.targets,
            rows.last_tokens,
            np.diff(rows.offsets),
            np.empty(0) if candidates is None else candidates.reshape(-1),
        )
        # [ranks, columns]
        sizes = self._gather(np.array([len(column) for column in columns]))

        flat = np.concatenate(columns).astype(np.int64)
        longest = int(sizes.sum(axis=1).max())
        gathered = self._gather(_padded_run(flat, 0, longest))

        # [rank][column], without the padding behind the last column
        columns_of_ranks = [
            np.split(values, np.cumsum(size))[:-1]
            for values, size in zip(gathered, sizes, strict=True)
        ]
        tokens, positions, predecessors, targets, last_tokens, lengths, others = (
            np.concatenate(column) for column in zip(*columns_of_ranks, strict=True)
        )

        # Indices of a rank's tokens move behind the tokens of the ranks before it.
        num_tokens = sizes[:, 0]
        first_token = num_tokens.cumsum() - num_tokens
        num_selected = sizes[:, 2]
        num_rows = sizes[:, 4]
        everything = PackedTokens(
            tokens=tokens,
            positions=positions,
            predecessors=predecessors + first_token.repeat(num_selected),
            targets=targets,
            last_tokens=last_tokens + first_token.repeat(num_rows),
            offsets=offsets_of(lengths),
            candidates=None
            if candidates is None
            else others.reshape(-1, candidates.shape[1]),
        )
        return everything, {TOKEN: offsets_of(num_selected), ROW: offsets_of(num_rows)}

    def _gather(self, own: Int64) -> Int64:
        """Gather an array [n] of each rank to [ranks, n]."""
        gathered = torch.empty(self._size * len(own), dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, torch.from_numpy(own), group=self._group)
        return gathered.view(self._size, -1).numpy()


def _padded_run(values: Int64, first: int, count: int) -> Int64:
    """Return `count` values beginning at index `first`, zeros behind the last value."""
    run = values[first : first + count]
    return np.pad(run, (0, count - len(run)))


class _Gather(torch.autograd.Function):
    """Concatenation of the values of all ranks.

    Every rank computes the same loss from the result and so has the same gradient of
    it. In the backward pass each rank takes its own part of that gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, counts: list[int], rank: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        longest = max(counts)
        if not longest:
            return own.clone()

        padded = own.new_zeros(longest, *own.shape[1:])
        padded[: len(own)] = own
        gathered = padded.new_empty(len(counts) * longest, *own.shape[1:])
        dist.all_gather_into_tensor(gathered, padded, group=group)

        values_of_ranks = gathered.view(len(counts), longest, *own.shape[1:])
        parts = [
            values[:count]
            for values, count in zip(values_of_ranks, counts, strict=True)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0][ctx.own], None, None, None


def _repartition(
    own: Tensor, old_bounds: Int64, new_bounds: Int64, group: dist.ProcessGroup
) -> Tensor:
    """Move a column from one partition over the ranks to another.

    Args:
        own: This rank's part under `old_bounds`.
        old_bounds: int64 [ranks + 1].
        new_bounds: int64 [ranks + 1].
        group: The ranks.

    Returns:
        This rank's part under `new_bounds`.
    """
    moved: Tensor = _Repartition.apply(  # type: ignore[no-untyped-call]
        own, old_bounds, new_bounds, group
    )
    return moved


class _Repartition(torch.autograd.Function):
    """A move of values between ranks.

    Every value moves to the one rank whose loss reads it. The gradient that moves back
    is therefore the sum of the value's gradients over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        old_bounds: Int64,
        new_bounds: Int64,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.old_bounds = old_bounds
        ctx.new_bounds = new_bounds
        ctx.group = group

        rank = dist.get_rank(group)
        sent = _overlaps(old_bounds, new_bounds, rank)
        received = _overlaps(new_bounds, old_bounds, rank)
        moved = own.new_empty(sum(received), *own.shape[1:])
        dist.all_to_all_single(moved, own.contiguous(), received, sent, group=group)
        return moved

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # The opposite move.
        gradient = _repartition(gradients[0], ctx.new_bounds, ctx.old_bounds, ctx.group)
        return gradient, None, None, None


def _overlaps(bounds: Int64, other_bounds: Int64, rank: int) -> list[int]:
    """Return how much of this rank's part each rank has under the other bounds."""
    first = bounds[rank]
    end = bounds[rank + 1]
    counts: list[int] = np.diff(np.clip(other_bounds, first, end)).tolist()
    return counts
