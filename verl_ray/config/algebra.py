"""The batch algebra: how the rows of one step become mini-batches and micro-batches, role by role.

Invariant: sizes are global unless the name ends in `_per_rank`, and one unit, the row, runs through all
of them. Deliberately not here: whether the numbers can run (`rules`).
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ray.config.roles import ModelRole
from verl_ray.config.schema import Config


@dataclass(frozen=True)
class RoleBatch:
    """What one role does with the rows of one step."""

    role: str
    ranks: int
    shares: int
    """Ranks that have rows of their own, with those that share them counted once."""
    rows_per_rank: int
    """Of one step, on the rank that gets the most."""
    mini_batch_size: int | None
    """Rows per optimizer step, over all ranks; null for a role that does not learn."""
    mini_batch_size_per_rank: int | None
    updates_per_step: int
    """Optimizer steps per training step."""
    micro_batch_tokens_per_rank: int


@dataclass(frozen=True)
class BatchAlgebra:
    """The sizes of one training step."""

    rows: int
    """That are learned from."""
    max_row_tokens: int
    """The longest row that can occur, in tokens."""
    roles: tuple[RoleBatch, ...]


def batch_algebra(config: Config) -> BatchAlgebra:
    """The sizes that `config` asks for. Divisions round up, as the fullest rank counts."""
    rows = config.rows_per_step
    roles = tuple(_role(name, role, rows) for name, role in config.model_roles.items())
    return BatchAlgebra(rows, config.longest_row[0], roles)


def _role(name: str, role: ModelRole, rows: int) -> RoleBatch:
    mini = role.rows_per_update(rows)
    shares = max(1, role.num_ranks // role.peers)
    return RoleBatch(
        role=name,
        ranks=role.num_ranks,
        shares=shares,
        rows_per_rank=-(-rows // shares),
        mini_batch_size=mini,
        mini_batch_size_per_rank=None if mini is None else -(-mini // shares),
        updates_per_step=role.updates_per_step(rows),
        micro_batch_tokens_per_rank=role.backend.micro_batch_tokens_per_rank,
    )
