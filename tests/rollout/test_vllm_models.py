"""Weight updates of other architectures, of tied heads, and over two ranks.

Each has its own engine.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import PreTrainedModel

from scripts.tiny_families import tiny_config
from tests.rollout.conftest import checkpoint_of, manifest_of, receive_without
from tests.rollout.generation import generate
from tests.weight_sync.fingerprints import fingerprint
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import EngineFailed, WeightSyncError
from verl_ray.models.tiny import Architecture
from verl_ray.proofs.cut_model import random_model
from verl_ray.rollout.probes import HIDDEN_MOVEMENT, Probe
from verl_ray.rollout.requests import Chunk, GenerationRequest, Sampling
from verl_ray.rollout.server import RolloutServer
from verl_ray.rollout.vllm_engine import VllmEngine
from verl_ray.rollout.vllm_environment import environment
from verl_ray.settings.config_json import positions_of
from verl_ray.weight_sync.broadcast import BroadcastSender
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import Experts, Slice, plan_buckets
from verl_ray.weight_sync.transport import WireSpec

pytestmark = pytest.mark.vllm

Reference = Callable[..., np.ndarray]
Load = Callable[[Path], PreTrainedModel]


def _worst(engine: VllmEngine, model: PreTrainedModel, reference: Reference) -> float:
    prompts = np.random.default_rng(1).integers(2, 15, size=(4, 9)).astype(np.int32)
    requests = [
        GenerationRequest(i, p, Sampling(0.8, 1.0, -1, 10, ()), seed=i)
        for i, p in enumerate(prompts)
    ]
    differences = [
        np.abs(
            chunk.log_probs
            - reference(model, prompts[chunk.request_id], chunk.tokens, 0.8)
        ).max()
        for step in generate(engine, requests)
        for chunk in step
    ]
    assert len(differences) == 4
    return float(max(differences))


@pytest.mark.parametrize(
    ("architecture", "tie", "vllm_is_right"),
    [
        # Of these two, other tests of vLLM sync weights too.
        pytest.param("qwen3", True, False, marks=pytest.mark.slow),
        pytest.param("llama", True, False, marks=pytest.mark.slow),
        ("qwen2", False, True),
        ("gemma", True, False),
        ("qwen3_moe", False, False),
    ],
)
def test_synced_weights_are_what_is_sampled_from(
    start_vllm: Callable[..., VllmEngine],
    make_model: Callable[..., Path],
    load_reference: Load,
    publish: Callable[..., object],
    reload_as_vllm_does: Callable[[VllmEngine, PreTrainedModel], None],
    reference_log_probs: Reference,
    architecture: Architecture,
    tie: bool,
    vllm_is_right: bool,
) -> None:
    path = make_model(architecture, tie=tie)
    engine = start_vllm(path)
    first, second = (
        load_reference(path),
        load_reference(make_model(architecture, tie=tie, seed=1)),
    )
    for version, model in enumerate((first, second, first)):
        publish(engine, model, version)
        assert _worst(engine, model, reference_log_probs) < 1e-4
    assert _worst(engine, second, reference_log_probs) > 0.1
    # All syncs but the first went by a plan, where vLLM does nothing but copy and pack.
    worker = engine.core._core.model_executor.driver_worker.worker
    assert (worker._weights_plan is None) == (architecture == "qwen3_moe")
    # Tied heads and experts are right because the loader mends them; a proof finds
    # where it does not.
    publish(engine, second, 3, verification_follows=True)
    reload_as_vllm_does(engine, first)
    row = np.random.default_rng(2).integers(2, 15, size=12).astype(np.int32)
    probe = Probe((row,), (reference_log_probs(first, row[:1], row[1:]),), 1e-4)
    if vllm_is_right:
        assert engine.verify(probe) < 1e-4
    else:
        with pytest.raises(
            WeightSyncError,
            match=r"version 3: every weight arrived as it was sent.*vLLM repacks",
        ):
            engine.verify(probe)
        assert engine.policy_version is None
    engine.sleep("weights")
    engine.wake("weights")
    publish(engine, second, 4)
    engine.wake("kv_cache")
    assert _worst(engine, second, reference_log_probs) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "by_copies"),
    # Tensors that vLLM's loader copies past the count of its reload.
    [
        ("gpt_oss", ("layers.1.self_attn.sinks", "layers.0.mlp.experts.down_proj")),
        ("ernie4_5_moe", ("layers.1.mlp.moe_statics.e_score_correction_bias",)),
    ],
)
def test_weights_that_vllm_does_not_count_are_loaded_again_and_missed(
    start_vllm: Callable[..., VllmEngine],
    publish: Callable[..., object],
    reference_log_probs: Reference,
    tmp_path: Path,
    family: str,
    by_copies: tuple[str, ...],
) -> None:
    character_tokenizer(tmp_path, "0123456789+= ")
    models = [random_model(tiny_config(family), seed) for seed in (1, 2)]
    models[0].save_pretrained(tmp_path)
    engine = start_vllm(tmp_path)
    for version, model in enumerate([*models, models[0]]):
        publish(engine, model, version)
        assert _worst(engine, model, reference_log_probs) < 1e-4
    for name in by_copies:
        sent = receive_without(engine, models[0], f"model.{name}")
        with pytest.raises(WeightSyncError, match="was not loaded completely"):
            engine.commit(sent)


def test_an_engine_quantizes_what_arrives_at_each_sync(
    start_vllm: Callable[..., VllmEngine],
    make_model: Callable[..., Path],
    load_reference: Load,
    publish: Callable[..., dict[str, Fingerprint]],
    reference_log_probs: Reference,
) -> None:
    path = make_model("llama", tie=True)
    engine = start_vllm(path, dtype="bfloat16", quantization="fp8")
    runner = engine.core._core.model_executor.driver_worker.worker.model_runner
    matrix = runner.model.model.layers[1].self_attn.o_proj
    models = [
        load_reference(make_model("llama", tie=True, seed=seed)).bfloat16()
        for seed in (0, 1)
    ]
    row = np.random.default_rng(2).integers(2, 15, size=12).astype(np.int32)
    differences = []
    for version, model in enumerate((*models, models[0])):
        received = publish(engine, model, version, verification_follows=True)
        said = reference_log_probs(model, row[:1], row[1:])
        differences.append(engine.verify(Probe((row,), (said,), 1.0)))
        weight = model.model.layers[1].self_attn.o_proj.weight
        assert received["model.layers.1.self_attn.o_proj.weight"] == fingerprint(weight)
        # A row's largest number becomes 448, the largest of fp8; 3 bits of a mantissa
        # are off by a 16th at most, and numbers near 0 by half of the least step.
        scale = matrix.weight_scale
        assert matrix.weight.dtype == torch.float8_e4m3fn
        assert torch.allclose(scale, weight.float().abs().amax(1, keepdim=True) / 448)
        error = (matrix.weight.t().float() * scale - weight.float()).abs()
        assert (error <= torch.maximum(weight.float().abs() / 16, scale / 2**10)).all()
        assert error.max() > 0
    # Rounding shows, by the same bits after other weights and back.
    assert differences[0] == differences[2] > 0.05
    assert differences[1] < 0.5


def test_weights_of_one_step_before_are_found_where_rounding_is_larger_than_the_step(
    start_vllm: Callable[..., VllmEngine],
    make_model: Callable[..., Path],
    load_reference: Load,
    publish: Callable[..., object],
    reload_as_vllm_does: Callable[[VllmEngine, PreTrainedModel], None],
    reference_log_probs: Reference,
) -> None:
    path = make_model("qwen2", tie=False)
    engine = start_vllm(path, dtype="bfloat16")
    before, now = load_reference(path), load_reference(path)
    with torch.no_grad():
        for parameter in now.parameters():
            parameter += 1e-3 * parameter.sign()
    row = np.random.default_rng(2).integers(2, 15, size=12).astype(np.int32)
    said = [reference_log_probs(model, row[:1], row[1:]) for model in (before, now)]
    tolerance = 1.0
    assert (
        HIDDEN_MOVEMENT < np.abs(said[1] - said[0]).max() < tolerance / 2
    )  # no tolerance of bfloat16 sees that
    for version, (model, log_probs) in enumerate(zip((before, now), said, strict=True)):
        publish(engine, model, version, verification_follows=True)
        assert engine.verify(Probe((row,), (log_probs,), tolerance)) < 0.2
    publish(engine, before, 2, verification_follows=True)
    reload_as_vllm_does(engine, now)
    with pytest.raises(
        WeightSyncError,
        match=r"older ones.* to the bit those of version 1, since when .* by 0\.\d",
    ):
        engine.verify(Probe((row,), (said[0],), tolerance))
    assert engine.policy_version is None


def test_sampling_settings_of_the_model_directory_are_left_alone(
    start_vllm: Callable[..., VllmEngine],
    make_model: Callable[..., Path],
    load_reference: Load,
    reference_log_probs: Reference,
) -> None:
    path = make_model("qwen3", tie=True)
    plain = load_reference(path)
    settings = json.loads((path / "generation_config.json").read_text())
    settings |= {
        "do_sample": True,
        "temperature": 0.1,
        "top_k": 1,
        "top_p": 0.1,
        "repetition_penalty": 2.0,
    }
    (path / "generation_config.json").write_text(json.dumps(settings))
    # Of a truncated or sharpened distribution the log-probs would be near 0.
    assert (
        _worst(start_vllm(path, initial_version=0), plain, reference_log_probs) < 1e-4
    )


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param(
            {
                "rope_type": "yarn",
                "factor": 12.0,
                "original_max_position_embeddings": 8,
            },
            marks=pytest.mark.slow,
        ),
        {"type": "yarn", "factor": 12.0},
        # A whole number, which transformers keeps as one.
        pytest.param({"type": "linear", "factor": 12}, marks=pytest.mark.slow),
    ],
)
def test_rows_behind_the_positions_before_scaling(
    scaling: dict[str, object],
    start_vllm: Callable[..., VllmEngine],
    make_model: Callable[..., Path],
    load_reference: Load,
    reference_log_probs: Reference,
) -> None:
    path = make_model("qwen3", tie=True)
    file = path / "config.json"
    settings = json.loads(file.read_text())
    theta = settings.pop("rope_parameters")["rope_theta"]
    settings |= {"rope_theta": theta, "rope_scaling": scaling}
    settings["max_position_embeddings"] = 8
    file.write_text(json.dumps(settings))
    # The longest rows of the engine have 96 tokens.
    assert positions_of(settings) == 96
    engine = start_vllm(path, initial_version=0)
    assert _worst(engine, load_reference(path), reference_log_probs) < 1e-4


@pytest.mark.parametrize(
    "section",
    [
        {"rope_type": "default"},
        {"rope_type": "default", "mrope_section": [4, 6, 6]},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "ntk", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48},
        {"rope_type": "proportional", "factor": 4.0},
        {
            "rope_type": "deepseek_yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 48,
        },
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
)
def test_vllm_has_an_entry_for_every_position(section: dict[str, object]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    positions = positions_of(
        {"max_position_embeddings": 64, "rope_parameters": section}
    )
    with set_current_vllm_config(VllmConfig()):
        table = get_rope(32, 64, rope_parameters={"rope_theta": 1e4, **section})
    assert positions is not None
    # Those of mrope are counted in parts of an image, too.
    spare = 4 if "mrope_section" in section else 1
    assert len(table.cos_sin_cache) == spare * positions


def test_experts_are_those_that_a_token_was_sampled_with(
    start_vllm: Callable[..., VllmEngine],
    make_model: Callable[..., Path],
    load_reference: Load,
    publish: Callable[..., object],
) -> None:
    """Also of a row that goes on after an update which computes it again."""
    path = make_model("qwen3_moe", tie=False)
    engine = start_vllm(path, routing_replay=True)
    models = [
        load_reference(make_model("qwen3_moe", tie=False, seed=seed)) for seed in (0, 1)
    ]
    prompt = np.array([3, 4, 5, 6], np.int32)
    publish(engine, models[0], 0)
    engine.submit([GenerationRequest(7, prompt, Sampling(1.0, 1.0, -1, 12, ()), 5)])
    for _ in range(5):
        assert engine.step() == []
    engine.pause("recompute")
    publish(engine, models[1], 1)
    engine.resume()
    chunks: list[Chunk] = []
    while engine.has_work:
        chunks += engine.step()

    (chunk,) = chunks
    assert chunk.version_spans == ((0, 0), (5, 1))
    row = torch.from_numpy(np.concatenate([prompt, chunk.tokens])).long()[None]
    first, second = (_choices(model, row) for model in models)
    assert chunk.routed_experts is not None
    recorded = torch.from_numpy(chunk.routed_experts).long().sort().values
    # The fifth token was sampled behind position 7, and the sixth behind 8.
    assert torch.equal(recorded, torch.cat([first[:8], second[8:15]]))
    assert not torch.equal(first[:8], second[:8])


def _choices(model: PreTrainedModel, row: torch.Tensor) -> torch.Tensor:
    """Return the experts that a model chooses, [tokens, layers, 2], in their order."""
    layers = model(row, output_router_logits=True).router_logits
    return torch.stack([logits.topk(2).indices.sort().values for logits in layers], 1)


RANKS: dict[str, dict[str, object]] = {
    "slices": {"tensor_parallel": 2},
    "experts": {"tensor_parallel": 2, "expert_parallel": True, "routing_replay": True},
    "stages": {"pipeline_parallel": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", RANKS)
def test_two_ranks(
    layout: str,
    start_vllm: Callable[..., VllmEngine],
    make_model: Callable[..., Path],
    load_reference: Load,
    publish: Callable[..., object],
    reference_log_probs: Reference,
) -> None:
    os.environ.update(environment("cpu", threads=1, num_ranks=2))
    path = make_model("qwen3_moe", tie=True)
    engine = start_vllm(path, **RANKS[layout])
    for version, seed in enumerate((1, 0)):
        model = load_reference(make_model("qwen3_moe", tie=True, seed=seed))
        publish(engine, model, version)
        assert _worst(engine, model, reference_log_probs) < 1e-4
    model = load_reference(make_model("qwen3_moe", tie=True, seed=1))
    halves = [frozenset({0, 1}), frozenset({2, 3})]
    assert engine.experts == (halves if layout == "experts" else [None, None])
    _broadcast(engine, model, 2)
    assert _worst(engine, model, reference_log_probs) < 1e-4
    if layout == "experts":
        # A rank that gets the experts of the other one lacks its own.
        with pytest.raises(WeightSyncError, match=r"missing for .*experts"):
            _broadcast(engine, model, 3, holders=halves[::-1])
        _broadcast(engine, model, 3)
        assert _worst(engine, model, reference_log_probs) < 1e-4
        # Each rank routes all tokens, whichever experts it holds.
        prompt = np.array([3, 4, 5], np.int32)
        request = GenerationRequest(1, prompt, Sampling(1.0, 1.0, -1, 6, ()), 0)
        (chunk,) = [chunk for step in generate(engine, [request]) for chunk in step]
        row = torch.from_numpy(np.concatenate([prompt, chunk.tokens])).long()[None]
        assert chunk.routed_experts is not None
        recorded = torch.from_numpy(chunk.routed_experts).long().sort().values
        assert torch.equal(recorded, _choices(model, row)[:8])
    server = RolloutServer(lambda: engine)

    def begin_again(version: int) -> None:
        server.run(lambda engine: engine.begin_update(manifest_of(model), version))
        server.run(lambda engine: engine.abort_update())

    begin_again(3)
    next(
        one
        for one in psutil.Process().children()
        if re.search("Worker_(TP|PP)1", "".join(one.cmdline()))
    ).kill()
    with pytest.raises(EngineFailed, match="a rank of it has exited"):
        for version in range(4, 10_000):  # until vLLM has seen it
            begin_again(version)
    with pytest.raises(
        EngineFailed,
        match="can no longer be used; start another: a rank of it has exited",
    ):
        server.run(lambda engine: engine.sleep("weights"))


def _broadcast(
    engine: VllmEngine,
    model: PreTrainedModel,
    version: int,
    holders: Sequence[Experts] = (),
) -> None:
    """An update over a wire on which every rank of the engine is a receiver."""
    manifest, state = manifest_of(model), checkpoint_of(model)
    buckets = plan_buckets(manifest, 100_000, holders or engine.experts)
    wire_spec = WireSpec(buckets, receivers=2, patience_s=60)
    sender = BroadcastSender(wire_spec, 0, torch.device("cpu"))
    address = sender.offer()
    with ThreadPoolExecutor(1) as thread:
        meeting = thread.submit(sender.connect, address)
        engine.connect(address, wire_spec, 0)
        meeting.result()
    engine.begin_update(manifest, version)
    sent: dict[str, Fingerprint] = {}
    for bucket in wire_spec.buckets:
        parameters = [entry.parameter for entry in bucket.entries]
        shards = [
            (Slice(one.name, (0,) * len(one.shape), one.shape), state[one.name])
            for one in parameters
        ]
        sent |= sender.send(bucket, shards, whole=True).fingerprints.by_name
        engine.receive(bucket)
    engine.commit(sent)
    sender.close()
