"""The receiving end in one process, and what arrived there.

Invariant: every tensor that is handed on is fingerprinted before its place is filled again, beside its loading.
Deliberately not here: what an engine makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from verl_ray.errors import WeightSyncError
from verl_ray.profiling.progress import advance
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Fingerprint, Fingerprints, Prints
from verl_ray.weight_sync.transport import Address, Receiver, Seat


class Inbox:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "fingerprints")  # beside the loading, which waits for memory, too
        self._printing: Future[Prints] | None = None
        self._receiver: Receiver | None = None
        self._found: dict[str, Fingerprint] = {}
        self._seconds = 0.0

    def connect(self, address: Address, seat: Seat) -> None:
        """Open a wire; one that was open before goes."""
        self.close()
        self._receiver = address.open(seat)

    def begin(self) -> None:
        """An update begins: what arrived for another one does not count."""
        self._found, self._seconds = {}, 0.0

    def receive(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """The bucket's parameters, whole, valid until `release`.

        Raises:
            WeightSyncError: no wire is open, or the bucket did not come over it as it was sent.
        """
        if self._receiver is None:
            raise WeightSyncError(f"bucket {bucket.index} cannot be received: no wire is open; call connect first")
        tensors = dict(self._receiver.receive(bucket))
        advance(bucket.nbytes, "bytes")
        self._printing = self._thread.submit(_fingerprints, tensors)
        return tensors

    def release(self) -> None:
        """The place of what was received last may be used again."""
        assert self._receiver is not None and self._printing is not None, "receive comes first"
        prints, self._printing = self._printing.result(), None
        self._found |= prints.by_name
        self._seconds += prints.seconds
        self._receiver.release()

    @property
    def prints(self) -> Prints:
        """Of all that arrived since `begin`."""
        return Prints(self._found, self._seconds)

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _fingerprints(tensors: Mapping[str, torch.Tensor]) -> Prints:
    made = Fingerprints()
    for name, tensor in tensors.items():
        made.add(name, tensor)
    return made.take()
