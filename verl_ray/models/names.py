"""The names that a checkpoint gives to the parameters of a module.

Invariant: the checkpoint tensors of a parameter are boxes that do not overlap and
together are the whole parameter. Most parameters are one tensor under their own name.
There are two exceptions. transformers holds the weights of all experts of a layer in
one parameter, whereas Hugging Face checkpoints (and rollout engines) have a tensor per
expert. In a layer with an adapter, the weight itself is called `base_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Box = tuple[slice, ...]
"""A part of a tensor: one slice per dimension, with start and stop."""

TYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The types of parameters by their names in safetensors."""

_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


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


def checkpoint_tensors(
    name: str, shape: Sequence[int], box: Box | None = None
) -> tuple[CheckpointTensor, ...]:
    """List the checkpoint tensors that make up a parameter of a module.

    Args:
        name: The parameter's name in the module.
        shape: The parameter's shape.
        box: Leave out experts that lie outside of this box.

    Returns:
        The tensors. There are none for a parameter of an adapter, which is no part of
        the model.
    """
    if is_adapter(name):
        return ()

    experts = _EXPERTS.fullmatch(name)
    if experts is None or len(shape) != 3:
        own_name = name.replace(".base_layer.", ".")
        origin = (0,) * len(shape)
        return (CheckpointTensor(own_name, origin, tuple(shape), tuple(shape)),)

    prefix, kind = experts.groups()
    # The rows of `gate_up_proj` are those of the gate, then those of the up projection.
    projections = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
    num_experts, all_rows, columns = shape
    rows = all_rows // len(projections)

    chosen = range(num_experts)
    if box is not None:
        chosen = chosen[box[0]]
    return tuple(
        CheckpointTensor(
            name=f"{prefix}.{expert}.{projection}.weight",
            start=(expert, number * rows, 0),
            sides=(1, rows, columns),
            shape=(rows, columns),
        )
        for expert in chosen
        for number, projection in enumerate(projections)
    )


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter and not to the base model."""
    return ".lora_A." in name or ".lora_B." in name
