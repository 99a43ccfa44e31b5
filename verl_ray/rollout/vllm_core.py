"""vLLM's engine core in this process, its setup, and what depends on vLLM's version.

Invariant: every use of vLLM's internals by the rollout engine is here, and differences
between its versions are resolved here, once, by looking at the installed version. A
version outside of `SUPPORTED` is refused before anything of it is used; a feature that
a supported version lacks is refused when it is requested. The setup of vLLM fixes the
environment of its process, and those of its arguments that the rest of this package
relies on; `rollout.vllm_args` cannot change them.

The tests run 0.32. With 0.22.1 on a CPU (torch 2.11) `pytest tests/rollout` passed,
except for what that version lacks (a KV cache that is freed alone), for what it does
right by itself, and for adapters, with which it did not start. What open requests need
was read in its source, and not run.

Deliberately not here: requests and responses as values of this project
(`vllm_engine.py`), and what runs inside vLLM's workers (`vllm_loader.py`,
`vllm_load_plan.py`, `vllm_cpu_worker.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.config.roles import LoraConfig
from verl_ray.config.rollout import (
    VLLM_BATCHED_REQUESTS,
    VLLM_BATCHED_TOKENS,
    VLLM_LORA_RANKS,
    RolloutEngineConfig,
)
from verl_ray.config.versions import RELEASES, minor
from verl_ray.errors import RolloutError
from verl_ray.profiling import memory
from verl_ray.rollout.requests import EngineLoad
from verl_ray.settings.config_json import positions_of
from verl_ray.settings.section import resolved

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine import EngineCoreOutput

SUPPORTED = minor(RELEASES[0].first_vllm), minor(RELEASES[-1].last_vllm)
"""First and last minor version of vLLM that this file knows."""

TRANSFER = "verl_ray"
"""Name of this project's engine in vLLM's registry of weight-transfer engines."""

PACKAGES = ("vllm", "vllm-cpu")
"""Names under which vLLM is distributed."""


def require_supported() -> None:
    """Raise `RolloutError` unless a supported version of vLLM is installed."""
    version = installed_version()
    if version is None:
        raise RolloutError(
            "vLLM is not installed: install the extra 'cpu' or 'gpu' of this package"
        )

    first, last = SUPPORTED
    if not first <= minor(version) <= last:
        first_name = ".".join(map(str, first))
        last_name = ".".join(map(str, last))
        raise RolloutError(
            f"vLLM {version} is installed, and verl_ray knows {first_name} to"
            f" {last_name}: install one of these"
        )


def installed_version() -> str | None:
    """Return the version of vLLM in this environment, or None without vLLM."""
    for name in PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_attention(module: torch.nn.Module) -> bool:
    """Whether vLLM finishes the loading of this module after that of all others."""
    from vllm.model_executor.layers import attention

    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(module))
    return isinstance(module, attention.Attention | attention.MLAAttention)


def drop_adapters(runner: Any) -> None:
    """Remove the adapters of a worker's model runner, which belong to old weights."""
    if hasattr(runner, "reset_lora_state"):
        runner.reset_lora_state()
    else:
        runner.maybe_remove_all_loras(runner.lora_config)


