"""The partition of a micro-batch's tokens over the ranks that compute it together.

Invariant: `postprocess` undoes `preprocess`. A loss sees complete rows, however their
tokens were partitioned in between, and gradients flow back through it. A manager leaves
nothing in the process: what a layer must know travels with its input. The base class
partitions nothing, for ranks that compute their rows alone.

`UlyssesManager` is sequence parallelism by exchanging heads (DeepSpeed-Ulysses,
arXiv:2309.14509). Outside of attention, each rank has a slice of all tokens and every
head; inside, it has all tokens and a slice of the heads. Log-probs, losses and the sum
of gradients over all ranks are those of a single rank that has everything. Peers with
the same rows compute the same loss from the same gathered outputs; peers with different
rows compute a part of the loss each. Each gradient flows back only to the rank whose
slice it came from, so the sum over ranks, which the engine computes in any case, counts
everything once. Deviation from the paper: with fewer key-value heads than ranks, each
head is sent to several ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.columns.batch import Int64, offsets_of
from verl_ray.errors import EngineError
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


# ----------------------------------------------------------- heads for tokens (Ulysses)

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
        columns = (
            rows.tokens,
            rows.positions,
            rows.predecessors,
            rows.targets,
            rows.last_tokens,
            np.diff(rows.offsets),
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
        tokens, positions, predecessors, targets, last_tokens, lengths = (
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

        padded = torch.nn.functional.pad(own, (0, longest - len(own)))
        gathered = padded.new_empty(len(counts) * longest)
        dist.all_gather_into_tensor(gathered, padded.contiguous(), group=group)

        values_of_ranks = gathered.view(len(counts), longest)
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
        moved = own.new_empty(sum(received))
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
