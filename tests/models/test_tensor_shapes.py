"""Described tensors are those that transformers builds, in the names of a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.preflight.published import PARAMETERS, published
from verl_ray.models.conversions import checkpoint_names
from verl_ray.models.weights import parameters_on_meta
from verl_ray.preflight.model_files import config_json
from verl_ray.settings.config_json import described_tensors

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "vocab_size": 20, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("gemma", {}),
        ("gemma", {"attention_bias": True}),
        ("gemma", {"tie_word_embeddings": False}),
        ("qwen2", {"head_dim": 8}),
        ("qwen2", {"head_dim": 8, "tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", EXPERTS),
        ("qwen3_moe", EXPERTS | {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen3_moe", EXPERTS | {"mlp_only_layers": [3], "decoder_sparse_step": 2}),
    ],
)
def test_tensors_are_those_of_the_model(family: str, settings: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **SIZES | settings)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config)
        model.tie_weights()
    names = checkpoint_names(model)
    built = {
        tensor.name: list(tensor.shape)
        for name, parameter in model.named_parameters()
        for tensor in names.tensors(name, parameter.shape)
    }
    assert dict(described_tensors(config.to_dict())) == built


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_published_models_have_their_published_size(name: str, parameters: int) -> None:
    shapes = dict(described_tensors(config_json(published(name))))
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_defaults_of_a_family_are_not_guessed() -> None:
    settings = SIZES | {"model_type": "qwen3"}
    assert dict(described_tensors(settings))
    assert not dict(described_tensors(settings | {"model_type": "gemma2"}))
    for name in ("hidden_size", "num_key_value_heads"):
        assert not dict(described_tensors(settings | {name: None}))

    # As many as there are queries, as transformers has it.
    tensors = dict(
        described_tensors(
            settings | {"model_type": "llama", "num_key_value_heads": None}
        )
    )
    assert tensors["model.layers.0.self_attn.k_proj.weight"] == [64, 32]
