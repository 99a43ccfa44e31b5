"""The micro-batches of one call: which rows each has, and its tensors on the device.

Invariant: a micro-batch moves to the device when it is requested. It knows the
positions of its rows and tokens in the batch of the call, so results can be put back in
order. Where ranks compute together, all have the same number of micro-batches.

Deliberately not here: how rows become model inputs (`row_packing.py`), and what is
computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.backends import Backend
from verl_ray.config.section import resolved
from verl_ray.data.batch import Int64
from verl_ray.data.packing import micro_batches
from verl_ray.errors import DataError
from verl_ray.models.role_model import PackedRows
from verl_ray.ops.outputs import RequestedOutputs, TokenOutputs
from verl_ray.profiling.progress import reach

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

    row_weights: Tensor | None = None
    """float32 [rows]: weight of each loss of a row. None where nothing is learned."""

    sequence_of_row: Tensor | None = None
    """int64 [rows]: number of the sequence that each row belongs to, from 0 and equal
    for neighbours. None where every row is one."""

    def row_of_loss(self, outputs: RequestedOutputs) -> Tensor:
        """Return the row of each loss that is computed from these outputs.

        Returns:
            int64 [rows] if the outputs are scores, which have one loss per row, else
            int64 [selected].
        """
        if outputs.scores:
            return torch.arange(len(self.row_indices), device=self.row_of_token.device)
        return self.row_of_token

    def sequence_of_loss(self, row: Tensor) -> Tensor:
        """Return the sequence that losses judge as a whole, for each loss of a row."""
        if self.sequence_of_row is None:
            return row
        return self.sequence_of_row.index_select(0, row)


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
    rows_per_unit: int = 1,
    sequence: Int64 | None = None,
    multiple: int = 1,
    agree_with_ranks: bool,
) -> list[Int64]:
    """Assign rows to micro-batches. There is at least one micro-batch.

    Args:
        lengths: int64 [rows], tokens of each row.
        backend: Gives the token cap.
        rows_per_unit: Number of adjacent rows that stay together.
        sequence: int64 [rows], equal for rows of one sequence, which stay together;
            None for none.
        multiple: The number of micro-batches is a multiple of this.
        agree_with_ranks: Plan as many micro-batches as the rank that needs most.
            Collective.

    Returns:
        The row indices of each micro-batch. They are empty for the micro-batches that a
        rank only needs in order to have as many as the others.

    Raises:
        DataError: A row, a unit or a sequence exceeds the token cap. With
            `agree_with_ranks` every rank raises if one does, so that no rank waits for
            another that has failed.
    """
    plan: list[Int64] = []
    refusal = None
    try:
        plan = micro_batches(
            lengths,
            resolved(backend.micro_batch_tokens_per_rank),
            rows_per_unit,
            backend.token_slices,
            sequence,
        )
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
