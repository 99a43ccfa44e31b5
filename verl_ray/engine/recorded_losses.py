"""Losses of single rows, for people to read.

Invariant: recording them changes no loss, and the host waits for the device once, after
the last micro-batch. Rows that are not to be recorded cost nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verl_ray.algorithms.losses import TokenLoss
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Float32, TrainingBatch
from verl_ray.engine.base import LOSS
from verl_ray.engine.micro_batches import MicroBatch
from verl_ray.learning.objectives import Level


class RecordedLosses:
    """Losses and metrics of the rows of a call that `TrainingBatch.recorded` numbers.

    A row has those of its selected tokens, in their order. Where an objective has one
    loss per unit, the first row of each unit has it.
    """

    def __init__(self, rows: TrainingBatch, level: Level) -> None:
        """Take the rows of the call, and what has one loss."""
        self._rows = rows
        self._level = level
        self._names: list[str] = []
        self._numbers: list[Int64] = []
        self._values: list[Tensor] = []
        """[names, recorded losses] of each micro-batch, on the device."""

    def add(self, batch: MicroBatch, token_loss: TokenLoss) -> None:
        """Add the losses of a micro-batch."""
        if self._rows.recorded is None:
            return
        numbers = self._rows.recorded[self._row_of_loss(batch)]
        places = np.flatnonzero(numbers >= 0)
        if not len(places):
            return
        values = {LOSS: token_loss.loss.detach(), **token_loss.metrics}
        index = torch.from_numpy(places).to(token_loss.loss.device, non_blocking=True)
        columns = [column.float().index_select(0, index) for column in values.values()]
        self._names = list(values)
        self._numbers.append(numbers[places])
        self._values.append(torch.stack(columns))

    def _row_of_loss(self, batch: MicroBatch) -> Int64:
        """Return the row of the call that each loss belongs to, int64 [losses]."""
        if self._level == "token":
            return self._rows.row_of_token[batch.selected]
        indices = batch.row_indices
        if self._rows.unit is None:
            return indices
        # Rows of one unit are neighbours, and the first one stands for it.
        names = self._rows.unit[indices]
        return indices[np.diff(names, prepend=names[:1] - 1) != 0]

    def by_row(self) -> dict[int, dict[str, Float32]]:
        """Return the values of each row by its number, float32 [losses] by name.

        It is empty where no loss is computed, as on pipeline stages before the last.
        """
        if not self._values:
            return {}
        values = torch.cat(self._values, dim=1).cpu().numpy()
        numbers = np.concatenate(self._numbers)
        return {
            int(number): dict(
                zip(self._names, values[:, numbers == number], strict=True)
            )
            for number in np.unique(numbers)
        }
