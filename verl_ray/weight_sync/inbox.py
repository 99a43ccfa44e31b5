"""The receiving ends in one process, and what arrived there.

Invariant: every tensor that is handed on is fingerprinted before its place is filled again, beside its loading.
Deliberately not here: what an engine makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from verl_ray.profiling.progress import advance
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Fingerprint, Fingerprints, Prints
from verl_ray.weight_sync.transport import Address, Receiver, Seat


class Inbox:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "fingerprints")  # beside the loading, which waits for memory, too
        self._printing: Future[Prints] | None = None
        self._receivers: dict[Address, Receiver] = {}
        self._found: dict[str, Fingerprint] = {}
        self._seconds = 0.0

    def connect(self, address: Address, seat: Seat) -> None:
        """Open a wire; one that was open before goes."""
        self.close()
        self._receivers[address] = address.open(seat)

    def begin(self) -> None:
        """An update begins: what arrived for another one does not count."""
        self._found, self._seconds = {}, 0.0

    def receive(self, bucket: Bucket, address: Address) -> dict[str, torch.Tensor]:
        """The bucket's parameters, whole, valid until `release`."""
        if address not in self._receivers:
            self._receivers[address] = address.open()
        tensors = dict(self._receivers[address].receive(bucket))
        advance(bucket.nbytes, "bytes")
        self._printing = self._thread.submit(_fingerprints, tensors)
        return tensors

    def release(self, address: Address) -> None:
        """The place of what was received last may be used again."""
        assert self._printing is not None, "receive comes first"
        prints, self._printing = self._printing.result(), None
        self._found |= prints.by_name
        self._seconds += prints.seconds
        self._receivers[address].release()

    @property
    def prints(self) -> Prints:
        """Of all that arrived since `begin`."""
        return Prints(self._found, self._seconds)

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()


def _fingerprints(tensors: Mapping[str, torch.Tensor]) -> Prints:
    made = Fingerprints()
    for name, tensor in tensors.items():
        made.add(name, tensor)
    return made.take()
