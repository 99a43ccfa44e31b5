"""Properties that only real vLLM shows: numbers against transformers, seeds, memory.

The engine has separate embeddings.
"""

import gc
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.foreign_files import Planted
from tests.rollout.conftest import receive_without
from tests.rollout.generation import drained, generate
from verl_ray.columns.stages import Finish
from verl_ray.errors import CallRefused, RolloutError, WeightSyncError
from verl_ray.profiling.memory import malloc_trim
from verl_ray.rollout.requests import (
    Chunk,
    EngineLoad,
    GenerationProgress,
    GenerationRequest,
    Sampling,
)
from verl_ray.rollout.tool_calls import ActionReader
from verl_ray.rollout.vllm_engine import VllmEngine
from verl_ray.rollout.vllm_environment import environment

pytestmark = pytest.mark.vllm

KV_BYTES = 256 << 20
EOS = 1  # of character_tokenizer


@pytest.fixture(scope="module")
def path(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen3", tie=False)


@pytest.fixture(scope="module")
def model(
    path: Path, load_reference: Callable[[Path], PreTrainedModel]
) -> PreTrainedModel:
    return load_reference(path)


@pytest.fixture(scope="module")
def shared(start_vllm: Callable[..., VllmEngine], path: Path) -> VllmEngine:
    # Blocks of 32 tokens, so that a prompt of 70 has some in the prefix cache.
    return start_vllm(
        path,
        initial_version=0,
        kv_cache_gib=KV_BYTES / 2**30,
        vllm_args={"block_size": 32},
    )


@pytest.fixture
def engine(
    shared: VllmEngine, model: PreTrainedModel, publish: Callable[..., object]
) -> Iterator[VllmEngine]:
    """An engine with the model's weights.

    They come from disk at first, and are synced again after a test that sent others.
    """
    if shared.policy_version != 0:
        publish(shared, model, 0)
    yield shared
    shared.wake("weights")
    shared.wake("kv_cache")


def _sampling(
    max_tokens: int = 12, stop: tuple[int, ...] | None = (), **kw: float
) -> Sampling:
    return Sampling(
        kw.get("temperature", 1.0),
        kw.get("top_p", 1.0),
        int(kw.get("top_k", -1)),
        max_tokens,
        stop,
    )


def _prompts(count: int, length: int = 7) -> list[np.ndarray]:
    return list(
        np.random.default_rng(0).integers(2, 15, size=(count, length)).astype(np.int32)
    )


def _run(engine: VllmEngine, requests: list[GenerationRequest]) -> list[Chunk]:
    chunks = [chunk for step in generate(engine, requests) for chunk in step]
    return sorted(chunks, key=lambda chunk: chunk.request_id)


def _worst(
    engine: VllmEngine,
    model: PreTrainedModel,
    reference: Callable[..., np.ndarray],
    **kw: float,
) -> float:
    prompts = _prompts(4)
    chunks = _run(
        engine,
        [
            GenerationRequest(i, p, _sampling(**kw), seed=i)
            for i, p in enumerate(prompts)
        ],
    )
    temperature = kw.get("temperature", 1.0) or 1.0
    return max(
        float(
            np.abs(
                chunk.log_probs - reference(model, prompt, chunk.tokens, temperature)
            ).max()
        )
        for chunk, prompt in zip(chunks, prompts, strict=True)
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6, 0.0])
def test_log_probs_are_those_of_transformers(
    engine: VllmEngine,
    model: PreTrainedModel,
    reference_log_probs: Callable[..., np.ndarray],
    temperature: float,
) -> None:
    assert _worst(engine, model, reference_log_probs, temperature=temperature) < 1e-4


