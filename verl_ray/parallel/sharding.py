"""Rows of packed tokens, and what partitions them over the ranks that compute together.

Invariant: `postprocess` undoes `preprocess`. A loss sees complete rows, however their
tokens were partitioned in between, and gradients flow back through it. A manager leaves
nothing in the process: what a layer must know travels with its input. The base class
partitions nothing, for ranks that compute their rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np

from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Bool, Int16, Int32
from verl_ray.ops.outputs import TokenOutputs
from verl_ray.parallel.head_exchange import HeadExchange


@dataclass(frozen=True)
class PackedTokens:
    """Rows one behind the other, or one rank's slice of them. Columns are int64.

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

    experts: Int16 | None = None
    """[tokens, layers, k]: the experts that a sampler chose for each token, unlike all
    others in int16; None = routers choose themselves."""

    is_routed: Bool | None = None
    """[tokens]: whether these are known of a token; None without them."""

    candidates: Int32 | None = None
    """[selected, candidates]: further tokens in the places of the selected ones, in
    int32; None = none."""

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
            experts=None
            if self.experts is None
            else np.pad(self.experts, ((0, missing), (0, 0), (0, 0))),
            is_routed=None
            if self.is_routed is None
            else np.pad(self.is_routed, (0, missing)),
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
