"""Manifests: a model's weights under their Hugging Face names, and in buckets of about
equal size.

Invariant: a manifest is the same on every rank, and for every way in which an engine
lays out the model. The slices that the ranks of one engine own cover each parameter
exactly once. A plan of buckets is a pure function of manifest, bucket size and the
experts that receivers hold, so every process makes the same one. Parameters with the
same receivers keep the manifest's order, which is the order of the layers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from verl_ray.errors import WeightSyncError

# The driver plans buckets, and does without torch.
if TYPE_CHECKING:
    import torch

_BITS = re.compile(r"\d+")
"""The size of an element in the name of its dtype, as in bfloat16 or float8_e4m3fn."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""The number of an expert in the name of a parameter that is its own."""

Experts = frozenset[int] | None
"""Numbers of the experts that a receiver holds of each layer; None if it takes the
parameters of all."""


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

    @property
    def expert(self) -> int | None:
        """Number of the expert that it belongs to; None if it is of no or of several.

        One tensor may have the weights of all experts of a layer.
        """
        number = _EXPERT.search(self.name)
        return None if number is None else int(number[1])


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


# ------------------------------------------------------------------------------ buckets

ALIGNMENT_BYTES = 64
"""Every parameter begins at a multiple of this, the size of a cache line."""


@dataclass(frozen=True)
class Entry:
    """One parameter and its place in a bucket, row-major, in the manifest's dtype."""

    parameter: Parameter
    offset: int
    """Byte of the bucket at which the parameter begins."""

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameter as it travels."""
        return torch_dtype(self.parameter)


@dataclass(frozen=True)
class Bucket:
    """Some parameters that travel together."""

    index: int
    """Number of the bucket in its plan, from 0."""
    entries: tuple[Entry, ...]
    nbytes: int
    """Size of the bucket, with the gaps of alignment."""
    receivers: tuple[int, ...] | None = None
    """Numbers of the receivers that it is for, in ascending order; None for all."""

    @property
    def names(self) -> list[str]:
        """Names of its parameters."""
        return [entry.parameter.name for entry in self.entries]

    @property
    def adapter(self) -> bool:
        """Whether it holds an adapter: no bucket holds both adapter and model."""
        return self.entries[0].parameter.adapter

    def is_for(self, receiver: int) -> bool:
        """Whether the receiver of this number gets it."""
        return self.receivers is None or receiver in self.receivers


def torch_dtype(parameter: Parameter) -> torch.dtype:
    """Return the torch dtype of a parameter as it travels."""
    import torch

    dtype: torch.dtype = getattr(torch, parameter.dtype)
    return dtype


def plan_buckets(
    manifest: Manifest, bucket_bytes: int, holders: Sequence[Experts] = ()
) -> tuple[Bucket, ...]:
    """Divide the parameters that travel into buckets of at most `bucket_bytes`.

    Parameters of one block, such as queries, keys and values, travel together if they
    fit into a bucket. A parameter that is larger than a bucket has one to itself. Those
    of an adapter come last, since they also travel alone. Buckets of experts that
    different receivers hold take turns.

    Args:
        manifest: The parameters.
        bucket_bytes: The limit in bytes.
        holders: The experts that each receiver holds; empty if all get everything.

    Raises:
        WeightSyncError: No receiver holds an expert.
    """
    by_receivers: dict[tuple[int, ...] | None, list[Parameter]] = {None: []}
    for parameter in manifest.sent:
        if not parameter.adapter:
            receivers = _receivers_of(parameter, holders)
            by_receivers.setdefault(receivers, []).append(parameter)

    common = _filled(by_receivers.pop(None), bucket_bytes)
    experts_by_receivers = [
        [replace(bucket, receivers=receivers) for bucket in _filled(own, bucket_bytes)]
        for receivers, own in by_receivers.items()
    ]
    # One bucket is for some receivers, and the next one for others.
    by_turns = itertools.zip_longest(*experts_by_receivers)
    experts = filter(None, itertools.chain.from_iterable(by_turns))
    adapter = _filled([p for p in manifest.sent if p.adapter], bucket_bytes)
    ordered = itertools.chain(common, experts, adapter)
    return tuple(replace(bucket, index=index) for index, bucket in enumerate(ordered))


def _receivers_of(
    parameter: Parameter, holders: Sequence[Experts]
) -> tuple[int, ...] | None:
    """Return the receivers that hold the expert of a parameter; None for all."""
    expert = parameter.expert
    if expert is None or not holders:
        return None
    receivers = tuple(
        receiver
        for receiver, experts in enumerate(holders)
        if experts is None or expert in experts
    )
    if not receivers:
        raise WeightSyncError(
            f"{parameter.name}: none of the {len(holders)} ranks of rollout engines"
            f" holds expert {expert}; set rollout.expert_parallel=false"
        )
    return None if len(receivers) == len(holders) else receivers


def _filled(parameters: Iterable[Parameter], bucket_bytes: int) -> list[Bucket]:
    """Return these parameters in buckets, numbered from 0."""
    units = _units(parameters, bucket_bytes)
    sizes = [sum(map(aligned_bytes, unit)) for unit in units]

    # Sizes are balanced: a bucket is closed once it has its share of the total, so that
    # the last one is not a remainder.
    bucket_count = max(1, math.ceil(sum(sizes) / bucket_bytes))
    share = sum(sizes) / bucket_count

    buckets: list[Bucket] = []
    entries: list[Entry] = []
    filled_bytes = 0
    for unit, size in zip(units, sizes, strict=True):
        is_full = filled_bytes >= share or filled_bytes + size > bucket_bytes
        # An empty bucket takes any parameter, also one that is too large.
        if entries and is_full:
            buckets.append(Bucket(len(buckets), tuple(entries), filled_bytes))
            entries = []
            filled_bytes = 0
        for parameter in unit:
            entries.append(Entry(parameter, filled_bytes))
            filled_bytes += aligned_bytes(parameter)

    if entries:
        buckets.append(Bucket(len(buckets), tuple(entries), filled_bytes))
    return buckets


def _units(
    parameters: Iterable[Parameter], bucket_bytes: int
) -> list[tuple[Parameter, ...]]:
    """Return neighbours that travel in one bucket, since they are of one block.

    A receiver may need several of them at once, and would have to copy those that came
    with an earlier bucket.
    """
    units: list[tuple[Parameter, ...]] = []
    for _, neighbours in itertools.groupby(parameters, _block_of):
        block = tuple(neighbours)
        if sum(map(aligned_bytes, block)) <= bucket_bytes:
            units.append(block)
        else:
            units += [(parameter,) for parameter in block]
    return units


def _block_of(parameter: Parameter) -> str:
    """Return the block of a parameter: "layers.0.mlp" of "layers.0.mlp.up.weight"."""
    return parameter.name.rsplit(".", 2)[0]


def aligned_bytes(parameter: Parameter) -> int:
    """Return the bytes that a parameter takes in a bucket."""
    bits = _BITS.search(parameter.dtype)
    assert bits is not None, f"{parameter.name} has the dtype {parameter.dtype}"
    return aligned(parameter.numel * int(bits[0]) // 8)


def aligned(nbytes: int) -> int:
    """Return the bytes that content takes, up to where the next may begin."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