def test_a_constrained_turn_matches_and_changes_no_other(engine: VllmEngine) -> None:
    reader = ActionReader(engine.tokenizer, None)
    prompt = _prompts(1)[0]

    def grammar(constraint: dict[str, object]) -> str:
        return reader.grammar(constraint, (), prompt.tolist())

    free = _sampling(stop=None)
    numbers = replace(free, grammar=grammar({"json": {"enum": [12, 345]}}))
    (alone,) = _run(engine, [GenerationRequest(0, prompt, free, seed=3)])
    seeds = [(number, free if number == 3 else numbers) for number in range(12)]
    chunks = _run(
        engine,
        [GenerationRequest(seed, prompt, each, seed=seed) for seed, each in seeds],
    )
    other = chunks.pop(3)
    assert other.tokens.tolist() == alone.tokens.tolist()
    assert other.log_probs.tolist() == pytest.approx(alone.log_probs.tolist(), abs=1e-5)
    assert {chunk.finish for chunk in chunks} == {Finish.STOP}
    assert {chunk.tokens[-1] for chunk in chunks} == {EOS}
    texts = [engine.tokenizer.decode(chunk.tokens[:-1]) for chunk in chunks]
    assert {json.loads(text) for text in texts} == {12, 345}

    with pytest.raises(CallRefused, match=r'response_format: .*"nonsense"') as refused:
        grammar({"json": {"type": "nonsense"}})
    assert refused.value.param == "response_format"
    with pytest.raises(CallRefused, match="not supported by xgrammar"):
        grammar({"json": {"type": "array", "uniqueItems": True}})
    # The vocabulary has no bracket, which is known once the engine looks for one.
    impossible = replace(free, grammar=grammar({"json_object": True}))
    (chunk,) = _run(engine, [GenerationRequest(0, prompt, impossible, seed=3)])
    assert chunk.finish is Finish.ABORTED and engine.failure is None


def test_greedy_takes_the_most_likely_token(
    engine: VllmEngine, model: PreTrainedModel
) -> None:
    prompt = _prompts(1)[0]
    (chunk,) = _run(
        engine, [GenerationRequest(0, prompt, _sampling(temperature=0.0), seed=3)]
    )
    row = np.concatenate([prompt, chunk.tokens])
    with torch.no_grad():
        best = model(torch.from_numpy(row).long()[None]).logits[0].argmax(-1).numpy()
    assert chunk.tokens.tolist() == best[len(prompt) - 1 : -1].tolist()


def test_truncation_is_in_the_log_probs(
    engine: VllmEngine, model: PreTrainedModel
) -> None:
    """The two probabilities of top_k = 2 sum to one.

    p = 1 / (1 + exp(-difference of the two best logits)).
    """
    prompt = _prompts(1)[0]
    chunks = _run(
        engine,
        [
            GenerationRequest(i, prompt, _sampling(1, top_k=2), seed=i)
            for i in range(64)
        ],
    )
    with torch.no_grad():
        logits, tokens = (
            model(torch.from_numpy(prompt).long()[None]).logits[0, -1].topk(2)
        )
    expected = dict(zip(tokens.tolist(), logits.log_softmax(-1).tolist(), strict=True))
    assert {int(chunk.tokens[0]) for chunk in chunks} == set(expected)
    for chunk in chunks:
        assert chunk.log_probs[0] == pytest.approx(
            expected[int(chunk.tokens[0])], abs=1e-4
        )
    assert all(
        chunk.log_probs[0] == 0
        for chunk in _run(
            engine, [GenerationRequest(0, prompt, _sampling(1, top_p=1e-6), seed=0)]
        )
    )


def test_seeds_decide_whatever_runs_beside(engine: VllmEngine) -> None:
    requests = [
        GenerationRequest(i, prompt, _sampling(), seed=100 + i)
        for i, prompt in enumerate(_prompts(12))
    ]

    def bits(chunk: Chunk) -> list[list[float]]:
        return [chunk.tokens.tolist(), chunk.log_probs.tolist()]

    together = [bits(chunk) for chunk in _run(engine, requests)]
    reordered = {
        chunk.request_id: bits(chunk) for chunk in _run(engine, requests[::-1])
    }
    alone = [bits(_run(engine, [request])[0]) for request in requests]
    assert together == alone == [reordered[i] for i in range(12)]
    same_prompt = [
        GenerationRequest(i, requests[0].tokens, _sampling(), seed=i) for i in range(12)
    ]
    assert len({tuple(chunk.tokens) for chunk in _run(engine, same_prompt)}) > 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_one_row_has_the_bits_that_it_has_beside_others(
    engine: VllmEngine, dtype: torch.dtype
) -> None:
    from vllm import _custom_ops as ops

    # oneDNN's own differ from 1,025 numbers on.
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 1280, generator=generator).to(dtype)
    weight = torch.randn(1024, 1280, generator=generator).to(dtype)
    handler = ops.create_onednn_mm(weight.t(), 32)
    together = ops.onednn_mm(handler, rows, None)
    alone = [ops.onednn_mm(handler, row, None) for row in rows.split(1)]
    assert torch.equal(torch.cat(alone), together)
    torch.testing.assert_close(
        together.float(), rows.float() @ weight.float().t(), rtol=1e-2, atol=0.3
    )


