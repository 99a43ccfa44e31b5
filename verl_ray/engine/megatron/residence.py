"""megatron-core's buffers of weights and gradients, moved to the host and back.

Invariant: megatron-core itself moves them, so parameters go on looking into their buffer; every move of weights is
waited for and proven. Deliberately not here: the optimizer's state, which its own methods move, and when (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor

from verl_ray.engine.offload import Offload


class Buffers:
    """Of a role that learns: those of its modules, which megatron-core's DistributedDataParallel has wrapped."""

    def __init__(self, modules: Sequence[Any], offload: Offload) -> None:
        self._offload = offload
        self._all = [one for module in modules for one in (*module.buffers, *module.expert_parallel_buffers)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def weights_to_host(self) -> None:
        """megatron-core begins the copies and does not wait."""
        there = {name: buffer for name, buffer in self._named() if not _is_freed(buffer.param_data)}
        for name, buffer in there.items():
            if buffer.param_data_cpu is None:  # megatron-core would make it of two copies, and only where CUDA is
                buffer.param_data_cpu = self._offload.place(name, buffer.param_data)
        sources = {name: buffer.param_data for name, buffer in there.items()}
        targets = {name: buffer.param_data_cpu for name, buffer in there.items()}
        with self._offload.proving(sources, targets, "host"):
            for buffer in there.values():
                buffer.offload_to_cpu(move_grads=False)

    def weights_to_device(self) -> None:
        away = {name: buffer for name, buffer in self._named() if _is_freed(buffer.param_data)}
        sources = {name: buffer.param_data_cpu for name, buffer in away.items()}
        targets = {name: buffer.param_data for name, buffer in away.items()}
        with self._offload.proving(sources, targets, "device"):
            for buffer in away.values():
                buffer.reload_from_cpu(move_grads=False)

    def release_gradients(self) -> None:
        """Give their memory back. Between steps they are none."""
        for buffer in self._all:
            buffer.offload_to_cpu(move_params=False)

    def renew_gradients(self) -> None:
        """Have their memory again, all zeros; idempotent."""
        for buffer in self._all:
            buffer.reload_from_cpu(move_params=False)

    def on_host(self, parameter: Tensor) -> Tensor:
        """The values of a parameter whose memory on the device is given back."""
        buffer = next(one for one in self._all if parameter in one.param_index_map)
        first = parameter.storage_offset() - buffer.param_data.storage_offset()
        return cast(Tensor, buffer.param_data_cpu).as_strided(parameter.shape, parameter.stride(), first)

    def _named(self) -> Iterator[tuple[str, Any]]:
        for number, buffer in enumerate(self._all):
            yield f"weights {number}", buffer


def _is_freed(memory: Tensor) -> bool:
    """Whether megatron-core has given it back; the tensor stays."""
    return memory.untyped_storage().size() == 0
