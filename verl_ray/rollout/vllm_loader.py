"""Methods that vLLM's workers gain, to load weights into them bucket by bucket.

Invariant: vLLM's model is made of the received tensors and of nothing else: every
module is loaded completely, or the update fails. The class runs inside of vLLM's worker
processes, mixed into the worker class, and its state lives on the worker.
"""

from __future__ import annotations

import functools
import json
import tempfile
import traceback
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
from verl_ray.errors import VerlRayError, WeightSyncError
from verl_ray.ownership import prefix, remove_stale
from verl_ray.private_files import shared_folder
from verl_ray.rollout.cpu_corrections import correct_computations
from verl_ray.rollout.equal_bits import compute_rows_alike
from verl_ray.rollout.vllm_core import (
    adapter_request,
    drop_adapters,
    is_attention,
)
from verl_ray.rollout.vllm_load_plan import LoadPlan, LoadRecorder
from verl_ray.rollout.vllm_transfer import BucketTransferEngine
from verl_ray.weight_sync.fingerprint import Fingerprints
from verl_ray.weight_sync.manifest import Bucket, Experts
from verl_ray.weight_sync.transport import Address, Inbox, WireEndpoint, WireSpec

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object

_COPIED = ("sinks", "attention_sink_bias", "e_score_correction_bias")
"""Parameters that vLLM (0.32) fills where they are, and does not count in a reload.

Of sinks it would take the copies for nothing, since a reload puts empty ones in their
place.
"""

# vLLM imports this module into each process of an engine before that computes.
compute_rows_alike()
correct_computations()


