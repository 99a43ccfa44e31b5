"""An engine's progress: bytes of weights while it is built, then micro-batches."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.engine.inputs import ENGINE, OPTIMIZER, POLICY, rows_of
from verl_ray.backends.engine import EngineBackend
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.engine.base import EngineSpec
from verl_ray.engine.build import build_engine
from verl_ray.models.tiny import make_tiny
from verl_ray.ops.outputs import RequestedOutputs
from verl_ray.profiling.progress import begin, progress

SIZES = TinyModelConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    intermediate_size=16,
    tie_embeddings=True,
)


def test_an_engine_counts_what_it_does(tmp_path: Path) -> None:
    character_tokenizer(tmp_path / "tokenizer", "0123456789+=")
    model = make_tiny(
        "qwen3", tmp_path / "model", tmp_path / "tokenizer", SIZES, seed=0
    )
    backend = EngineBackend(**ENGINE | {"micro_batch_tokens_per_rank": 20})
    spec = EngineSpec("actor", str(model), "policy", backend, OPTIMIZER, 10, seed=3)
    begin()
    engine = build_engine(spec, device=torch.device("cpu"), rank=0, world_size=1)
    sent = sum(parameter.numel for parameter in engine.manifest().sent)
    assert str(progress()) == f"{4 * sent} of {4 * sent} bytes"

    rows, seen = rows_of((3, 9, 17, 18)), []

    def watched(*arguments: object) -> object:
        seen.append(str(progress()))
        return real(*arguments)

    real, engine._run = engine._run, watched  # type: ignore[attr-defined]
    engine.forward(rows, RequestedOutputs(log_probs=True))
    assert seen == [f"{done} of 3 micro-batches" for done in range(3)]
    assert str(progress()) == "3 of 3 micro-batches"
    engine.forward_backward(rows, POLICY)
    assert seen[3:] == [f"{done} of 3 micro-batches" for done in range(3)]
    begin()
    engine.export(str(tmp_path / "out"))
    assert str(progress()) == f"{4 * sent} of {4 * sent} bytes"
