"""The rule of the arguments that are passed on to vLLM, and the tables behind it.

Invariant: nothing that the project sets or depends on can be set a second time through
`vllm_args`. Deliberately not here: whether an engine fits its model
(`verl_ray/preflight/model_directories.py`).
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ray.config.rules.rule import OverriddenKeys
from verl_ray.config.suggest import closest, either
from verl_ray.errors import Problem

if TYPE_CHECKING:
    from verl_ray.config.rollout_task import RolloutTaskConfig


VLLM_ARGS_OF_OTHER_KEYS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "generation_config": "rollout.temperature",
    "override_generation_config": "rollout.temperature",
    "dtype": "rollout.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "data_parallel_size": "rollout.num_replicas",
    "max_model_len": "rollout.max_response_tokens",
    "seed": "run.seed",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "gpu_memory_utilization": "rollout.kv_cache_gib",
    "enable_sleep_mode": "rollout.sleep",
    "distributed_executor_backend": "rollout.tensor_parallel",
    "enable_lora": "rollout.sync.adapter",
    "max_loras": "rollout.sync.adapter",
    "max_lora_rank": "actor.lora.rank",
    "lora_target_modules": "actor.lora.targets",
}
"""Argument of the rollout engine -> the key of this configuration that sets it."""

_ADAPTER_ARGS = ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules")

# Arguments of an engine over several nodes, or one that is not whole.
_DISTRIBUTED_ARGS = (
    "pipeline_parallel_size",
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
    "an engine is rollout.tensor_parallel processes of one node, each with all layers"
)
_WORKER_CLASS = "the worker class is what frees memory and receives weights"

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
    "disable_log_stats": "the project measures the engine itself",
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
    "kv_transfer_config": (
        "a KV cache outside of the engine would keep what earlier weights computed"
    ),
    "weight_transfer_config": (
        "weights reach the engine through the project's own transport"
    ),
    **dict.fromkeys(_DISTRIBUTED_ARGS, _ONE_NODE),
}
"""Argument of the rollout engine that the project depends on -> the reason."""

VLLM_ARGS_FIXED_ON_A_CPU = {
    "enforce_eager": "compiled graphs are for GPUs",
    "enable_chunked_prefill": "seeded sampling needs it off",
}
"""The same for a machine without GPUs, which only preflight knows."""


def vllm_args_are_free(
    config: RolloutTaskConfig, _: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each argument of vLLM that the user may not set."""
    yield from _argument_problems(
        "rollout", config.rollout.vllm_args, VLLM_ARGS_OF_OTHER_KEYS, VLLM_ARGS_FIXED
    )

    # A judge has settings of its own, no adapter, and never sleeps.
    fixed = VLLM_ARGS_FIXED | dict.fromkeys(_ADAPTER_ARGS, "a judge has no adapter")
    fixed["enable_sleep_mode"] = (
        "a judge shares its devices with nobody and never sleeps"
    )
    for section, judge in config.judges.items():
        yield from _argument_problems(
            f"{section}.engine", judge.engine.vllm_args, _judge_keys(section), fixed
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


# ------------------------------------------------------------ names of vLLM's arguments

# The names of the engine arguments that the installed vLLM has.
#
# They let the project refuse a misspelt rollout.vllm_args before anything starts.
#
# Invariant: vLLM is not imported, which takes seconds; the names are read in its
# source.

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
