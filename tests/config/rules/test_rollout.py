"""Sampling, weight syncs and endpoints."""

from __future__ import annotations

import pytest

from scripts.configuration import compose
from tests.config.rules.cases import Case
from verl_ray.config.tasks.rl import RLConfig

CASES = [
    Case(
        "sampling_is_what_the_trainer_sees",
        "rollout.temperature=0",
        "rollout.temperature",
        "sampled",
        "Use 1.0",
    ),
    Case(
        "sampling_is_what_the_trainer_sees",
        "rollout.top_p=0.9",
        "rollout.top_p",
        "whole vocabulary",
        "Use 1.0",
    ),
    Case(
        "sampling_is_what_the_trainer_sees",
        "rollout.top_k=50",
        "rollout.top_k",
        "whole vocabulary",
        "Use -1",
    ),
    Case(
        "temperature_is_not_too_low",
        "rollout.temperature=0.001",
        "rollout.temperature",
        "of 0.01",
        "at least 0.01.",
    ),
    Case(
        "temperature_is_not_too_low",
        "prepare.min_gain=0 evaluation.temperature=0.001",
        "evaluation.temperature",
        "vLLM samples from a temperature of 0.01",
        "or 0 for greedy",
    ),
    Case(
        "adapters_can_be_sent_alone",
        "rollout.sync.adapter=merged",
        "rollout.sync.adapter",
        "with actor.lora.rank=0 there is no adapter",
        "Leave it out",
    ),
    Case(
        "adapters_can_be_sent_alone",
        "rollout.sync.adapter=alone actor.lora.rank=8 rollout.sleep=weights",
        "rollout.sync.adapter",
        "sleep=weights frees the model that the adapter is for",
        "rollout.sleep=kv_cache",
    ),
    Case(
        "adapters_can_be_sent_alone",
        "rollout.sync.adapter=alone actor.lora.rank=8 rollout.quantization=fp8",
        "rollout.sync.adapter",
        "no test has an adapter on rollout.quantization=fp8",
        "Use merged",
    ),
    Case(
        "adapters_can_be_sent_alone",
        "rollout.sync.adapter=alone actor.lora.rank=513",
        "rollout.sync.adapter",
        "adapters up to rank 512",
        "Use merged",
    ),
    Case(
        "adapters_can_be_sent_alone",
        "rollout.sync.adapter=alone actor.lora.rank=8 actor.lora.targets=[q_proj,lm_head]",
        "rollout.sync.adapter",
        "with an adapter on lm_head",
        "take lm_head from actor.lora.targets",
    ),
    Case(
        "transport_fits_the_placement",
        "rollout.sync.delta=true",
        "rollout.sync.delta",
        "auto may be memory",
        "broadcast",
    ),
    Case(
        "transport_fits_the_placement",
        "rollout.sync.delta=true rollout.sync.transport=cuda_ipc",
        "rollout.sync.delta",
        "cuda_ipc is memory that both sides see",
        "Use false",
    ),
    Case(
        "transport_fits_the_placement",
        "rollout.sync.folder=/shared",
        "rollout.sync.folder",
        "rollout.sync.transport=auto has no files",
        "Leave it out",
    ),
    Case(
        "transport_fits_the_placement",
        "rollout.sync.transport=cuda_ipc placement=separate",
        "rollout.sync.transport",
        "placement=separate gives each role its own",
        "placement=colocated",
    ),
    Case(
        "transport_fits_the_placement",
        "rollout.sync.transport=cuda_ipc rollout.num_replicas=2",
        "rollout.sync.transport",
        "rollout.num_replicas=2 are more than actor.num_ranks=1",
        "as many ranks",
    ),
    Case(
        "experts_have_ranks",
        "rollout.expert_parallel=true",
        "rollout.expert_parallel",
        "rollout.tensor_parallel is 1",
        "Use false",
    ),
    Case(
        "routing_is_recorded_whole",
        "rollout.routing_replay=true rollout.pipeline_parallel=2",
        "rollout.routing_replay",
        "rollout.pipeline_parallel is 2",
        "Use false",
    ),
    Case(
        "routing_is_recorded_whole",
        "rollout.routing_replay=true rollout.vllm_args={enable_prefix_caching:true}",
        "rollout.vllm_args.enable_prefix_caching",
        "rollout.routing_replay=true sets it itself",
        "Leave it out",
    ),
    Case(
        "quantized_engines_compute_in_bfloat16",
        "rollout.quantization=fp8 rollout.dtype=float32",
        "rollout.quantization",
        "rollout.dtype=float32",
        "Set rollout.dtype=bfloat16",
    ),
    Case(
        "quantization_is_measured",
        "rollout.quantization=fp8 rollout.sync.probe_tolerance=0.1",
        "rollout.sync.probe_tolerance",
        "what the first sync shows",
        "Use measured",
    ),
    Case(
        "endpoint_settings_are_used",
        "rollout.endpoint.port=9000",
        "rollout.endpoint.port",
        "rollout.endpoint.enabled=false",
        "or set rollout.endpoint.enabled=true",
    ),
    Case(
        "endpoints_have_an_address",
        "rollout.endpoint.enabled=true rollout.endpoint.host=localhost",
        "rollout.endpoint.host",
        "no address to listen on",
        "127.0.0.1",
    ),
    Case(
        "endpoints_have_an_address",
        "rollout.endpoint.enabled=true rollout.endpoint.port=65534 rollout.num_replicas=3",
        "rollout.endpoint.port",
        "each of 3 replicas has the port behind the one before",
        "at most 65533",
    ),
]


@pytest.mark.parametrize("wire", ["broadcast", "disk"])
def test_changes_alone_travel_where_wires_are_slow(wire: str) -> None:
    config = compose(
        "quickstart", [f"rollout.sync.transport={wire}", "rollout.sync.delta=true"]
    )
    assert isinstance(config, RLConfig)
    assert config.rollout.sync.delta
    assert config.rollout.sync.folder == f"{config.run.dir}/weight_sync"
