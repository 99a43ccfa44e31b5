"""The wire on one GPU: buckets in device memory of the trainer, mapped by the engine.

Every rank gathers the whole bucket on its own GPU, where its receiver maps it.

Invariant: there is one handle per slot, exported once and opened once, by one process.
torch counts the users of an export, so a second opening or closing would end it. The
sender's stream is synchronized before a bucket may be read, and the receiver's stream
before the slot may be filled again. It has run with one rank and one receiver, and not
yet on several GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from verl_ray.errors import WeightSyncError
from verl_ray.profiling.memory import exportable
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.gathered_slots import GatheredSlots, from_all_ranks
from verl_ray.weight_sync.manifest import Bucket
from verl_ray.weight_sync.transport import (
    Address,
    SendResult,
    Shards,
    Slots,
    WireEndpoint,
    WireSpec,
)

# Position of the device's number among the arguments of `rebuild_cuda_tensor`. Every
# process numbers the devices in its own way.
_DEVICE = 6

Handle = tuple[Any, ...]
"""Arguments with which `rebuild_cuda_tensor` maps a slot."""


@dataclass(frozen=True)
class CudaIpcAddress:
    """The slots of a wire on every GPU."""

    handles: dict[str, tuple[Handle, ...]]
    """One handle per slot, by the UUID of the GPU."""

    waits_for_peers: ClassVar[bool] = False

    def open(self, endpoint: WireEndpoint) -> MappedSlots:
        """Map the slots on the receiver's GPU.

        Raises:
            WeightSyncError: No rank of the actor runs on this GPU.
        """
        uuid = _uuid(endpoint.device)
        if uuid not in self.handles:
            raise WeightSyncError(
                "rollout.sync.transport = cuda_ipc: receiver"
                f" {endpoint.receiver} runs on GPU {uuid}, where no rank of the actor"
                f" runs (they have {sorted(self.handles)}). Use shared_memory, or"
                " broadcast on other nodes"
            )

        device_number = endpoint.device.index or 0
        buffers: list[torch.Tensor] = []
        for handle in self.handles[uuid]:
            arguments = list(handle)
            arguments[_DEVICE] = device_number
            buffers.append(rebuild_cuda_tensor(*arguments))
        return MappedSlots(buffers, endpoint.device)


class MappedSlots(Slots):
    """Slots in device memory of another process."""

    def __init__(self, buffers: list[torch.Tensor], device: torch.device) -> None:
        """Use buffers that are mapped on this device."""
        super().__init__(buffers)
        self._device = device

    def release(self) -> None:
        """Wait until this process has read the slot."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Unmap the slots, once they are read."""
        self.release()
        super().close()


class CudaIpcSender:
    """The sending endpoint on one rank, with slots on its GPU."""

    def __init__(self, wire_spec: WireSpec, rank: int, device: torch.device) -> None:
        """Allocate the slots.

        Raises:
            WeightSyncError: The actor is not on a GPU.
        """
        if device.type != "cuda":
            raise WeightSyncError(
                "rollout.sync.transport = cuda_ipc: the actor is not on a GPU. Use"
                " shared_memory"
            )
        self._device = device
        self._rank = rank
        # Memory of expandable segments could not be exported everywhere.
        with exportable():
            self._buffers = [
                torch.empty(wire_spec.slot_bytes, dtype=torch.uint8, device=device)
                for _ in range(SLOTS)
            ]
        self._slots = GatheredSlots(self._buffers, everywhere=True)

    def offer(self) -> CudaIpcAddress:
        """Return the handles of all ranks. Collective."""
        own_handles = tuple(_export(buffer) for buffer in self._buffers)
        # The ranks are on different GPUs; each receiver finds its own by the UUID.
        handles_of_ranks = from_all_ranks((_uuid(self._device), own_handles))
        return CudaIpcAddress(dict(handles_of_ranks))

    def connect(self, address: Address) -> None:
        """Do nothing: receivers open the handles themselves."""

    def stop_waiting(self) -> None:
        """Do nothing: this wire has no rendezvous."""

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> SendResult:
        """Gather the bucket on every GPU. It may be read when this returns."""
        fingerprints = self._slots.gather(bucket, shards)
        # The receiver is another process, which does not see the order of this stream.
        torch.cuda.current_stream(self._device).synchronize()

        nbytes = 0
        if self._rank == 0:
            nbytes = bucket.nbytes
        return SendResult(fingerprints, nbytes)

    def finish(self) -> None:
        """Do nothing: the slots stay for the next sync."""

    def close(self) -> None:
        """Free the slots."""
        self._slots.close()
        self._buffers.clear()
        torch.cuda.ipc_collect()


def _export(buffer: torch.Tensor) -> Handle:
    """Return a handle with which another process can map a buffer.

    Raises:
        WeightSyncError: Device memory cannot be shared on this machine.
    """
    try:
        _, arguments = reduce_tensor(buffer)
    except RuntimeError as error:
        raise WeightSyncError(
            "rollout.sync.transport = cuda_ipc: device memory cannot be shared"
            f" ({error}); use shared_memory"
        ) from error
    return tuple(arguments)


def _uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)