def test_what_was_under_way_at_a_pause_belongs_to_it_even_if_the_request_is_ended(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        GenerationRequest(i, prompt, _sampling(5), seed=i)
        for i, prompt in enumerate(_prompts(2))
    ]
    alone = _run(engine, requests[1:])[0].tokens.tolist()
    engine.submit(requests)
    engine.step()
    hold = engine._pause
    with monkeypatch.context() as patch:  # as where a GPU has begun a step
        patch.setattr(
            engine,
            "_pause",
            lambda: [*hold(), GenerationProgress(0, [3], [-1.0], None)],
        )
        engine.pause()
    engine.abort([0])
    chunks = engine.step()
    engine.resume()
    while engine.unfinished:
        chunks += engine.step()
    assert {chunk.request_id: chunk.finish for chunk in chunks} == {
        0: Finish.ABORTED,
        1: Finish.LENGTH,
    }
    assert (
        next(chunk for chunk in chunks if chunk.request_id == 0).tokens.tolist()[-1]
        == 3
    )
    assert (
        next(chunk for chunk in chunks if chunk.request_id == 1).tokens.tolist()
        == alone
    )


def test_a_response_ends_with_its_end_token(engine: VllmEngine) -> None:
    requests = [
        GenerationRequest(i, prompt, _sampling(60, None), seed=i)
        for i, prompt in enumerate(_prompts(24))
    ]
    chunks = _run(engine, requests)
    stopped = [chunk for chunk in chunks if chunk.finish is Finish.STOP]
    assert len(stopped) > 12
    assert all(
        chunk.tokens[-1] == EOS and EOS not in chunk.tokens[:-1] for chunk in stopped
    )
    assert all(
        len(chunk.tokens) == 60 and EOS not in chunk.tokens
        for chunk in chunks
        if chunk.finish is Finish.LENGTH
    )
    # A caller's own stop tokens replace the model's.
    other = _run(
        engine,
        [
            GenerationRequest(i, prompt, _sampling(60, (5,)), seed=i)
            for i, prompt in enumerate(_prompts(24))
        ],
    )
    assert all(chunk.tokens[-1] == 5 for chunk in other if chunk.finish is Finish.STOP)
    assert any(EOS in chunk.tokens for chunk in other)


def test_requests_beyond_the_engine_are_refused(engine: VllmEngine) -> None:
    with pytest.raises(
        RolloutError,
        match="90 prompt tokens and up to 12 response tokens are more than the engine's 96",
    ):
        engine.submit(
            [GenerationRequest(0, np.full(90, 3, np.int32), _sampling(), seed=0)]
        )
    with pytest.raises(
        RolloutError,
        match="found the token ids 3 to 15, expected 0 to 14, the vocabulary",
    ):
        engine.submit(
            [GenerationRequest(0, np.array([3, 15], np.int32), _sampling(), seed=0)]
        )
    with pytest.raises(
        RolloutError, match=r"rollout.temperature = 3.0: vLLM samples at 0"
    ):
        engine.submit(
            [GenerationRequest(0, _prompts(1)[0], _sampling(temperature=3.0), seed=0)]
        )
    assert engine.unfinished == 0


