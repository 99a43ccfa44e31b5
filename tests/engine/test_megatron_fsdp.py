"""Megatron-FSDP's strategies and settings on 2 and 4 ranks against the plain engine,
states between them on 1, 2 and 4 ranks, and what the package gets wrong.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.engine import inputs, strategies
from tests.engine.strategies import HYBRID, LAYER, SETTINGS, STRATEGIES
from tests.engine.test_contract import BFLOAT16, close
from tests.rank_processes import ROOT, run_ranks, slow_tests_asked
from verl_ray.backends.base import ParameterCounts
from verl_ray.backends.megatron_fsdp import MegatronFsdpBackend
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.engine.megatron_fsdp import sharding
from verl_ray.models.tiny import make_tiny

pytestmark = pytest.mark.ranks

FOUR = pytest.mark.slow
PLACES = [pytest.param((name, 2), id=name) for name in STRATEGIES] + [
    pytest.param((name, 4), id=name, marks=FOUR) for name in HYBRID
]
BESIDE = 2 * 14 * 64 + 64  # embeddings, head, norm
MODEL = ParameterCounts(
    parameters=4 * LAYER + BESIDE,
    in_experts=0,
    in_layers=4 * LAYER,
    largest_layer=LAYER,
)

Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron_fsdp")
    character_tokenizer(root / "tokenizer", "0123456789+=")
    sizes = TinyModelConfig(
        hidden_size=64, num_layers=4, num_heads=2, num_kv_heads=1, head_size=32, intermediate_size=96,
        tie_embeddings=False,
    )  # fmt: skip
    make_tiny("qwen3", root / strategies.MODEL, root / "tokenizer", sizes, seed=1)
    return root


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, folder: Path) -> Found:
    """The findings of each rank, by number of ranks; four only if their tests run."""
    waves = strategies.waves(with_four=slow_tests_asked(request))
    run_ranks(strategies.__name__, waves, folder, deadline_s=inputs.DEADLINE_S)
    findings: Found = {}
    for part, rank, world in itertools.chain(*waves):
        ranks = findings.setdefault(world, [{} for _ in range(world)])
        ranks[rank] |= torch.load(
            folder / f"found_{part}_{world}_{rank}.pt", weights_only=False
        )
    return findings


@pytest.fixture(params=PLACES)
def ranks(request: pytest.FixtureRequest, found: Found) -> list[dict[str, Any]]:
    """The findings of each rank for one strategy."""
    name, world = request.param
    return [{**rank[name], "plain": rank} for rank in found[world]]


def test_three_steps_are_those_of_the_plain_engine(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        plain = rank["plain"]
        for key in ("loss", "norm"):
            close(rank[key], plain["plain"][key])
            close(rank["bfloat16"][key], plain["plain"][key][:1], BFLOAT16)
            assert rank["bfloat16"][key] != rank[key][:1]
        assert (
            max(rank["norm"]) > inputs.OPTIMIZER.max_grad_norm
        )  # so the comparison saw clipping
        for name, value in plain["plain weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=2e-5)


def test_a_new_engine_holds_the_checkpoint_and_an_optimizer_that_has_not_stepped(
    folder: Path, ranks: list[dict[str, Any]]
) -> None:
    """The package alone decays the weights once, counts a step, and forgets groups."""
    expected = load_file(folder / strategies.MODEL / "model.safetensors")
    for rank in ranks:
        assert all(
            torch.equal(rank["before"][name], value) for name, value in expected.items()
        )
        first, after = rank["steps"]
        assert set(first) == {0} and set(after) == {3}
        assert rank["groups"] == [(inputs.OPTIMIZER.weight_decay, 30), (0.0, 17)]


def test_what_computes_in_bfloat16_is_sent_in_float32(
    ranks: list[dict[str, Any]],
) -> None:
    assert all(rank["exact"] for rank in ranks)


@pytest.mark.parametrize("place", PLACES)
def test_each_rank_holds_what_the_formula_says(
    found: Found, place: tuple[str, int]
) -> None:
    name, world = place
    settings = HYBRID[name] if world == 4 else {"sharding": name}
    backend = MegatronFsdpBackend(**inputs.MEGATRON_FSDP | settings)
    memory = backend.rank_memory(world, MODEL, MODEL.parameters)
    expected = sum(memory.persistent.values())
    most = max(rank[name]["bytes"] for rank in found[world])
    assert (
        0.97 * expected < most < 1.06 * expected
    )  # buckets are padded to whole rows per rank


@FOUR
def test_a_rank_may_hold_nothing_of_what_learns(found: Found) -> None:
    for rank in found[4]:
        given, plain = rank["small adapter"]
        close(given["loss"], plain["loss"])
        close(given["norm"], plain["norm"])


STATES = [(writer, 2, 1) for writer in STRATEGIES] + [
    pytest.param(*place, marks=FOUR)
    for place in (
        *((writer, 2, 4) for writer in STRATEGIES),
        *((writer, 4, reader) for writer in list(HYBRID)[:2] for reader in (1, 2)),
    )
]
"""The strategy of a state, how many ranks wrote it, and how many read it."""


@pytest.mark.parametrize(("writer", "wrote", "reads"), STATES)
def test_states_go_on_alike_on_other_numbers_of_ranks(
    found: Found, writer: str, wrote: int, reads: int
) -> None:
    """States that were copied, and written in the background, continue equally."""
    expected = found[wrote][0][writer]
    readings = {
        name: one
        for name, one in found[reads][0]["elsewhere"].items()
        if one["writer"] == writer
    }
    assert readings
    for name, one in readings.items():
        for weight, value in expected["weights"].items():
            assert torch.equal(one["weights"][weight], value), (name, weight)
            torch.testing.assert_close(
                one["on"][weight], expected["on"][weight], rtol=0, atol=2e-5
            )


# ----------------------------------------------------------------------------- settings


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_do_not_change_what_is_computed(found: Found, name: str) -> None:
    tolerance = 1e-3 if name == "bfloat16 sums" else 1e-5
    for rank in found[2]:
        for key in ("loss", "norm"):
            close(rank["settings"][name][key], rank["plain"][key], tolerance)
    if name == "bfloat16 sums":
        assert (
            found[2][0]["settings"][name]["norm"]
            != found[2][0]["settings"]["small buckets"]["norm"]
        )


def sent(events: list[Any], kind: str) -> list[Any]:
    return [event for event in events if event[0] == kind]


def test_buckets_say_how_much_is_sent_at_once(found: Found) -> None:
    def gathers(name: str) -> list[int]:
        return [
            event[1]
            for event in sent(found[2][0]["settings"][name]["computing"], "gather")
        ]

    assert (
        len(gathers("one bucket")) == 1
        and sum(gathers("one bucket")) >= MODEL.parameters
    )
    cut = gathers("buckets of the optimizer")
    assert 4 <= len(cut) <= 7 and all(
        20_000 <= size < 20_000 + 6144 + 400 for size in cut[:-1]
    )


def test_layers_are_gathered_ahead_of_the_one_that_computes(found: Found) -> None:
    def before_first(name: str) -> int:
        said = found[2][0]["settings"][name]["computing"]
        return sum(event[1] >= LAYER for event in said[: said.index(("layer", 0))])

    assert before_first("small buckets") == 1  # its own
    assert before_first("layers ahead") == 2
    assert before_first("bfloat16 sums") == 4  # no bound: all


def test_memory_in_flight_is_bounded_by_buckets(found: Found) -> None:
    """The unit is a layer, for gathered parameters and for gradients in flight."""
    live = {name: found[2][0]["settings"][name]["live"] for name in SETTINGS}
    weights, gradients = live["layers ahead"]
    assert 2 <= weights < 2.2 and 1 <= gradients < 2.2
    assert live["small buckets"][0] < 2.2
    assert live["bfloat16 sums"][0] > 4 and live["bfloat16 sums"][1] > 3


def test_gathering_and_summing_overlap_with_computing_or_wait_for_its_end(
    found: Found,
) -> None:
    of = found[2][0]["settings"]
    for name in ("gathered at once", "gathered at once, gradients"):
        assert not sent(of[name]["computing"], "gather") and sent(
            of[name]["stepping"], "gather"
        )
    for name in ("summed at once", "summed at once, none"):
        assert not sent(of[name]["computing"], "sum") and sent(
            of[name]["stepping"], "sum"
        )
    for event in ("gather", "sum"):
        assert sent(of["one bucket"]["computing"], event) and not sent(
            of["one bucket"]["stepping"], event
        )


def test_gradients_are_summed_in_the_type_that_is_set(found: Found) -> None:
    of = found[2][0]["settings"]
    assert {event[2] for event in sent(of["bfloat16 sums"]["computing"], "sum")} == {
        "bfloat16"
    }
    assert {event[2] for event in sent(of["small buckets"]["computing"], "sum")} == {
        "float32"
    }


def test_two_buffers_take_turns(found: Found) -> None:
    said = found[2][0]["settings"]["double buffer"]["computing"]
    for kind in ("gather", "sum"):
        assert len({event[3] for event in sent(said, kind) if event[1] >= LAYER}) == 2


# ---------------------------------------------------------- what the package gets wrong


def test_the_package_alone_forgets_groups_and_takes_a_step(found: Found) -> None:
    """If the first assertion fails, `shard_optimizer` is not needed any more."""
    for rank in found[2]:
        alone, mended = rank["package"]["alone"], rank["package"]["mended"]
        assert alone["groups"] == [(0.25, 0.01)] and alone["steps"] == {1}
        assert mended["groups"] == [(0.25, 0.1), (0.5, 0.0)] and mended["steps"] == {0}
        assert mended["norm"] <= {1.0}
    assert {
        value for rank in found[2] for value in rank["package"]["alone"]["norm"]
    } == {0.9975}  # 1 - 0.25 * 0.01
    assert any(rank["package"]["mended"]["norm"] for rank in found[2])


def test_gloo_alone_gathers_no_parts_of_different_sizes(found: Found) -> None:
    """The shim adds it, and exports and adapters depend on it."""
    assert all("gathers unevenly" not in rank for rank in found[2])


def test_megatron_core_beside_the_package_does_no_harm() -> None:
    """The package is imported as this project does it, before and after, and as it is.

    Each in its own process.
    """
    code = """
