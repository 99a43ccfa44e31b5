"""Parameters of modules and tensors of checkpoints: every element has one place."""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl_ray.errors import ModelError
from verl_ray.models.conversions import checkpoint_names
from verl_ray.models.names import Box, CheckpointNames, CheckpointTensor, is_adapter

EXPERTS = "model.layers.0.mlp.experts"
SIZES = {
    "hidden_size": 5, "intermediate_size": 3, "moe_intermediate_size": 3, "vocab_size": 4, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4, "num_experts": 2, "num_local_experts": 2,
    "num_experts_per_tok": 1, "pad_token_id": 0,
}  # fmt: skip


@functools.cache
def built(family: str) -> PreTrainedModel:
    config = AutoConfig.for_model(family, **SIZES)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def names_of(family: str) -> CheckpointNames:
    return checkpoint_names(built(family))


def whole(shape: tuple[int, ...]) -> Box:
    return tuple(slice(0, side) for side in shape)


def test_most_parameters_are_one_tensor_under_their_own_name() -> None:
    names = names_of("qwen3_moe")
    assert names.tensors("model.norm.weight", (7,)) == (
        CheckpointTensor("model.norm.weight", (0,), (7,), (7,)),
    )
    adapted = names.tensors("model.layers.0.self_attn.q_proj.base_layer.weight", (4, 5))
    assert [piece.name for piece in adapted] == [
        "model.layers.0.self_attn.q_proj.weight"
    ]


def test_an_adapter_is_no_part_of_the_model() -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert is_adapter(name) and CheckpointNames().tensors(name, (2, 4)) == ()
    assert not is_adapter("model.layers.0.self_attn.q_proj.base_layer.weight")


def test_experts_are_apart_in_a_checkpoint() -> None:
    names = names_of("qwen3_moe")
    gates = names.tensors(f"{EXPERTS}.gate_up_proj", (2, 6, 5))
    assert [(piece.name, piece.start, piece.shape) for piece in gates] == [
        (f"{EXPERTS}.0.gate_proj.weight", (0, 0, 0), (3, 5)),
        (f"{EXPERTS}.0.up_proj.weight", (0, 3, 0), (3, 5)),
        (f"{EXPERTS}.1.gate_proj.weight", (1, 0, 0), (3, 5)),
        (f"{EXPERTS}.1.up_proj.weight", (1, 3, 0), (3, 5)),
    ]
    second = (slice(1, 2), slice(0, 3), slice(0, 5))
    assert names.tensors(f"{EXPERTS}.gate_up_proj", (2, 6, 5), second) == gates[2:]
    downs = names.tensors(f"{EXPERTS}.down_proj", (2, 5, 3))
    assert [(piece.name, piece.shape) for piece in downs] == [
        (f"{EXPERTS}.0.down_proj.weight", (5, 3)),
        (f"{EXPERTS}.1.down_proj.weight", (5, 3)),
    ]


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "gpt_oss", "phi3"])
def test_names_and_values_are_those_that_transformers_writes(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp(family)
    model, names = built(family), names_of(family)
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    for name, value in model.state_dict().items():
        for piece in names.tensors(name, value.shape):
            here, _ = piece.overlap(whole(tuple(value.shape)))
            assert torch.equal(saved.pop(piece.name), value[here].view(piece.shape))
    assert not saved


def test_a_tensor_that_is_no_part_of_a_parameter_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import core_model_loading

    def transposed(
        _: PreTrainedModel, state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return state | {"lm_head.weight": state["lm_head.weight"].T}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", transposed)
    with pytest.raises(ModelError, match=r"lm_head\.weight is not a part of lm_head"):
        names_of("phi3")


def test_a_box_meets_a_piece_here_and_there() -> None:
    names = names_of("qwen3_moe")
    # expert 1, rows 3 to 6
    up = names.tensors(f"{EXPERTS}.gate_up_proj", (2, 6, 5))[3]
    here, there = up.overlap((slice(1, 2), slice(2, 5), slice(0, 5)))
    assert here == (slice(0, 1), slice(1, 3), slice(0, 5))
    assert there == (slice(0, 2), slice(0, 5))
    # the other expert's rank
    _, nothing = up.overlap((slice(0, 1), slice(0, 6), slice(0, 5)))
    assert nothing == (slice(0, 0), slice(0, 0))


@st.composite
def sharded(draw: st.DrawFn) -> tuple[str, int, list[int]]:
    """Generate a parameter, the dimension that it is cut along, and the cuts."""
    name = draw(
        st.sampled_from(
            [f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj", "lm_head.weight"]
        )
    )
    shape = built("qwen3_moe").get_parameter(name).shape
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    return name, dim, [0, *cuts, shape[dim]]


@given(sharded())
def test_however_a_parameter_is_cut_its_tensors_are_put_together(
    case: tuple[str, int, list[int]],
) -> None:
    name, dim, cuts = case
    names, value = names_of("qwen3_moe"), built("qwen3_moe").get_parameter(name).data
    shape = tuple(value.shape)
    tensors = {
        piece.name: torch.full(piece.shape, -1.0)
        for piece in names.tensors(name, shape)
    }
    for first, last in pairwise(cuts):
        box = tuple(
            slice(first, last) if d == dim else slice(0, side)
            for d, side in enumerate(shape)
        )
        local = value[box]
        for piece in names.tensors(name, shape, box):
            here, there = piece.overlap(box)
            part = tensors[piece.name][there]
            assert bool((part == -1).all())  # nobody else's
            tensors[piece.name][there] = local[here].reshape(part.shape)
    for piece in names.tensors(name, shape):
        here, _ = piece.overlap(whole(shape))
        assert torch.equal(tensors[piece.name], value[here].view(piece.shape))
