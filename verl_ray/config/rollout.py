"""vLLM's engines, and the rollouts that the engines of the policy generate.

Invariant: the sampler's distribution is the one that the trainer computes log-probs
of. What `vllm_args` may hold is in `vllm_args.py`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from verl_ray.config.paths import LocalPath
from verl_ray.errors import Problem
from verl_ray.settings.section import (
    Auto,
    Dtype,
    NonNegative,
    OverriddenKeys,
    Positive,
    PositiveFloat,
    Section,
    Temperature,
    resolved,
)

VLLM_BATCHED_TOKENS = 8192
"""Tokens of a rollout engine's batch, unless max_num_batched_tokens in its vllm_args is
set."""

VLLM_BATCHED_REQUESTS = 256
"""Requests of a rollout engine's batch, unless max_num_seqs in its vllm_args is set."""

SCORED_PROMPT_TOKENS = 2048
"""Longest prompt whose log-probs an endpoint's client may ask for, in tokens.

vLLM computes the log-probs of all words for all tokens of such a prompt at once, one
prompt after another. The memory plan counts this many tokens.
"""

CONCURRENCY = 2 * VLLM_BATCHED_REQUESTS
"""Responses that a replica generates at a time, unless its cache decides.

Twice what vLLM runs at once, so that it never waits for the driver.
"""

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of adapters that vLLM reserves memory for."""

ATTENTION_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that the rollout engine's attention takes on a CPU."""

EXPERTS_HIDDEN_MULTIPLE = 32
"""Divisor of the hidden sizes that the rollout engine's experts take on a CPU."""

SILU_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Families of models that the rollout engine computes with one activation alone."""

VLLM_LEAST_TEMPERATURE = 0.01
"""The lowest temperature of the sampler above 0, which is greedy."""

HEAD = "lm_head"
"""vLLM's name of the layer that makes logits."""

_LAST_PORT = 65535

WireName = Literal["shared_memory", "cuda_ipc", "broadcast", "host_broadcast", "disk"]
Freed = Literal["never", "kv_cache", "weights"]
ScheduleName = Literal["synchronous", "one_step_off", "asynchronous", "carry_over"]


class RolloutEngineConfig(Section):
    """A vLLM engine, of the policy or of a judge."""

    num_replicas: Positive | Auto
    """Independent engines.

    auto: on GPUs as many as there are devices for them; else 1. A judge has 1.
    """
    tensor_parallel: Positive
    """Ranks of a replica that share out the matrices of each layer."""
    pipeline_parallel: Positive
    """Stages of a replica, each with a part of the layers on tensor_parallel ranks."""
    expert_parallel: bool
    """Whether tensor_parallel ranks share out whole experts, instead of a slice of
    each."""
    dtype: Dtype | Auto
    """Type of the weights and of the computation.

    auto: bfloat16 on GPUs and with a quantization, else float32 on a CPU.
    """
    quantization: Literal["fp8"] | None
    """Form in which the engine keeps the matrices of its layers and multiplies by them.

    fp8: vLLM rounds each row of a matrix to 8 bits with a scale of its own as it loads
    it, at every sync anew, and each token's activations as it computes (vLLM's
    fp8_per_channel); embeddings and head stay in `dtype`, bfloat16. null: all in
    `dtype`.
    """
    kv_cache_gib: PositiveFloat | Auto
    """Memory for the key-value cache of one replica rank.

    auto: as much as the GPU has left and rows can use: those of a step, with
    evaluations or an endpoint as many as the engine runs at once; 2 on a CPU.
    """
    vllm_args: Annotated[dict[str, Any], Field(examples=["{block_size: 32}"])]
    """Further arguments of vLLM's engine, verbatim.

    Those that another key sets, or that would break what the engine promises, are
    refused; those that no test runs are named in a warning.
    """

    @property
    def ranks_per_replica(self) -> int:
        """The number of ranks, and devices, of each replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def batched_requests(self) -> int:
        """The most requests that an engine runs at once."""
        value = self.vllm_args.get("max_num_seqs")
        return value if isinstance(value, int) else VLLM_BATCHED_REQUESTS


@dataclass(frozen=True)
class ServedModel:
    """A model that vLLM engines serve."""

    config: RolloutEngineConfig
    section: str
    """The key of the engines' settings."""
    key: str
    """The key that names the model's directory."""
    path: str
    trusts_code: bool
    """Whether the code in the directory may run."""
    max_prompt_tokens: int
    max_response_tokens: int

    @property
    def ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.replicas * self.config.ranks_per_replica

    @property
    def replicas(self) -> int:
        """Number of replicas in a resolved configuration."""
        return resolved(self.config.num_replicas)


