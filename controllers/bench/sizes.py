"""The models of contests: their sizes by name, and how one is made.

Invariant: models are random and made on this machine, so nothing is downloaded.
Deliberately not here: models that can learn a task (`step.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from verl_ray.config.preparation import TinyModelConfig

_BLOCK = 2**22
"""Random numbers of a model that is made."""


@dataclass(frozen=True)
class Size:
    """A model to be made; the characters of its vocabulary have no meaning."""

    vocab_size: int
    layers: TinyModelConfig


MODELS = {
    "1m": Size(
        1024,
        TinyModelConfig(
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_size=32,
            intermediate_size=384,
            tie_embeddings=True,
        ),
    ),
    "20m": Size(
        4096,
        TinyModelConfig(
            hidden_size=512,
            num_layers=6,
            num_heads=8,
            num_kv_heads=4,
            head_size=64,
            intermediate_size=1408,
            tie_embeddings=True,
        ),
    ),
    # The sizes of Qwen2.5-0.5B.
    "500m": Size(
        151_936,
        TinyModelConfig(
            hidden_size=896,
            num_layers=24,
            num_heads=14,
            num_kv_heads=2,
            head_size=64,
            intermediate_size=4864,
            tie_embeddings=True,
        ),
    ),
    # The sizes of Qwen2.5-1.5B.
    "1500m": Size(
        151_936,
        TinyModelConfig(
            hidden_size=1536,
            num_layers=28,
            num_heads=12,
            num_kv_heads=2,
            head_size=128,
            intermediate_size=8960,
            tie_embeddings=True,
        ),
    ),
    # The sizes of Qwen3-8B.
    "8b": Size(
        151_936,
        TinyModelConfig(
            hidden_size=4096,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_size=128,
            intermediate_size=12_288,
            tie_embeddings=False,
        ),
    ),
}


def tensors_of(size: Size) -> list[int]:
    """Return the number of elements of each parameter of a model."""
    layers = size.layers
    hidden = layers.hidden_size
    queries = hidden * layers.num_heads * layers.head_size
    keys = hidden * layers.num_kv_heads * layers.head_size
    projections = [queries, keys, keys, queries]
    feed_forward = 3 * [hidden * layers.intermediate_size]
    norms = [hidden, hidden, layers.head_size, layers.head_size]

    embeddings = [size.vocab_size * hidden] * (1 if layers.tie_embeddings else 2)
    in_layers = layers.num_layers * (projections + feed_forward + norms)
    return [*embeddings, *in_layers, hidden]


def with_layers(size: Size, num_layers: int) -> Size:
    """Return the size of a model of the same widths with fewer layers."""
    return replace(
        size, layers=size.layers.model_copy(update={"num_layers": num_layers})
    )


def make_model(size: Size, folder: str) -> str:
    """Write a model to `folder` and return its path; it has no tokenizer.

    Its matrices repeat one block of random numbers, since billions of them would take
    minutes. The speed of a computation does not depend on them.
    """
    import numpy as np
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM

    from verl_ray.models.tiny import model_settings

    settings = model_settings("qwen3", size.layers, size.vocab_size, {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    settings.save_pretrained(folder)

    scale = size.layers.hidden_size**-0.5
    block = np.random.default_rng(0).normal(0, scale, _BLOCK).astype(np.float32)
    file_of: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1
        shape = tuple(parameter.shape)
        values = np.ones(shape, np.float32) if is_norm else np.resize(block, shape)
        # A file per parameter, so that the host holds one of them at a time.
        file_of[name] = f"model-{len(file_of):05}.safetensors"
        file = Path(folder) / file_of[name]
        save_file({name: values}, file, metadata={"format": "pt"})

    index = {"metadata": {}, "weight_map": file_of}
    (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