class WeightLoader(_Worker):
    """Loading of weights, as an extension of vLLM's worker class.

    The names begin with `weights_`, since they share a namespace with vLLM's methods.
    """

    # Whether the open update holds a model, and the adapter that has arrived with it.
    _weights_holds_model = False
    _weights_adapter: dict[str, torch.Tensor]

    # The modules that have the weights of others.
    _weights_tied: list[torch.nn.Module]

    # How models are loaded. Without a plan vLLM's own loader does it, which is recorded
    # once.
    _weights_plan: LoadPlan | None = None
    _weights_are_recorded = False

    # What vLLM has recorded for each module, and for each of these records how many of
    # its tensors were copied from the wire.
    _weights_layer_infos: list[LayerReloadingInfo]
    _weights_num_copied: dict[int, int]

    def weights_call(
        self, method: str, *args: object
    ) -> tuple[object, Exception | None]:
        """Call a method by its name, and return its result and its error, if any."""
        try:
            return getattr(self, method)(*args), None
        except VerlRayError as error:
            return None, error
        except Exception as error:
            # Other errors need not survive pickling.
            traceback.print_exc()
            return None, RuntimeError(repr(error))

    # ----------------------------------------------------------------------- the update

    def weights_experts(self) -> Experts:
        """Return the experts that this rank holds of every layer.

        None, which stands for all, if it lacks none, or other ones in another layer.
        """
        modules = self.model_runner.model.modules()
        held_by_layer = {
            _experts_of(each) for each in modules if isinstance(each, RoutedExperts)
        }
        return held_by_layer.pop() if len(held_by_layer) == 1 else None

    def weights_connect(
        self, address: Address, wire_spec: WireSpec, first_receiver: int
    ) -> None:
        """Open the wire over which buckets arrive, in place of an earlier one."""
        endpoint = WireEndpoint(wire_spec, first_receiver + self.rank, self.device)
        self.init_weight_transfer_engine({"address": address, "endpoint": endpoint})

    def weights_begin_update(self, holds_model: bool) -> None:
        """Prepare for the tensors of an update.

        Args:
            holds_model: Whether a whole model comes. Otherwise only an adapter comes,
                for the model that is loaded.
        """
        self._weights_inbox.begin()
        self._weights_holds_model = holds_model
        self._weights_adapter = {}

        # A failed verification names them, whatever the update holds.
        model = self.model_runner.model
        self._weights_tied = _tied_modules(model)
        if not holds_model:
            return
        if self._weights_plan is not None:
            self._weights_plan.begin()
            return

        if self._weights_on_cpu():
            self._weights_reset_expert_kernels(model)
        _name_loaders(model)
        with self._weights_context():
            self.start_weight_update()
        _put_back_copied(model)

        modules = list(model.modules())
        self._weights_layer_infos = [get_layerwise_info(module) for module in modules]
        self._weights_num_copied = {}
        # A plan has not run on a GPU, where not every update is probed either.
        if self._weights_on_cpu() and not self._weights_are_recorded:
            self._weights_engine.recorder = LoadRecorder(model)

    def weights_receive(self, bucket: Bucket) -> None:
        """Load a bucket, and free its place on the wire."""
        if bucket.adapter:
            # vLLM gets the adapter as a whole, with the commit.
            received = self._weights_inbox.receive(bucket)
            self._weights_adapter |= {
                name: tensor.to("cpu", copy=True) for name, tensor in received.items()
            }
        elif self._weights_plan is not None:
            received = self._weights_inbox.receive(bucket)
            self._weights_plan.load(received)
        else:
            with self._weights_context():
                self.update_weights({"bucket": bucket})
            self._weights_copy_recorded()
        self._weights_inbox.release()

    def weights_fingerprints(self) -> Fingerprints:
        """Return the fingerprints of the tensors that vLLM's loader got."""
        return self._weights_inbox.fingerprints

    def weights_commit(self, lora: LoraConfig | None) -> None:
        """Finish the update.

        Args:
            lora: The configuration of the adapter that came, if one came.
        """
        if self._weights_holds_model:
            self._weights_commit_model()
        if lora is not None:
            self._weights_add_adapter(lora)

    def weights_abort_update(self) -> None:
        """Leave the reload, whatever was loaded, so that another update can begin."""
        if not self._weights_holds_model or self._weights_plan is not None:
            return
        with self._weights_context():
            finalize_layerwise_reload(self.model_runner.model, self.model_config)
        # vLLM has no method for this.
        self._weight_update_active = False
        self._weights_engine.recorder = None

    def weights_close(self) -> None:
        """Close the wire."""
        self._weights_inbox.close()

    # ---------------------------------------------------------------------- diagnostics

    def weights_repacked(self) -> list[str]:
        """Return the modules whose weights vLLM holds in another form than received."""
        model = self.model_runner.model
        tied = set(self._weights_tied)
        names = [
            name
            for name, module in model.named_modules()
            if module in tied or isinstance(module, RoutedExperts)
        ]
        packed = [
            name
            for name, module in model.named_modules()
            if getattr(module, "cpu_linear", None) is not None
        ]
        # A dictionary drops duplicates and keeps the order.
        return list(dict.fromkeys([*names, *packed]))

    def memory_in_use(self) -> tuple[int, int]:
        """Return the worker's process id and the bytes that it uses.

        These are the resident set on a CPU, and what is in use on the device on a GPU.
        """
        process = psutil.Process()
        if self._weights_on_cpu():
            return process.pid, process.memory_info().rss
        free, total = torch.cuda.mem_get_info(self.device)
        return process.pid, total - free

    # -------------------------------------------------------------- parts of the update

    def _weights_reset_expert_kernels(self, model: torch.nn.Module) -> None:
        # vLLM 0.32 packs the weights of experts for the CPU when it sets up their
        # kernel, and not again: it would read the new weights, which are plain, as if
        # they were packed, without a message (measured: log-probs are off by 3).
        # Without a kernel it sets up another one for this load, as for the first.
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                module.quant_method.moe_kernel = None

    def _weights_copy_recorded(self) -> None:
        """Copy the tensors that vLLM has only recorded so far.

        They are the parts of modules that the bucket does not complete. The wire will
        use their place again before vLLM reads them.
        """
        for index, info in enumerate(self._weights_layer_infos):
            num_copied = self._weights_num_copied.get(index, 0)
            self._weights_num_copied[index] = len(info.loaded_weights)

            for _, arguments in info.loaded_weights[num_copied:]:
                for key, value in arguments.arguments.items():
                    if isinstance(value, torch.Tensor) and not value.is_meta:
                        arguments.arguments[key] = value.clone()

    def _weights_commit_model(self) -> None:
        model = self.model_runner.model
        plan = self._weights_plan
        incomplete = plan.incomplete() if plan else self._weights_incomplete(model)
        if incomplete:
            raise WeightSyncError(
                "vLLM's model was not loaded completely; parameters are missing for"
                f" {incomplete}"
            )

        with self._weights_context():
            if plan is not None:
                plan.finish(self.model_config.dtype)
            else:
                self._weights_finish_recorded()
            if self._weights_on_cpu():
                # vLLM 0.32 packs the weights of a linear layer for the CPU, but not
                # again for a head that is tied to the embedding: it would continue
                # with the old weights, without a message.
                for module in self._weights_tied:
                    if isinstance(module, VocabParallelEmbedding):
                        module.quant_method.process_weights_after_loading(module)
        drop_adapters(self.model_runner)

    def _weights_finish_recorded(self) -> None:
        """Let vLLM finish the update, and plan those to come."""
        self.finish_weight_update()
        recorder = self._weights_engine.recorder
        if recorder is not None:
            self._weights_plan = recorder.plan()
            self._weights_are_recorded = True
            self._weights_engine.recorder = None

    def _weights_incomplete(self, model: torch.nn.Module) -> list[str]:
        """Return the modules that got fewer elements than a checkpoint has for them."""
        incomplete = []
        for name, module in model.named_modules():
            info = get_layerwise_info(module)
            copied = _copied_parameters(module).values()
            if any(bool(value.isnan().any()) for value in copied):
                incomplete.append(name)
            if not info.can_load():
                continue
            # Attention holds scales that a checkpoint need not have; tied modules are
            # loaded with their owner.
            if is_attention(module) or module in self._weights_tied:
                continue
            if info.load_numel < _checkpoint_numel(module):
                incomplete.append(name)
        return incomplete

    def _weights_add_adapter(self, lora: LoraConfig) -> None:
        """Give vLLM the adapter in a directory, which is the only way it takes one."""
        folder = shared_folder()
        remove_stale(folder)
        with tempfile.TemporaryDirectory(prefix=prefix("adapter"), dir=folder) as path:
            save_file(self._weights_adapter, Path(path, "adapter_model.safetensors"))
            adapter_config = {
                "peft_type": "LORA",
                "r": lora.rank,
                "lora_alpha": lora.alpha,
                "target_modules": list(lora.targets),
                "bias": "none",
            }
            config_file = Path(path, "adapter_config.json")
            config_file.write_text(json.dumps(adapter_config))
            self.add_lora(adapter_request(path, replace=True))
        self._weights_adapter = {}

    @property
    def _weights_inbox(self) -> Inbox:
        return self._weights_engine.inbox

    @property
    def _weights_engine(self) -> BucketTransferEngine:
        engine = self.weight_transfer_engine
        assert isinstance(engine, BucketTransferEngine)
        return engine

    def _weights_on_cpu(self) -> bool:
        return bool(self.device.type == "cpu")

    def _weights_context(self) -> AbstractContextManager[object]:
        return set_current_vllm_config(self.vllm_config)


