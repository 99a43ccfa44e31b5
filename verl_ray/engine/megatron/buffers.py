"""megatron-core's buffers of weights and gradients, moved between device and host.

Invariant: megatron-core itself moves its buffers of weights and gradients, so
parameters remain views of their buffer; every move of weights is waited for and
verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor

from verl_ray.engine.offload import Offload


class MegatronBuffers:
    """The buffers of a role that learns.

    They belong to its modules, which megatron-core's DistributedDataParallel has
    wrapped. Without modules there are no buffers.
    """

    def __init__(self, modules: Sequence[Any], offload: Offload) -> None:
        self._offload = offload
        self._buffers: list[Any] = []
        for module in modules:
            self._buffers += module.buffers
            self._buffers += module.expert_parallel_buffers

    def __iter__(self) -> Iterator[Any]:
        return iter(self._buffers)

    def weights_to_host(self) -> None:
        """Offload the weights that are on the device."""
        on_device = {
            name: buffer
            for name, buffer in self._named_weights()
            if not is_freed(buffer.param_data)
        }
        for name, buffer in on_device.items():
            # megatron-core would build this memory from two copies, and only with CUDA.
            if buffer.param_data_cpu is None:
                memory = self._offload.host_memory(name, buffer.param_data)
                buffer.param_data_cpu = memory

        sources = {name: buffer.param_data for name, buffer in on_device.items()}
        targets = {name: buffer.param_data_cpu for name, buffer in on_device.items()}
        # megatron-core begins the copies and does not wait for them.
        with self._offload.verifying(sources, targets, "host"):
            for buffer in on_device.values():
                buffer.offload_to_cpu(move_grads=False)

    def weights_to_device(self) -> None:
        """Move the weights that are offloaded back to the device."""
        offloaded = {
            name: buffer
            for name, buffer in self._named_weights()
            if is_freed(buffer.param_data)
        }

        sources = {name: buffer.param_data_cpu for name, buffer in offloaded.items()}
        targets = {name: buffer.param_data for name, buffer in offloaded.items()}
        with self._offload.verifying(sources, targets, "device"):
            for buffer in offloaded.values():
                buffer.reload_from_cpu(move_grads=False)

    def release_gradients(self) -> None:
        """Release the memory of gradients, which hold nothing between steps."""
        for buffer in self._buffers:
            buffer.offload_to_cpu(move_params=False)

    def renew_gradients(self) -> None:
        """Allocate the memory of gradients again, all zeros; idempotent."""
        for buffer in self._buffers:
            buffer.reload_from_cpu(move_params=False)

    def on_host(self, parameter: Tensor) -> Tensor:
        """Return the offloaded values of a parameter: a view of the host's memory."""
        buffer = next(
            buffer for buffer in self._buffers if parameter in buffer.param_index_map
        )
        buffer_start = buffer.param_data.storage_offset()
        offset = parameter.storage_offset() - buffer_start

        memory = cast(Tensor, buffer.param_data_cpu)
        return memory.as_strided(parameter.shape, parameter.stride(), offset)

    def _named_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield the buffers with the names of their weights, for verification."""
        for number, buffer in enumerate(self._buffers):
            yield f"weights {number}", buffer


def is_freed(memory: Tensor) -> bool:
    """Return whether the memory of a tensor was released; the tensor itself remains."""
    return memory.untyped_storage().size() == 0
