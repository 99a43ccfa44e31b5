"""The micro-batches of one call: which rows each has, how they are packed into the flat
inputs of a model, and their tensors on the device.

Invariant: a micro-batch moves to the device when it is requested. It knows the
positions of its rows and tokens in the batch of the call, so results can be put back in
order. Where ranks compute together, all have the same number of micro-batches. Packed
rows lie one behind the other without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.backends import Backend
from verl_ray.columns.batch import Int64, Kind, offsets_of
from verl_ray.columns.packing import equal_micro_batches, micro_batches
from verl_ray.columns.stages import Rows, TrainingBatch
from verl_ray.errors import DataError
from verl_ray.learning.objectives import Level, LossInputs
from verl_ray.models.role_model import PackedRows
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs
from verl_ray.parallel.sharding import PackedTokens
from verl_ray.profiling.progress import reach
from verl_ray.settings.section import resolved

MICRO_BATCHES = "micro-batches"


@dataclass(frozen=True)
class MicroBatch:
    """Some rows on the device, with the selected tokens.

    The selected tokens are those under the response mask: the tokens whose outputs a
    role reads.
    """

    packed: PackedRows

    row_indices: Int64
    """[rows]: index of each row in the batch of the call."""

    selected: Int64
    """[selected]: position of each selected token in the batch of the call."""

    row_of_token: Tensor
    """int64 [selected]: row of this micro-batch that each selected token belongs to."""

    level: Level = "token"
    """What has one loss."""

    row_weights: Tensor | None = None
    """float32 [rows]: weight of each loss of a row. None where nothing is learned."""

    row_of_loss: Tensor | None = None
    """int64 [losses]: the row whose weight each loss has; of a unit the first one. None
    where nothing is learned."""

    unit: Tensor | None = None
    """int64 [rows]: number of the unit that each row belongs to, from 0 and ascending.
    None where every row is one."""

    losses_of_rows: Tensor | None = None
    """float32 [rows]: number of losses of each row, of which rows of a unit share one.
    None where nothing is learned."""

    def row_of_output(self, outputs: RequestedOutputs) -> Tensor:
        """Return the row of each number that a model gives.

        Returns:
            int64 [rows] if the outputs are scores, else int64 [selected].
        """
        return self.rows if outputs.scores else self.row_of_token

    @property
    def rows(self) -> Tensor:
        """The numbers of the rows from 0, int64 [rows]."""
        return torch.arange(len(self.row_indices), device=self.row_of_token.device)


class MicroBatches(Sequence[MicroBatch]):
    """The micro-batches of a call. Each is made when it is requested."""

    def __init__(
        self, plan: Sequence[Int64], make: Callable[[Int64], MicroBatch]
    ) -> None:
        """Take the plan and the factory of the micro-batches.

        Args:
            plan: The row indices of each micro-batch.
            make: Makes a micro-batch from its row indices.
        """
        self._plan = plan
        self._make = make

        self.selected: dict[int, Int64] = {}
        """`MicroBatch.selected` of each micro-batch that was requested so far."""

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, i: int) -> MicroBatch:  # type: ignore[override]
        if not 0 <= i < len(self):
            raise IndexError(i)

        # The micro-batches before this one are done, or in flight in a pipeline.
        reach(i, len(self), MICRO_BATCHES)
        batch = self._make(self._plan[i])
        self.selected[i] = batch.selected
        return batch


Loss = Callable[[MicroBatch, TokenOutputs], Tensor]
"""A function that returns a micro-batch's share of the loss, given its outputs."""


def plan_micro_batches(
    lengths: Int64,
    backend: Backend,
    *,
    unit: Int64 | None = None,
    multiple: int = 1,
    equal_lengths: bool = False,
    agree_with_ranks: bool,
) -> list[Int64]:
    """Assign rows to micro-batches. There is at least one micro-batch.

    Args:
        lengths: int64 [rows], tokens of each row.
        backend: Gives the token cap.
        unit: int64 [rows], equal for rows that stay together; None: each is one.
        multiple: The number of micro-batches is a multiple of this.
        equal_lengths: Whether the rows of a micro-batch have the same length.
        agree_with_ranks: Plan as many micro-batches as the rank that needs most.
            Collective.

    Returns:
        The row indices of each micro-batch. They are empty for the micro-batches that a
        rank only needs in order to have as many as the others.

    Raises:
        DataError: A row or a unit exceeds the token cap. With
            `agree_with_ranks` every rank raises if one does, so that no rank waits for
            another that has failed.
    """
    plan: list[Int64] = []
    refusal = None
    cap = resolved(backend.micro_batch_tokens_per_rank)
    try:
        if equal_lengths:
            plan = equal_micro_batches(lengths, cap, unit)
        else:
            plan = micro_batches(lengths, cap, backend.token_slices, unit)
    except DataError as error:
        refusal = error

    count = max(len(plan), 1)
    if agree_with_ranks:
        # A host tensor, so the gloo half of the process group carries it.
        agreed = torch.tensor([count, refusal is not None])
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        count, refused_anywhere = agreed.tolist()
        if refused_anywhere and refusal is None:
            refusal = DataError(
                "another rank refused its rows of this call; its error says why"
            )
    if refusal is not None:
        raise refusal

    count += -count % multiple
    no_rows = np.empty(0, dtype=np.int64)
    return plan + [no_rows] * (count - len(plan))