def test_a_sync_changes_what_is_sampled(
    engine: VllmEngine,
    make_model: Callable[..., Path],
    load_reference: Callable[[Path], PreTrainedModel],
    publish: Callable[..., object],
    reference_log_probs: Callable[..., np.ndarray],
    model: PreTrainedModel,
) -> None:
    other = load_reference(make_model("qwen3", tie=False, seed=1))
    # A prompt of more than one block of the KV cache, so that stale cached prefixes
    # would show.
    prompt = _prompts(1, length=70)[0]
    request = GenerationRequest(0, prompt, _sampling(), seed=0)
    for version, weights in ((1, other), (2, model), (3, other)):
        publish(engine, weights, version)
        for _ in range(2):  # the second time from the prefix cache
            (chunk,) = _run(engine, [request])
            assert chunk.version_spans == ((0, version),)
            assert (
                np.abs(
                    chunk.log_probs - reference_log_probs(weights, prompt, chunk.tokens)
                ).max()
                < 1e-4
            )
    assert (
        np.abs(chunk.log_probs - reference_log_probs(model, prompt, chunk.tokens)).max()
        > 0.1
    )


def test_a_manifest_that_does_not_fill_the_model_is_refused(
    engine: VllmEngine, model: PreTrainedModel
) -> None:
    for left_out, module in (
        ("model.layers.1.self_attn.k_proj.weight", "qkv_proj"),
        ("lm_head.weight", "lm_head"),
    ):
        sent = receive_without(engine, model, left_out)
        with pytest.raises(
            WeightSyncError,
            match=rf"not loaded completely; parameters are missing for \['.*{module}'\]",
        ):
            engine.commit(sent)
        assert engine.policy_version is None


def test_sleep_gives_memory_back_and_wake_takes_it_again(
    engine: VllmEngine,
    model: PreTrainedModel,
    publish: Callable[..., object],
    reference_log_probs: Callable[..., np.ndarray],
) -> None:
    gc.collect()
    malloc_trim()  # what earlier tests left would go with the first sleep
    awake = engine.memory_bytes
    engine.sleep("kv_cache")
    assert awake - engine.memory_bytes > 0.95 * KV_BYTES
    engine.wake("kv_cache")
    assert abs(engine.memory_bytes - awake) < 0.2 * KV_BYTES
    assert _worst(engine, model, reference_log_probs) < 1e-4  # the weights stayed

    # Open rows change nothing about it.
    prompt = _prompts(1, length=70)[0]
    engine.submit([GenerationRequest(7, prompt, _sampling(), seed=7)])
    engine.step()
    engine.pause("recompute")
    engine.sleep("weights")
    assert awake - engine.memory_bytes > 0.95 * KV_BYTES
    # This model is too small to be seen in the resident set: no storage is left,
    # neither plain nor packed.
    asleep = engine.core._core.model_executor.driver_worker.worker.model_runner.model
    assert (
        sum(parameter.untyped_storage().nbytes() for parameter in asleep.parameters())
        == 0
    )
    assert {getattr(module, "cpu_linear", None) for module in asleep.modules()} == {
        None
    }
    engine.wake("weights")
    publish(engine, model, 4)
    assert awake - engine.memory_bytes > 0.9 * KV_BYTES  # the KV cache still sleeps
    engine.wake("kv_cache")
    assert abs(engine.memory_bytes - awake) < 0.2 * KV_BYTES
    engine.resume()
    (row,) = drained(engine)
    expected = reference_log_probs(model, prompt, row.tokens)
    np.testing.assert_allclose(row.log_probs, expected, atol=1e-5)
    assert row.version_spans == ((0, 0), (1, 4)) and len(row.tokens) == 12
    assert _worst(engine, model, reference_log_probs) < 1e-4


