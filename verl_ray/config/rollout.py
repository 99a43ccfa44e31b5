"""vLLM's engines, and the rollouts that the policy's ones draw.

Deliberately not here: what vLLM itself accepts in `vllm_args` (`vllm_arguments`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from verl_ray.config.section import Auto, NonNegative, Positive, PositiveFloat, Section, Temperature, resolved

VLLM_BATCHED_TOKENS = 8192
"""Tokens of a batch of the rollout engine, unless max_num_batched_tokens in its vllm_args says another number."""

VLLM_BATCHED_REQUESTS = 256
"""Requests of a batch of the rollout engine, unless max_num_seqs in its vllm_args says another number."""

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes of room that vLLM makes for adapters."""

HEAD = "lm_head"
"""What vLLM calls the layer that makes logits."""

WireName = Literal["shared_memory", "cuda_ipc", "broadcast", "host_broadcast", "disk"]
Freed = Literal["never", "kv_cache", "weights"]


class RolloutEngineConfig(Section):
    """One vLLM engine, whoever asks it."""

    num_replicas: Positive
    """Independent engines."""
    tensor_parallel: Positive
    """Ranks per replica."""
    dtype: Literal["float32", "bfloat16"]
    kv_cache_gib: PositiveFloat
    """Memory for the key-value cache of one replica rank."""
    vllm_args: Annotated[dict[str, Any], Field(examples=["{block_size: 32}"])]
    """Further arguments of vLLM's engine, verbatim; those that another key sets are refused."""


@dataclass(frozen=True)
class ServedModel:
    """A model that vLLM engines serve."""

    config: RolloutEngineConfig
    section: str
    """The key of the engines' settings."""
    key: str
    """The key that names its directory."""
    path: str
    max_prompt_tokens: int

    @property
    def ranks(self) -> int:
        """Of all replicas."""
        return self.config.num_replicas * self.config.tensor_parallel


class SyncConfig(Section):
    """How weights reach the replicas, and how that is proved."""

    transport: WireName | Auto
    """broadcast = between GPUs where actor and rollout have their own, else between hosts; host_broadcast = always
    between hosts; auto = shared memory where the cluster is one node, else host_broadcast: it never takes what has not
    run on a GPU yet."""
    bucket_mib: Positive | Auto
    """What travels at once, and two of them are under way; a single larger tensor takes more. auto = a twelfth of the
    model, from 16 to 512: so little has to come before the first can be loaded, and few calls are made."""
    delta: bool
    """After the first sync send only what changed, over a broadcast or disk; the actor's rank 0 and every rollout rank
    keep a copy of the weights in host memory."""
    adapter: Literal["alone", "merged"] | Auto
    """How a LoRA adapter leaves the actor: after the first sync alone, for the model that the replicas keep; or merged
    into its weights. auto = alone, unless the replicas free their weights while the trainer works."""
    folder: str
    """Where transport=disk puts its files; all nodes must see it."""
    probe_every: Positive | Auto
    """Syncs from one comparison of log-probs, of fixed tokens with the trainer's, to the next; auto = every one on a
    CPU, every tenth on GPUs. Fingerprints are compared at every sync."""
    probe_tolerance: PositiveFloat | Literal["measured"] | Auto
    """The largest difference of a log-prob; measured = five times what the first sync of the run shows, at least 0.1
    and at most 1; auto = 0.001 where trainer and rollout compute in float32, else measured."""

    @property
    def wire(self) -> WireName:
        """`transport`, once it is resolved."""
        return resolved(self.transport)

    @property
    def bucket_bytes(self) -> int:
        """What travels at once."""
        return resolved(self.bucket_mib) << 20


class HealthConfig(Section):
    """When a replica is taken for lost, beside one that makes no progress (run.stall_s), and how often that may
    happen."""

    interval_s: PositiveFloat
    """While responses are drawn, each replica is asked this often how it is."""
    deadline_s: PositiveFloat
    """One that has not answered for so long is lost."""
    max_restarts: NonNegative
    """Replicas that may be lost from one published policy to the next before the run stops."""


class EndpointConfig(Section):
    """What clients outside of the run may ask of the replicas: an OpenAI-compatible endpoint of each."""

    enabled: bool
    host: str
    """The address to listen on; 127.0.0.1 = for processes of the same machine alone, 0.0.0.0 = for every machine."""
    port: Annotated[int, Field(ge=0, le=65535)]
    """Of the first replica, the next one has the next; 0 = any that is free."""
    in_flight: Positive
    """Responses that one replica draws for clients at a time; others wait."""
    token_env: str | None
    """Environment variable of the workers that holds the token which clients must send; null = none."""


class RolloutConfig(RolloutEngineConfig):
    group_size: Positive
    """Responses per prompt."""
    max_response_tokens: Positive
    temperature: Temperature
    """Of the sampler; the trainer divides its logits by the same."""
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: int
    """-1 = all tokens."""
    stream_rows: Positive
    """Finished responses are handed on to the reward role once this many are ready."""
    in_flight: Positive
    """Responses that one replica draws at a time; the others wait for the least loaded one."""
    staleness: NonNegative
    """How many policy versions a token may be behind the policy that learns from it; 0 = a step learns from its own
    rollouts alone."""
    sync: SyncConfig
    health: HealthConfig
    endpoint: EndpointConfig
    sleep: Freed | Auto
    """What a replica frees while the trainer works: nothing, the cache, or the weights too, which are then not copied
    anywhere (vLLM's sleep level 2): each sync brings new ones. auto = weights (kv_cache with sync.adapter=alone) on a
    GPU it shares with the trainer, else never."""

    @property
    def frees(self) -> Literal["kv_cache", "weights"] | None:
        """What `sleep` gives back, once it is resolved; None = nothing."""
        sleep: Freed = resolved(self.sleep)
        return None if sleep == "never" else sleep
