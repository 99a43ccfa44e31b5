"""The place of a rank among the data-parallel ranks of its role.

Invariant: ranks with the same `dp_rank` (tensor-, pipeline-, context- and
sequence-parallel peers) get the same rows, and exactly one of them returns results.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The rows that a rank gets, and whether it returns the results for them.

    A worker may carry one as its attribute `topology`. Without it, every rank has its
    own rows and returns results.
    """

    dp_rank: int
    """Data-parallel rank, in [0, dp_size)."""

    dp_size: int
    """Number of parts that a batch's rows are partitioned into."""

    returns_results: bool
    """Whether this rank returns the results of its data-parallel rank."""

    quadratic: float = 0.0
    """Cost of a pair of tokens (attention) relative to the cost of one token."""
