"""The names that a checkpoint gives to the parameters of a module.

Invariant: the checkpoint tensors of a parameter are boxes that do not overlap and
together are the whole parameter. Most parameters are one tensor under their own name.
There are two exceptions. transformers may hold what a family publishes as several
tensors in one parameter, such as the weights of all experts of a layer. In a layer with
an adapter, the weight itself is called `base_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Box = tuple[slice, ...]
"""A part of a tensor: one slice per dimension, with start and stop."""

TYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The types of parameters by their names in safetensors."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, as a box of a module's parameter."""

    name: str

    start: tuple[int, ...]
    """The first element of the box in the parameter."""

    sides: tuple[int, ...]
    """The size of the box, with as many dimensions as the parameter."""

    shape: tuple[int, ...]
    """The shape of the tensor, which lacks leading sides of 1."""

    def overlap(self, box: Box) -> tuple[Box, Box]:
        """Intersect this tensor with a box of the parameter.

        Returns:
            The intersection relative to `box`, and relative to the checkpoint's tensor.
            Both are empty if there is none.
        """
        within_box = []
        within_tensor = []
        for start, side, own in zip(self.start, self.sides, box, strict=True):
            first = max(start, own.start)
            last = max(first, min(start + side, own.stop))
            within_box.append(slice(first - own.start, last - own.start))
            within_tensor.append(slice(first - start, last - start))

        dropped = len(self.sides) - len(self.shape)
        dropped_sides = within_tensor[:dropped]
        if any(side.start >= side.stop for side in dropped_sides):
            # The intersection is empty in a dimension that the tensor does not have.
            return tuple(within_box), tuple(slice(0, 0) for _ in self.shape)
        return tuple(within_box), tuple(within_tensor[dropped:])


@dataclass(frozen=True)
class CheckpointNames:
    """The tensors that the parameters of a model are published as."""

    parts: Mapping[str, tuple[CheckpointTensor, ...]] = field(default_factory=dict)
    """The tensors of each parameter that is not one tensor under its own name, in the
    order of their first elements."""

    def tensors(
        self, name: str, shape: Sequence[int], box: Box | None = None
    ) -> tuple[CheckpointTensor, ...]:
        """List the checkpoint tensors that make up a parameter of a module.

        Args:
            name: The parameter's name in the module.
            shape: The parameter's shape.
            box: Leave out tensors that lie outside of this box in its first dimension.

        Returns:
            The tensors. There are none for a parameter of an adapter, which is no part
            of the model.
        """
        if is_adapter(name):
            return ()

        own_name = name.replace(".base_layer.", ".")
        if own_name not in self.parts:
            origin = (0,) * len(shape)
            return (CheckpointTensor(own_name, origin, tuple(shape), tuple(shape)),)

        parts = self.parts[own_name]
        if box is None:
            return parts
        first, last = box[0].start, box[0].stop
        return tuple(
            part
            for part in parts
            if part.start[0] < last and first < part.start[0] + part.sides[0]
        )


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether one of these patterns is found in a name, as transformers looks."""
    return any(re.search(pattern, name) for pattern in patterns)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter and not to the base model."""
    return ".lora_A." in name or ".lora_B." in name
