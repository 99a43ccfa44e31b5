"""The fingerprint of one tensor, and that of nothing."""

from __future__ import annotations

import torch

from verl_ray.weight_sync.fingerprint import Fingerprint, FingerprintAccumulator
from verl_ray.weight_sync.manifest import Slice

EMPTY = Fingerprint((0,) * 16, 0)


def fingerprint(tensor: torch.Tensor, part: Slice | None = None) -> Fingerprint:
    """Return the fingerprint of a tensor, or of a slice of a parameter."""
    accumulator = FingerprintAccumulator()
    accumulator.add("", tensor, part)
    return accumulator.take().by_name[""]
