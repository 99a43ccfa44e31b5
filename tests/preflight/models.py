"""Model directories that take no space, with all that preflight reads of a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from verl_ray.settings.config_json import described_tensors

LLAMA: dict[str, object] = {
    "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 128, "head_dim": 32, "intermediate_size": 96, "vocab_size": 20, "max_position_embeddings": 2048,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
"""A small model."""


def write_model(folder: Path, tokenizer: Path, settings: dict[str, object]) -> Path:
    """Write the model that a config.json describes, with the tokenizer of another."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    write_tensors(folder / "model.safetensors", described_tensors(settings))
    return folder


def write_tensors(path: Path, tensors: Iterable[tuple[str, list[int]]]) -> None:
    """Write a safetensors file of zeros, which the file system does not store."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in tensors:
        start = end
        end += 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}

    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as stream:
        stream.truncate(8 + len(text) + end)
