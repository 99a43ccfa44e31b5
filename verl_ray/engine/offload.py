"""Offload of an engine's state from its device to the memory of the host, and back.

Invariant: no code reads memory whose copy is still in flight. All copies of a move are
started, then waited for together, and only then do the owners of the state take the new
memory. So no host code can read, and no allocator can reuse, what a transfer still
writes or reads. (`module.to("cpu", non_blocking=True)` breaks this rule: FSDP2 pads an
uneven shard on the host as soon as `to` returns, from a buffer with undefined values.)
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_ray.errors import EngineError
from verl_ray.profiling.progress import touch
from verl_ray.weight_sync.fingerprint import Fingerprint, FingerprintAccumulator

_ALIGNMENT = 512
"""Bytes. Device allocators use the same alignment, and kernels and vectorized copies
may rely on it."""

_FINGERPRINT_COLUMNS = 4096
"""Flat memory is fingerprinted as a matrix with this many columns, because the
fingerprint of a vector is as long as the vector."""


@dataclass(frozen=True)
class OffloadableTensor:
    """A tensor of an engine's state that can move between the device and the host."""

    name: str

    memory: Callable[[], Tensor]
    """Returns the present memory, contiguous: what the engine itself reads."""

    replace_memory: Callable[[Tensor], None]
    """Takes a flat tensor of the same dtype, number of elements and values, which the
    engine reads from then on."""


def offloadable(name: str, tensor: Tensor) -> OffloadableTensor:
    """Describe a tensor that remains the same object when it moves."""

    def replace_memory(memory: Tensor) -> None:
        tensor.data = memory.view(tensor.shape)

    return OffloadableTensor(name, lambda: tensor.data, replace_memory)


def offloadable_entry(
    name: str, state: dict[str, Tensor], key: str
) -> OffloadableTensor:
    """Describe an entry of an optimizer's state, which is replaced when it moves."""

    def memory() -> Tensor:
        value = state[key]
        return value._local_tensor if isinstance(value, DTensor) else value

    def replace_memory(memory: Tensor) -> None:
        value = state[key]
        if isinstance(value, DTensor):
            local = memory.view(value._local_tensor.shape)
            state[key] = DTensor(local, value._spec, requires_grad=False)
        else:
            state[key] = memory.view(value.shape)

    return OffloadableTensor(name, memory, replace_memory)


class Transfers:
    """Copies between a device and the host: started singly, waited for together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, target: Tensor, source: Tensor) -> None:
        """Start a copy. Neither tensor may be touched until `wait` has returned."""
        target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Wait until all copies that were started are complete."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class HostArena:
    """A block of host memory from which tensors are cut.

    The memory is page-locked where there is CUDA, and freed with the last tensor.

    torch's own allocator of pinned memory rounds every block up to a power of two (2.11
    and 2.13, by default), which wastes up to half of it for the state of a model. The
    arena is therefore mapped to the byte and locked by CUDA's runtime.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._memory = mmap.mmap(-1, max(nbytes, 1))
        self._used = 0
        if pinned:
            self._lock()

    def cut(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the next `numel` elements, flat, as a storage of their own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        start = self._used
        self._used += aligned(numel * dtype.itemsize)
        assert self._used <= len(self._memory), (
            "the arena is as large as what is cut from it"
        )
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)

    def _lock(self) -> None:
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, len(self._memory), 0))
        if status != 0:
            raise EngineError(
                f"CUDA cannot lock {len(self._memory) / 2**30:.1f} GiB of the host's"
                f" memory for what leaves the device (cudaError {status}): give this"
                " rank's node more memory, or set placement.offload=none"
            )

        # Tensors may outlive the arena. Their memory then remains mapped, but is
        # pageable.
        unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)
        # At the end of the process the driver unlocks the memory.
        unlock.atexit = False