def _experts_of(module: RoutedExperts) -> Experts:
    """Return the experts that a module holds; None for all.

    vLLM numbers copies of experts, if there are any, apart from a checkpoint's experts.
    """
    expert_map = module.expert_map_manager
    sizes = module.moe_config
    has_copies = sizes.num_experts != sizes.num_logical_experts
    if expert_map.expert_map is None or has_copies:
        return None
    return frozenset(expert_map.get_local_expert_ids())


def _name_loaders(model: torch.nn.Module) -> None:
    """Name the loaders of parameters that are partial functions, as of MiniMax-M2.

    vLLM's reload (0.32) asks each for its name.
    """
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
            setattr(loader, "__name__", "partial")  # noqa: B010


def _copied_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    own = module.named_parameters(recurse=False)
    return {name: value for name, value in own if name in _COPIED}


def _put_back_copied(model: torch.nn.Module) -> None:
    """Put such parameters back into a model whose reload has begun.

    Those that no tensor arrives for will be told by not being numbers.
    """
    for module in model.modules():
        for name in _copied_parameters(module):
            parameters, _ = get_layerwise_info(module).kernel_tensors
            parameters[name].data.fill_(torch.nan)
            module.register_parameter(name, parameters[name])


def _tied_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules whose parameters all belong to an earlier module."""
    seen: set[int] = set()
    tied = []
    for module in model.modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        if own and own <= seen:
            tied.append(module)
        seen |= own
    return tied


def _checkpoint_numel(module: torch.nn.Module) -> int:
    """Return how many elements a module's own parameters take by their loaders."""
    own = module.named_parameters(recurse=False)
    parameters = [value for name, value in own if name not in _COPIED]
    if isinstance(module, VocabParallelEmbedding):
        # vLLM pads vocabularies; the padding is in no checkpoint.
        rows = module.shard_indices.num_org_elements
        return sum(rows * parameter[:1].numel() for parameter in parameters)
    return sum(parameter.numel() for parameter in parameters)
