"""The arguments of a vLLM engine, made of the settings of a run and of its model.

Invariant: those that the rest of this package relies on are fixed, and
`rollout.vllm_args` cannot change them.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.config.roles import LoraConfig
from verl_ray.config.rollout import (
    VLLM_BATCHED_REQUESTS,
    VLLM_BATCHED_TOKENS,
    VLLM_LORA_RANKS,
    RolloutEngineConfig,
)
from verl_ray.errors import RolloutError
from verl_ray.models.parts import text_config
from verl_ray.settings.config_json import has_other_parts, positions_of, text_part
from verl_ray.settings.section import resolved

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import VllmConfig

RECORDS_ROUTING = "records_routing"
"""Name of the setting with which the CPU worker records what routers choose."""

TRANSFER = "verl_ray"
"""Name of this project's engine in vLLM's registry of weight-transfer engines."""

QUANTIZATIONS = {None: None, "fp8": "fp8_per_channel"}
"""Value of `rollout.quantization` -> vLLM's name of it.

Without one vLLM reads what config.json says, which may quantize a judge.
"""


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
        "hf_overrides": functools.partial(
            _as_computed, text_alone=options["without_weights"]
        ),
    }
    if device == "cpu":
        _register_model(model_path, text_alone=options["without_weights"])
    _allow_scaled_positions(model_path, max_model_len)

    conflicts = sorted(fixed.keys() & config.vllm_args.keys())
    if conflicts:
        raise RolloutError(
            f"rollout.vllm_args sets {conflicts}, which other keys of rollout, or the"
            " engine, set"
        )
    arguments = EngineArgs(**{**preferred, **config.vllm_args, **fixed})
    is_open = not {"enable_prefix_caching"} & (config.vllm_args.keys() | fixed.keys())
    if device == "cpu" and is_open:
        # Without chunks of prompts vLLM (0.32) caches no prefixes of states.
        has_states = arguments.create_model_config().has_inner_state
        arguments.enable_prefix_caching = not has_states
    return arguments.create_engine_config()


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
    trusts_code: bool = False,
    records_routing: bool = False,
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
        trusts_code: Whether the code in the model directory may run.
        records_routing: Whether to record the experts that routers choose.
    """
    # In a placement group of Ray, vLLM would run one rank per bundle, and would refuse
    # to do so on a CPU. "mp" starts the ranks as processes of this one.
    executor = "uni" if config.ranks_per_replica == 1 else "mp"

    fixed: dict[str, Any] = {
        "model": model_path,
        "trust_remote_code": trusts_code,
        "skip_tokenizer_init": True,
        "dtype": resolved(config.dtype),
        "quantization": QUANTIZATIONS[config.quantization],
        "seed": seed,
        "max_model_len": max_model_len,
        "tensor_parallel_size": config.tensor_parallel,
        "pipeline_parallel_size": config.pipeline_parallel,
        "enable_expert_parallel": config.expert_parallel,
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
    if records_routing:
        fixed |= _recording_arguments(device)
    return fixed


def _recording_arguments(device: str) -> dict[str, Any]:
    if device == "cpu":
        worker_settings = {RECORDS_ROUTING: True}
        return {"additional_config": worker_settings, "enable_prefix_caching": False}
    # vLLM keeps the experts of cached prefixes by the hashes of their blocks.
    return {"enable_return_routed_experts": True, "enable_prefix_caching": True}


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
    positions = positions_of(text_part(_model_settings(model_path)))
    if positions is not None and max_model_len <= positions:
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"


def _as_computed(config: PretrainedConfig, *, text_alone: bool) -> PretrainedConfig:
    """Return the configuration of the model that vLLM is to compute.

    vLLM (0.32) takes a whole factor of linear scaling for a list of factors, so no
    factor of positions is an int.

    Args:
        config: The configuration of the model directory.
        text_alone: Whether the text part of a model that sees images is meant.
    """
    if text_alone and text_config(config) is not config:
        config = text_config(config)
        config.architectures = _text_classes(config.model_type)
    rope = getattr(config, "rope_parameters", None) or {}
    sections = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for section in sections:
        if isinstance(section.get("factor"), int):
            section["factor"] = float(section["factor"])
    return config


def _register_model(model_path: str, *, text_alone: bool) -> None:
    """Register the class of the model with vLLM.

    Otherwise vLLM inspects the class in another process, so that this process does not
    touch a GPU. That process imports all of vLLM again, which takes 10 s the first time
    in every home directory.
    """
    from vllm.model_executor.models import ModelRegistry

    settings = _model_settings(model_path)
    names = settings.get("architectures") or []
    if text_alone and has_other_parts(settings):
        names = _text_classes(text_part(settings).get("model_type"))
    for name in names:
        if name in ModelRegistry.models:
            model_class = ModelRegistry.models[name].load_model_cls()
            ModelRegistry.register_model(name, model_class)


def _text_classes(family: object) -> list[str]:
    """Return the name of the class of language models of a model_type, if it has one.

    vLLM names its own classes as transformers does.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [
        str(name)
        for each, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if each == family
    ]


def _model_settings(model_path: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(Path(model_path, "config.json").read_text())
    return settings