def aligned(nbytes: int) -> int:
    """Return the size of a tensor of `nbytes` in an arena, with its padding."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Offload:
    """The offload of one engine's state on one rank.

    Each tensor has its own host memory from its first move on; tensors that move for
    the first time together share an arena. The first move of each tensor in each
    direction is verified: if its fingerprint has changed, the move raises EngineError.
    """

    def __init__(
        self, device: torch.device, transfers: Transfers | None = None
    ) -> None:
        self._device = device
        self._transfers = transfers or Transfers(device)
        self._host_memory: dict[str, Tensor] = {}
        self._arenas: list[HostArena] = []

        # Pairs of a tensor's name and the target, "host" or "device".
        self._verified: set[tuple[str, str]] = set()

    def to_host(self, state: Sequence[OffloadableTensor]) -> None:
        """Move these tensors to the host. Those that are there already stay.

        The memory on the device is free when this returns.
        """
        moving = [tensor for tensor in state if not self._is_on_host(tensor)]
        self._reserve(moving)
        targets = [self._host_memory[tensor.name] for tensor in moving]
        self._move(moving, targets, "host")

    def to_device(self, state: Sequence[OffloadableTensor]) -> None:
        """Move these tensors back to the device. Those that are there already stay.

        Their host memory is kept for the next move.
        """
        moving = []
        for tensor in state:
            is_elsewhere = tensor.memory().device.type != self._device.type
            if self._is_on_host(tensor) or is_elsewhere:
                moving.append(tensor)

        targets = [
            torch.empty_like(tensor.memory().view(-1), device=self._device)
            for tensor in moving
        ]
        self._move(moving, targets, "device")

    def host_memory(self, name: str, like: Tensor) -> Tensor:
        """Return flat host memory for a tensor that its owner moves by itself.

        The owner moves it inside of `verifying`.

        Args:
            name: The name of the tensor.
            like: A tensor of the same dtype and number of elements.
        """
        self._reserve([OffloadableTensor(name, lambda: like, lambda memory: None)])
        return self._host_memory[name]

    @contextlib.contextmanager
    def verifying(
        self,
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        place: str,
    ) -> Iterator[None]:
        """Verify a move that the owner of the state makes inside the block.

        The end of the block waits for the copies. The first move of each tensor is
        verified.

        Args:
            sources: The memory that is copied, by name.
            targets: The memory that it is copied to, under the same names.
            place: The target, "host" or "device".
        """
        unverified = [name for name in sources if (name, place) not in self._verified]

        # Without a GPU, fingerprints read memory through NumPy, and torch does not
        # resize a storage that NumPy has seen. So copies are read there.
        readable = Tensor.clone if self._device.type == "cpu" else Tensor.detach
        before = _fingerprints((name, readable(sources[name])) for name in unverified)

        yield
        self._transfers.wait()

        after = _fingerprints((name, readable(targets[name])) for name in unverified)
        _refuse_changes(before, after, place)
        self._verified.update((name, place) for name in unverified)

    def _is_on_host(self, tensor: OffloadableTensor) -> bool:
        """Whether the tensor's present memory is its own host memory."""
        host_memory = self._host_memory.get(tensor.name)
        if host_memory is None:
            return False
        memory = tensor.memory()
        is_same_device = memory.device == host_memory.device
        return is_same_device and memory.data_ptr() == host_memory.data_ptr()

    def _reserve(self, state: Sequence[OffloadableTensor]) -> None:
        """Allocate host memory for tensors that have none of their type and size."""
        new = [tensor for tensor in state if not self._has_host_memory(tensor)]
        if not new:
            return

        nbytes = 0
        for tensor in new:
            memory = tensor.memory()
            nbytes += aligned(memory.numel() * memory.dtype.itemsize)
        arena = HostArena(nbytes, pinned=self._device.type == "cuda")
        self._arenas.append(arena)

        for tensor in new:
            memory = tensor.memory()
            self._host_memory[tensor.name] = arena.cut(memory.numel(), memory.dtype)

    def _has_host_memory(self, tensor: OffloadableTensor) -> bool:
        host_memory = self._host_memory.get(tensor.name)
        if host_memory is None:
            return False
        memory = tensor.memory()
        is_same_dtype = host_memory.dtype == memory.dtype
        return is_same_dtype and host_memory.numel() == memory.numel()

    @torch.no_grad()
    def _move(
        self,
        state: Sequence[OffloadableTensor],
        targets: Sequence[Tensor],
        place: str,
    ) -> None:
        if not state:
            return
        unverified = [
            tensor for tensor in state if (tensor.name, place) not in self._verified
        ]
        before = _fingerprints((tensor.name, tensor.memory()) for tensor in unverified)

        for tensor, target in zip(state, targets, strict=True):
            self._transfers.begin(target, tensor.memory().view(-1))
            touch()
        self._transfers.wait()
        for tensor, target in zip(state, targets, strict=True):
            tensor.replace_memory(target)

        after = _fingerprints((tensor.name, tensor.memory()) for tensor in unverified)
        _refuse_changes(before, after, place)
        self._verified.update((tensor.name, place) for tensor in unverified)


def _fingerprints(state: Iterable[tuple[str, Tensor]]) -> dict[str, Fingerprint]:
    """Return the fingerprint of each tensor by its name."""
    accumulator = FingerprintAccumulator()
    for name, memory in state:
        touch()
        flat = memory.view(-1)
        in_matrix = flat.numel() - flat.numel() % _FINGERPRINT_COLUMNS
        accumulator.add(name, flat[:in_matrix].view(-1, _FINGERPRINT_COLUMNS))
        accumulator.add(name, flat[in_matrix:])
    return accumulator.take().by_name


def _refuse_changes(
    before: dict[str, Fingerprint], after: dict[str, Fingerprint], place: str
) -> None:
    """Raise EngineError if a fingerprint has changed in a move."""
    changed = [
        name for name, fingerprint in before.items() if after[name] != fingerprint
    ]
    if not changed:
        return

    name = changed[0]
    others = ""
    if len(changed) > 1:
        others = f" (and {len(changed) - 1} others)"
    raise EngineError(
        f"{name}{others} changed on the way to the {place}: it has another fingerprint"
        " there. What this rank holds is lost: go on from the last checkpoint, with"
        " placement.offload=none, which moves nothing"
    )