def adapter_request(path: str, *, replace: bool = False) -> LoRARequest:
    """Return vLLM's name for the only adapter of an engine.

    Args:
        path: Directory of the adapter.
        replace: Whether a worker that has the adapter loads it again, from `path`.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", 1, path, load_inplace=replace)


class VllmCore:
    """A client of vLLM's engine core, which its caller steps."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Start the engine core in this process, and its workers."""
        from vllm.utils.import_utils import resolve_obj_by_qualname
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.core_client import InprocClient
        from vllm.v1.executor import Executor

        resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
        # All imports are done and stay. vLLM collects garbage six times as it starts,
        # which takes 2 s over objects that are not frozen.
        gc.freeze()

        executor = Executor.get_class(vllm_config)
        self._client = InprocClient(vllm_config, executor, log_stats=False)
        self._core = self._client.engine_core
        self._request_class = EngineCoreRequest
        # The path is not read, since the workers have the adapter already.
        self._adapter = adapter_request("which the workers have")

        # Callers may use an id again as soon as its request has ended. On a GPU a step
        # is then still under way, and vLLM would take what it samples for the new
        # request (0.32 fails). Its own front-end makes ids unique, too.
        self._numbers = itertools.count()
        self._core_ids: dict[str, str] = {}

        self._has_sessions = "session_id" in EngineCoreRequest.__struct_fields__
        self._has_versions = hasattr(self._client, "set_weight_version")
        self._frees_cache_alone = hasattr(self._core, "release_kv_cache_memory")

        self._is_paused = False
        self._preemptions = 0
        self._count_preemptions()

    def _count_preemptions(self) -> None:
        """Count what vLLM counts only along with all its other statistics."""
        scheduler = self._core.scheduler
        preempt = scheduler._preempt_request

        def counting(*arguments: Any, **options: Any) -> None:
            self._preemptions += 1
            preempt(*arguments, **options)

        scheduler._preempt_request = counting

    # ----------------------------------------------------------------------- generation

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: SamplingParams,
        cache_salt: str,
        session: str | None = None,
        *,
        adapted: bool,
    ) -> None:
        """Queue a request.

        Args:
            request_id: Unique among the requests that are in the core.
            tokens: Token ids of the prompt.
            params: vLLM's sampling parameters, which the core keeps.
            cache_salt: Prefixes are shared only by requests with the same salt.
            session: A hint for vLLM, where its version takes it.
            adapted: Use the model with the adapter that the workers were sent.
        """
        version_fields: dict[str, str | None] = {}
        if self._has_sessions:
            version_fields["session_id"] = session

        core_id = f"{request_id}-{next(self._numbers)}"
        self._core_ids[request_id] = core_id
        request = self._request_class(
            request_id=core_id,
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapter if adapted else None,
            cache_salt=cache_salt,
            data_parallel_rank=None,
            **version_fields,
        )
        self._client.add_request(request)

    def step(self) -> list[EngineCoreOutput]:
        """Step the core and return its outputs.

        On a GPU a step may still be under way; these are then the outputs of the step
        before it.
        """
        outputs: list[EngineCoreOutput] = self._client.get_output().outputs
        for output in outputs:
            output.request_id, _, _ = output.request_id.rpartition("-")
            if output.finish_reason is not None:
                del self._core_ids[output.request_id]
        return outputs

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; the core returns no more outputs of them.

        Ids of requests that have ended by themselves are ignored.
        """
        core_ids = [self._core_ids.pop(name, None) for name in request_ids]
        self._client.abort_requests([name for name in core_ids if name is not None])

    @property
    def load(self) -> EngineLoad:
        """How busy the scheduler is."""
        scheduler = self._core.scheduler
        running, waiting = scheduler.get_request_counts()
        return EngineLoad(
            scheduler.kv_cache_manager.usage, running, waiting, self._preemptions
        )

    def pause(self) -> list[EngineCoreOutput]:
        """Schedule nothing more, but keep all requests and their KV cache.

        Returns:
            The outputs of the steps that were under way.
        """
        self._is_paused = True
        self._core.pause_scheduler(mode="keep", clear_cache=False)

        # Consumes the batches that are on the device; it ends with the last of them,
        # since no new batch is scheduled.
        outputs: list[EngineCoreOutput] = []
        while self._core.batch_queue:
            outputs += self.step()
        return outputs

    def resume(self) -> None:
        """Schedule again."""
        self._is_paused = False
        self._core.resume_scheduler()

    @contextlib.contextmanager
    def only_running(self) -> Iterator[None]:
        """Schedule, in the block, no request that waits as it begins."""
        scheduler = self._core.scheduler
        waiting = list(scheduler.waiting)
        scheduler.waiting.remove_requests(waiting)
        try:
            yield
        finally:
            for request in waiting:
                scheduler.waiting.add_request(request)

    # --------------------------------------------------------------------------- memory

    def give_up_kv_cache(self) -> None:
        """Free the KV cache of all requests, while paused, and forget all prefixes.

        The requests wait, and are computed again from their tokens.
        """
        preemptions = self._preemptions
        self._client.reset_prefix_cache(reset_running_requests=True)
        self._preemptions = preemptions

    def free_everything(self) -> None:
        """Free the weights and the KV cache, while no request holds a part of it."""
        self._flush_ended_requests()
        self._core.sleep(level=2, mode="keep")

    def free_kv_cache(self) -> None:
        """Free the KV cache, while no request holds a part of it.

        Raises:
            RolloutError: This vLLM cannot free it alone.
        """
        if not self._frees_cache_alone:
            raise RolloutError(
                f"vLLM {installed_version()} cannot free its KV cache alone: set"
                " rollout.sleep=weights or never"
            )
        self._flush_ended_requests()
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        self._core.release_kv_cache_memory()

    def wake(self, part: str) -> None:
        """Take the memory of "weights" or "kv_cache" back."""
        self._client.wake_up([part])
        # vLLM ends its own pause with the last part.
        if self._is_paused:
            self._core.pause_scheduler(mode="keep", clear_cache=False)

    def _flush_ended_requests(self) -> None:
        """Step until the workers know which requests have ended.

        They learn it with the next batch, which is empty; on a GPU one more batch is
        under way. The loop ends when neither batches are left nor requests, except
        those that are paused.
        """
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self.step()

    # -------------------------------------------------------------------------- weights

    def call_workers(self, method: str, *args: object) -> list[Any]:
        """Call a method of every worker, and return the results by rank."""
        return list(self._client.collective_rpc(method, args=args))

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load all weights by vLLM's own means, as a yardstick for benchmarks.

        What `vllm_loader.py` corrects and verifies is left out.
        """
        self._client.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(weights)}
        )

    def forget_prefixes(self, cache_salt: str) -> None:
        """Let requests that hold no KV cache read nothing of what was computed before.

        Args:
            cache_salt: The salt of the requests that are added from now on.
        """
        if self._client.reset_prefix_cache():
            return

        # Requests that run hold blocks, with which the cache cannot be emptied. The
        # others could find these, so they get another salt.
        scheduler = self._core.scheduler
        if not scheduler.running:
            raise RolloutError("vLLM did not reset its prefix cache")
        for request in scheduler.waiting:
            request.cache_salt = cache_salt
            request.block_hashes.clear()
            request.update_block_hashes()

    def set_version(self, version: int) -> None:
        """Set the policy version of the weights in vLLM, where its version takes it."""
        if self._has_versions:
            self._client.set_weight_version(str(version))

    # ------------------------------------------------------------------------- lifetime

    @property
    def is_failed(self) -> bool:
        """Whether a process of the engine has exited, if the engine has several."""
        return bool(getattr(self._core.model_executor, "is_failed", False))

    def close(self) -> None:
        """Shut the engine core down, and its processes if it has any."""
        self._client.shutdown()
        del self._client
        del self._core
        # Nothing of the engine may be left when another one starts in this process, or
        # when its process groups are destroyed.
        gc.collect()


