"""The contract of a wire: how a receiver gets at a bucket that the training group has put on it.

Invariant: an address is small, picklable and hashable; opening it in a process of the receiver gives a reader whose
tensors are whole parameters. Deliberately not here: what travels (manifest) and how much at once (buckets).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Protocol

import torch

from verl_ray.weight_sync.buckets import Bucket


class Reader(Protocol):
    def read(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """The bucket's parameters under their Hugging Face names, valid until the bucket's place is used again."""

    def close(self) -> None: ...


class Address(Hashable, Protocol):
    def open(self) -> Reader: ...
