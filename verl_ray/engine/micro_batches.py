"""The micro-batches of a call: some rows each, on the device, with the tokens that are read.

Invariant: a micro-batch comes to the device when it is asked for, and knows which rows and tokens of the call are its
own, so results go back to their places. Deliberately not here: which rows go together, and what is computed of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ray.data.batch import Int64
from verl_ray.models.role_model import PackedRows
from verl_ray.ops.outputs import Outputs, TokenOutputs
from verl_ray.profiling.progress import reach

MICRO_BATCHES = "micro-batches"


@dataclass(frozen=True)
class MicroBatch:
    """Some rows on the device, with the tokens that are read."""

    packed: PackedRows
    index: Int64  # [rows] which rows of the whole batch
    read: Int64  # [read] their places among the tokens of the whole batch
    row: Tensor  # int64 [read] which of these rows each belongs to
    weight: Tensor | None = None  # float32 [rows] of each loss of the row, where they are learned from

    def row_of_losses(self, outputs: Outputs) -> Tensor:
        """int64 [losses]: which row each loss of such outputs is of, one per token that is read, or one per row."""
        return torch.arange(len(self.index), device=self.row.device) if outputs.scores else self.row


class MicroBatches(Sequence[MicroBatch]):
    """The micro-batches of a call; each comes to the device when it is asked for."""

    def __init__(self, plan: Sequence[Int64], make: Callable[[Int64], MicroBatch]) -> None:
        self._plan, self._make = plan, make
        self.read: dict[int, Int64] = {}
        """Of those that were asked for."""

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, i: int) -> MicroBatch:  # type: ignore[override]
        if not 0 <= i < len(self):
            raise IndexError(i)
        reach(i, len(self), MICRO_BATCHES)  # those before it are done, or under way in a pipeline
        batch = self._make(self._plan[i])
        self.read[i] = batch.read
        return batch


Loss = Callable[[MicroBatch, TokenOutputs], Tensor]
"""What a micro-batch adds to the loss, given its outputs."""
