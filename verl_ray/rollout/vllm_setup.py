"""How vLLM is set up: the environment of its process, its arguments, and the tokens that end a response.

Invariant: what the rest of this package relies on is fixed here, and `rollout.vllm_args` cannot change it. Deliberately
not here: the engine itself (`vllm_engine.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.config.roles import LoraConfig
from verl_ray.config.rollout import (
    VLLM_BATCHED_REQUESTS,
    VLLM_BATCHED_TOKENS,
    VLLM_LORA_RANKS,
    RolloutEngineConfig,
)
from verl_ray.data.tokenizers import load_tokenizer
from verl_ray.errors import RolloutError
from verl_ray.profiling import allocator
from verl_ray.rollout.vllm_core import TRANSFER

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def environment(device: str, threads: int, tensor_parallel: int = 1) -> dict[str, str]:
    """The environment variables that this process needs before it imports torch, to hold a `VllmEngine`.

    Args:
        device: "cpu" or "cuda".
        threads: CPU threads of each rank of the engine.
        tensor_parallel: ranks of the engine.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core is stepped by its owner: starts in 3 s instead of 40
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # models are local directories; a look-up would hang without internet
        "OMP_NUM_THREADS": str(threads),
    }
    if device == "cpu":
        variables["TORCHDYNAMO_DISABLE"] = "1"  # else the first request waits 8-15 s for a compiler
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind" if tensor_parallel == 1 else _cores(threads, tensor_parallel)
    else:
        variables |= _without_expandable_segments(os.environ)
    return variables


def _without_expandable_segments(given: Mapping[str, str]) -> dict[str, str]:
    """The allocator's settings for a process that sleeps. What vLLM puts to sleep lies in a memory pool of its own, and
    torch's expandable segments are not for such pools (pytorch#147851): vLLM 0.32 turns them off while it fills one,
    earlier ones refuse to start. Trainers, whose environment this is not, have them (`profiling/allocator.py`)."""
    changed: dict[str, str] = {}
    for name in allocator.VARIABLES:
        settings = [one.strip() for one in given.get(name, "").split(",") if one.strip()]
        kept = [one for one in settings if not allocator.is_expandable(one)]
        if kept != settings:
            changed[name] = ",".join(kept)
            print(f"warning: the rollout engine runs without expandable_segments of {name}: it cannot sleep with them")
    return changed


def _cores(threads: int, ranks: int) -> str:
    """Consecutive cores of this machine for each rank, as vLLM writes it; the ranks share cores if there are few."""
    cores = sorted(os.sched_getaffinity(0))
    chosen = ([cores[(rank * threads + i) % len(cores)] for i in range(threads)] for rank in range(ranks))
    return "|".join(",".join(str(core) for core in sorted(set(of_rank))) for of_rank in chosen)


def _register_model(model_path: str) -> None:
    """Tell vLLM the class of the model. It would look at it in a process that imports all of vLLM again, which takes
    10 s the first time in every home directory, lest this one touch a GPU."""
    from vllm.model_executor.models import ModelRegistry

    for name in json.loads(Path(model_path, "config.json").read_text()).get("architectures") or []:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def engine_config(
    model_path: str, config: RolloutEngineConfig, max_model_len: int, seed: int, device: str, **more: Any
) -> VllmConfig:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if (device == "cpu") != current_platform.is_cpu():
        raise RolloutError(
            f"rollout on {device!r} was asked for, but the installed vLLM runs on {current_platform.device_type!r}: "
            f"install the extra 'cpu' or 'gpu' of this package"
        )
    fixed = fixed_arguments(model_path, config, max_model_len, seed, device, **more)
    preferred: dict[str, Any] = {
        "enable_prefix_caching": True,
        # vLLM's own are small but for its server and its offline engine
        "max_num_seqs": VLLM_BATCHED_REQUESTS,
        "max_num_batched_tokens": max(max_model_len, VLLM_BATCHED_TOKENS),
    }
    if device == "cpu":
        _register_model(model_path)
    if clash := sorted(fixed.keys() & config.vllm_args.keys()):
        raise RolloutError(f"rollout.vllm_args sets {clash}, which other keys of rollout, or the engine, set")
    return EngineArgs(**{**preferred, **config.vllm_args, **fixed}).create_engine_config()


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
    """The engine arguments that rollout.vllm_args may not set; `verl_ray.config.rules` tells the user so."""
    fixed: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        "tensor_parallel_size": config.tensor_parallel,
        # In a placement group of Ray vLLM would take its bundles apart, one rank per bundle, and on a CPU refuse.
        "distributed_executor_backend": "uni" if config.tensor_parallel == 1 else "mp",
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "load_format": "dummy" if without_weights else "auto",
        "weight_transfer_config": {"backend": TRANSFER},
        "worker_extension_cls": "verl_ray.rollout.vllm_loader.WeightLoader",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if lora is not None:
        fixed |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": vllm_rank(lora.rank)}
        # Without it vLLM also prepares the head for an adapter, whose log-probs of prompts then fail (0.32 on a CPU).
        fixed["lora_target_modules"] = list(lora.targets)
    if device == "cpu":
        fixed["worker_cls"] = "verl_ray.rollout.vllm_cpu_worker.SleepingCPUWorker"
        fixed["enforce_eager"] = True
        # With seeds per request, a prompt that is prefilled in parts fails on a CPU (its generators know no offset).
        fixed["enable_chunked_prefill"] = False
    else:
        fixed["enable_sleep_mode"] = sleeps
        # With its KV cache given in bytes vLLM sizes nothing by this share of the device, but refuses to start while
        # less of it is free: a trainer on the same GPU would keep it from starting.
        fixed["gpu_memory_utilization"] = 0.01
    return fixed


def vllm_rank(rank: int) -> int:
    """The least room for adapters that vLLM makes and that this rank fits in."""
    return next(room for room in VLLM_LORA_RANKS if rank <= room)


def end_tokens_of(model_path: str, vllm_config: VllmConfig) -> tuple[int, ...]:
    """Tokens that end a response: those of generation_config.json and the tokenizer's; else those of config.json."""
    model_config = vllm_config.model_config
    named: set[int] = set()
    for ids in (model_config.try_get_generation_config().get("eos_token_id"), load_tokenizer(model_path).eos_token_id):
        named.update([ids] if isinstance(ids, int) else ids or [])
    if not named:
        ids = getattr(model_config.hf_text_config, "eos_token_id", None)
        named.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(named))
