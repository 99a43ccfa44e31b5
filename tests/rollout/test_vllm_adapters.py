"""Adapters that reach vLLM together with the model, and then alone."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.generation import drained, generate
from verl_ray.backends.engine import EngineBackend
from verl_ray.columns.batch import offsets_of
from verl_ray.columns.stages import Rows
from verl_ray.config.roles import LoraConfig
from verl_ray.engine.base import EngineSpec
from verl_ray.engine.build import build_engine
from verl_ray.engine.module_engine import ModuleEngine
from verl_ray.errors import WeightSyncError
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.rollout.base import RolloutEngine
from verl_ray.rollout.engine_state import EnginePause
from verl_ray.rollout.probes import Probe
from verl_ray.rollout.requests import Chunk, GenerationRequest, Sampling
from verl_ray.rollout.vllm_engine import VllmEngine
from verl_ray.rollout.vllm_loader import WeightLoader
from verl_ray.weight_sync.manifest import plan_buckets
from verl_ray.weight_sync.shared_memory import create, map_slots, remove
from verl_ray.weight_sync.transport import WireSpec

pytestmark = pytest.mark.vllm

LORA = LoraConfig(
    rank=4, alpha=8, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
)
ROW = np.random.default_rng(2).integers(2, 15, size=12).astype(np.int32)
LONG = np.random.default_rng(4).integers(2, 15, size=70).astype(np.int32)
"""A prompt of which the prefix cache can hold two blocks of 32 tokens."""


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def path(request: pytest.FixtureRequest, make_model: Callable[..., Path]) -> Path:
    return make_model(request.param, tie=request.param == "qwen3")


@pytest.fixture
def actor(path: Path) -> ModuleEngine:
    """An engine whose adapter has learned something."""
    backend = EngineBackend(
        kind="engine",
        dtype="float32",
        micro_batch_tokens_per_rank=128,
        activation_checkpointing=False,
    )
    spec = EngineSpec("actor", str(path), "policy", backend, None, 1, seed=3, lora=LORA)
    made = build_engine(spec, device=torch.device("cpu"), rank=0, world_size=1)
    assert isinstance(made, ModuleEngine)
    learn(made, 1)
    return made


@pytest.fixture(scope="module")
def rollout(path: Path, start_vllm: Callable[..., VllmEngine]) -> VllmEngine:
    return start_vllm(path, lora=LORA, vllm_args={"block_size": 32})


@torch.no_grad()
def learn(actor: ModuleEngine, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for name, value in actor.parameters().items():
        if ".lora_B." in name:
            value.copy_(torch.randn(value.shape, generator=random) * 0.1)


def send(
    actor: ModuleEngine,
    rollout: RolloutEngine,
    version: int,
    *,
    alone: bool,
    verifies: bool = False,
) -> int:
    """Send one update and return the bytes that travelled."""
    manifest = actor.manifest(separate_adapter=True)
    buckets = [
        one for one in plan_buckets(manifest, 100_000) if one.adapter or not alone
    ]
    address = create("adapters", max(one.nbytes for one in buckets))
    try:
        wire, sent = map_slots(address), {}
        rollout.connect(
            address, WireSpec(tuple(buckets), receivers=1, patience_s=60), 0
        )
        rollout.begin_update(manifest.adapter if alone else manifest, version)
        for bucket in buckets:
            sent |= wire.fill(
                bucket, actor.shards(bucket.names, separate_adapter=True)
            ).by_name
            rollout.receive(bucket)
        rollout.commit(sent, verification_follows=verifies)
    finally:
        remove(address)
    return sum(bucket.nbytes for bucket in buckets)


def log_probs(actor: ModuleEngine, tokens: np.ndarray) -> np.ndarray:
    """Log-probs of all tokens except the first, by the actor."""
    mask = np.arange(len(tokens)) > 0
    said = actor.forward(
        Rows(offsets=offsets_of([len(tokens)]), tokens=tokens, response_mask=mask),
        RequestedOutputs(log_probs=True),
    )
    assert said.log_probs is not None
    return said.log_probs[1:]


def probe(actor: ModuleEngine) -> Probe:
    rows = (ROW, ROW[3:])
    return Probe(rows, tuple(log_probs(actor, row) for row in rows), 1e-4)


def test_after_the_model_only_the_adapter_travels(
    actor: ModuleEngine, rollout: VllmEngine
) -> None:
    whole = send(actor, rollout, 1, alone=False, verifies=True)
    before = probe(actor)
    assert rollout.verify(before) < 1e-5
    learn(actor, 2)
    alone = send(actor, rollout, 2, alone=True, verifies=True)
    now = probe(actor)
    assert np.abs(now.log_probs[0] - before.log_probs[0]).max() > 0.05
    assert rollout.verify(now) < 1e-5
    # rank 4 beside matrices of 64 to 192 rows and columns
    assert alone < whole / 8
    (chunks,) = generate(
        rollout, [GenerationRequest(0, ROW, Sampling(1.0, 1.0, -1, 8, ()), seed=5)]
    )
    expected = log_probs(actor, np.concatenate([ROW, chunks[0].tokens]))[len(ROW) - 1 :]
    np.testing.assert_allclose(chunks[0].log_probs, expected, atol=1e-5)
    send(
        actor, rollout, 3, alone=False, verifies=True
    )  # a model that comes again brings its adapter with it
    assert rollout.verify(now) < 1e-5


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_a_request_that_is_paused_goes_on_with_the_new_adapter(
    actor: ModuleEngine, rollout: VllmEngine, mode: EnginePause
) -> None:
    """Others with its prompt read nothing of what the old adapter has computed.

    One of them waits for the update, and one comes after it.
    """

    def asked(request_id: int) -> GenerationRequest:
        return GenerationRequest(request_id, LONG, Sampling(1.0, 1.0, -1, 20, ()), 5)

    send(actor, rollout, 1, alone=False)
    rollout.submit([asked(0)])
    for _ in range(5):
        assert rollout.step() == []
    rollout.pause(mode)
    rollout.submit([asked(1)])

    old_values = {name: value.clone() for name, value in actor.parameters().items()}
    learn(actor, 2)
    send(actor, rollout, 2, alone=True)
    rollout.resume()
    rollout.submit([asked(2)])
    chunks = {chunk.request_id: chunk for chunk in drained(rollout)}

    def differences(chunk: Chunk) -> np.ndarray:
        row = np.concatenate([LONG, chunk.tokens])
        return np.abs(chunk.log_probs - log_probs(actor, row)[len(LONG) - 1 :])

    (start, first), (turn, second) = chunks[0].version_spans
    assert (start, first, second) == (0, 1, 2) and 4 <= turn <= 6
    assert differences(chunks[0])[:turn].max() > 0.01
    rest = differences(chunks[0])[turn:].max()
    assert rest < 1e-5 if mode == "recompute" else rest > 1e-3
    for number in (1, 2):
        assert chunks[number].version_spans == ((0, 2),)
        assert differences(chunks[number]).max() < 1e-5

    with torch.no_grad():
        for name, value in actor.parameters().items():
            value.copy_(old_values[name])
    assert differences(chunks[0])[:turn].max() < 1e-5


def test_an_adapter_that_vllm_was_not_given_is_found(
    actor: ModuleEngine,
    rollout: VllmEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send(actor, rollout, 1, alone=False)
    learn(actor, 2)
    monkeypatch.setattr(
        "verl_ray.rollout.vllm_loader.WeightLoader._weights_add_adapter",
        lambda self, lora: None,
    )
    send(actor, rollout, 2, alone=True, verifies=True)  # all fingerprints are right
    with pytest.raises(
        WeightSyncError,
        match="version 2: every weight arrived as it was sent, but the engine",
    ):
        rollout.verify(probe(actor))
    assert rollout.policy_version is None


def test_an_adapter_needs_a_model_beside_it(
    actor: ModuleEngine, rollout: VllmEngine
) -> None:
    send(actor, rollout, 2, alone=False)
    rollout.sleep("weights")
    rollout.wake("weights")
    rollout.wake("kv_cache")
    with pytest.raises(
        WeightSyncError,
        match="version 3 is an adapter, and the engine does not hold the model",
    ):
        send(actor, rollout, 3, alone=True)


def test_rows_in_flight_do_not_change_between_a_model_with_an_adapter_and_one_without(
    actor: ModuleEngine, rollout: VllmEngine
) -> None:
    send(actor, rollout, 1, alone=False)
    rollout.submit([GenerationRequest(0, ROW, Sampling(1.0, 1.0, -1, 4, ()), seed=5)])
    rollout.pause("recompute")
    with pytest.raises(
        WeightSyncError,
        match="1 requests in flight began with an adapter, and would go on like that",
    ):
        rollout.begin_update(actor.manifest(separate_adapter=False), 2)
    rollout.abort()
    rollout.step()
    rollout.resume()


def test_a_model_that_came_from_disk_tells_what_shares_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first update may be an adapter alone, whose verification may fail."""
    inbox = SimpleNamespace(begin=lambda: None)
    monkeypatch.setattr(WeightLoader, "_weights_inbox", inbox)
    embedding, head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
    head.weight = embedding.weight
    loader: Any = WeightLoader()
    loader.model_runner = SimpleNamespace(model=torch.nn.Sequential(embedding, head))
    loader.weights_begin_update(holds_model=False)
    assert loader.weights_repacked() == ["1"]
