"""vLLM's CPU worker with a sleep that gives memory back. vLLM's own accepts sleep and wake on a CPU and ignores them.

Invariant: tensors keep their identity over sleep and wake, only their storage goes and comes, so nothing that holds
them has to be told. Deliberately not here: anything a GPU worker needs; there vLLM's own sleep mode is used.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from verl_ray.profiling.memory import malloc_trim

Storages = list[tuple[torch.UntypedStorage, int]]  # with their sizes in bytes when resident


class SleepingCPUWorker(CPUWorker):
    """Follows the verbs of vLLM's executor: `sleep(2)` frees everything, `discard` and `wake_up` take tags."""

    _freed: dict[str, Storages]

    def init_device(self) -> None:
        self.device = torch.device("cpu")  # 0.22 leaves it empty, and fails on it when weights come
        super().init_device()

    def sleep(self, level: int = 1) -> None:
        if level != 2:
            raise ValueError(f"sleep level {level}: on a CPU there is no other memory to offload weights to")
        self.discard(("kv_cache", "weights"))

    def discard(self, tags: tuple[str, ...]) -> None:
        self._freed = getattr(self, "_freed", {})
        if "kv_cache" in tags and "kv_cache" not in self._freed:
            self._freed["kv_cache"] = _free(_tensors(self.model_runner.kv_caches))
        if "weights" in tags and "weights" not in self._freed:
            model = self.model_runner.model
            # Buffers (rotary tables) stay: no weight update brings them back.
            self._freed["weights"] = _free(model.parameters())
            for module in model.modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = None  # holds the weights as packed for the CPU; loading packs them anew
        gc.collect()
        malloc_trim()

    def wake_up(self, tags: list[str] | None = None) -> None:
        for tag in tags or ["weights", "kv_cache"]:
            for storage, nbytes in self._freed.pop(tag, []):
                storage.resize_(nbytes)
                # A KV cache must be finite where it is not written yet; new memory may hold anything.
                torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,)).zero_()


def _tensors(nested: object) -> Iterable[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for inner in nested:
            yield from _tensors(inner)


def _free(tensors: Iterable[torch.Tensor]) -> Storages:
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    storages = [(storage, storage.nbytes()) for storage in found.values() if storage.nbytes()]
    for storage, _ in storages:
        storage.resize_(0)
    return storages
