"""Manifests: a model's weights under their Hugging Face names.

Invariant: a manifest is the same on every rank, and for every way in which an engine
lays out the model. The slices that the ranks of one engine own cover each parameter
exactly once. Deliberately not here: tensors, and how they travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Parameter:
    """One parameter: its Hugging Face name, its global shape, and how it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the torch dtype in which it is sent."""
    tied_to: str | None = None
    """The parameter that holds the same storage; a tied parameter is never sent."""
    adapter: bool = False
    """Whether it is part of an adapter that is sent apart from the model.

    Its name is then that in the adapter's file.
    """

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slice:
    """A box of a parameter, in global indices: `start` [dims] and `shape` [dims]."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The parameters of a model, in the order of its layers."""

    parameters: tuple[Parameter, ...]

    @property
    def sent(self) -> tuple[Parameter, ...]:
        """The parameters that travel: all but the tied ones."""
        return tuple(p for p in self.parameters if p.tied_to is None)

    @property
    def adapter(self) -> Manifest:
        """The manifest of the adapter alone."""
        return Manifest(tuple(p for p in self.parameters if p.adapter))

    @property
    def has_model(self) -> bool:
        """Whether it holds more than an adapter."""
        return not all(p.adapter for p in self.parameters)


def cast_for_engine(manifest: Manifest, dtype: str) -> Manifest:
    """Return the manifest as it is sent to an engine that keeps its model in `dtype`.

    What the engine would round to bfloat16 is rounded before it travels. An adapter is
    small, and keeps its dtype.
    """
    parameters: list[Parameter] = []
    for parameter in manifest.parameters:
        is_rounded = (parameter.dtype, dtype) == ("float32", "bfloat16")
        if is_rounded and not parameter.adapter:
            parameters.append(replace(parameter, dtype=dtype))
        else:
            parameters.append(parameter)
    return Manifest(tuple(parameters))
