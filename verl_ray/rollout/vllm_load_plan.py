"""A plan by which vLLM's model takes weights without vLLM's own loader.

In every update vLLM's loader looks for the place of every tensor, allocates each module
anew, copies its tensors there, and packs the copy. The first update of an engine goes
that way, and is recorded. Later ones follow the record: what a module keeps is copied
to its place, and what it keeps packed is packed from where it lies on the wire.

Invariant: there is a plan only if vLLM's loader did nothing but copy what had arrived
into parameters, each of which it filled, and if packing is all that vLLM does with them
afterwards. Models with experts or quantized weights have none. It runs inside of vLLM's
worker processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
)

from verl_ray.errors import WeightSyncError
from verl_ray.rollout.vllm_core import is_attention

Received = Mapping[str, torch.Tensor]
"""The parameters of a bucket by their names, whole and row-major."""

_PACKING = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""The methods of vLLM that pack the weights of a module, or leave them as they are."""


# ----------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Elements:
    """Some elements of a tensor, described as torch describes a view."""

    offset: int
    """Number of its first element, from the beginning of the tensor."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of this tensor."""
        first = tensor.storage_offset() + self.offset
        return tensor.as_strided(self.shape, self.stride, first)


@dataclass(frozen=True)
class Copy:
    """A part of a received tensor, and its place in a parameter."""

    source: str
    part: Elements
    place: Elements


@dataclass(frozen=True)
class ParameterPlan:
    """The copies that fill one parameter of a module.

    Attributes:
        shape: Its shape before it is packed.
        dtype: Its type before it is packed.
        copies: In the order of their places.
    """

    shape: torch.Size
    dtype: torch.dtype
    copies: Sequence[Copy]

    def fill(self, target: torch.Tensor, received: Received) -> None:
        """Copy what has arrived into a tensor of this shape."""
        for copy in self.copies:
            if copy.source in received:
                part = copy.part.of(received[copy.source])
                copy.place.of(target).copy_(part)

    def joined(self, received: Received) -> torch.Tensor | None:
        """Return the parameter as a view of what has arrived.

        None unless its parts lie behind one another as in the parameter.
        """
        if any(copy.source not in received for copy in self.copies):
            return None
        parts = [copy.part.of(received[copy.source]) for copy in self.copies]
        first = parts[0]
        whole = torch.empty(self.shape, dtype=self.dtype, device="meta")

        end = 0
        for copy, part in zip(self.copies, parts, strict=True):
            lies_behind = (
                part.dtype == self.dtype
                and part.is_contiguous()
                and part.untyped_storage().data_ptr()
                == first.untyped_storage().data_ptr()
                and part.storage_offset() == first.storage_offset() + end
                and copy.place.offset == end
                and copy.place.of(whole).is_contiguous()
            )
            if not lies_behind:
                return None
            end += part.numel()
        return first.as_strided(whole.shape, whole.stride(), first.storage_offset())


class ModulePlan:
    """The parameters of one module.

    Attributes:
        name: Name of the module in its model.
        sources: Names of the tensors that it takes.
        missing: Those that have not arrived in this update.
    """

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        parameters: Mapping[str, ParameterPlan],
    ) -> None:
        self.name = name
        self.module = module
        self._parameters = parameters
        self.sources = {
            copy.source for plan in parameters.values() for copy in plan.copies
        }
        self.begin()

    def begin(self) -> None:
        """Forget what arrived in another update."""
        self.missing = set(self.sources)
        # Parameters that the module keeps only packed, while they are put together.
        self._unpacked: dict[str, torch.Tensor] = {}

    def take(self, received: Received) -> None:
        """Take what has arrived; pack the module once all of it is there."""
        self.missing -= received.keys()
        is_last = not self.missing

        for name, plan in self._parameters.items():
            parameter = self.module.get_parameter(name)
            if parameter.shape == plan.shape:
                plan.fill(parameter, received)
                continue

            # The slot is filled again after this bucket, so only a module that is
            # packed now can be packed from there.
            joined = plan.joined(received) if is_last else None
            if joined is not None:
                self._unpacked[name] = joined
                continue
            if name not in self._unpacked:
                self._unpacked[name] = torch.empty(plan.shape, dtype=plan.dtype)
            plan.fill(self._unpacked[name], received)

        if is_last:
            self._pack()

    def _pack(self) -> None:
        """Let vLLM pack the module, which keeps its parameter objects."""
        module: Any = self.module
        packing = getattr(module, "quant_method", None)
        if packing is not None:
            # The memory of the earlier weights is free for the new ones.
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None

            parameters = {name: module.get_parameter(name) for name in self._unpacked}
            for name, unpacked in self._unpacked.items():
                replacement = torch.nn.Parameter(unpacked, requires_grad=False)
                module.register_parameter(name, replacement)
            packing.process_weights_after_loading(module)
            for name, parameter in parameters.items():
                module.register_parameter(name, parameter)
        self._unpacked = {}


