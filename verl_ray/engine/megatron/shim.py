"""The CUDA calls of megatron-core and megatron-fsdp, on a machine without a GPU.

Invariant: no file of these packages is edited. What they call on `torch.cuda` has the
effect on the CPU that torch's own CPU device has. `install` is called in worker
processes of a run without a GPU, before megatron is imported, and holds for the whole
process. Deliberately not here: faults of these packages that a machine with a GPU has
as well; those are mended where they occur.
"""

# mypy: disable-error-code="assignment,override,attr-defined,misc,return-value"
from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.overrides import TorchFunctionMode

_mode: TorchFunctionMode | None = None
_core_is_patched = False


def install(*, core: bool = True) -> None:
    """Patch torch and torch.distributed in this process.

    Idempotent.

    Args:
        core: True if megatron-core is used, which is then patched too.
    """
    global _mode, _core_is_patched

    if _mode is None:
        _disable_compiler()
        _patch_device()
        _patch_streams()
        _patch_random_numbers()
        _patch_uneven_collectives()
        _patch_coalescing()
        _mode = CudaAsCpu()
        _mode.__enter__()

    if core and not _core_is_patched:
        _patch_core()
        _core_is_patched = True


def _disable_compiler() -> None:
    """Turn torch.compile off, which is megatron's `jit_fuser`.

    On a CPU it needs a C++ compiler, for a gain that is not needed.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


# --------------------------------------------------------------- devices and streams


def _patch_device() -> None:
    """Make the CPU the current device, and waiting for it a call without effect."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    # Marks for a profiler.
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *_, **__: None)


class HostEvent(torch.cpu.Event):
    """A point in a stream, which has passed as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def elapsed_time(self, _: HostEvent) -> float:
        return 0.0


class HostStream(torch.cpu.Stream):
    """The only stream: all calls are executed at once and in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event or HostEvent()

    def synchronize(self) -> None:
        pass


def _patch_streams() -> None:
    """Replace streams and events.

    megatron names both in annotations too, so the replacements are classes.
    """
    stream = HostStream()
    torch.cuda.Stream = HostStream
    torch.cuda.Event = HostEvent
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.default_stream = lambda *_: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()


def _patch_random_numbers() -> None:
    """Make the device's generator that of the CPU.

    `torch.cuda.manual_seed` seeds that generator alone: torch's own `manual_seed` would
    seed all devices and call it again, without end.
    """
    get_state = lambda *_, **__: torch.get_rng_state()  # noqa: E731
    torch.cuda.get_rng_state = get_state
    torch.cuda.random.get_rng_state = get_state
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)


# ----------------------------------------------------------------------- collectives


def _patch_uneven_collectives() -> None:
    """Accept lists of tensors that differ in size, as NCCL does and gloo does not."""
    gather: Callable[..., Any] = dist.all_gather
    scatter: Callable[..., Any] = dist.reduce_scatter

    def all_gather(
        outputs: list[Tensor], own: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if _have_equal_shapes(outputs):
            return gather(outputs, own, group=group, async_op=async_op)

        # Every rank sends its tensor padded to the longest one.
        longest = max(output.numel() for output in outputs)
        padded = own.new_zeros(longest)
        padded[: own.numel()] = own.reshape(-1)
        parts = [own.new_empty(longest) for _ in outputs]
        gather(parts, padded, group=group)
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part[: output.numel()].view_as(output))
        return None

    def reduce_scatter(
        output: Tensor,
        parts: list[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if _have_equal_shapes(parts):
            return scatter(output, parts, op=op, group=group, async_op=async_op)

        # All parts are reduced as one tensor, and every rank keeps its own.
        whole = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(whole, op=op, group=group)
        reduced_parts = whole.split([part.numel() for part in parts])
        own = reduced_parts[dist.get_rank(group)]
        output.copy_(own.view_as(output))
        return None

    dist.all_gather = all_gather
    dist.reduce_scatter = reduce_scatter


def _have_equal_shapes(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1


def _patch_coalescing() -> None:
    """Make coalesced collectives single ones, each complete before the next.

    On a GPU, streams order a gather that runs ahead and the code that replaces or frees
    its tensors. gloo's threads would read and write them at the same time, which
    corrupts the heap within a minute. So the collectives of a context run one by one
    when it ends, in their order, and then there is nothing to wait for.
    """
    recorded_in = c10d._world.pg_coalesce_state

    @contextlib.contextmanager
    def synchronous_manager(
        group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[Any]:
        group = group or dist.group.WORLD
        if group in recorded_in:
            raise ValueError("a group coalesces its collectives already")

        # torch's collectives note themselves here instead of running.
        operations = recorded_in[group] = []
        try:
            yield c10d._CoalescingManager()
        finally:
            del recorded_in[group]

        for operation in operations:
            targets = [operation.dst_tensor] if operation.dst_tensor is not None else []
            reduction = {"op": operation.redop} if operation.redop is not None else {}
            operation.op(*targets, operation.tensor, group=group, **reduction)

    dist._coalescing_manager = synchronous_manager


# -------------------------------------------------------------- arguments of torch


class CudaAsCpu(TorchFunctionMode):
    """A mode in which an explicit "cuda" means the CPU.

    `.cuda()` has no effect, nothing is pinned, and the type of a tensor has the name
    that megatron's optimizers expect ("torch.cuda.FloatTensor").
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Every call of torch passes through here, even for the shape of a tensor. The
        # statements below take 0.5 microseconds.
        if func is _cuda:
            return args[0]
        if func is _type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)

        for argument in args:
            if type(argument) in _DEVICE_TYPES and _is_cuda(argument):
                args = ["cpu" if _is_cuda(value) else value for value in args]
                break
        if not kwargs:
            return func(*args)

        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


_cuda = Tensor.cuda
_type = Tensor.type
_DEVICE_TYPES = (str, torch.device)
"""Types of values that name a device."""


def _is_cuda(value: object) -> bool:
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


# --------------------------------------------------------------------- megatron-core


def _patch_core() -> None:
    """Replace functions of megatron-core that do not go through `torch.cuda`."""
    import megatron.core.tensor_parallel.random as random
    from megatron.core.transformer.moe import token_dispatcher

    # Its own versions wait for torch's lazy initialisation of CUDA, which never
    # happens: the states of streams would silently stay as they are.
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    # It warns that "CPU RNG state changed within GPU RNG context"; here they are one.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    # It copies counts to the host, and converts them to NumPy arrays only if they were
    # on a device.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    if as_numpy and isinstance(tensor, Tensor):
        return tensor.numpy()
    return tensor
