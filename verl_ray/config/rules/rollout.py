"""Rules of rollout engines: sampling, the arguments that are passed on to vLLM, wires and endpoints.

Invariant: nothing that the project sets or depends on can be set a second time through `vllm_args`. Deliberately not
here: whether an engine fits its model (`verl_ray/preflight/model_directories.py`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from verl_ray.config.rollout import HEAD, VLLM_LORA_RANKS
from verl_ray.config.rules.rule import Overridden, ignored
from verl_ray.config.suggest import closest, either
from verl_ray.config.vllm_arguments import VLLM_ARGUMENTS
from verl_ray.errors import Problem

if TYPE_CHECKING:  # which name these rules
    from verl_ray.config.drawing import DrawingConfig
    from verl_ray.config.tasks.rl import RLConfig

ATTENTION_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that the rollout engine's attention takes on a CPU."""

EXPERTS_HIDDEN_MULTIPLE = 32
"""Hidden sizes that the rollout engine's experts take on a CPU are multiples of it."""

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
"""Arguments of the rollout engine that a key of this configuration sets, and the key."""

_OF_SEVERAL = (
    "pipeline_parallel_size", "prefill_context_parallel_size", "nnodes", "node_rank", "master_addr", "master_port",
    "device_ids", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local",
    "data_parallel_address", "data_parallel_rpc_port", "data_parallel_hybrid_lb", "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb", "data_parallel_backend",
)  # fmt: skip

VLLM_ARGS_FIXED = {
    "logprobs_mode": "the trainer compares with log-probs after temperature",
    "logits_processors": "tokens are drawn as temperature, top_p and top_k say, without penalties",
    "watermark_config": "tokens are drawn as temperature, top_p and top_k say, without marks",
    "skip_tokenizer_init": "the engine takes and gives token ids as it stands",
    "load_format": "weights come from model.path as safetensors, or from the trainer",
    "disable_log_stats": "the project measures the engine itself",
    "use_tqdm_on_load": "the engine's process has no terminal",
    "worker_cls": "the worker class is what frees memory and receives weights",
    "worker_extension_cls": "the worker class is what frees memory and receives weights",
    "weight_transfer_config": "weights reach the engine through the project's own transport",
    **dict.fromkeys(_OF_SEVERAL, "an engine is rollout.tensor_parallel processes of one node, each with all layers"),
}
"""Arguments of the rollout engine that the project depends on, and why."""

_OF_ADAPTERS = ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules")

VLLM_ARGS_FIXED_ON_A_CPU = {
    "enforce_eager": "compiled graphs are for GPUs",
    "enable_chunked_prefill": "seeded sampling needs it off",
}
"""The same for a machine without GPUs, which only preflight knows."""

VLLM_LEAST_TEMPERATURE = 0.01
"""Above 0, which is greedy, the sampler takes nothing lower."""


def sampling_is_what_the_trainer_sees(config: DrawingConfig, _: Overridden) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.temperature == 0:
        rule = "training needs sampled responses, and the trainer divides its logits by this"
        yield Problem("rollout.temperature", 0.0, rule, "Use 1.0; evaluation.temperature=0 is greedy.")
    for field, value, whole in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, -1)):
        if value != whole:
            rule = "the trainer's log-probs are of the whole vocabulary, which a truncated sampler does not draw from"
            fix = f"Use {whole}; rollout.temperature sharpens sampling without truncating it."
            yield Problem(f"rollout.{field}", value, rule, fix)
    speculation = rollout.vllm_args.get("speculative_config")
    if isinstance(speculation, dict) and speculation.get("rejection_sample_method") == "synthetic":
        rule = "synthetic acceptance draws tokens that the model would not"
        key = "rollout.vllm_args.speculative_config.rejection_sample_method"
        yield Problem(key, "synthetic", rule, "Use standard.")


def rollouts_are_of_the_policy_that_learns(config: DrawingConfig, _: Overridden) -> Iterator[Problem]:
    staleness = config.rollout.staleness
    if staleness:
        rule = "rollouts are drawn while nothing learns, so no token is older than the policy that learns from it"
        yield Problem("rollout.staleness", staleness, rule, "Set it to 0.")


def temperature_is_not_too_low(config: RLConfig, _: Overridden) -> Iterator[Problem]:
    settings = {"rollout": config.rollout.temperature, "evaluation": config.evaluation.temperature}
    for section, value in settings.items():
        if 0 < value < VLLM_LEAST_TEMPERATURE:
            rule = f"vLLM samples from a temperature of {VLLM_LEAST_TEMPERATURE}"
            greedy = ", or 0 for greedy" if section == "evaluation" else ""
            yield Problem(f"{section}.temperature", value, rule, f"Use at least {VLLM_LEAST_TEMPERATURE}{greedy}.")


