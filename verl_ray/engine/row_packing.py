"""Packing of a call's rows into the flat inputs of a model.

Invariant: packed rows lie one behind the other without padding. The selected tokens are
those under the response mask, and every one of them has a predecessor in its own row,
whose hidden state predicts it.

Deliberately not here: devices, except for the columns of a loss, and which rows share a
micro-batch (`micro_batches.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from verl_ray.algorithms.objectives import LossInputs
from verl_ray.data.batch import Int64, Kind, offsets_of
from verl_ray.data.stages import Rows, TrainingBatch
from verl_ray.engine.micro_batches import MicroBatch
from verl_ray.errors import DataError
from verl_ray.parallel.sharding_manager import PackedTokens


@dataclass(frozen=True)
class Packing:
    """Some rows of a call, packed, and where their selected tokens came from."""

    tokens: PackedTokens

    selected: Int64
    """[selected]: position of each selected token among all tokens of the call."""

    row_of_token: Int64
    """[selected]: row of the packing that each selected token belongs to."""


def pack_rows(rows: Rows, indices: Int64) -> Packing:
    """Pack the rows with these indices, at least one.

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

    tokens = PackedTokens(
        tokens=chosen.tokens,
        positions=np.arange(chosen.num_tokens) - chosen.offsets[row_of_token],
        predecessors=selected - 1,
        targets=chosen.tokens[selected],
        last_tokens=chosen.offsets[1:] - 1,
        offsets=chosen.offsets,
    )
    return Packing(tokens, selected + shift[row_of_selected], row_of_selected)


def pack_no_rows() -> Packing:
    """Return one token that is not selected.

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


def to_learn(batch: MicroBatch, rows: TrainingBatch) -> MicroBatch:
    """Return the micro-batch with the weights of its rows, and their sequences."""
    indices, device = batch.row_indices, batch.row_of_token.device
    weights = torch.from_numpy(rows.loss_weight[indices])
    sequence = None
    if rows.sequence is not None:
        # Numbered from 0, as rows are; rows of one sequence are neighbours.
        _, number = np.unique(rows.sequence[indices], return_inverse=True)
        sequence = torch.from_numpy(number.reshape(-1).astype(np.int64))
        sequence = sequence.to(device, non_blocking=True)
    return replace(
        batch,
        row_weights=weights.to(device, non_blocking=True),
        sequence_of_row=sequence,
    )
