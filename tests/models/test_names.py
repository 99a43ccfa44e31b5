"""Parameters of modules and tensors of checkpoints: every element has one place."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.models.names import CheckpointTensor, checkpoint_tensors, is_adapter

EXPERTS = "model.layers.3.mlp.experts"


def test_most_parameters_are_one_tensor_under_their_own_name() -> None:
    assert checkpoint_tensors("model.norm.weight", (7,)) == (
        CheckpointTensor("model.norm.weight", (0,), (7,), (7,)),
    )
    adapted = checkpoint_tensors(
        "model.layers.0.self_attn.q_proj.base_layer.weight", (4, 6)
    )
    assert [piece.name for piece in adapted] == [
        "model.layers.0.self_attn.q_proj.weight"
    ]


def test_an_adapter_is_no_part_of_the_model() -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert is_adapter(name) and checkpoint_tensors(name, (2, 4)) == ()
    assert not is_adapter("model.layers.0.self_attn.q_proj.base_layer.weight")


def test_experts_are_apart_in_a_checkpoint() -> None:
    gates = checkpoint_tensors(f"{EXPERTS}.gate_up_proj", (2, 6, 5))
    assert [(piece.name, piece.start, piece.shape) for piece in gates] == [
        (f"{EXPERTS}.0.gate_proj.weight", (0, 0, 0), (3, 5)),
        (f"{EXPERTS}.0.up_proj.weight", (0, 3, 0), (3, 5)),
        (f"{EXPERTS}.1.gate_proj.weight", (1, 0, 0), (3, 5)),
        (f"{EXPERTS}.1.up_proj.weight", (1, 3, 0), (3, 5)),
    ]
    assert (
        checkpoint_tensors(
            f"{EXPERTS}.gate_up_proj",
            (2, 6, 5),
            (slice(1, 2), slice(0, 3), slice(0, 5)),
        )
        == gates[2:]
    )
    downs = checkpoint_tensors(f"{EXPERTS}.down_proj", (2, 5, 3))
    assert [(piece.name, piece.shape) for piece in downs] == [
        (f"{EXPERTS}.0.down_proj.weight", (5, 3)),
        (f"{EXPERTS}.1.down_proj.weight", (5, 3)),
    ]


def test_a_box_meets_a_piece_here_and_there() -> None:
    up = checkpoint_tensors(f"{EXPERTS}.gate_up_proj", (2, 6, 5))[
        3
    ]  # expert 1, rows 3 to 6
    here, there = up.overlap((slice(1, 2), slice(2, 5), slice(0, 5)))
    assert here == (slice(0, 1), slice(1, 3), slice(0, 5)) and there == (
        slice(0, 2),
        slice(0, 5),
    )
    _, nothing = up.overlap(
        (slice(0, 1), slice(0, 6), slice(0, 5))
    )  # the other expert's rank
    assert nothing == (slice(0, 0), slice(0, 0))


@st.composite
def sharded(draw: st.DrawFn) -> tuple[str, tuple[int, ...], int, list[int]]:
    """Generate a parameter, the dimension that it is cut along, and the cuts."""
    count, rows, columns = (draw(st.integers(1, 5)) for _ in range(3))
    name, shape = draw(
        st.sampled_from(
            [
                (f"{EXPERTS}.gate_up_proj", (count, 2 * rows, columns)),
                (f"{EXPERTS}.down_proj", (count, rows, columns)),
                ("model.embed_tokens.weight", (rows, columns)),
            ]
        )
    )
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    return name, shape, dim, [0, *cuts, shape[dim]]


@given(sharded())
def test_however_a_parameter_is_cut_its_tensors_are_put_together(
    case: tuple[str, tuple[int, ...], int, list[int]],
) -> None:
    name, shape, dim, cuts = case
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    tensors = {
        piece.name: torch.full(piece.shape, -1.0)
        for piece in checkpoint_tensors(name, shape)
    }
    for first, last in pairwise(cuts):
        box = tuple(
            slice(first, last) if d == dim else slice(0, side)
            for d, side in enumerate(shape)
        )
        local = whole[box]
        for piece in checkpoint_tensors(name, shape, box):
            here, there = piece.overlap(box)
            part = tensors[piece.name][there]
            assert bool((part == -1).all())  # nobody else's
            tensors[piece.name][there] = local[here].reshape(part.shape)
    for piece in checkpoint_tensors(name, shape):
        here, _ = piece.overlap(tuple(slice(0, side) for side in shape))
        assert torch.equal(tensors[piece.name], whole[here].view(piece.shape))
