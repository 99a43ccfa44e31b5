"""Every argument of vLLM's engine: who sets it, or what is known of it.

Invariant: each field of `EngineArgs` of the vLLM that the tests run has one class here.
Another key of the configuration sets it; or the project depends on it, and it is
refused; or tests run engines with it; or nobody has tried it, and a run that sets it is
warned. A name that is not here counts as not tried.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from verl_ray.config.rollout import RolloutConfig, RolloutEngineConfig
from verl_ray.errors import Problem
from verl_ray.suggest import closest, either

VLLM_ARGS_OF_OTHER_KEYS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "generation_config": "rollout.temperature",
    "override_generation_config": "rollout.temperature",
    "dtype": "rollout.dtype",
    "quantization": "rollout.quantization",
    "quantization_config": "rollout.quantization",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "pipeline_parallel_size": "rollout.pipeline_parallel",
    "enable_expert_parallel": "rollout.expert_parallel",
    "data_parallel_size": "rollout.num_replicas",
    "max_model_len": "rollout.max_response_tokens",
    "seed": "run.seed",
    "trust_remote_code": "actor.model.trust_remote_code",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "gpu_memory_utilization": "rollout.kv_cache_gib",
    "num_gpu_blocks_override": "rollout.kv_cache_gib",
    "enable_sleep_mode": "rollout.sleep",
    "distributed_executor_backend": "rollout.tensor_parallel",
    "enable_lora": "rollout.sync.adapter",
    "max_loras": "rollout.sync.adapter",
    "max_lora_rank": "actor.lora.rank",
    "lora_target_modules": "actor.lora.targets",
    "enable_return_routed_experts": "rollout.routing_replay",
    "aux_output_config": "rollout.routing_replay",
}
"""Argument of an engine -> the key of this configuration that sets it."""

_ADAPTER_ARGS = ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules")

# Arguments of an engine over several nodes, or one that is not whole.
_DISTRIBUTED_ARGS = (
    "prefill_context_parallel_size",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "device_ids",
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_size_local",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb",
    "data_parallel_backend",
)

_ONE_NODE = (
    "an engine is rollout.tensor_parallel x rollout.pipeline_parallel processes of one"
    " node"
)
_WORKER_CLASS = "the worker class is what frees memory and receives weights"
_OUTER_CACHE = "a cache outside of the engine would keep what earlier weights computed"
_GENERATES = "an engine generates text, token by token"

# vLLM's front-end is its server, and what makes requests of texts and images.
_FRONT_END_ARGS = (
    "allowed_local_media_path",
    "allowed_media_domains",
    "collect_detailed_traces",
    "default_mm_loras",
    "enable_prompt_embeds",
    "interleave_mm_strings",
    "io_processor_plugin",
    "max_logprobs",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "media_io_kwargs",
    "otlp_traces_endpoint",
    "reasoning_parser",
    "reasoning_parser_plugin",
    "renderer_num_workers",
    "served_model_name",
    "stream_interval",
    "structured_outputs_config",
    "tokenizer_mode",
    "tokenizer_revision",
    "tokens_only",
)

_HUB_ARGS = ("code_revision", "download_dir", "hf_token", "revision")

_STATISTICS_ARGS = (
    "aggregate_engine_logging",
    "cudagraph_metrics",
    "custom_histogram_buckets",
    "disable_log_stats",
    "enable_mfu_metrics",
    "kv_cache_metrics",
    "kv_cache_metrics_sample",
    "per_request_spec_decode_metrics",
    "show_hidden_metrics_for_version",
)

VLLM_ARGS_FIXED = {
    "logprobs_mode": "the trainer compares with log-probs after temperature",
    "logits_processors": (
        "tokens are sampled by temperature, top_p and top_k, without penalties"
    ),
    "watermark_config": (
        "tokens are sampled by temperature, top_p and top_k, without marks"
    ),
    "skip_tokenizer_init": "the engine takes and gives token ids as it stands",
    "load_format": "weights come from model.path as safetensors, or from the trainer",
    "use_tqdm_on_load": "the engine's process has no terminal",
    "worker_cls": _WORKER_CLASS,
    "worker_extension_cls": _WORKER_CLASS,
    "scheduler_cls": (
        "pauses, aborts and versions rely on the order of steps of vLLM's own scheduler"
    ),
    "kv_sharing_fast_prefill": (
        "with it vLLM's log-probs of prompts are wrong, and the probe of a weight sync"
        " compares them"
    ),
    "weight_transfer_config": (
        "weights reach the engine through the project's own transport"
    ),
    "ray_workers_use_nsight": "the processes of an engine are no workers of Ray",
    "kv_transfer_config": _OUTER_CACHE,
    "kv_offloading_size": _OUTER_CACHE,
    "kv_offloading_backend": _OUTER_CACHE,
    "ec_transfer_config": _OUTER_CACHE,
    "runner": _GENERATES,
    "convert": _GENERATES,
    "pooler_config": _GENERATES,
    "diffusion_config": _GENERATES,
    **dict.fromkeys(_DISTRIBUTED_ARGS, _ONE_NODE),
    **dict.fromkeys(
        _FRONT_END_ARGS, "only vLLM's front-end reads it, which is not used"
    ),
    **dict.fromkeys(_HUB_ARGS, "the model is a folder of this node"),
    **dict.fromkeys(_STATISTICS_ARGS, "the project measures the engine itself"),
}
"""Argument of any engine that the project depends on, or that would do nothing -> the
reason."""

_SPECULATION_ARGS = ("speculative_config", "spec_method", "spec_model", "spec_tokens")

_OFFLOADING_ARGS = (
    "cpu_offload_gb",
    "cpu_offload_params",
    "offload_backend",
    "offload_group_size",
    "offload_num_in_group",
    "offload_params",
    "offload_prefetch_step",
)

_SAME_MODEL = "it has to compute what config.json says, as the trainer does"
_MOVED_EXPERTS = "experts that have moved would get the weights of others at a sync"
_RANDOM_ROUNDING = "equal seeds would no longer draw equal tokens"

VLLM_ARGS_FIXED_FOR_A_POLICY = {
    **dict.fromkeys(
        _SPECULATION_ARGS,
        "a row's tokens would depend on what was proposed, and so on the rows beside"
        " it, and a drafter would receive no weights",
    ),
    **dict.fromkeys(
        _OFFLOADING_ARGS, "vLLM cannot reload weights that it has offloaded"
    ),
    "hf_overrides": _SAME_MODEL,
    "hf_config_path": _SAME_MODEL,
    "model_class_overrides": _SAME_MODEL,
    "enable_eplb": _MOVED_EXPERTS,
    "eplb_config": _MOVED_EXPERTS,
    "enable_mamba_cache_stochastic_rounding": _RANDOM_ROUNDING,
    "mamba_cache_philox_rounds": _RANDOM_ROUNDING,
    "sleep_preserve_parameter_names": "a sync after a sleep brings every weight",
}
"""The same for an engine that receives weights and whose tokens are learned from; a
judge may have these."""

_WHOLE_PROMPTS = "seeded sampling needs prompts that are computed at once"

VLLM_ARGS_FIXED_ON_A_CPU = {
    "enforce_eager": "compiled graphs are for GPUs",
    "enable_chunked_prefill": _WHOLE_PROMPTS,
    "long_prefill_token_threshold": _WHOLE_PROMPTS,
    "async_scheduling": "vLLM turns it off",
    **dict.fromkeys(
        _SPECULATION_ARGS,
        "vLLM 0.32 checks proposals at a temperature that it has not set",
    ),
}
"""The same for a machine without GPUs, which only preflight knows.

