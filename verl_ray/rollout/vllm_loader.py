"""What vLLM's workers gain so that weights can be loaded into them bucket by bucket.

Invariant: vLLM's model is made of the received tensors and of nothing else: every module is loaded completely, or the
update fails. Runs inside vLLM's worker processes, mixed into the worker class; its state lives on the worker.
Deliberately not here: the order of calls and the coverage of the manifest, which the engine keeps.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
)

from verl_ray.config.roles import LoraConfig
from verl_ray.errors import WeightSyncError
from verl_ray.rollout.vllm_core import adapter, forget_adapters, is_attention
from verl_ray.rollout.vllm_transfer import BucketTransferEngine
from verl_ray.weight_sync.buckets import Bucket
from verl_ray.weight_sync.fingerprint import Prints
from verl_ray.weight_sync.inbox import Inbox
from verl_ray.weight_sync.shared_files import FOLDER, prefix, remove_stale
from verl_ray.weight_sync.transport import Address, Route, Seat

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object


class WeightLoader(_Worker):
    """The names begin with `weights_`, since they share a namespace with the methods of vLLM's worker."""

    _weights_tied: list[torch.nn.Module]
    _weights_model_comes = False
    _weights_adapter: dict[str, torch.Tensor]
    _weights_noted: list[LayerReloadingInfo]
    _weights_owned: dict[int, int]  # by place in `_weights_noted`, how many of its tensors are no longer the wire's

    def weights_connect(self, address: Address, route: Route, first_receiver: int) -> None:
        """Open the wire that buckets will come over; one that was open before goes."""
        seat = Seat(route, first_receiver + self.rank, self.device)
        self.init_weight_transfer_engine({"address": address, "seat": seat})

    def weights_begin_update(self, model_comes: bool) -> None:
        """`model_comes`: else an adapter for the one that is there."""
        self._weights_inbox.begin()
        self._weights_model_comes, self._weights_adapter = model_comes, {}
        if not model_comes:
            return
        model = self.model_runner.model
        if self._weights_on_cpu():
            # vLLM 0.32 packs the weights of experts for the CPU when it sets up their kernel, and not again: it would
            # read the new ones, which are plain, as if they were packed, without a message (measured: log-probs are off
            # by 3). Without a kernel it sets up another for this load, as for the first.
            for module in model.modules():
                if isinstance(module, RoutedExperts):
                    module.quant_method.moe_kernel = None
        self._weights_tied = _tied_modules(model)
        with self._weights_context():
            self.start_weight_update()
        self._weights_noted, self._weights_owned = [get_layerwise_info(module) for module in model.modules()], {}

    def weights_receive(self, bucket: Bucket) -> None:
        """Load a bucket."""
        if bucket.adapter:
            arrived = self._weights_inbox.receive(bucket)
            self._weights_adapter |= {name: tensor.to("cpu", copy=True) for name, tensor in arrived.items()}
        else:
            with self._weights_context():
                self.update_weights({"bucket": bucket})
            self._weights_own_pending()
        self._weights_inbox.release()

    def weights_arrived(self) -> Prints:
        """The fingerprints of the tensors that vLLM's loader was given."""
        return self._weights_inbox.prints

    def _weights_own_pending(self) -> None:
        """Copy what vLLM has only noted so far (the parts of modules that the bucket does not complete), since the wire
        will use the place again."""
        for place, info in enumerate(self._weights_noted):
            owned, self._weights_owned[place] = self._weights_owned.get(place, 0), len(info.loaded_weights)
            for _, arguments in info.loaded_weights[owned:]:
                for key, value in arguments.arguments.items():
                    if isinstance(value, torch.Tensor) and not value.is_meta:
                        arguments.arguments[key] = value.clone()

    def weights_commit(self, lora: LoraConfig | None) -> None:
        """`lora`: what the adapter is that came; None = none came."""
        if self._weights_model_comes:
            self._weights_commit_model()
        if lora is not None:
            self._weights_add_adapter(lora)

    def _weights_commit_model(self) -> None:
        model = self.model_runner.model
        if missing := self._weights_incomplete(model):
            raise WeightSyncError(f"vLLM's model was not loaded completely; parameters are missing for {missing}")
        with self._weights_context():
            self.finish_weight_update()
            if self._weights_on_cpu():
                # vLLM 0.32 packs the weights of a linear layer for the CPU, but not again for a head that is tied to
                # the embedding: it would go on with the old ones, without a message.
                for module in self._weights_tied:
                    if isinstance(module, VocabParallelEmbedding):
                        module.quant_method.process_weights_after_loading(module)
        forget_adapters(self.model_runner)

    def _weights_add_adapter(self, lora: LoraConfig) -> None:
        """vLLM takes adapters from directories alone, at any time."""
        remove_stale()
        with tempfile.TemporaryDirectory(prefix=prefix("adapter"), dir=FOLDER if FOLDER.is_dir() else None) as path:
            save_file(self._weights_adapter, Path(path, "adapter_model.safetensors"))
            described = {
                "peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets),
                "bias": "none",
            }  # fmt: skip
            Path(path, "adapter_config.json").write_text(json.dumps(described))
            self.add_lora(adapter(path, anew=True))
        self._weights_adapter = {}

    def weights_abort_update(self) -> None:
        """Leave the reload, whatever was loaded, so that another one can begin."""
        if not self._weights_model_comes:
            return
        with self._weights_context():
            finalize_layerwise_reload(self.model_runner.model, self.model_config)
        self._weight_update_active = False  # vLLM has no verb for it

    def weights_repacked(self) -> list[str]:
        """Modules whose weights vLLM holds in another form than it received them in."""
        model = self.model_runner.model
        tied = set(self._weights_tied)
        names = [name for name, module in model.named_modules() if module in tied or isinstance(module, RoutedExperts)]
        packed = [name for name, module in model.named_modules() if getattr(module, "cpu_linear", None) is not None]
        return list(dict.fromkeys([*names, *packed]))

    def weights_close(self) -> None:
        self._weights_inbox.close()

    def memory_in_use(self) -> tuple[int, int]:
        """(process id, bytes): the resident set on a CPU, what is in use on the device on a GPU."""
        process = psutil.Process()
        if self._weights_on_cpu():
            return process.pid, process.memory_info().rss
        free, total = torch.cuda.mem_get_info(self.device)
        return process.pid, total - free

    @property
    def _weights_inbox(self) -> Inbox:
        engine = self.weight_transfer_engine
        assert isinstance(engine, BucketTransferEngine)
        return engine.inbox

    def _weights_on_cpu(self) -> bool:
        return bool(self.device.type == "cpu")

    def _weights_context(self) -> AbstractContextManager[object]:
        return set_current_vllm_config(self.vllm_config)

    def _weights_incomplete(self, model: torch.nn.Module) -> list[str]:
        incomplete = []
        for name, module in model.named_modules():
            info = get_layerwise_info(module)
            # Attention holds scales that a checkpoint need not have; tied modules are loaded with their owner.
            if not info.can_load() or is_attention(module) or module in self._weights_tied:
                continue
            if info.load_numel < _checkpoint_numel(module):
                incomplete.append(name)
        return incomplete


def _tied_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules whose parameters all belong to an earlier module."""
    seen: set[int] = set()
    tied = []
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        if own and own <= seen:
            tied.append(module)
        seen |= own
    return tied


def _checkpoint_numel(module: torch.nn.Module) -> int:
    """Elements of a checkpoint that the module's own parameters take; vLLM pads vocabularies beyond that."""
    if isinstance(module, VocabParallelEmbedding):
        rows = module.shard_indices.num_org_elements
        return sum(rows * parameter[:1].numel() for parameter in module.parameters(recurse=False))
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))
