"""The batch algebra: how the rows of a step become mini-batches and micro-batches.

Invariant: sizes are global unless the name ends in `_per_rank`, and one unit, the row,
runs through all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ray.config.roles import ModelRole
from verl_ray.config.schema import Config
from verl_ray.config.section import Auto


@dataclass(frozen=True)
class RoleBatch:
    """The sizes of one role's batches within one step."""

    role: str
    ranks: int
    """Number of processes."""
    dp_size: int
    """Number of data-parallel ranks, each of which has rows of its own."""
    rows_per_rank: int
    """Rows of one step on the rank that has the most."""
    mini_batch_size: int | None
    """Rows per optimizer step over all ranks; None if the role does not learn."""
    mini_batch_size_per_rank: int | None
    updates_per_step: int
    """Optimizer steps per training step."""
    micro_batch_tokens_per_rank: int | Auto
    """The most tokens of one micro-batch."""


@dataclass(frozen=True)
class BatchAlgebra:
    """The sizes of one training step."""

    rows: int
    """Number of rows that the step learns from."""
    max_row_tokens: int
    """Length of the longest row that can occur, in tokens."""
    roles: tuple[RoleBatch, ...]


def batch_algebra(config: Config) -> BatchAlgebra:
    """Return the sizes that follow from `config`.

    Divisions round up, because the rank with the most rows counts.
    """
    rows = config.rows_per_step
    max_row_tokens, _ = config.longest_row
    roles = tuple(
        _role_batch(name, role, rows) for name, role in config.model_roles.items()
    )
    return BatchAlgebra(rows, max_row_tokens, roles)


def row_tokens_per_rank(config: Config, role: str) -> int:
    """Return the tokens on a rank of what must be computed at once, at its longest.

    It is a row, or the rows that a loss compares.
    """
    longest, _ = config.longest_row
    slices = config.model_roles[role].backend.token_slices
    return -(-config.rows_per_unit * longest // slices)


def _role_batch(name: str, role: ModelRole, rows: int) -> RoleBatch:
    # Ranks that compute the same rows together count once.
    dp_size = max(1, role.num_ranks // role.peers)

    mini_batch_size = role.rows_per_update(rows)
    mini_batch_size_per_rank = None
    if mini_batch_size is not None:
        mini_batch_size_per_rank = -(-mini_batch_size // dp_size)

    return RoleBatch(
        role=name,
        ranks=role.num_ranks,
        dp_size=dp_size,
        rows_per_rank=-(-rows // dp_size),
        mini_batch_size=mini_batch_size,
        mini_batch_size_per_rank=mini_batch_size_per_rank,
        updates_per_step=role.updates_per_step(rows),
        micro_batch_tokens_per_rank=role.backend.micro_batch_tokens_per_rank,
    )
