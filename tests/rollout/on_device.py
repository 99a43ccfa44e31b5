"""A part of `python -m scripts.bench gpu`: a rollout engine on this machine's device.

`python -m tests.rollout.on_device '{"device": "cuda", "dtype": "bfloat16"}'` prints
what was measured, and exits with 1 if the contract does not hold.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from verl_ray.rollout.requests import Chunk
    from verl_ray.rollout.vllm_engine import VllmEngine

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Of log-probs: that of the probe, and a bound for rounding."""


def main(task: dict[str, Any]) -> int:
    from verl_ray.rollout.vllm_environment import environment

    # Before torch is imported.
    os.environ.update(environment(task["device"], 1, dtype=task["dtype"]))
    with tempfile.TemporaryDirectory() as folder:
        found = checked(Path(folder), task["device"], task["dtype"])
    print(json.dumps(found))
    wrong = [name for name, value in found.items() if value is False]
    if wrong:
        print(f"does not hold: {wrong}", file=sys.stderr)
    return int(bool(wrong))


def checked(folder: Path, device: str, dtype: str) -> dict[str, Any]:
    from verl_ray.config.preparation import TinyModelConfig
    from verl_ray.config.rollout import RolloutEngineConfig
    from verl_ray.data.tokenizers import character_tokenizer
    from verl_ray.models.tiny import make_tiny
    from verl_ray.rollout.vllm_engine import VllmEngine

    character_tokenizer(folder / "tokenizer", "0123456789+= ")
    sizes = TinyModelConfig(
        hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_size=64, intermediate_size=512,
        tie_embeddings=True,
    )  # fmt: skip
    path = make_tiny("qwen3", folder / "model", folder / "tokenizer", sizes, seed=0)
    # Compiled graphs take half a minute, so only bfloat16 on a GPU has them.
    is_eager = device == "cuda" and dtype == "float32"
    config = RolloutEngineConfig(
        num_replicas=1,
        tensor_parallel=1,
        pipeline_parallel=1,
        expert_parallel=False,
        dtype=dtype,
        quantization=None,
        kv_cache_gib=0.0625,
        vllm_args={"enforce_eager": True} if is_eager else {},
    )  # type: ignore[arg-type]
    engine = VllmEngine(
        str(path), config, max_model_len=96, seed=0, device=device, initial_version=1
    )
    scheduler = engine.core._core.vllm_config.scheduler_config
    found: dict[str, Any] = {
        "v2_runner": str(engine.core._core.vllm_config.use_v2_model_runner),
        "asynchronous": str(scheduler.async_scheduling),
    }
    found |= sampling(engine, path, TOLERANCE[dtype])
    found |= stopping(engine)
    found |= sleeping(engine, device)
    engine.close()
    return found


def requests(count: int, tokens: int = 24, **options: Any) -> list[Any]:
    from verl_ray.rollout.requests import GenerationRequest, Sampling

    random = np.random.default_rng(0)
    return [
        GenerationRequest(
            index, random.integers(0, 12, 7).astype(np.int32), Sampling(1.0, 1.0, -1, tokens, ()),
            seed=100 + index, **options,
        )
        for index in range(count)
    ]  # fmt: skip


def responses(engine: VllmEngine, asked: list[Any]) -> dict[int, Chunk]:
    from tests.rollout.generation import generate

    return {
        chunk.request_id: chunk for step in generate(engine, asked) for chunk in step
    }


def sampling(engine: VllmEngine, path: Path, tolerance: float) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    asked = requests(32)
    together = responses(engine, asked)
    repeated = responses(engine, asked)
    alone = {
        request.request_id: responses(engine, [request])[request.request_id]
        for request in asked[:8]
    }

    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    worst = worst_probe = 0.0
    rows = []
    for request in asked[:8]:
        chunk = together[request.request_id]
        row = np.concatenate([request.tokens, chunk.tokens])
        ids = torch.from_numpy(row).long()[None]
        with torch.no_grad():
            said = model(ids).logits[0, :-1].log_softmax(-1)
        exact = said.gather(-1, ids[0, 1:, None])[:, 0].numpy()
        own = exact[len(request.tokens) - 1 :]
        worst = max(worst, float(np.abs(chunk.log_probs - own).max()))
        rows.append((row.astype(np.int32), exact))
    probed, _ = engine._probe([row for row, _ in rows])
    for values, (_, exact) in zip(probed, rows, strict=True):
        worst_probe = max(worst_probe, float(np.abs(values - exact).max()))

    same = [
        float(np.array_equal(alone[index].tokens, together[index].tokens))
        for index in alone
    ]
    return {
        "log_probs": worst,
        "log_probs_fit": worst <= tolerance,
        "probe": worst_probe,
        "probe_fits": worst_probe <= tolerance,
        "same_again": all(
            np.array_equal(together[index].tokens, repeated[index].tokens)
            for index in together
        ),
        # 1 needs kernels that are batch-invariant.
        "same_alone_fraction": float(np.mean(same)),
    }


def stopping(engine: VllmEngine) -> dict[str, Any]:
    """Check pauses, an abort and an id that is used again, each with a request alone."""
    from tests.rollout.generation import drained

    (request,) = requests(1)
    undisturbed = responses(engine, [request])[0].tokens

    engine.submit([request])
    for _ in range(4):
        engine.step()
    engine.pause()
    idle = engine.step() == []
    engine.resume()
    paused = drained(engine)[-1].tokens

    engine.submit([request])
    for _ in range(4):
        engine.step()
    engine.pause("recompute")
    if frees_kv_cache_alone(engine):
        engine.sleep("kv_cache")
        engine.wake("kv_cache")
    engine.resume()
    recomputed = drained(engine)[-1].tokens

    engine.submit([request])
    for _ in range(4):
        engine.step()
    engine.abort()
    (aborted,) = engine.step()
    again = responses(engine, [request])[0].tokens
    return {
        "idle_while_paused": idle,
        "same_after_a_pause": bool(np.array_equal(undisturbed, paused)),
        # 1 in float32. In bfloat16 a prefill rounds otherwise than single steps.
        "same_after_recompute_fraction": float(np.mean(undisturbed == recomputed)),
        "aborted_is_a_beginning": bool(
            np.array_equal(undisturbed[: len(aborted.tokens)], aborted.tokens)
        ),
        "same_id_again": bool(np.array_equal(undisturbed, again)),
    }


def sleeping(engine: VllmEngine, device: str) -> dict[str, Any]:
    (request,) = requests(1)
    undisturbed = responses(engine, [request])[0].tokens
    mib = {"awake": engine.memory_bytes >> 20}
    same = True
    if frees_kv_cache_alone(engine):
        engine.sleep("kv_cache")
        mib["without_kv_cache"] = engine.memory_bytes >> 20
        engine.wake("kv_cache")
        again = responses(engine, [request])[0].tokens
        same = bool(np.array_equal(undisturbed, again))
    engine.sleep("weights")
    mib["asleep"] = engine.memory_bytes >> 20
    engine.wake("weights")
    engine.wake("kv_cache")
    mib["awake_again"] = engine.memory_bytes >> 20
    between = mib.get("without_kv_cache", mib["asleep"])
    return {
        "mib": mib,
        "same_after_sleep": same,
        # A CPU gives memory back to its heap.
        "sleep_frees": device == "cpu" or mib["asleep"] <= between < mib["awake"],
    }


def frees_kv_cache_alone(engine: VllmEngine) -> bool:
    """Return whether this vLLM can (0.22 cannot)."""
    return hasattr(engine.core._core, "release_kv_cache_memory")


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