On GPUs each is of one of the other classes.
"""

VLLM_ARGS_PROVEN = frozenset(
    {
        "async_scheduling",
        "block_size",
        "enable_prefix_caching",
        "enforce_eager",
        "max_num_batched_tokens",
        "max_num_seqs",
        "model_impl",
    }
)
"""Arguments that tests give engines, with other values than vLLM's own."""

VLLM_ARGS_UNPROVEN = frozenset(
    {
        # Numbers.
        "allow_deprecated_quantization",
        "disable_sliding_window",
        "kv_cache_dtype",
        "kv_cache_dtype_skip_layers",
        "lora_dtype",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mm_encoder_attn_dtype",
        "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_margin",
        "mm_encoder_fp8_scale_save_path",
        "use_fp64_gumbel",
        # Kernels and graphs.
        "attention_backend",
        "attention_config",
        "compilation_config",
        "cudagraph_capture_sizes",
        "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "enable_dbo",
        "enable_flashinfer_autotune",
        "gdn_prefill_backend",
        "ir_op_priority",
        "kda_decode_backend",
        "kda_prefill_backend",
        "kernel_config",
        "linear_backend",
        "mamba_backend",
        "mamba_config",
        "mamba_ssu_algorithm",
        "max_cudagraph_capture_size",
        "mm_encoder_attn_backend",
        "moe_backend",
        "optimization_level",
        "performance_mode",
        "replayssm_buffer_len",
        "sparse_indexer_topk_backend",
        "specialize_active_lora",
        "swa_bounded_replay",
        "ubatch_size",
        "use_replayssm",
        # Several ranks.
        "all2all_backend",
        "cp_kv_cache_interleave_size",
        "cpu_distributed_timeout_seconds",
        "dcp_comm_backend",
        "dcp_kv_cache_interleave_size",
        "dcp_q_replicate",
        "decode_context_parallel_size",
        "disable_nccl_for_dp_synchronization",
        "distributed_timeout_seconds",
        "dp_sync_interval",
        "elastic_ep_max_dp_size",
        "enable_batch_sharded_sampling",
        "enable_elastic_ep",
        "enable_ep_weight_filter",
        "enable_fault_tolerance",
        "enable_hc_sp",
        "enable_nccl_comm_suspend",
        "enable_shm_tensor_arena",
        "expert_placement_strategy",
        "fault_tolerance_config",
        "fully_sharded_loras",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        # The scheduler and its cache.
        "disable_chunked_mm_input",
        "disable_hybrid_kv_cache_manager",
        "ec_manager_config",
        "enable_chunked_prefill",
        "enable_mamba_shared_prefix_checkpoint",
        "kv_events_config",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "mamba_block_size",
        "mamba_cache_mode",
        "max_num_active_seqs",
        "max_num_scheduled_tokens",
        "prefill_schedule_interval",
        "prefix_cache_retention_interval",
        "prefix_caching_hash_algo",
        "prefix_match_unit",
        "scheduler_reserve_full_isl",
        "scheduling_policy",
        "watermark",
        # Memory and loading.
        "config_format",
        "enable_cumem_allocator",
        "engram_config",
        "ignore_patterns",
        "max_parallel_loading_workers",
        "model_loader_extra_config",
        "model_weights",
        "pt_load_map_location",
        "safetensors_load_strategy",
        "safetensors_prefetch_block_size",
        "safetensors_prefetch_num_threads",
        "sleep_mode_offload_cudagraph",
        # Adapters.
        "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras",
        "enable_tower_connector_lora",
        "max_cpu_loras",
        "max_lora_cls_labels",
        # What else a request can ask for, and images.
        "enable_mm_embeds",
        "enable_mm_processor_stats",
        "enable_trace_replay",
        "language_model_only",
        "limit_mm_per_prompt",
        "mm_device_do_normalize",
        "mm_encoder_only",
        "mm_encoder_tp_mode",
        "mm_hasher_algorithm",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_processor_device",
        "mm_processor_kwargs",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "reasoning_config",
        "return_sampling_mask",
        "skip_mm_profiling",
        "video_pruning_method",
        "video_pruning_rate",
        # Logs, and the process.
        "additional_config",
        "enable_layerwise_nvtx_tracing",
        "enable_logging_iteration_details",
        "fail_on_environ_validation",
        "jit_monitor_mode",
        "jit_monitor_verbose",
        "log_config_file",
        "log_level",
        "logging_config",
        "profiler_config",
        "shutdown_timeout",
    }
)
"""Arguments that were looked at and that no test runs.

None of them is known to break what the project promises. Those of numbers change what
the engine computes beside the trainer.
"""