class SyncConfig(Section):
    """The weight sync: how weights reach the replicas, and how that is verified."""

    transport: WireName | Auto
    """The wire that weights are sent over.

    broadcast: between GPUs where actor and rollout have their own, else between hosts.
    host_broadcast: always between hosts. auto: shared memory where the cluster is one
    node, else host_broadcast; it takes no wire that has not run on several GPUs.
    """
    bucket_mib: Positive | Auto
    """Size of a bucket, two of which are in flight; a single larger tensor takes more.

    auto: a twelfth of the model, from 16 to 512, so that little has to arrive before
    the first bucket can be loaded, and few calls are made.
    """
    delta: bool
    """After the first sync send only what changed, over a broadcast or disk; the ranks
    of the actor that send share a copy of the weights, and every rollout rank keeps
    one, in host memory."""
    adapter: Literal["alone", "merged"] | Auto
    """How a LoRA adapter leaves the actor.

    alone: after the first sync only the adapter is sent, for the model that the
    replicas keep. merged: it is merged into the weights. auto: alone, unless the
    replicas free their weights while the trainer works.
    """
    folder: LocalPath
    """Folder of the files of transport=disk; all nodes must see it."""
    probe_every: Positive | Auto
    """Syncs from one comparison of log-probs of fixed tokens with the trainer's to the
    next; fingerprints are compared at every sync.

    auto: every sync on a CPU, every tenth on GPUs.
    """
    probe_tolerance: PositiveFloat | Literal["measured"] | Auto
    """The largest difference of a log-prob.

    measured: five times what the first sync of the run shows, at least 0.1 and at most
    1. auto: 0.001 where trainer and rollout compute in float32, else measured.
    """

    @property
    def wire(self) -> WireName:
        """The value of `transport` in a resolved configuration."""
        return resolved(self.transport)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket in a resolved configuration."""
        return resolved(self.bucket_mib) << 20


class HealthConfig(Section):
    """Health checks of the replicas.

    A replica that makes no progress (run.stall_s) is lost as well. How many may be lost
    is run.recovery.max_restarts.
    """

    interval_s: PositiveFloat
    """Time between two health checks of a replica while responses are generated."""
    deadline_s: PositiveFloat
    """Longest time until a reply, after which the replica counts as lost."""


class EndpointConfig(Section):
    """The OpenAI-compatible endpoint that each replica offers to outside clients."""

    enabled: bool
    """Whether replicas offer an endpoint."""
    host: str
    """The address to listen on; 127.0.0.1 = only for processes of the same machine,
    0.0.0.0 = for every machine."""
    port: Annotated[int, Field(ge=0, le=_LAST_PORT)]
    """Port of the first replica, each further one has the next; 0 = any free port."""
    in_flight: Positive
    """Responses that one replica generates for clients at a time; others wait."""
    token_env: str | None
    """Environment variable of the workers that holds the token which clients must send;
    null = none."""


class RolloutConfig(RolloutEngineConfig):
    """The engines of the policy, and the rollouts that they generate."""

    group_size: Positive
    """Responses per prompt."""
    max_response_tokens: Positive
    """The longest response, in tokens."""
    temperature: Temperature
    """Temperature of the sampler; the trainer divides its logits by the same."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    """Probability mass that is sampled from; 1 = all tokens."""
    top_k: int
    """Number of tokens that are sampled from; -1 = all tokens."""
    stop: list[Annotated[str, Field(min_length=1)]]
    """Texts that end a response, in training and in evaluations; in an episode every
    turn for which its environment has no others.

    Such a response has ended by itself. The tokens of the text stay in it. Special
    tokens count by their names.
    """
    routing_replay: bool
    """Whether the engines record the experts that routers choose for each token, and
    the actor computes with these instead of choosing anew (R3, arXiv:2510.11370)."""
    stream_rows: Positive
    """Finished responses are handed to the graders once this many are ready, or the
    first of them has waited for a second."""
    schedule: ScheduleName
    """The order of rollouts and training, which the group `schedule` sets.

    synchronous: in turn. one_step_off: at the same time, each prompt with the policy
    version that its number names. asynchronous: at the same time, and rollouts never
    stop. carry_over: in turn, and open rows go on after the update.
    """
    staleness: NonNegative
    """Policy versions that a token may be behind the policy that learns from it; 0 = a
    step learns from its own rollouts alone."""
    updates: Literal["between", "in_flight"]
    """When replicas take new weights: between rows only, or also under open rows."""
    kv: Literal["recompute", "keep"] | None
    """The key-value cache of open rows when weights change under them.

    recompute: it is computed again with the new weights. keep: it stays, so that later
    tokens are sampled from new weights over an old cache. null: none are open.
    """
    concurrency: Positive | Literal["adaptive"] | Auto
    """Responses that one replica generates at a time; the others wait for the least
    loaded replica.

    adaptive: as many as the key-value cache holds without preemptions. auto: 512, twice
    what vLLM runs at once, with schedule=synchronous, else adaptive.
    """
    sync: SyncConfig
    health: HealthConfig
    endpoint: EndpointConfig
    sleep: Freed | Auto
    """Memory that a replica frees while the trainer works: none, the cache, or the
    weights as well.

    Freed weights are not copied anywhere (vLLM's sleep level 2), since each sync brings
    new ones. auto: weights (kv_cache with sync.adapter=alone) on a GPU that the replica
    shares with the trainer, else never.
    """

    @property
    def freed_by_sleep(self) -> Literal["kv_cache", "weights"] | None:
        """The memory that `sleep` frees in a resolved configuration; None if none."""
        sleep: Freed = resolved(self.sleep)
        return None if sleep == "never" else sleep


# -------------------------------------------------------------------------------- rules


def sampling_is_what_the_trainer_sees(rollout: RolloutConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that samples from another distribution."""
    # Logits cannot be divided by 0.
    if rollout.temperature == 0:
        rule = (
            "training needs sampled responses, and the trainer divides its logits by"
            " this"
        )
        fix = "Use 1.0; evaluation.temperature=0 is greedy."
        yield Problem("rollout.temperature", 0.0, rule, fix)

    yield from _is_not_truncated("rollout.top_p", rollout.top_p, 1.0)
    yield from _is_not_truncated("rollout.top_k", rollout.top_k, -1)


def _is_not_truncated(key: str, value: float, whole: float) -> Iterator[Problem]:
    """Yield a problem unless the sampler takes the `whole` vocabulary."""
    if value != whole:
        rule = (
            "the trainer's log-probs are of the whole vocabulary, which a truncated"
            " sampler does not sample from"
        )
        fix = (
            f"Use {whole}; rollout.temperature sharpens sampling without truncating it."
        )
        yield Problem(key, value, rule, fix)


def temperature_is_not_too_low(section: str, temperature: float) -> Iterator[Problem]:
    """Yield a problem if vLLM would not sample from the temperature of a section."""
    # A temperature of 0 is greedy, which vLLM takes.
    if 0 < temperature < VLLM_LEAST_TEMPERATURE:
        key = f"{section}.temperature"
        rule = f"vLLM samples from a temperature of {VLLM_LEAST_TEMPERATURE}"
        greedy = ", or 0 for greedy" if section == "evaluation" else ""
        fix = f"Use at least {VLLM_LEAST_TEMPERATURE}{greedy}."
        yield Problem(key, temperature, rule, fix)


def experts_have_ranks(
    engines: Mapping[str, RolloutEngineConfig],
) -> Iterator[Problem]:
    """Yield a problem for each engine with a single rank for whole experts.

    Args:
        engines: The engines, by the key of their settings.
    """
    for section, engine in engines.items():
        if engine.expert_parallel and engine.tensor_parallel == 1:
            rule = f"this setting would be ignored: {section}.tensor_parallel is 1"
            fix = "Use false, or so many ranks as are to share the experts."
            yield Problem(f"{section}.expert_parallel", True, rule, fix)


def routing_is_recorded_whole(rollout: RolloutConfig) -> Iterator[Problem]:
    """Yield the problems of engines that cannot return every choice of experts."""
    if rollout.routing_replay and rollout.pipeline_parallel > 1:
        yield Problem(
            "rollout.routing_replay",
            True,
            "vLLM returns no choices of experts from several stages:"
            f" rollout.pipeline_parallel is {rollout.pipeline_parallel}",
            "Use false, or rollout.pipeline_parallel=1 with more tensor_parallel.",
        )
    for name in ("enable_prefix_caching", "additional_config"):
        if rollout.routing_replay and name in rollout.vllm_args:
            yield Problem(
                f"rollout.vllm_args.{name}",
                rollout.vllm_args[name],
                "rollout.routing_replay=true sets it itself",
                "Leave it out, or set rollout.routing_replay=false.",
            )


def quantized_engines_compute_in_bfloat16(
    engines: Mapping[str, RolloutEngineConfig],
) -> Iterator[Problem]:
    """Yield a problem for each quantized engine of another type.

    Args:
        engines: The engines, by the key of their settings.
    """
    for section, engine in engines.items():
        if engine.quantization is not None and engine.dtype == "float32":
            rule = f"vLLM quantizes bfloat16, and {section}.dtype=float32"
            fix = f"Set {section}.dtype=bfloat16, or leave it auto."
            yield Problem(f"{section}.quantization", engine.quantization, rule, fix)


def quantization_is_measured(rollout: RolloutConfig) -> Iterator[Problem]:
    """Yield a problem if a number limits what only a first sync can show."""
    tolerance = rollout.sync.probe_tolerance
    if rollout.quantization is not None and isinstance(tolerance, float):
        rule = (
            f"with rollout.quantization={rollout.quantization} log-probs differ from"
            " the trainer's by what the first sync shows"
        )
        fix = "Use measured, or leave it auto."
        yield Problem("rollout.sync.probe_tolerance", tolerance, rule, fix)


def open_rows_survive_a_turn(rollout: RolloutConfig) -> Iterator[Problem]:
    """Yield a problem if trainers need the memory that open rows would keep."""
    if rollout.schedule == "carry_over" and rollout.kv == "keep":
        rule = "with schedule=carry_over the trainers use the memory of the cache"
        yield Problem("rollout.kv", "keep", rule, "Use recompute.")


def endpoint_settings_are_used(
    endpoint: EndpointConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of an endpoint that is not enabled."""
    switch = "rollout.endpoint.enabled"
    if endpoint.enabled:
        return

    # Switching it off by hand is no mistake.
    keys = [key for key in overridden.under("rollout.endpoint") if key != switch]
    fix = f"Leave it out, or set {switch}=true."
    yield from overridden.ignored(keys, f"{switch}=false", fix)


def endpoints_have_an_address(rollout: RolloutConfig) -> Iterator[Problem]:
    """Yield a problem if an endpoint has no address or no port to listen on."""
    endpoint = rollout.endpoint
    # What auto becomes is at least 1.
    replicas = rollout.num_replicas
    if replicas == "auto":
        replicas = 1

    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        rule = "this is no address to listen on"
        fix = "Use 127.0.0.1 for this machine alone, 0.0.0.0 for every machine."
        yield Problem("rollout.endpoint.host", endpoint.host, rule, fix)

    # Port 0 means that each replica takes a free one.
    last_port = endpoint.port + replicas - 1
    if endpoint.port and last_port > _LAST_PORT:
        rule = (
            f"each of {replicas} replicas has the port behind the one before, and the"
            f" last port is {_LAST_PORT}"
        )
        fix = f"Use at most {_LAST_PORT + 1 - replicas}."
        yield Problem("rollout.endpoint.port", endpoint.port, rule, fix)
