"""How much travels at once: the parameters of a manifest, laid out in buckets of about equal size.

Invariant: a plan is a pure function of manifest and bucket size, so every process makes the same one; parameters keep
the manifest's order, which is the order of the layers. Deliberately not here: tensors, and how they travel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from verl_ray.weight_sync.manifest import Manifest, Parameter

ALIGNMENT_BYTES = 64  # a cache line


@dataclass(frozen=True)
class Entry:
    """One parameter and where its bytes begin in the bucket (row-major, in the manifest's dtype)."""

    parameter: Parameter
    offset: int

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.parameter)


@dataclass(frozen=True)
class Bucket:
    """`index` counts the buckets of a plan from 0; `nbytes` includes the gaps of alignment."""

    index: int
    entries: tuple[Entry, ...]
    nbytes: int

    @property
    def names(self) -> list[str]:
        return [entry.parameter.name for entry in self.entries]

    @property
    def adapter(self) -> bool:
        """Whether it holds parameters of an adapter: those and the model's are never in one bucket."""
        return self.entries[0].parameter.adapter


def torch_dtype(parameter: Parameter) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, parameter.dtype)
    return dtype


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Every parameter that travels, once, in buckets of at most `bucket_bytes`; a larger one has a bucket to itself.

    Sizes are balanced: a bucket is closed once it has its share of the total, so that the last one is not a remainder.
    Those of an adapter come last, since they also travel alone.
    """
    buckets: list[Bucket] = []
    for adapter in (False, True):
        parameters = [parameter for parameter in manifest.sent if parameter.adapter == adapter]
        sizes = [aligned_bytes(parameter) for parameter in parameters]
        share = sum(sizes) / max(1, math.ceil(sum(sizes) / bucket_bytes))
        entries: list[Entry] = []
        filled = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            if entries and (filled >= share or filled + size > bucket_bytes):
                buckets.append(Bucket(len(buckets), tuple(entries), filled))
                entries, filled = [], 0
            entries.append(Entry(parameter, filled))
            filled += size
        if entries:
            buckets.append(Bucket(len(buckets), tuple(entries), filled))
    return tuple(buckets)


def aligned_bytes(parameter: Parameter) -> int:
    """Bytes that a parameter takes in a bucket."""
    nbytes = parameter.numel * torch_dtype(parameter).itemsize
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
