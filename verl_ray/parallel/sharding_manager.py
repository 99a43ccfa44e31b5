"""How the tokens of a micro-batch are spread over the ranks that compute it together.

Invariant: `postprocess` undoes what `preprocess` did: a loss sees complete rows, whatever was sliced in between, and
gradients flow back through it. Managers keep nothing in the process: what a layer has to know travels with its input.
The base does nothing, for ranks that have their rows to themselves. Deliberately not here: which ranks those are
(`Topology`), and how parameters are sharded (the backends).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np

from verl_ray.data.batch import Int64
from verl_ray.ops.outputs import TokenOutputs
from verl_ray.parallel.exchange import HeadExchange


@dataclass(frozen=True)
class PackedTokens:
    """Rows one behind the other, as a model takes them, or one rank's slice of them with the `offsets` of the whole,
    from which attention is planned. All int64."""

    tokens: Int64  # [tokens]
    positions: Int64  # [tokens] within the row
    before: Int64  # [read], ascending: the token before each token that is read
    targets: Int64  # [read]: ids of the tokens that are read
    ends: Int64  # [rows], ascending: the last token of each row
    offsets: Int64  # [rows of the whole + 1]: where each begins, and the total

    def filled_up(self, multiple: int) -> Self:
        """With as many tokens behind the last row as make it a multiple, in a row of their own that nobody reads."""
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
    """`with manager:` around forward and backward pass; `preprocess` before the one, `postprocess` after it. A block
    inside another leaves it as it found it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def preprocess(self, rows: PackedTokens) -> PackedTokens:
        """The part that this rank computes, given its rows."""
        return rows

    def postprocess(self, outputs: TokenOutputs) -> TokenOutputs:
        """The outputs of the rows that this rank gave, whole and in their order, given those of its part."""
        return outputs

    @property
    def exchange(self) -> HeadExchange | None:
        """What attention needs in order to see the peers' tokens; None where it has them all."""
        return None