def vllm_args_are_free(
    rollout: RolloutConfig, judges: Mapping[str, RolloutEngineConfig]
) -> Iterator[Problem]:
    """Yield a problem for each argument of vLLM that the user may not set.

    Args:
        rollout: The engines of the policy.
        judges: The engine of each judge, by the section of the judge.
    """
    yield from _argument_problems(
        "rollout",
        rollout.vllm_args,
        VLLM_ARGS_OF_OTHER_KEYS,
        VLLM_ARGS_FIXED | VLLM_ARGS_FIXED_FOR_A_POLICY,
    )

    # A judge has settings of its own, no adapter, and never sleeps.
    fixed = VLLM_ARGS_FIXED | dict.fromkeys(_ADAPTER_ARGS, "a judge has no adapter")
    fixed["enable_sleep_mode"] = (
        "a judge shares its devices with nobody and never sleeps"
    )
    for section, engine in judges.items():
        yield from _argument_problems(
            f"{section}.engine", engine.vllm_args, _judge_keys(section), fixed
        )


def _judge_keys(section: str) -> dict[str, str]:
    """Return the key of a judge that sets each of vLLM's arguments."""
    keys = {}

    for argument, key in VLLM_ARGS_OF_OTHER_KEYS.items():
        # A judge has no key for these, and they are refused as fixed.
        if argument == "enable_sleep_mode" or argument in _ADAPTER_ARGS:
            continue
        keys[argument] = re.sub("^rollout", f"{section}.engine", key)

    return keys | {
        "model": f"{section}.model.path",
        "trust_remote_code": f"{section}.model.trust_remote_code",
        "tokenizer": f"{section}.model.path",
        "generation_config": f"{section}.temperature",
        "override_generation_config": f"{section}.temperature",
        "max_model_len": f"{section}.max_prompt_tokens",
    }


