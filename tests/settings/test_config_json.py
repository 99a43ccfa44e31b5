"""The values of config.json that are known are those of the installed transformers."""

from __future__ import annotations

import pytest
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl_ray.settings.config_json import (
    ACTIVATIONS,
    ROTARY_TYPES,
    Settings,
    not_computed,
    positions_of,
    wrong_value,
)

SETTINGS: dict[str, object] = {"model_type": "llama"}


def test_activations_and_rotary_types_are_those_of_transformers() -> None:
    assert set(ACTIVATIONS) == set(ACT2FN)
    assert set(ROTARY_TYPES) == {*ROPE_INIT_FUNCTIONS, "default"}


def test_values_that_are_left_out_are_right() -> None:
    assert wrong_value(SETTINGS) is None
    assert not_computed(SETTINGS) is None
    assert wrong_value(SETTINGS | {"head_dim": None}) is None


def test_sizes_of_a_family_that_is_not_described_are_not_judged_here() -> None:
    dense = {"num_experts_per_tok": 0, "num_local_experts": 0}
    lists = {"moe_intermediate_size": [3072] * 32, "intermediate_size": [64, 128]}
    other = {"model_type": "other", "vocab_size": None, **dense, **lists}
    assert wrong_value(other) is None
    assert wrong_value(SETTINGS | dense) is not None
    assert wrong_value(SETTINGS | lists) is not None


def test_dropouts_of_heads_that_are_not_computed_do_not_count() -> None:
    heads = {"summary_first_dropout": 0.1, "classifier_dropout": 0.1}
    assert not_computed(SETTINGS | heads) is None
    assert not_computed(SETTINGS | heads | {"attn_pdrop": 0.1}) == (
        "attn_pdrop is 0.1, and would be 0, so that log-probs are certain"
    )


def test_values_are_named_with_what_they_would_be() -> None:
    assert wrong_value({}) == "it has no model_type"
    assert wrong_value(SETTINGS | {"vocab_size": 0}) == (
        "vocab_size is 0, and would be a whole number above 0"
    )
    assert not_computed(SETTINGS | {"hidden_act": ["silu"]}) == (
        "hidden_act is ['silu'], which is no activation of transformers"
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BY_LAYERS = {
    "sliding_attention": {"rope_type": "default"},
    "full_attention": {"rope_type": "linear", "factor": 8.0},
}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("positions", "section", "expected"),
    [
        (64, {}, 64),
        (64, {"rope_type": "default", "rope_theta": 1e6}, 64),
        (64, YARN, 256),
        (256, YARN, 256),
        # Cards of Qwen3: 40,960 positions that were trained as 32,768.
        (80, YARN, 256),
        (64, {"type": "yarn", "factor": 4}, 256),
        (64, YARN | {"factor": None}, 64),
        (64, YARN | {"rope_type": "deepseek_yarn"}, 256),
        (64, {"type": "linear", "factor": 2.5}, 160),
        (64, {"type": "dynamic", "factor": 4.0}, 64),
        (64, {"type": "mrope", "mrope_section": [2, 3, 3]}, 64),
        (256, {"type": "su", "original_max_position_embeddings": 64}, 64),
        (256, YARN | {"rope_type": "longrope"}, 64),
        (256, YARN | {"rope_type": "llama3"}, 256),
        (64, {"rope_type": "proportional", "factor": 8.0}, 64),
        (64, BY_LAYERS, 64),
    ],
)
def test_positions_are_those_behind_the_scaling(
    key: str, positions: int, section: Settings, expected: int
) -> None:
    settings = SETTINGS | {"max_position_embeddings": positions, key: section}
    assert positions_of(settings) == expected


def test_positions_before_the_scaling_may_stand_beside_it() -> None:
    settings = SETTINGS | {"max_position_embeddings": 96, "rope_scaling": YARN}
    settings["original_max_position_embeddings"] = 32
    assert positions_of(settings) == 128
    # It says nothing of kinds of layers that have their own.
    assert positions_of(settings | {"rope_scaling": {"full_attention": YARN}}) == 256
    assert positions_of(SETTINGS) is None


def test_a_judge_has_the_positions_that_vllm_alone_computes() -> None:
    section = YARN | {"rope_type": "longrope"}
    settings = SETTINGS | {"max_position_embeddings": 256, "rope_scaling": section}
    assert positions_of(settings, trained=False) == 256
    linear = {"type": "linear", "factor": 8.0}
    settings = {"max_position_embeddings": 256, "rope_scaling": linear}
    assert positions_of(settings | {"model_type": "gemma3_text"}) == 256