def test_an_engine_that_fails_says_so_and_stays_failed(
    start_vllm: Callable[..., VllmEngine], path: Path
) -> None:
    with pytest.raises(
        RolloutError, match=r"is not a local model directory: it has no config.json"
    ):
        start_vllm(path / "nothing")
    with pytest.raises(
        RolloutError,
        match=r"rollout.vllm_args sets \['max_model_len'\], which other keys",
    ):
        start_vllm(path, vllm_args={"max_model_len": 12})
    # Of 5 blocks of 32 tokens, 2 layers, keys and values, 2 heads of 32 float32, vLLM
    # uses 4.
    engine = start_vllm(
        path,
        initial_version=0,
        kv_cache_gib=5 * 32 * 2 * 2 * 2 * 32 * 4 / 2**30,
        vllm_args={"max_num_seqs": 2, "block_size": 32, "enable_prefix_caching": False},
    )
    requests = [
        GenerationRequest(i, prompt, _sampling(4), seed=i)
        for i, prompt in enumerate(_prompts(5))
    ]
    assert [len(chunk.tokens) for chunk in _run(engine, requests)] == [
        4
    ] * 5  # more requests than fit a batch
    _check_preemption(engine)
    engine.submit([GenerationRequest(0, np.array([3], np.int32), _sampling(), seed=0)])
    del (
        engine.core._core.model_executor.driver_worker.worker.model_runner.model
    )  # breaks the next step
    with pytest.raises(RolloutError, match="rollout engine: a step failed"):
        engine.step()
    with pytest.raises(
        RolloutError, match="can no longer be used; start another: a step failed"
    ):
        engine.submit(
            [GenerationRequest(1, np.array([3], np.int32), _sampling(), seed=0)]
        )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_no_weights(
    start_vllm: Callable[..., VllmEngine], path: Path, tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    (copy / name).write_bytes(pickle.dumps(Planted(tmp_path / "made")))
    with pytest.raises(
        RolloutError, match=r"vLLM did not start on .*Cannot find any model weights"
    ):
        start_vllm(copy, initial_version=0)
    assert not (tmp_path / "made").exists()


def _check_preemption(engine: VllmEngine) -> None:
    """Draw two rows that need 3 blocks each at their 65th token, where there are 4."""
    requests = [
        GenerationRequest(i, prompt, _sampling(60), seed=i)
        for i, prompt in enumerate(_prompts(2, length=30))
    ]
    alone = [_run(engine, [request])[0] for request in requests]
    assert engine.load == EngineLoad(0.0, 0, 0, 0)
    engine.submit(requests)
    chunks: list[Chunk] = []
    for _ in range(35):  # of the 64 tokens that two blocks hold
        chunks += engine.step()
    assert engine.load == EngineLoad(1.0, 2, 0, 0)
    engine.step()
    assert engine.load == EngineLoad(0.75, 1, 1, 1)
    engine.pause("recompute")
    assert engine.load == EngineLoad(0.0, 0, 2, 1)
    engine.resume()
    chunks += drained(engine)
    for chunk in chunks:
        assert chunk.tokens.tolist() == alone[chunk.request_id].tokens.tolist()


def test_the_environment_pins_each_rank_of_a_cpu_engine() -> None:
    assert environment("cpu", 1)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert (
        environment("cpu", 1, num_ranks=2)["VLLM_CPU_OMP_THREADS_BIND"].count("|") == 1
    )
    # With vLLM's own setting, bits at contexts of 600 tokens depend on what else runs.
    assert environment("cpu", 2)["VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment("cuda", 4)


def test_float32_on_a_gpu_is_not_rounded_to_tf32() -> None:
    assert environment("cuda", 1, dtype="float32")["TRITON_F32_DEFAULT"] == "ieee"
    assert "TRITON_F32_DEFAULT" not in environment("cuda", 1, dtype="bfloat16")
    assert "TRITON_F32_DEFAULT" not in environment("cpu", 1, dtype="float32")


def test_a_rollout_engine_on_a_gpu_does_without_expandable_segments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True,roundup_power2_divisions:[256:1,512:2]",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    made = environment("cuda", 1)
    assert (
        made["PYTORCH_ALLOC_CONF"]
        == "max_split_size_mb:512,roundup_power2_divisions:[256:1,512:2]"
    )
    assert "PYTORCH_CUDA_ALLOC_CONF" not in made  # stays as it is
    assert (
        "runs without expandable_segments of PYTORCH_ALLOC_CONF"
        in capsys.readouterr().out
    )
    assert not environment("cpu", 1).keys() & given.keys()
