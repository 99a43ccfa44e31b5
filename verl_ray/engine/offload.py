"""Offload: the state of an engine leaves its device for the memory of the host, and comes back.

Invariant: nothing looks into memory whose copy is still under way. All copies of a move are begun, then waited for
together, and only then do the owners of the state take the new memory; so no host code can read, and no allocator can
reuse, what a transfer still writes or reads. (`module.to("cpu", non_blocking=True)` breaks this rule: FSDP2 pads an
uneven shard on the host as soon as `to` returns, from a buffer that holds anything yet.) Deliberately not here: which
tensors are state (each engine lists its own), and when they move (`placement.offload`).
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ray.errors import EngineError
from verl_ray.profiling.progress import touch
from verl_ray.weight_sync.fingerprint import Fingerprint, Fingerprints

_ALIGNMENT = 512
"""Bytes. Device allocators align as much, so kernels and vectorized copies see what they are used to."""

_PRINT_COLUMNS = 4096
"""Flat memory is fingerprinted as a matrix with so many columns: the fingerprint of a vector is as long as itself."""


@dataclass(frozen=True)
class Held:
    """One piece of an engine's state: its name, the memory that it has now, and how it takes other memory."""

    name: str
    memory: Callable[[], Tensor]
    """Contiguous; what the engine itself reads."""
    take: Callable[[Tensor], None]
    """Given a tensor of the same type and number of elements, flat, with the same values: use it from now on."""


