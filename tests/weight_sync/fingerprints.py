"""The fingerprint of one tensor."""

from __future__ import annotations

import torch

from verl_ray.weight_sync.fingerprint import Fingerprint, FingerprintAccumulator
from verl_ray.weight_sync.manifest import Slice


def fingerprint(tensor: torch.Tensor, part: Slice | None = None) -> Fingerprint:
    """Return the fingerprint of a tensor, or of a slice of a parameter."""
    accumulator = FingerprintAccumulator()
    accumulator.add("", tensor, part)
    return accumulator.take().by_name[""]