import sys
from dataclasses import fields
from verl_ray.engine.megatron_fsdp import sharding
mine = sharding.DistributedDataParallelConfig
assert not [name for name in sys.modules if name.startswith("megatron.")], "megatron-core is left alone"
import megatron.core.distributed as core

def forget():
    for name in [name for name in sys.modules if name.startswith(("megatron_fsdp", "verl_ray.engine.megatron_fsdp"))]:
        del sys.modules[name]

forget()
from verl_ray.engine.megatron_fsdp import sharding
assert sharding.DistributedDataParallelConfig is not core.DistributedDataParallelConfig, "it is hidden"
assert sys.modules["megatron.core.distributed"] is core, "and back"
forget()
import megatron_fsdp
theirs = sys.modules["megatron_fsdp.fully_shard"].DistributedDataParallelConfig
assert theirs is core.DistributedDataParallelConfig is not mine
print(sorted({field.name for field in fields(mine)} - {field.name for field in fields(theirs)}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert "fsdp_db_use_persist_buf_on_alloc_fail" in done.stdout, done.stderr


def test_the_settings_of_the_package_are_its_own() -> None:
    known = {field.name for field in fields(sharding.DistributedDataParallelConfig)}
    assert {
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "megatron_fsdp_main_params_dtype",
    } <= known


class Strategy:
    data_parallel_sharding_strategy = "optim"


shapes = st.lists(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(torch.Size), min_size=1, max_size=8
)  # fmt: skip


@given(shapes, st.integers(1, 5))
def test_shards_are_cut_between_rows_and_cover_each_element_once(
    elements: list[torch.Size], world: int
) -> None:
    unit = unit_of(elements)
    covered = [torch.zeros(shape.numel()) for shape in elements]
    for rank in range(world):
        items, bucket, shard = sharding.bucket_index(
            elements, rank, world, True, Strategy, 0, unit
        )
        assert bucket.size % (unit * world) == 0 and {
            item.item_id for item in bucket.items
        } == set(items)
        for number, item in items.items():
            low = (
                max(item.global_data_index, shard.global_data_index)
                - item.global_data_index
            )
            high = min(
                item.global_data_index + item.size, shard.global_data_index + shard.size
            )
            high -= item.global_data_index
            if low < high:
                row = elements[number][1:].numel()
                assert low % row == high % row == 0
                covered[number][low:high] += 1
    spans = sorted(
        (item.global_data_index, item.global_data_index + item.size)
        for item in items.values()
    )
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert all(bool((one == 1).all()) for one in covered)


def test_the_package_alone_cuts_through_rows() -> None:
    """(2, 3) follows (2, 4) in units of 12, so 12 is a cut after its fourth element."""
    elements = [torch.Size((2, 4)), torch.Size((2, 3))]
    items, _, shard = sharding._bucket_index(elements, 1, 2, True, Strategy, 0, 12)
    assert (shard.global_data_index - items[1].global_data_index) % 3 == 1
    items, _, shard = sharding.bucket_index(elements, 1, 2, True, Strategy, 0, 12)
    assert (items[1].global_data_index, shard.global_data_index) == (12, 12)


def unit_of(elements: list[torch.Size]) -> int:
    """Return the unit that the package chooses.

    It begins with the largest row, and becomes a common multiple with the row of any
    other tensor that does not fit.
    """
    elements.sort(key=lambda shape: -shape[1:].numel())
    unit = elements[0][1:].numel()
    for shape in elements:
        row = shape[1:].numel()
        if (
            row != unit
            and (unit % row or shape.numel() % unit)
            and shape.numel() >= unit
        ):
            unit = math.lcm(unit, row)
    return unit
