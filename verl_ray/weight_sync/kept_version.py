"""The weights of the published version, on the host, while the actor learns the next.

A replica that starts again while the actor learns gets them, so that it generates with
the same version as the others.

Invariant: slices of a bucket are those that were sent last, bit by bit. The memory of a
bucket is used again for the next version. Deliberately not here: which version may be
sent (`controllers/publishing`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from verl_ray.weight_sync.manifest import Slice
from verl_ray.weight_sync.transport import Shards


class KeptVersion:
    """Copies of the slices that a rank has sent, by the index of their bucket."""

    def __init__(self) -> None:
        self._slices: dict[int, list[tuple[Slice, torch.Tensor]]] = {}

    def keep(self, index: int, shards: Shards) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Yield the slices of a bucket, and copy each one to the host."""
        older = self._slices.get(index, [])
        copies: list[tuple[Slice, torch.Tensor]] = []

        for number, (piece, content) in enumerate(shards):
            memory = older[number][1] if number < len(older) else None
            if memory is None or memory.shape != content.shape:
                memory = torch.empty_like(content, device="cpu")
            memory.copy_(content)
            copies.append((piece, memory))
            yield piece, content

        self._slices[index] = copies

    def shards(
        self, index: int, device: torch.device
    ) -> Iterator[tuple[Slice, torch.Tensor]] | None:
        """Return the kept slices of a bucket, on a device; None if none were kept."""
        slices = self._slices.get(index)
        if slices is None:
            return None
        return ((piece, content.to(device)) for piece, content in slices)
