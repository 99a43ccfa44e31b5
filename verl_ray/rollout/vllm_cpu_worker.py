"""vLLM's CPU worker with a sleep that gives memory back.

vLLM's own CPU worker accepts sleep and wake, and ignores them.

Invariant: tensors keep their identity over sleep and wake. Only their storage is freed
and allocated again, so whoever holds a tensor need not be informed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker

from verl_ray.columns.stages import Int16
from verl_ray.profiling.memory import malloc_trim
from verl_ray.rollout.vllm_arguments import RECORDS_ROUTING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from verl_ray.rollout.vllm_cpu_routing import RoutingRecorder

Storages = list[tuple[torch.UntypedStorage, int]]
"""Storages, each with its size in bytes while it is awake."""


class SleepingCPUWorker(CPUWorker):
    """A CPU worker that follows the sleep methods of vLLM's executor.

    `sleep(2)` frees everything; `discard` and `wake_up` take tags.
    """

    _freed: dict[str, Storages]
    _routing: RoutingRecorder | None = None

    def init_device(self) -> None:
        # vLLM 0.22 leaves this empty, and fails on it when weights come.
        self.device = torch.device("cpu")
        super().init_device()

    def load_model(self, *arguments: Any, **options: Any) -> None:
        super().load_model(*arguments, **options)
        # vLLM makes what a later stage of a pipeline receives into as it measures its
        # memory, which it does not where the KV cache has a size.
        if not get_pp_group().is_first_rank:
            runner = self.model_runner
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )
        if self.vllm_config.additional_config.get(RECORDS_ROUTING):
            # The hooks are newer than the oldest vLLM.
            from verl_ray.rollout.vllm_cpu_routing import RoutingRecorder

            self._routing = RoutingRecorder(self.model_runner)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        output = super().execute_model(scheduler_output)
        if self._routing is not None:
            self._routing.record(scheduler_output)
        return output

    def take_routing(self, ends: Mapping[str, int]) -> dict[str, Int16] | None:
        """Return what routers chose; see `RoutingRecorder.take`.

        All ranks have the same, and only the first one returns it.
        """
        assert self._routing is not None, "the engine was started to record"
        return None if self.rank else self._routing.take(ends)

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache and the weights; level 2 is the only one."""
        if level != 2:
            raise ValueError(
                f"sleep level {level}: on a CPU there is no other memory to offload"
                " weights to"
            )
        self.discard(("kv_cache", "weights"))

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the parts of the memory with these tags, "kv_cache" and "weights"."""
        self._freed = getattr(self, "_freed", {})
        if "kv_cache" in tags and "kv_cache" not in self._freed:
            self._freed["kv_cache"] = _free(_tensors(self.model_runner.kv_caches))
        if "weights" in tags and "weights" not in self._freed:
            self._freed["weights"] = self._free_weights()
        gc.collect()
        malloc_trim()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate the memory of these tags again; None = of everything."""
        for tag in tags or ["weights", "kv_cache"]:
            for storage, nbytes in self._freed.pop(tag, []):
                storage.resize_(nbytes)
                # A KV cache must be finite where it is not written yet, and new memory
                # may hold anything.
                flat = torch.empty(0, dtype=torch.uint8)
                flat.set_(storage, 0, (nbytes,), (1,)).zero_()

    def _free_weights(self) -> Storages:
        model = self.model_runner.model
        # Buffers, such as rotary tables, stay: no weight update restores them.
        storages = _free(model.parameters())
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                # This holds the weights packed for the CPU; loading packs them again.
                module.cpu_linear = None
        return storages


def _tensors(nested: object) -> Iterable[torch.Tensor]:
    """Yield the tensors in nested lists and tuples."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for inner in nested:
            yield from _tensors(inner)


def _free(tensors: Iterable[torch.Tensor]) -> Storages:
    """Free the storages of tensors, several of which may share a storage."""
    by_address: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        by_address[storage._cdata] = storage

    storages = [
        (storage, storage.nbytes())
        for storage in by_address.values()
        if storage.nbytes()
    ]
    for storage, _ in storages:
        storage.resize_(0)
    return storages
