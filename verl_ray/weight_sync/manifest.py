"""What a model's weights are, under their Hugging Face names, whichever way an engine holds them.

Invariant: a manifest is the same on every rank and for every layout of the same model; the slices that the ranks of
one engine own cover each parameter exactly once. Deliberately not here: tensors, and how they travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Parameter:
    """One parameter: its Hugging Face name, global shape, and dtype as it is sent (a torch dtype's name)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    tied_to: str | None = None  # the parameter that holds the same storage; such a one is never sent itself
    adapter: bool = False  # part of an adapter that is sent beside the model, under the name in an adapter's file

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slice:
    """A box of a parameter, in global indices: `start` [dims] and `shape` [dims]."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


def as_loaded(manifest: Manifest, dtype: str) -> Manifest:
    """What travels to an engine that keeps its model in `dtype`: what it would round is rounded before. An adapter is
    small, and stays as it is."""
    rounded = ("float32", "bfloat16")
    return Manifest(
        tuple(
            replace(one, dtype=dtype) if (one.dtype, dtype) == rounded and not one.adapter else one
            for one in manifest.parameters
        )
    )


@dataclass(frozen=True)
class Manifest:
    parameters: tuple[Parameter, ...]

    @property
    def sent(self) -> tuple[Parameter, ...]:
        """The parameters that travel: all but the tied ones."""
        return tuple(p for p in self.parameters if p.tied_to is None)

    @property
    def adapter(self) -> Manifest:
        """The adapter alone."""
        return Manifest(tuple(p for p in self.parameters if p.adapter))

    @property
    def has_model(self) -> bool:
        """Whether there is more than an adapter in it."""
        return not all(p.adapter for p in self.parameters)
