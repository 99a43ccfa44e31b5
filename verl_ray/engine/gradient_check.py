"""The search for a gradient that is not finite.

Invariant: every rank returns the same description, so all report the same skipped step.

Deliberately not here: the decision to skip a step, which follows from the norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from verl_ray.profiling.progress import touch


def describe_bad_gradient(
    gradients: Iterable[tuple[str, Tensor | None]],
    names: Sequence[str],
    *,
    rank: int,
    world_size: int,
) -> str:
    """Describe the first parameter whose gradient is not finite on some rank.

    Collective.

    Args:
        gradients: This rank's part of each gradient with the name of its parameter.
        names: The names of all parameters of the model, in its order.
        rank: This rank.
        world_size: The number of ranks.
    """
    first = len(names)
    for name, gradient in gradients:
        touch()
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            first = min(first, names.index(name))

    # The minimum over (parameter, rank), encoded in one number. It is a host tensor, so
    # the gloo half of the process group carries it.
    encoded = torch.tensor(first * world_size + rank)
    if world_size > 1:
        dist.all_reduce(encoded, dist.ReduceOp.MIN)
    first, first_rank = divmod(int(encoded), world_size)

    if first == len(names):
        return "the gradient norm is not finite, though every gradient is"
    return f"the gradient of {names[first]} is not finite on rank {first_rank}"