class LoadPlan:
    """The places of all tensors of a model."""

    def __init__(
        self,
        model: torch.nn.Module,
        modules: Sequence[ModulePlan],
        names: Iterable[str],
    ) -> None:
        """Begin without an update.

        Args:
            model: The model.
            modules: Its modules that take tensors.
            names: All tensors of the recorded update; vLLM may have no use for some.
        """
        self._modules = modules
        self._attentions = list(filter(is_attention, model.modules()))
        self._takers: dict[str, list[ModulePlan]] = {name: [] for name in names}
        for module in modules:
            for source in module.sources:
                self._takers[source].append(module)

    def begin(self) -> None:
        """Begin an update."""
        for module in self._modules:
            module.begin()

    @torch.no_grad()
    def load(self, received: Received) -> None:
        """Take the parameters of a bucket, which are no longer needed afterwards.

        Raises:
            WeightSyncError: The update that was recorded did not have one of them.
        """
        unknown = sorted(received.keys() - self._takers.keys())
        if unknown:
            raise WeightSyncError(
                f"the engine's first update did not hold {unknown}, so their place is"
                " not known"
            )
        takers = [taker for name in received for taker in self._takers[name]]
        # A dictionary drops duplicates and keeps the order.
        for taker in dict.fromkeys(takers):
            taker.take(received)

    def incomplete(self) -> list[str]:
        """Return the names of the modules that lack tensors."""
        return [module.name for module in self._modules if module.missing]

    def finish(self, dtype: torch.dtype) -> None:
        """Let attention, which vLLM finishes last, use the new weights."""
        for attention in self._attentions:
            process: Any = attention.process_weights_after_loading
            process(dtype)


# --------------------------------------------------------------------------- the record


@dataclass
class _Record:
    """Account of what vLLM's loader did with one parameter."""

    module: torch.nn.Module
    name: str
    # The tensor lives as long as the record, so that its memory has no other owner.
    parameter: torch.Tensor
    copies: list[Copy] = field(default_factory=list)
    padding: int = 0
    """Number of elements that were filled with zeros."""


class LoadRecorder(TorchDispatchMode):
    """Records what vLLM's loader does with the parameters of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Begin a record of an update that vLLM has just begun."""
        super().__init__()
        self._model = model
        self._received: Received = {}
        self._names: set[str] = set()
        self._is_plain = True
        self._records = {
            _memory(parameter): _Record(module, name, parameter)
            for module in model.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        self._buffers = {_memory(buffer) for buffer in model.buffers()}

    @contextmanager
    def recording(self, received: Received) -> Iterator[None]:
        """Record the loading of these parameters."""
        self._received = received
        self._names |= received.keys()
        try:
            with self:
                yield
        finally:
            self._received = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        record = None
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            record = self._records.get(_memory(args[0]))
        if record is not None:
            self._note(record, func, args)
        elif func is torch.ops.aten.copy_.default and _memory(args[0]) in self._buffers:
            # A plan knows the places of parameters alone.
            self._is_plain &= self._part_of(args[1]) is None
        return func(*args, **(kwargs or {}))

    def _note(self, record: _Record, func: Any, args: tuple[Any, ...]) -> None:
        """Note an operation that changes a parameter."""
        target = args[0]
        if func is torch.ops.aten.fill_.Scalar and args[1] == 0:
            record.padding += target.numel()
            return

        if func is not torch.ops.aten.copy_.default:
            self._is_plain = False
            return

        source = args[1]
        part = self._part_of(source)
        if part is None:
            # vLLM copies a parameter that it did not allocate anew onto itself.
            is_there = not target.is_meta and torch.equal(target, source)
            self._is_plain &= is_there
            return

        first = target.storage_offset() - record.parameter.storage_offset()
        place = Elements(first, tuple(target.shape), target.stride())
        copy = Copy(*part, place)
        # It also loads such a parameter twice.
        if copy not in record.copies:
            record.copies.append(copy)

    def _part_of(self, source: torch.Tensor) -> tuple[str, Elements] | None:
        """Return which part of which received tensor this is; None if it is none."""
        address = source.data_ptr()
        for name, tensor in self._received.items():
            begin = tensor.data_ptr()
            if begin <= address < begin + tensor.nbytes:
                if source.dtype != tensor.dtype:
                    return None
                first = (address - begin) // tensor.element_size()
                return name, Elements(first, tuple(source.shape), source.stride())
        return None

    def plan(self) -> LoadPlan | None:
        """Return the plan of later updates, after vLLM has finished this one."""
        by_module: dict[torch.nn.Module, dict[str, ParameterPlan]] = {}
        for record in self._records.values():
            if not record.copies:
                continue
            before = record.parameter
            copies = sorted(record.copies, key=lambda copy: copy.place.offset)
            plan = ParameterPlan(before.shape, before.dtype, copies)
            by_module.setdefault(record.module, {})[record.name] = plan

            filled = sum(torch.Size(copy.place.shape).numel() for copy in copies)
            self._is_plain &= filled + record.padding == before.numel()
            # Padding stays where vLLM keeps the parameter as it is.
            after = record.module.get_parameter(record.name)
            is_packed = not after.numel() and not record.padding
            self._is_plain &= is_packed or after.shape == before.shape

        # Zentorch may keep the weights that it gets, and does not always pack them.
        if hasattr(torch.ops.zentorch, "zentorch_linear_unary"):
            return None
        packing = [getattr(module, "quant_method", None) for module in by_module]
        is_known = all(method is None or type(method) in _PACKING for method in packing)
        if not self._is_plain or not is_known or any(map(is_attention, by_module)):
            return None
        modules = [
            ModulePlan(name, module, by_module[module])
            for name, module in self._model.named_modules()
            if module in by_module
        ]
        return LoadPlan(self._model, modules, self._names)


def _memory(tensor: torch.Tensor) -> int:
    """Return a number of the memory of a tensor, which all of its views have.

    A tensor on the meta device has no address.
    """
    number: int = tensor.untyped_storage()._cdata
    return number
