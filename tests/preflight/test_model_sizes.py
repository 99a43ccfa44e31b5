"""Sizes of models from headers, and of one that is yet to be made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.preflight.models import LLAMA, write_model
from tests.preflight.published import published
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.preflight.model_files import size_of


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("head", ["policy", "value"])
def test_what_is_said_of_a_model_before_it_is_made_is_true_of_it(
    tmp_path: Path, tie: bool, head: str
) -> None:
    from verl_ray.data.arithmetic import ALPHABET
    from verl_ray.data.tokenizers import character_tokenizer
    from verl_ray.models.tiny import make_tiny_qwen3

    shape = TinyModelConfig(
        hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=80,
        tie_embeddings=tie,
    )  # fmt: skip
    character_tokenizer(tmp_path / "tokenizer", ALPHABET)
    made = make_tiny_qwen3(tmp_path / "model", tmp_path / "tokenizer", shape, seed=0)
    planned = [
        f"prepare.model.{name}={value}" for name, value in shape.model_dump().items()
    ]
    config = compose("quickstart", planned)
    adapted = ("q_proj", "down_proj")
    before = size_of(config.model.path, config, head, adapted)  # type: ignore[arg-type]
    assert before == size_of(str(made), config, head, adapted)  # type: ignore[arg-type]
    # 2 layers: 2 x 48 x (128 + 64) of attention, norms of 2 x 32, 3 x 48 x 80 of
    # feed-forward, norms of 2 x 48.
    assert (
        before.largest_layer == 2 * 48 * 192 + 64 + 3 * 48 * 80 + 96
        and before.in_layers == 2 * before.largest_layer
    )
    assert before.outside_layers == 48 + 14 * 48 * (1 if tie or head == "value" else 2)
    assert before.adapter == 2 * (48 + 128 + 80 + 48) and before.tied == tie


EXPERTS = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
}  # fmt: skip


@pytest.mark.parametrize("settings", [LLAMA, EXPERTS])
@pytest.mark.parametrize("head", ["policy", "value"])
def test_config_json_alone_says_the_same_as_the_weights(
    tmp_path: Path, model: Path, settings: dict[str, object], head: str
) -> None:
    config = compose("quickstart")
    folder = write_model(tmp_path / "model", model, settings)
    adapted = ("q_proj", "down_proj")
    whole = size_of(str(folder), config, head, adapted)  # type: ignore[arg-type]
    (folder / "model.safetensors").unlink()
    assert size_of(str(folder), config, head, adapted) == whole  # type: ignore[arg-type]
    assert whole.parameters > 3 * 128 * 128

    # An index names files of which none has arrived.
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert size_of(str(folder), config, head, adapted) == whole  # type: ignore[arg-type]


def test_experts_are_counted_apart() -> None:
    size = size_of(published("Qwen3-30B-A3B"), compose("quickstart"), "policy")
    # 48 layers of 128 experts with three matrices of 2048 x 768.
    assert size.in_experts == 48 * 128 * 3 * 2048 * 768
    # Beside the layers: embedding and head of 151,936 tokens, and the last norm.
    assert size.outside_layers == 2 * 151_936 * 2048 + 2048 and not size.tied
