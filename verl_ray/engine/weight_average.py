"""The exponential moving average of the weights that an optimizer steps.

It is that of mean teachers (arXiv:1703.01780, section 2): after each step
average = decay * average + (1 - decay) * weights.

Invariant: the average is one more moment of the optimizer. So each rank has it of what
it steps, in float32, and it is saved, loaded and offloaded as the other moments are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

AVERAGE = "average"
"""The key of the average in the optimizer's state of a parameter."""

Stepped = Iterable[tuple[Tensor, dict[str, Tensor]]]
"""What an optimizer steps: the weights of each parameter, in place, and its state."""


@torch.no_grad()
def begin_average(stepped: Stepped) -> None:
    """Let the average be the weights, in their sharding."""
    for weights, state in stepped:
        state[AVERAGE] = torch.zeros_like(weights, requires_grad=False)
        _local(state[AVERAGE]).copy_(_local(weights))


@torch.no_grad()
def update_average(stepped: Stepped, decay: float) -> None:
    """Move the average towards the weights that a step has left."""
    for weights, state in stepped:
        _local(state[AVERAGE]).lerp_(_local(weights), 1 - decay)


@torch.no_grad()
def exchange_average(stepped: Stepped) -> None:
    """Exchange the values of weights and average; twice changes no bit."""
    for weights, state in stepped:
        own, average = _local(weights), _local(state[AVERAGE])
        former = own.clone()
        own.copy_(average)
        average.copy_(former)


def _local(value: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return value._local_tensor if isinstance(value, DTensor) else value
