"""Families on megatron: what is computed, written and read is what the plain engine has."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.bench import layouts
from tests.engine.megatron import families
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.ranks

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def cases() -> list[layouts.Case]:
    """List one layout of two ranks for each mechanism; `bench layouts` has all others."""
    names = {
        "mistral": "cp2",
        "gemma2": "tp2 sp recompute full",
        "gemma3_text": "pp2",
        "mixtral": "ep2 dp2",
        "qwen2_moe": "tp2 ep2 sp",
        "deepseek_v2": "tp2 sp",
        "deepseek_v3": "tp2 ep2 sp",
    }
    return [
        case
        for case in layouts.CASES
        if case.world == 2
        and case.head == "policy"
        and names.get(case.model) == case.name
    ]


def test_each_mechanism_computes_and_writes_what_the_plain_engine_does() -> None:
    found = layouts.measure(cases())
    assert len(found) == 7
    for one in found:
        figures = [*one["outputs"].values(), one["loss"], one["grad_norm"]]
        assert len(figures) == 5 and max(figures) < 1e-5, one
        assert one["unwritten"] == []


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The findings of the plain engine, two ranks of megatron, and the plain engine."""
    folder: Path = tmp_path_factory.mktemp("families")
    layouts.write_model(folder / families.MODEL, families.MODEL, "0123456789+=")
    waves = [
        [("engine", 0, 0, 1)],
        [("megatron", 1, rank, 2) for rank in range(2)],
        [("engine", 2, 0, 1)],
    ]
    run_ranks(
        families.__name__,
        waves,
        folder,
        deadline_s=300,
        imports=("verl_ray.engine.plain",),
    )
    return [
        torch.load(folder / f"found_{turn}_0.pt", weights_only=False)
        for turn in range(3)
    ]


@pytest.mark.slow
def test_each_backend_goes_on_from_the_others_state(
    turns: list[dict[str, Any]],
) -> None:
    for writer, reader in itertools.pairwise(turns):
        assert writer["written"].keys() == reader["read"].keys()
        for name, value in writer["written"].items():
            assert torch.equal(reader["read"][name], value), name
    losses = [turn["steps"]["loss"][0] for turn in turns]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.slow
def test_the_biases_of_a_choice_stay_as_they_were_read(
    turns: list[dict[str, Any]],
) -> None:
    biases = [turn[when][BIAS] for turn in turns for when in ("read", "written")]
    assert biases[0].any() and all(bias.equal(biases[0]) for bias in biases)


@pytest.mark.slow
def test_half_precision_computes_the_same_with_biases_in_full(
    turns: list[dict[str, Any]],
) -> None:
    plain, megatron, _ = turns
    difference = abs(plain["bfloat16"] - megatron["bfloat16"])[plain["bfloat16"] != 0]
    # A few tokens are near the border between two experts.
    assert np.quantile(difference, 0.9) < 0.1
    types = megatron["types"]
    assert types.pop(BIAS) == "float32"
    assert {kind for name, kind in types.items() if "bias" not in name} == {"bfloat16"}
