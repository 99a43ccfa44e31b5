"""The values of config.json that are known are those of the installed transformers."""

from __future__ import annotations

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl_ray.models.settings import (
    ACTIVATIONS,
    ROTARY_TYPES,
    not_computed,
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


def test_values_are_named_with_what_they_would_be() -> None:
    assert wrong_value({}) == "it has no model_type"
    assert wrong_value(SETTINGS | {"vocab_size": 0}) == (
        "vocab_size is 0, and would be a whole number above 0"
    )
    assert not_computed(SETTINGS | {"hidden_act": ["silu"]}) == (
        "hidden_act is ['silu'], which is no activation of transformers"
    )