# -------------------------------------------------------------------------------- setup

# -------------------------------------------------------------------------- environment


def environment(
    device: str, threads: int, tensor_parallel: int = 1, *, dtype: str = "float32"
) -> dict[str, str]:
    """Return the environment variables of a process that is to hold a `VllmEngine`.

    They must be set before the process imports torch.

    Args:
        device: "cpu" or "cuda".
        threads: CPU threads of each rank of the engine.
        tensor_parallel: Number of ranks of the engine.
        dtype: Type of the computation.
    """
    variables = {
        # The engine core is stepped in this process: it starts in 3 s instead of 40 s.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # Models are local directories; a look-up would hang without internet.
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }

    if device != "cpu":
        if dtype == "float32":
            # In float32 vLLM attends with Triton, whose products would round their
            # inputs to TF32, by more than the probe of a weight sync tolerates.
            variables["TRITON_F32_DEFAULT"] = "ieee"
        return variables | _without_expandable_segments(os.environ)

    # Otherwise the first request waits 8 to 15 s for a compiler.
    variables["TORCHDYNAMO_DISABLE"] = "1"
    # Otherwise threads share out a long context by what else is computed, and the last
    # bits of a response depend on that.
    variables["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    if tensor_parallel == 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    else:
        cores = _cores_of_ranks(threads, tensor_parallel)
        variables["VLLM_CPU_OMP_THREADS_BIND"] = cores
    return variables


def _without_expandable_segments(present: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator settings that differ from the present environment.

    What vLLM puts to sleep lies in a memory pool of its own, and torch's expandable
    segments are not for such pools (pytorch#147851). vLLM 0.32 turns them off while it
    fills a pool; earlier versions refuse to start. Trainers have another environment,
    and keep their segments (`profiling/memory.py`).
    """
    changed: dict[str, str] = {}
    for name in memory.ALLOCATOR_VARIABLES:
        settings = [setting.strip() for setting in present.get(name, "").split(",")]
        settings = [setting for setting in settings if setting]
        remaining = [
            setting for setting in settings if not memory.is_expandable(setting)
        ]
        if remaining != settings:
            changed[name] = ",".join(remaining)
            print(
                "warning: the rollout engine runs without expandable_segments of"
                f" {name}: it cannot sleep with them"
            )
    return changed


def _cores_of_ranks(threads: int, num_ranks: int) -> str:
    """Return consecutive cores of this machine for each rank, as vLLM writes them.

    Ranks share cores where there are too few of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    ranks = []
    for rank in range(num_ranks):
        first = rank * threads
        chosen = {cores[(first + thread) % len(cores)] for thread in range(threads)}
        ranks.append(",".join(map(str, sorted(chosen))))
    return "|".join(ranks)


# ---------------------------------------------------------------------------- arguments


def engine_config(
    model_path: str,
    config: RolloutEngineConfig,
    max_model_len: int,
    seed: int,
    device: str,
    **options: Any,
) -> VllmConfig:
    """Return vLLM's configuration of an engine.

    Args:
        model_path: The model directory.
        config: Settings of the engine.
        max_model_len: Largest number of tokens of prompt and response together.
        seed: Seed of vLLM.
        device: "cpu" or "cuda".
        options: The keyword arguments of `fixed_arguments`.

    Raises:
        RolloutError: vLLM is installed for another device, or `rollout.vllm_args` sets
            what must not be set.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if (device == "cpu") != current_platform.is_cpu():
        raise RolloutError(
            f"rollout on {device!r} was requested, but the installed vLLM runs on"
            f" {current_platform.device_type!r}: install the extra 'cpu' or 'gpu' of"
            " this package"
        )

    fixed = fixed_arguments(model_path, config, max_model_len, seed, device, **options)
    preferred: dict[str, Any] = {
        "enable_prefix_caching": True,
        # vLLM's defaults are small, except for its server and its offline engine.
        "max_num_seqs": VLLM_BATCHED_REQUESTS,
        "max_num_batched_tokens": max(max_model_len, VLLM_BATCHED_TOKENS),
        "hf_overrides": _with_real_factors,
    }
    if device == "cpu":
        _register_model(model_path)
    _allow_scaled_positions(model_path, max_model_len)

    conflicts = sorted(fixed.keys() & config.vllm_args.keys())
    if conflicts:
        raise RolloutError(
            f"rollout.vllm_args sets {conflicts}, which other keys of rollout, or the"
            " engine, set"
        )
    arguments = {**preferred, **config.vllm_args, **fixed}
    return EngineArgs(**arguments).create_engine_config()


def fixed_arguments(
    model_path: str,
    config: RolloutEngineConfig,
    max_model_len: int,
    seed: int,
    device: str,
    *,
    without_weights: bool,
    sleeps: bool,
    lora: LoraConfig | None = None,
) -> dict[str, Any]:
    """Return the engine arguments that `rollout.vllm_args` may not set.

    `verl_ray.config.rollout` refuses them before an engine starts.

    Args:
        model_path: The model directory.
        config: Settings of the engine.
        max_model_len: Largest number of tokens of prompt and response together.
        seed: Seed of vLLM.
        device: "cpu" or "cuda".
        without_weights: Do not read the weights of the model directory.
        sleeps: Whether the engine will free memory.
        lora: The adapter that updates will transfer, if any.
    """
    # In a placement group of Ray, vLLM would run one rank per bundle, and would refuse
    # to do so on a CPU. "mp" starts the ranks as processes of this one.
    executor = "uni" if config.tensor_parallel == 1 else "mp"

    fixed: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "dtype": resolved(config.dtype),
        "seed": seed,
        "max_model_len": max_model_len,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": executor,
        "kv_cache_memory_bytes": int(resolved(config.kv_cache_gib) * 2**30),
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy" if without_weights else "safetensors",
        "weight_transfer_config": {"backend": TRANSFER},
        "worker_extension_cls": "verl_ray.rollout.vllm_loader.WeightLoader",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if lora is not None:
        fixed |= _adapter_arguments(lora)
    fixed |= _cpu_arguments() if device == "cpu" else _gpu_arguments(sleeps)
    return fixed


def _adapter_arguments(lora: LoraConfig) -> dict[str, Any]:
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": vllm_rank(lora.rank),
        # Otherwise vLLM also prepares the head for an adapter, and the log-probs of
        # prompts then fail (0.32 on a CPU).
        "lora_target_modules": list(lora.targets),
    }


def _cpu_arguments() -> dict[str, Any]:
    return {
        "worker_cls": "verl_ray.rollout.vllm_cpu_worker.SleepingCPUWorker",
        "enforce_eager": True,
        # With a seed per request, a prompt that is prefilled in parts fails on a CPU,
        # since the generators there have no offset.
        "enable_chunked_prefill": False,
    }


def _gpu_arguments(sleeps: bool) -> dict[str, Any]:
    return {
        "enable_sleep_mode": sleeps,
        # The KV cache is given in bytes, so vLLM sizes nothing by this share of the
        # device. But it refuses to start while less of it is free, so a larger share
        # would keep it from starting next to a trainer.
        "gpu_memory_utilization": 0.01,
    }


def vllm_rank(rank: int) -> int:
    """Return the smallest rank of vLLM's adapters that has space for `rank`."""
    return next(allocated for allocated in VLLM_LORA_RANKS if rank <= allocated)


def _allow_scaled_positions(model_path: str, max_model_len: int) -> None:
    """Let vLLM take rows that fit the model's positions after their scaling.

    Some versions (0.32) expect that YaRN has raised max_position_embeddings already and
    refuse longer rows, although the table of positions has entries for them.
    """
    positions = positions_of(_model_settings(model_path))
    if positions is not None and max_model_len <= positions:
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"


def _with_real_factors(config: PretrainedConfig) -> PretrainedConfig:
    """Return a model's configuration in which no factor of positions is an int.

    vLLM (0.32) takes a whole factor of linear scaling for a list of factors.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    sections = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for section in sections:
        if isinstance(section.get("factor"), int):
            section["factor"] = float(section["factor"])
    return config


def _register_model(model_path: str) -> None:
    """Register the class of the model with vLLM.

    Otherwise vLLM inspects the class in another process, so that this process does not
    touch a GPU. That process imports all of vLLM again, which takes 10 s the first time
    in every home directory.
    """
    from vllm.model_executor.models import ModelRegistry

    for name in _model_settings(model_path).get("architectures") or []:
        if name in ModelRegistry.models:
            model_class = ModelRegistry.models[name].load_model_cls()
            ModelRegistry.register_model(name, model_class)


def _model_settings(model_path: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(Path(model_path, "config.json").read_text())
    return settings
