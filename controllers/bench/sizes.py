"""The models of contests: their sizes by name, and how one is made.

Invariant: models are random and made on this machine, so nothing is downloaded.
Deliberately not here: models that can learn a task (`step.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ray.config.preparation import TinyModelConfig


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


def make_model(name: str, folder: str) -> str:
    """Make a model of `MODELS` and a tokenizer in `folder`; return the model's path."""
    from verl_ray.data.tokenizers import character_tokenizer
    from verl_ray.models.tiny import make_tiny_qwen3

    size = MODELS[name]
    specials = 2
    first = 0x10000  # the planes of Unicode above the surrogates
    alphabet = "".join(map(chr, range(first, first + size.vocab_size - specials)))
    tokenizer = f"{folder}/tokenizer"
    character_tokenizer(tokenizer, alphabet)
    return str(make_tiny_qwen3(f"{folder}/model", tokenizer, size.layers, seed=0))