# ------------------------------------------------------------------------------ packing


@dataclass(frozen=True)
class Packing:
    """Some rows of a call, packed, and where their selected tokens came from.

    The selected tokens are those under the response mask, and every one of them has a
    predecessor in its own row, whose hidden state predicts it.
    """

    tokens: PackedTokens

    selected: Int64
    """[selected]: position of each selected token among all tokens of the call."""

    row_of_token: Int64
    """[selected]: row of the packing that each selected token belongs to."""


def pack_rows(rows: Rows, indices: Int64, *, replays_routing: bool = False) -> Packing:
    """Pack the rows with these indices, at least one.

    Args:
        rows: The rows of a call.
        indices: The rows to pack.
        replays_routing: Whether routers choose what the sampler's did.

    Raises:
        DataError: The response mask is True on the first token of a row.
    """
    chosen = rows
    if not np.array_equal(indices, np.arange(rows.num_rows)):
        chosen = rows.select(indices)

    first_tokens = chosen.offsets[:-1]
    if bool(chosen.response_mask[first_tokens].any()):
        raise DataError(
            "response_mask is True on a row's first token, which nothing comes before"
        )

    row_of_token = chosen.row_of_token
    selected = np.flatnonzero(chosen.response_mask)
    row_of_selected = row_of_token[selected]

    # Distance of each row from its place here to its place in the whole batch.
    shift = rows.offsets[indices] - first_tokens

    experts = chosen.routed_experts if replays_routing else None
    is_routed = None
    if experts is not None:
        # Every token before the last one of its row that was sampled.
        last = np.zeros(chosen.num_rows, np.int64)
        np.maximum.at(last, row_of_selected, selected)
        is_routed = np.arange(chosen.num_tokens) < last[row_of_token]

    tokens = PackedTokens(
        tokens=chosen.tokens,
        positions=np.arange(chosen.num_tokens) - chosen.offsets[row_of_token],
        predecessors=selected - 1,
        targets=chosen.tokens[selected],
        last_tokens=chosen.offsets[1:] - 1,
        offsets=chosen.offsets,
        experts=experts,
        is_routed=is_routed,
        candidates=None if chosen.candidates is None else chosen.candidates[selected],
    )
    return Packing(tokens, selected + shift[row_of_selected], row_of_selected)


def pack_no_rows(rows: Rows) -> Packing:
    """Return one token that is not selected, with the columns of `rows`.

    A rank without rows passes it through the model where the other ranks need its part
    in their collectives.
    """
    nothing = np.empty(0, np.int64)
    token = np.zeros(1, np.int64)
    tokens = PackedTokens(
        tokens=token,
        positions=token,
        predecessors=nothing,
        targets=nothing,
        last_tokens=nothing,
        offsets=offsets_of([1]),
        candidates=None if rows.candidates is None else rows.candidates[:0],
    )
    return Packing(tokens, selected=nothing, row_of_token=nothing)


def loss_columns(rows: TrainingBatch, batch: MicroBatch) -> dict[str, Tensor]:
    """Return the micro-batch's part of each column that a loss reads, on the device.

    Columns per row are [rows], columns per token are [selected].
    """
    kinds = rows.columns()
    device = batch.row_of_token.device
    columns = {}

    for name in LossInputs.columns():
        values = getattr(rows, name)
        if values is None:
            continue

        positions = batch.selected
        if kinds[name].kind is Kind.ROW:
            positions = batch.row_indices
        part = torch.from_numpy(values[positions])
        columns[name] = part.to(device, non_blocking=True)

    return columns


def to_learn(batch: MicroBatch, rows: TrainingBatch, level: Level) -> MicroBatch:
    """Return the micro-batch with what weighs its losses, and with its units.

    Args:
        batch: Some of the rows.
        rows: All rows of the call.
        level: What has one loss.
    """
    indices, device = batch.row_indices, batch.row_of_token.device

    def on_device(values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    weights = on_device(rows.loss_weight[indices])
    row_of_loss = batch.row_of_token if level == "token" else batch.rows
    losses = torch.bincount(row_of_loss, minlength=len(indices)).float()
    if rows.unit is None:
        return replace(
            batch,
            level=level,
            row_weights=weights,
            row_of_loss=row_of_loss,
            losses_of_rows=losses,
        )

    # Rows of one unit are neighbours.
    names = rows.unit[indices]
    begins = np.diff(names, prepend=names[:1] - 1) != 0
    unit = np.cumsum(begins) - 1
    if level == "unit":
        row_of_loss = on_device(np.flatnonzero(begins))
        losses = on_device((1 / np.bincount(unit)[unit]).astype(np.float32))
    return replace(
        batch,
        level=level,
        row_weights=weights,
        row_of_loss=row_of_loss,
        losses_of_rows=losses,
        unit=on_device(unit),
    )