def _argument_problems(
    section: str,
    arguments: Mapping[str, object],
    keys: Mapping[str, str],
    fixed: Mapping[str, str],
) -> Iterator[Problem]:
    """Yield a problem for each of an engine's `arguments` that may not be set.

    Args:
        section: the key of the engine's settings.
        arguments: what the user has set in `vllm_args`.
        keys: argument -> the key that sets it instead.
        fixed: argument -> why it may not change.
    """
    for name, value in sorted(arguments.items()):
        argument_key = f"{section}.vllm_args.{name}"

        if name in keys:
            rule = f"{keys[name]} sets this argument"
            fix = f"Leave it out and set {keys[name]}."
            yield Problem(argument_key, value, rule, fix)
            continue
        if name in fixed:
            rule = f"this argument may not change: {fixed[name]}"
            yield Problem(argument_key, value, rule, "Leave it out.")
            continue

        # Other versions have other names.
        names = vllm_arguments()
        if names is not None and name not in names:
            rule = "the installed vLLM has no such engine argument"

            # An argument that would be refused is no suggestion.
            free = [
                argument
                for argument in names
                if argument not in keys and argument not in fixed
            ]
            near = closest(name, free)
            fix = "Use the name of a field of vLLM's EngineArgs."
            if near:
                fix = f"Did you mean {either(near)}?"
            yield Problem(argument_key, value, rule, fix)


# The class whose fields are vLLM's engine arguments, and its file in the package.
_CLASS = "EngineArgs"
_FILE = "engine/arg_utils.py"


@cache
def vllm_arguments() -> tuple[str, ...] | None:
    """Return the public fields of vLLM's `EngineArgs`, in their order.

    None where they are not known: without vLLM, or if its source has no such class.
    vLLM itself then refuses a wrong name.
    """
    package = importlib.util.find_spec("vllm")
    if package is None:
        return None

    for folder in package.submodule_search_locations or []:
        file = Path(folder, _FILE)
        if not file.is_file():
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == _CLASS:
                return _fields(node)
    return None


def _fields(class_: ast.ClassDef) -> tuple[str, ...]:
    names = [
        line.target.id
        for line in class_.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    return tuple(name for name in names if not name.startswith("_"))
