"""Which rows a rank computes, and whether its answer is the one that is read.

Invariant: ranks with the same `row_index` (tensor-, pipeline-, context- and sequence-parallel peers) get the same rows,
and exactly one of them answers. Deliberately not here: process groups.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """A worker may carry one as the attribute `topology`; without it every rank has rows of its own and answers."""

    row_index: int  # in [0, row_count)
    row_count: int
    answers: bool
    quadratic: float = 0.0  # work of a pair of tokens as a fraction of that of a token: what attention adds
