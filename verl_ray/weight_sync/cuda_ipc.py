"""The wire on one GPU: buckets in device memory of the trainer rank, which the rollout engine beside it maps.

Invariant: one handle per slot, exported once and opened once, by one process: torch counts the users of an export, and
a second opening or closing would end it. Every rank gathers the whole bucket on its own GPU, where its receiver finds
it. The sender's stream is waited for before a bucket may be read, and the receiver's before it may be filled again. Has
not run on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from verl_ray.errors import WeightSyncError
from verl_ray.profiling.allocator import exportable
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.slots import GatheredSlots, Slots
from verl_ray.weight_sync.transport import Address, Route, Seat, Sent, Shards

_DEVICE = 6  # among the arguments of rebuild_cuda_tensor: the device's number, which each process counts its own way


@dataclass(frozen=True)
class CudaIpcAddress:
    handles: dict[str, tuple[tuple[Any, ...], ...]]
    """By the UUID of a GPU: for each slot there the arguments that rebuild it."""

    ends_meet: ClassVar[bool] = False

    def open(self, seat: Seat) -> MappedSlots:
        uuid = _uuid(seat.device)
        if uuid not in self.handles:
            raise WeightSyncError(
                f"rollout.sync.transport = cuda_ipc: receiver {seat.receiver} runs on GPU {uuid}, where no rank of the "
                f"actor runs (they have {sorted(self.handles)}). Use shared_memory, or broadcast on other nodes"
            )
        index = seat.device.index or 0
        slots = [(*args[:_DEVICE], index, *args[_DEVICE + 1 :]) for args in self.handles[uuid]]
        return MappedSlots([rebuild_cuda_tensor(*args) for args in slots], seat.device)


class MappedSlots(Slots):
    """Slots in memory of another process."""

    def __init__(self, buffers: list[torch.Tensor], device: torch.device) -> None:
        super().__init__(buffers)
        self._device = device

    def release(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        self.release()
        super().close()


class CudaIpcSender:
    def __init__(self, route: Route, rank: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise WeightSyncError("rollout.sync.transport = cuda_ipc: the actor is not on a GPU. Use shared_memory")
        self._device, self._rank = device, rank
        with exportable():
            self._buffers = [torch.empty(route.slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._slots = GatheredSlots(self._buffers, everywhere=True)

    def offer(self) -> CudaIpcAddress:
        own = {_uuid(self._device): tuple(_exported(buffer) for buffer in self._buffers)}
        every = [own]
        if dist.is_initialized() and dist.get_world_size() > 1:
            every = [{} for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, own)
        return CudaIpcAddress({uuid: slots for one in every for uuid, slots in one.items()})

    def connect(self, address: Address) -> None:
        """Receivers open the handles themselves."""

    def leave(self) -> None:
        """Nobody meets here."""

    def send(self, bucket: Bucket, shards: Shards, *, whole: bool) -> Sent:
        prints = self._slots.gather(bucket, shards)
        torch.cuda.current_stream(self._device).synchronize()
        return Sent(prints, bucket.nbytes if self._rank == 0 else 0)

    def finish(self) -> None:
        """Nothing to free: the slots stay for the next sync."""

    def close(self) -> None:
        self._slots.close()
        self._buffers.clear()
        torch.cuda.ipc_collect()


def _exported(buffer: torch.Tensor) -> tuple[Any, ...]:
    try:
        _, args = reduce_tensor(buffer)
    except RuntimeError as error:
        raise WeightSyncError(
            f"rollout.sync.transport = cuda_ipc: device memory cannot be shared ({error}); use shared_memory"
        ) from error
    return tuple(args)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
