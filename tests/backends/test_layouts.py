"""Feasible layouts and the nearest one, by hand and against a search of all layouts."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ray.backends.layouts import (
    ModelSizes,
    can_exchange,
    layout_description,
    model_obstacles,
    nearest_layout,
    obstacles,
    other_ranks,
    rank_obstacles,
)
from verl_ray.backends.megatron import MegatronBackend

WHOLE: dict[str, Any] = {
    "kind": "megatron", "dtype": "float32", "micro_batch_tokens_per_rank": 64, "tensor_parallel": 1,
    "sequence_parallel": False, "pipeline_parallel": 1, "virtual_stages": 1, "context_parallel": 1,
    "expert_parallel": 1, "expert_tensor_parallel": 1, "recompute": "none",
}  # fmt: skip
DENSE = ModelSizes(layers=6, heads=6, key_heads=2, vocabulary=100, intermediate=96)
EXPERTS = ModelSizes(
    layers=4,
    heads=8,
    key_heads=8,
    vocabulary=100,
    intermediate=None,
    experts=6,
    expert_intermediate=96,
)


def layout(**sizes: int) -> MegatronBackend:
    return MegatronBackend(**WHOLE | sizes)


def rules_of(sizes: ModelSizes, **overrides: int) -> dict[str, str]:
    return {
        obstacle.key: obstacle.rule
        for obstacle in model_obstacles(layout(**overrides), sizes)
    }


def test_nothing_is_in_the_way_of_what_fits() -> None:
    assert not rules_of(DENSE) and not rules_of(
        DENSE, tensor_parallel=2, context_parallel=3, pipeline_parallel=3
    )
    assert not rules_of(DENSE, pipeline_parallel=2, virtual_stages=3)
    assert not rules_of(
        EXPERTS,
        tensor_parallel=2,
        sequence_parallel=True,
        expert_parallel=3,
        expert_tensor_parallel=32,
    )


@pytest.mark.parametrize(
    ("sizes", "overrides", "key", "rule"),
    [
        (
            DENSE,
            {"tensor_parallel": 3},
            "tensor_parallel",
            "it must divide the model's 2 key-value heads",
        ),
        (
            DENSE,
            {"tensor_parallel": 5},
            "tensor_parallel",
            "it must divide the model's 6 attention heads and 2 key-value heads and intermediate_size of 96",
        ),
        (
            ModelSizes(layers=6, heads=8, key_heads=8, vocabulary=9, intermediate=96),
            {"tensor_parallel": 8},  # parts of 2 words: five of them hold all
            "tensor_parallel",
            "cut into 8 equal parts, the model's 9 words leave the last part without any",
        ),
        (
            DENSE,
            {"pipeline_parallel": 4},
            "pipeline_parallel",
            "it must divide the model's 6 layers",
        ),
        (
            DENSE,
            {"pipeline_parallel": 2, "virtual_stages": 2},
            "virtual_stages",
            "pipeline_parallel=2 times this must divide the model's 6 layers",
        ),
        (
            DENSE,
            {"context_parallel": 4},
            "context_parallel",
            "these ranks share out the 6 attention heads and 2 key-value heads of the model",
        ),
        (
            DENSE,
            {"tensor_parallel": 2, "context_parallel": 2},
            "context_parallel",
            "these ranks share out the 3 attention heads and 1 key-value heads that each of tensor_parallel=2 ranks "
            "has",
        ),
        (
            DENSE,
            {"expert_parallel": 2},
            "expert_parallel",
            "this setting would be ignored: the model has no experts",
        ),
        (
            DENSE,
            {"expert_tensor_parallel": 2},
            "expert_tensor_parallel",
            "this setting would be ignored: the model has no experts",
        ),
        (
            EXPERTS,
            {"expert_parallel": 4},
            "expert_parallel",
            "it must divide the model's 6 experts per layer",
        ),
        (
            EXPERTS,
            {"expert_tensor_parallel": 5},
            "expert_tensor_parallel",
            "it must divide the 96 numbers inside an expert",
        ),
        (
            EXPERTS,
            {"tensor_parallel": 2},
            "sequence_parallel",
            "with tensor_parallel=2, megatron-core gives experts slices of the tokens alone",
        ),
        (
            EXPERTS,
            {"context_parallel": 2},
            "context_parallel",
            "the model has experts, whose balance is that of whole rows: rows cannot be cut",
        ),
    ],
)
def test_what_is_in_the_way_is_named(
    sizes: ModelSizes, overrides: dict[str, int], key: str, rule: str
) -> None:
    assert rules_of(sizes, **overrides) == {key: rule}


def test_heads_are_exchanged_in_equal_parts() -> None:
    """6 heads with 2 keys among 3 ranks: 2 heads each, and no whole number of keys, nor
    of ranks per key.
    """
    assert [can_exchange(8, 2, ranks) for ranks in (1, 2, 3, 4, 8, 16)] == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    assert not can_exchange(6, 2, 3) and can_exchange(6, 3, 3)


@pytest.mark.parametrize(
    ("overrides", "ranks", "sizes", "nearest"),
    [
        ({}, 1, DENSE, {}),
        ({"tensor_parallel": 4}, 4, DENSE, {"tensor_parallel": 2}),  # 2 key-value heads
        ({"tensor_parallel": 4}, 4, None, {}),
        (
            {"tensor_parallel": 4, "context_parallel": 2},
            4,
            None,
            {"context_parallel": 1},
        ),
        # 6 divides the ranks and is nearer, but only 2 divides the heads
        ({"tensor_parallel": 5}, 6, DENSE, {"tensor_parallel": 2}),
        (
            {"tensor_parallel": 5, "pipeline_parallel": 4},
            6,
            DENSE,
            {"tensor_parallel": 2, "pipeline_parallel": 3},
        ),
        (
            {"pipeline_parallel": 2, "virtual_stages": 2},
            2,
            DENSE,
            {"virtual_stages": 3},
        ),
        ({"tensor_parallel": 2}, 2, EXPERTS, {"sequence_parallel": True}),
        (
            {"tensor_parallel": 1, "sequence_parallel": True},
            2,
            DENSE,
            {"sequence_parallel": False},
        ),
        (
            {"tensor_parallel": 8, "expert_parallel": 8},
            8,
            EXPERTS,
            {"sequence_parallel": True, "expert_parallel": 2},
        ),
        (
            {"tensor_parallel": 3, "pipeline_parallel": 2},
            4,
            DENSE,
            {"tensor_parallel": 2},
        ),
        # two changes are nearer than to give the one up
        (
            {"tensor_parallel": 16},
            16,
            EXPERTS,
            {"tensor_parallel": 8, "sequence_parallel": True},
        ),
    ],
)
def test_the_nearest_layout(
    overrides: dict[str, int],
    ranks: int,
    sizes: ModelSizes | None,
    nearest: dict[str, int],
) -> None:
    """The sizes change by the smallest total factor."""
    assert nearest_layout(layout(**overrides), ranks, sizes) == nearest


def test_a_layout_may_want_other_ranks() -> None:
    assert other_ranks(layout(tensor_parallel=2, pipeline_parallel=2), 6) == [4, 8]
    assert other_ranks(layout(tensor_parallel=4), 2) == [4]
    assert other_ranks(layout(tensor_parallel=3, expert_parallel=2), 7) == [6, 12]
    assert other_ranks(layout(tensor_parallel=2), 2) == [2]


def test_a_layout_in_short() -> None:
    assert layout_description(layout(), 2) == "dp2"
    assert (
        layout_description(layout(tensor_parallel=2, pipeline_parallel=2), 8)
        == "tp2 pp2 dp2"
    )
    assert (
        layout_description(
            layout(tensor_parallel=2, sequence_parallel=True, pipeline_parallel=2), 4
        )
        == "tp2 sp pp2 dp1"
    )
    assert (
        layout_description(layout(context_parallel=2, expert_parallel=4), 4)
        == "cp2 ep4 dp2"
    )


SIZES = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "virtual_stages",
    "expert_parallel",
)
SMALL = st.integers(1, 5)
MODELS = st.builds(
    lambda layers, shared, groups, words, inner, experts: ModelSizes(
        layers, shared * groups, shared, words, None if experts else inner, experts, inner if experts else 0
    ),
    SMALL, SMALL, SMALL, st.integers(1, 40), st.integers(1, 40), st.integers(0, 4),
)  # fmt: skip


def distance(original: MegatronBackend, candidate: MegatronBackend) -> float:
    factors = (
        abs(math.log2(getattr(candidate, name) / getattr(original, name)))
        for name in SIZES
    )
    return sum(factors) + 0.1 * (
        candidate.sequence_parallel != original.sequence_parallel
    )


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(SIZES, SMALL)),
    st.booleans(),
    SMALL,
    st.none() | MODELS,
)
def test_no_possible_layout_is_nearer(
    overrides: dict[str, int], sliced: bool, ranks: int, sizes: ModelSizes | None
) -> None:
    """The nearest layout is feasible, and no other feasible layout is nearer.

    Sizes of 1 stay 1 in all of them.
    """
    backend = layout(**overrides, sequence_parallel=sliced)
    nearest = backend.model_copy(update=nearest_layout(backend, ranks, sizes))
    every = (
        layout(**dict(zip(SIZES, values, strict=True)), sequence_parallel=on)
        for values in product(
            *((1,) if overrides[name] == 1 else range(1, 6) for name in SIZES)
        )
        for on in (False, True)
    )
    possible = [
        candidate for candidate in every if not any(obstacles(candidate, ranks, sizes))
    ]
    assert nearest in possible
    assert (
        distance(backend, nearest)
        <= min(distance(backend, candidate) for candidate in possible) + 1e-9
    )


def test_a_layout_that_does_not_divide_is_named_once() -> None:
    """All sizes are wrong, and the first is named.

    The partition of the experts over the same pipeline is not reported again.
    """
    backend = layout(
        tensor_parallel=5, pipeline_parallel=3, context_parallel=7, expert_parallel=9
    )
    assert [obstacle.key for obstacle in rank_obstacles(backend, 4)] == [
        "tensor_parallel"
    ]
