"""The names and shapes that transformers gives to the tensors of a model it writes.

Invariant: they are transformers' own. Each parameter is filled with numbers that tell
its elements apart, and goes through the conversion with which transformers saves a
model; where the numbers come out is where the elements are published. The numbers are
those of small tensors, since no conversion depends on the size of a matrix.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_ray.errors import ModelError
from verl_ray.models.names import CheckpointNames, CheckpointTensor, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SIDE = 12
"""Longest side of a small tensor, except the first one of three: that of experts. It
can be cut into 2, 3, 4 or 6 parts."""


def checkpoint_names(hf: PreTrainedModel) -> CheckpointNames:
    """Find the tensors that the parameters of a model are published as.

    Args:
        hf: The model, whose parameters may have no memory.

    Raises:
        ModelError: A tensor is not a part of one parameter with its elements in order.
    """
    from transformers.core_model_loading import revert_weight_conversion

    shapes = _published_shapes(hf)
    numbers: dict[str, Tensor] = {}
    first: list[tuple[int, str]] = []
    total = 0
    for name, shape in shapes.items():
        small = _small(shape)
        count = math.prod(small)
        numbers[name] = torch.arange(total, total + count).view(small)
        first.append((total, name))
        total += count

    written = revert_weight_conversion(hf, dict(numbers))
    starts = torch.tensor([start for start, _ in first])

    parts: dict[str, list[CheckpointTensor]] = defaultdict(list)
    for published, tensor in written.items():
        place = int(torch.searchsorted(starts, int(tensor.min()), right=True)) - 1
        start, name = first[place]
        parts[name].append(
            _part(published, tensor - start, name, numbers[name].shape, shapes[name])
        )

    for name, tensors in parts.items():
        tensors.sort(key=lambda part: part.start)
        covered = sum(math.prod(part.sides) for part in tensors)
        if covered != math.prod(shapes[name]):
            raise ModelError(f"{name} is published only in part, as {tensors[0].name}")
    return CheckpointNames(
        {
            name: tuple(tensors)
            for name, tensors in parts.items()
            if [part.name for part in tensors] != [name]
        }
    )


def _published_shapes(hf: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a checkpoint has, by the names without adapters."""
    return {
        name.replace(".base_layer.", "."): tuple(value.shape)
        for name, value in hf.state_dict().items()
        if not is_adapter(name) and value.numel()
    }


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the numbers that stand for a parameter."""
    whole_sides = 1 if len(shape) > 2 else 0
    sides = (min(side, _SIDE) for side in shape[whole_sides:])
    return (*shape[:whole_sides], *sides)


def _part(
    published: str,
    numbers: Tensor,
    name: str,
    small: Sequence[int],
    shape: Sequence[int],
) -> CheckpointTensor:
    """Return the box of a parameter that a published tensor is.

    Args:
        published: The tensor's name.
        numbers: Its elements, as indices into the flat small parameter.
        name: The parameter's name.
        small: The shape of the small parameter.
        shape: The shape of the parameter.
    """
    whole = torch.arange(math.prod(small)).view(tuple(small))
    lowest = _position(int(numbers.min()), small)
    highest = _position(int(numbers.max()), small)
    box = tuple(slice(low, high + 1) for low, high in zip(lowest, highest, strict=True))
    sides = [part.stop - part.start for part in box]

    is_box = torch.equal(whole[box].flatten(), numbers.flatten())
    dropped = len(small) - numbers.dim()
    if not is_box or dropped < 0 or math.prod(sides[:dropped]) != 1:
        raise ModelError(
            f"{published} is not a part of {name} with its elements in order, and such"
            " a tensor is neither read nor written here"
        )

    start, real_sides = [], []
    for part, few, real in zip(box, small, shape, strict=True):
        ends = [real * end for end in (part.start, part.stop)]
        if any(end % few for end in ends):
            raise ModelError(
                f"{published} is {part.stop - part.start} / {few} of {name}, whose side"
                f" {real} is not divisible"
            )
        start.append(ends[0] // few)
        real_sides.append((ends[1] - ends[0]) // few)
    return CheckpointTensor(
        published, tuple(start), tuple(real_sides), tuple(real_sides[dropped:])
    )


def _position(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the place of a flat index in a tensor."""
    position = []
    for side in reversed(shape):
        position.append(index % side)
        index //= side
    return tuple(reversed(position))