def vllm_args_are_free(config: DrawingConfig, _: Overridden) -> Iterator[Problem]:
    yield from _vllm_args("rollout", config.rollout.vllm_args, VLLM_ARGS_OF_OTHER_KEYS, VLLM_ARGS_FIXED)
    fixed = VLLM_ARGS_FIXED | {"enable_sleep_mode": "a judge shares its devices with nobody and never sleeps"}
    fixed |= dict.fromkeys(_OF_ADAPTERS, "a judge has no adapter")
    for section, judge in config.judges.items():
        engine = {name: re.sub("^rollout", f"{section}.engine", key) for name, key in VLLM_ARGS_OF_OTHER_KEYS.items()}
        setters = engine | {
            "model": f"{section}.model.path",
            "tokenizer": f"{section}.model.path",
            "generation_config": f"{section}.temperature",
            "override_generation_config": f"{section}.temperature",
            "max_model_len": f"{section}.max_prompt_tokens",
        }
        for name in ("enable_sleep_mode", *_OF_ADAPTERS):
            del setters[name]
        yield from _vllm_args(f"{section}.engine", judge.engine.vllm_args, setters, fixed)


def wires_can_join_the_ends(config: DrawingConfig, overridden: Overridden) -> Iterator[Problem]:
    sync, key = config.rollout.sync, "rollout.sync"
    if sync.delta and sync.transport not in ("broadcast", "host_broadcast", "disk"):
        rule = (
            f"changes are for slow wires, and transport={sync.transport} "
            + ("may be" if sync.transport == "auto" else "is")
            + " memory that both sides see: finding changes there costs more than copying all"
        )
        yield Problem(f"{key}.delta", True, rule, f"Use false, or {key}.transport=broadcast or disk.")
    if sync.transport != "disk":
        yield from ignored(overridden.under(f"{key}.folder"), config, f"{key}.transport={sync.transport} has no files")
    if sync.transport == "cuda_ipc":
        if config.placement.kind != "colocated":
            rule = f"it joins processes on one GPU, and placement={config.placement.kind} gives each role its own"
            yield Problem(f"{key}.transport", "cuda_ipc", rule, "Use auto or host_broadcast, or placement=colocated.")
        elif config.rollout.num_replicas > config.actor.num_ranks:
            rule = (
                f"every rollout engine must share the GPU of a rank of the actor, and rollout.num_replicas="
                f"{config.rollout.num_replicas} are more than actor.num_ranks={config.actor.num_ranks}"
            )
            yield Problem(f"{key}.transport", "cuda_ipc", rule, "Use auto, or as many ranks as replicas.")


def adapters_can_be_sent_alone(config: DrawingConfig, overridden: Overridden) -> Iterator[Problem]:
    given, key, rank = config.rollout.sync.adapter, "rollout.sync.adapter", config.actor.lora.rank
    if given == "auto":
        return
    if not rank and (given == "alone" or overridden.under(key)):  # merged is what `auto` stands for then
        yield Problem(key, given, "with actor.lora.rank=0 there is no adapter", "Leave it out, or set actor.lora.rank.")
    elif given == "alone" and config.rollout.sleep == "weights":
        rule = "rollout.sleep=weights frees the model that the adapter is for"
        yield Problem(key, given, rule, "Use merged, or rollout.sleep=kv_cache.")
    elif given == "alone" and rank > VLLM_LORA_RANKS[-1]:
        rule = f"vLLM has room for adapters of rank {VLLM_LORA_RANKS[-1]}, and actor.lora.rank is {rank}"
        yield Problem(key, given, rule, "Use merged, or a smaller rank.")
    elif given == "alone" and HEAD in config.actor.lora.targets:
        rule = f"vLLM has no log-probs of prompts, which prove a sync, with an adapter on {HEAD}"
        yield Problem(key, given, rule, f"Use merged, or take {HEAD} from actor.lora.targets.")


def endpoint_settings_are_used(config: DrawingConfig, overridden: Overridden) -> Iterator[Problem]:
    switch = "rollout.endpoint.enabled"
    if not config.rollout.endpoint.enabled:
        keys = [key for key in overridden.under("rollout.endpoint") if key != switch]
        yield from ignored(keys, config, f"{switch}=false", f"Leave it out, or set {switch}=true.")


def endpoints_have_an_address(config: DrawingConfig, _: Overridden) -> Iterator[Problem]:
    endpoint, replicas = config.rollout.endpoint, config.rollout.num_replicas
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        fix = "Use 127.0.0.1 for this machine alone, 0.0.0.0 for every one."
        yield Problem("rollout.endpoint.host", endpoint.host, "this is no address to listen on", fix)
    if endpoint.port and endpoint.port + replicas - 1 > 65535:
        rule = f"each of {replicas} replicas has the port behind the one before, and the last port is 65535"
        yield Problem("rollout.endpoint.port", endpoint.port, rule, f"Use at most {65536 - replicas}.")


def _vllm_args(
    section: str, arguments: Mapping[str, object], setters: Mapping[str, str], fixed: Mapping[str, str]
) -> Iterator[Problem]:
    for name, value in sorted(arguments.items()):
        key = f"{section}.vllm_args.{name}"
        if setter := setters.get(name):
            yield Problem(key, value, f"{setter} sets this argument", f"Leave it out and set {setter}.")
        elif reason := fixed.get(name):
            yield Problem(key, value, f"this argument may not change: {reason}", "Leave it out.")
        elif name not in VLLM_ARGUMENTS:
            own = [argument for argument in VLLM_ARGUMENTS if argument not in {*setters, *fixed}]
            near = closest(name, own)
            fix = f"Did you mean {either(near)}?" if near else "Use the name of a field of vLLM's EngineArgs."
            yield Problem(key, value, "vLLM has no such engine argument", fix)
