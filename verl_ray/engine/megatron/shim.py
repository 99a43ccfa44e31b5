"""What megatron-core and megatron-fsdp ask of CUDA, answered by a machine that has none.

Invariant: no file of theirs is edited; what they call on `torch.cuda` does on the CPU what torch's own CPU device does.
`install` is for worker processes of a run without a GPU, before megatron is imported, and holds for the whole process.
Deliberately not here: faults of these packages that a GPU machine has, too (they are mended where they are met).
"""

# mypy: disable-error-code="assignment, override, attr-defined, misc, return-value, no-untyped-def"
from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_mode: TorchFunctionMode | None = None
_core = False


def install(*, core: bool = True) -> None:
    """Patch torch and torch.distributed in this process, and megatron-core if it is used; once each."""
    global _mode, _core
    if _mode is None:
        _without_compiler()
        _device()
        _streams()
        _random_numbers()
        _uneven_collectives()
        _collectives_in_order()
        _mode = CudaMeansCpu()
        _mode.__enter__()
    if core and not _core:
        _after_import()
        _core = True


def _without_compiler() -> None:
    """megatron's `jit_fuser` is torch.compile, which on a CPU wants a C++ compiler for a gain that is not needed."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _device() -> None:
    """The current device is the CPU, and waiting for it takes no time."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    for name in ("range_push", "range_pop"):  # marks for a profiler
        setattr(torch.cuda.nvtx, name, lambda *_, **__: None)


class Event(torch.cpu.Event):
    """A point in a stream: passed as soon as it is reached."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def elapsed_time(self, _: Event) -> float:
        return 0.0


class Stream(torch.cpu.Stream):
    """Everything runs at once and in order, so there is one stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass


def _streams() -> None:
    """Streams and events, which megatron also names in annotations, so they are classes."""
    only = Stream()
    torch.cuda.Stream, torch.cuda.Event = Stream, Event
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: only
    torch.cuda.stream = lambda _: contextlib.nullcontext()


def _random_numbers() -> None:
    """The device's generator is the CPU's. `manual_seed` seeds that one generator, not all devices: torch's own
    `manual_seed` calls the device's, and would not end."""
    get = lambda *_, **__: torch.get_rng_state()  # noqa: E731
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)


def _uneven_collectives() -> None:
    """NCCL takes lists of tensors that differ in size, gloo does not: gather them padded, reduce them in one piece."""
    gather: Callable[..., Any] = dist.all_gather
    scatter: Callable[..., Any] = dist.reduce_scatter

    def all_gather(outputs: list[Tensor], own: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({out.shape for out in outputs}) == 1:
            return gather(outputs, own, group=group, async_op=async_op)
        most = max(out.numel() for out in outputs)
        padded = own.new_zeros(most)
        padded[: own.numel()] = own.reshape(-1)
        parts = [own.new_empty(most) for _ in outputs]
        gather(parts, padded, group=group)
        for out, part in zip(outputs, parts, strict=True):
            out.copy_(part[: out.numel()].view_as(out))
        return None

    def reduce_scatter(
        output: Tensor, parts: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({part.shape for part in parts}) == 1:
            return scatter(output, parts, op=op, group=group, async_op=async_op)
        whole = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split([part.numel() for part in parts])[dist.get_rank(group)].view_as(output))
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def _collectives_in_order() -> None:
    """On a GPU what is gathered ahead and what replaces or frees its tensors follow each other in streams. gloo has
    threads instead, which would read and write them at the same time: after a minute the heap is corrupt. So what is
    given together is done when it has been given; there is nothing left to wait for."""
    given_together = dist._coalescing_manager

    @contextlib.contextmanager
    def done_together(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        with given_together(group, device) as manager:
            yield manager

    dist._coalescing_manager = done_together


class CudaMeansCpu(TorchFunctionMode):
    """An explicit "cuda" is the CPU, `.cuda()` does nothing, nothing is pinned, and a tensor's type is spelled as
    megatron's optimizers expect it ("torch.cuda.FloatTensor")."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every call of torch comes through here, the shape of a tensor too: what follows takes 0.5 microseconds.
        if func is _cuda:
            return args[0]
        if func is _type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        for argument in args:
            if type(argument) in _NAMES and _is_cuda(argument):
                args = ["cpu" if _is_cuda(one) else one for one in args]
                break
        if not kwargs:
            return func(*args)
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


_cuda, _type = Tensor.cuda, Tensor.type
_NAMES = (str, torch.device)
"""Types of what names a device."""


def _is_cuda(value: object) -> bool:
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


def _after_import() -> None:
    """megatron-core's own functions that reach past `torch.cuda`."""
    import megatron.core.tensor_parallel.random as random
    from megatron.core.transformer.moe import token_dispatcher

    # They queue in torch's lazy initialisation of CUDA, which never comes: streams would silently differ.
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    # "CPU RNG state changed within GPU RNG context": the two are one here
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    # It copies counts to the host, and as NumPy arrays only if they were on a device.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
