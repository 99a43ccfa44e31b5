"""The inbox: the receiving endpoint in one process, and what arrived there.

Invariant: every tensor that is handed on is fingerprinted before its slot is filled
again, at the same time as it is loaded. Deliberately not here: what an engine does with
the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from verl_ray.errors import WeightSyncError
from verl_ray.profiling.progress import advance
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import (
    Fingerprint,
    FingerprintAccumulator,
    Fingerprints,
)
from verl_ray.weight_sync.transport import Address, Receiver, WireEndpoint


class Inbox:
    """The wire that is open in this process, and fingerprints of what arrived."""

    def __init__(self) -> None:
        """Start without a wire."""
        # Fingerprints and loading both wait for memory, so they run at the same time.
        self._thread = ThreadPoolExecutor(1, "fingerprints")
        self._pending: Future[Fingerprints] | None = None
        self._receiver: Receiver | None = None

        self._arrived: dict[str, Fingerprint] = {}
        self._seconds = 0.0

    def connect(self, address: Address, endpoint: WireEndpoint) -> None:
        """Open a wire; close the one that was open before."""
        self.close()
        self._receiver = address.open(endpoint)

    def begin(self) -> None:
        """Begin a sync: forget what arrived in another one."""
        self._arrived = {}
        self._seconds = 0.0

    def receive(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Return the bucket's parameters, whole, valid until `release`.

        Raises:
            WeightSyncError: No wire is open, or the bucket did not arrive over it as it
                was sent.
        """
        if self._receiver is None:
            raise WeightSyncError(
                f"bucket {bucket.index} cannot be received: no wire is open; call"
                " connect first"
            )
        # The caller loads the tensors while the thread takes their fingerprints.
        tensors = dict(self._receiver.receive(bucket))
        advance(bucket.nbytes, "bytes")
        self._pending = self._thread.submit(_fingerprints, tensors)
        return tensors

    def release(self) -> None:
        """Free the slot of the last bucket, once its fingerprints are taken."""
        assert self._receiver is not None and self._pending is not None, (
            "receive comes first"
        )
        # The thread reads the slot too, so it has to finish first.
        fingerprints = self._pending.result()
        self._pending = None
        self._arrived |= fingerprints.by_name
        self._seconds += fingerprints.seconds
        self._receiver.release()

    @property
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of everything that arrived since `begin`."""
        return Fingerprints(self._arrived, self._seconds)

    def close(self) -> None:
        """Close the wire, if one is open."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _fingerprints(tensors: Mapping[str, torch.Tensor]) -> Fingerprints:
    """Return the fingerprints of whole parameters."""
    accumulator = FingerprintAccumulator()
    for name, tensor in tensors.items():
        accumulator.add(name, tensor)
    return accumulator.take()