class Transfers:
    """Copies between one device and the host, begun one by one and waited for together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy. Neither tensor may be touched until `wait` has returned."""
        target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Return when everything that was begun has arrived."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class HostArena:
    """Memory of the host, page-locked where there is CUDA, from which tensors are cut; it is freed with the last one.

    torch's own allocator of pinned memory rounds every block up to a power of two (2.11 and 2.13, by default), which
    for the state of a model wastes up to half of it. So this is mapped to the byte, and locked by CUDA's runtime.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._memory = mmap.mmap(-1, max(nbytes, 1))
        self._used = 0
        if pinned:
            self._lock()

    def cut(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next so many elements, flat; the tensor's storage is these and no more."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        start = self._used
        self._used += aligned(numel * dtype.itemsize)
        assert self._used <= len(self._memory), "the arena is as large as what is cut from it"
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)

    def _lock(self) -> None:
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, len(self._memory), 0))
        if status != 0:
            raise EngineError(
                f"CUDA cannot lock {len(self._memory) / 2**30:.1f} GiB of the host's memory for what leaves the device "
                f"(cudaError {status}): give this rank's node more memory, or set placement.offload=none"
            )
        # Tensors may outlive the arena: their memory stays mapped as long as they live, and is pageable by then.
        unlock = weakref.finalize(self, runtime.cudaHostUnregister, address)
        unlock.atexit = False  # the driver does it when the process ends


def aligned(nbytes: int) -> int:
    """How far tensors of so many bytes stand apart."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Offload:
    """Moves the state of one engine on one rank.

    Each piece of state has a place on the host that is its own from its first move on; what moves for the first time
    together lies in one arena. The first move of each piece in each direction is proved: one whose fingerprint is
    another afterwards is an EngineError.
    """

    def __init__(self, device: torch.device, transfers: Transfers | None = None) -> None:
        self._device = device
        self._transfers = transfers or Transfers(device)
        self._places: dict[str, Tensor] = {}
        self._arenas: list[HostArena] = []
        self._proved: set[tuple[str, str]] = set()  # names of pieces, and where they went

    def to_host(self, state: Sequence[Held]) -> None:
        """Bring these to the host; what is there already stays. The memory on the device is free when this returns."""
        moving = [held for held in state if not self._is_in_place(held)]
        self._reserve(moving)
        self._move(moving, [self._places[held.name] for held in moving], "host")

    def to_device(self, state: Sequence[Held]) -> None:
        """Bring these back to the device; what is there already stays. Their places on the host are kept."""
        moving = [held for held in state if self._is_in_place(held) or held.memory().device.type != self._device.type]
        targets = [torch.empty_like(held.memory().view(-1), device=self._device) for held in moving]
        self._move(moving, targets, "device")

    def place(self, name: str, like: Tensor) -> Tensor:
        """The place on the host, flat, of a piece of state that its owner moves by itself, inside of `proving`."""
        self._reserve([Held(name, lambda: like, lambda memory: None)])
        return self._places[name]

    @contextlib.contextmanager
    def proving(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor], where: str) -> Iterator[None]:
        """Around a move that the owner of the state makes by itself, from memory to other memory of the same names: it
        is waited for, and the first one of each piece is proved."""
        unproved = [name for name in sources if (name, where) not in self._proved]
        # Without a GPU both are read through NumPy, after which torch does not resize a storage any more: read copies.
        read = Tensor.clone if self._device.type == "cpu" else Tensor.detach
        before = _fingerprints((name, read(sources[name])) for name in unproved)

        yield
        self._transfers.wait()

        _compare(before, _fingerprints((name, read(targets[name])) for name in unproved), where)
        self._proved.update((name, where) for name in unproved)

    def _is_in_place(self, held: Held) -> bool:
        place, memory = self._places.get(held.name), held.memory()
        return place is not None and memory.device == place.device and memory.data_ptr() == place.data_ptr()

    def _reserve(self, state: Sequence[Held]) -> None:
        """A place for each piece that has none of its type and size."""
        new = []
        for held in state:
            place, memory = self._places.get(held.name), held.memory()
            if place is None or (place.dtype, place.numel()) != (memory.dtype, memory.numel()):
                new.append(held)
        if not new:
            return
        nbytes = sum(aligned(held.memory().numel() * held.memory().dtype.itemsize) for held in new)
        arena = HostArena(nbytes, pinned=self._device.type == "cuda")
        self._arenas.append(arena)
        for held in new:
            memory = held.memory()
            self._places[held.name] = arena.cut(memory.numel(), memory.dtype)

    @torch.no_grad()
    def _move(self, state: Sequence[Held], targets: Sequence[Tensor], where: str) -> None:
        if not state:
            return
        unproved = [held for held in state if (held.name, where) not in self._proved]
        before = _fingerprints((held.name, held.memory()) for held in unproved)

        for held, target in zip(state, targets, strict=True):
            self._transfers.begin(target, held.memory().view(-1))
            touch()
        self._transfers.wait()
        for held, target in zip(state, targets, strict=True):
            held.take(target)

        _compare(before, _fingerprints((held.name, held.memory()) for held in unproved), where)
        self._proved.update((held.name, where) for held in unproved)


def tensor_held(name: str, tensor: Tensor) -> Held:
    """A tensor that stays the object that it is."""

    def take(memory: Tensor) -> None:
        tensor.data = memory.view(tensor.shape)

    return Held(name, lambda: tensor.data, take)


def _fingerprints(state: Iterable[tuple[str, Tensor]]) -> dict[str, Fingerprint]:
    prints = Fingerprints()
    for name, memory in state:
        touch()
        flat = memory.view(-1)
        rest = flat.numel() % _PRINT_COLUMNS
        prints.add(name, flat[: flat.numel() - rest].view(-1, _PRINT_COLUMNS))
        prints.add(name, flat[flat.numel() - rest :])
    return prints.take().by_name


def _compare(before: dict[str, Fingerprint], after: dict[str, Fingerprint], where: str) -> None:
    changed = [name for name, one in before.items() if after[name] != one]
    if changed:
        name = changed[0]
        others = f" (and {len(changed) - 1} others)" if len(changed) > 1 else ""
        raise EngineError(
            f"{name}{others} changed on the way to the {where}: its fingerprint was {before[name].total:016x}, and is "
            f"{after[name].total:016x} there. What this rank holds is lost: go on from the last checkpoint, with "
            f"placement.offload=none, which moves nothing"
        )
