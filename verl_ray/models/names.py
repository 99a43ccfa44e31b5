"""What a checkpoint calls the parameters of a module.

Invariant: the pieces of a parameter are boxes that do not overlap and together are the whole of it. Most parameters are
one piece under their own name. But transformers holds the weights of all experts of a layer in one tensor, which
Hugging Face checkpoints (and rollout engines) know expert by expert; and in a layer with an adapter the weight itself
is called `base_layer`.
Deliberately not here: reading, writing and sharding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

Box = tuple[slice, ...]

_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint, and the box of a module's parameter that it is."""

    name: str
    start: tuple[int, ...]  # in the parameter
    sides: tuple[int, ...]  # of the box, as many as the parameter has
    shape: tuple[int, ...]  # of the checkpoint's tensor, which lacks leading sides of 1

    def overlap(self, box: Box) -> tuple[Box, Box]:
        """Where the piece and a box of the parameter meet: within the box, and within the checkpoint's tensor. Both are
        empty where they do not."""
        first = [max(start, own.start) for start, own in zip(self.start, box, strict=True)]
        last = [
            max(low, min(start + side, own.stop))
            for low, start, side, own in zip(first, self.start, self.sides, box, strict=True)
        ]
        here = tuple(slice(a - own.start, b - own.start) for a, b, own in zip(first, last, box, strict=True))
        there = [slice(a - start, b - start) for a, b, start in zip(first, last, self.start, strict=True)]
        dropped = len(self.sides) - len(self.shape)
        if any(side.start >= side.stop for side in there[:dropped]):
            return here, tuple(slice(0, 0) for _ in self.shape)
        return here, tuple(there[dropped:])


def pieces(name: str, shape: Sequence[int], box: Box | None = None) -> tuple[Piece, ...]:
    """The tensors of a checkpoint that make up the module's parameter of this name and shape; none for an adapter's,
    which is no part of the model. Of experts, those in the box alone."""
    if is_adapter(name):
        return ()
    experts = _EXPERTS.fullmatch(name)
    if experts is None or len(shape) != 3:
        own = name.replace(".base_layer.", ".")
        return (Piece(own, (0,) * len(shape), tuple(shape), tuple(shape)),)
    prefix, kind = experts.groups()
    count, rows, columns = shape
    names = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
    rows //= len(names)
    return tuple(
        Piece(f"{prefix}.{expert}.{part}.weight", (expert, i * rows, 0), (1, rows, columns), (rows, columns))
        for expert in (range(count) if box is None else range(count)[box[0]])
        for i, part in enumerate(names)
    )


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, and not to the model that it adapts."""
    return ".lora_A." in name or ".lora_B." in name
