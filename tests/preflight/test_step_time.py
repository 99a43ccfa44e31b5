"""Seconds of a step that can be computed by hand, and what changes them."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.compose.composition import compose
from tests.preflight.plan_bases import bases, machine
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.assumptions import TRAINING_EFFICIENCY, Links
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.plan_candidates import (
    Space,
    offloaded,
    with_backend,
    with_cache,
    with_engines,
    with_ranks,
)
from verl_ray.preflight.step_time import StepTime, step_time

H100 = machine("gpus=1,gpu=H100-80G")
NODE = machine("gpus=8,gpu=H100-80G")
TWO_NODES = machine("nodes=2,gpus=8,gpu=H100-80G,link=400G")

# Qwen2.5-0.5B: 24 layers, 14 heads of 64, 2 of keys, hidden 896, inner 4864, 151936 words.
MATRICES = 24 * (896 * 64 * 2 * 16 + 3 * 896 * 4864) + 151936 * 896


def configured(
    where: Machine, kind: str, *, ranks: int, placement: str = "colocated", model: str = "Qwen2.5-0.5B",
    root: str = "grpo", **settings: Any,
) -> RLConfig:  # fmt: skip
    space = Space.of(bases(model, root=root), where)
    base = getattr(space, placement)[kind]
    recompute = "recompute" if kind == "megatron" else "activation_checkpointing"
    update: dict[str, Any] = {"dtype": "bfloat16", "micro_batch_tokens_per_rank": 6144}
    update |= {recompute: "none" if kind == "megatron" else False} | settings
    backend = base.actor.backend.model_copy(update=update)
    config = with_backend(with_ranks(base, {"actor": ranks}), backend)
    if placement == "colocated":
        config = offloaded(config, "none")
    return with_cache(with_engines(config, ranks, 1), 8.0)


def timed(where: Machine, kind: str, **settings: Any) -> StepTime:
    return step_time(configured(where, kind, **settings), Links.of(where))


def test_a_pass_takes_its_flops_at_the_stated_efficiency() -> None:
    # 256 rows: prompts of 256 tokens, responses of 32, 96 .. 992 tokens, 512 in the mean.
    pairs = sum(n * (n + 1) / 2 for n in range(288, 1280, 64)) / 16
    forward = 256 * (2 * MATRICES * 768 + 4 * 24 * 14 * 64 * pairs)
    rate = TRAINING_EFFICIENCY * 989e12
    seconds = timed(H100, "engine", ranks=1).seconds
    assert seconds["measure"] == pytest.approx(forward / rate, rel=1e-6)

    # The optimizer reads and writes 28 bytes per parameter at half of 3350 GB/s.
    parameters = MATRICES + 24 * (896 * 2 + 64 * 18) + 896
    optimizer = 28 * parameters / 1675e9
    assert seconds["learn"] == pytest.approx(3 * forward / rate + optimizer, rel=1e-6)


def test_checkpointing_computes_a_third_more() -> None:
    plain = timed(H100, "engine", ranks=1).seconds["learn"]
    recomputed = timed(H100, "engine", ranks=1, activation_checkpointing=True)
    assert recomputed.seconds["learn"] / plain == pytest.approx(4 / 3, rel=0.01)


def test_more_ranks_divide_the_work_until_there_are_no_more_rows() -> None:
    alone = timed(NODE, "fsdp", ranks=1).seconds
    shared = timed(NODE, "fsdp", ranks=8).seconds
    assert alone["measure"] / shared["measure"] == pytest.approx(8, rel=0.05)
    # A replica reads its weights for each token, however few rows it has.
    assert alone["generate"] / shared["generate"] < 4


def test_links_by_hand() -> None:
    links = Links.of(TWO_NODES)
    # 70 % of 450 GB/s within a node, and of 400 Gbit/s = 50 GB/s between nodes.
    assert links.gather_s(8e9, 8) == pytest.approx(7e9 / 315e9)
    assert links.gather_s(8e9, 16) == pytest.approx(7.5e9 / 35e9)
    assert links.gather_s(8e9, 2, stride=8) == pytest.approx(4e9 / 35e9)
    assert links.sum_s(8e9, 8) == 2 * links.gather_s(8e9, 8)
    assert links.gather_s(8e9, 1) == 0


def test_groups_within_nodes_gather_faster_than_all_ranks() -> None:
    sharded = {"model": "Qwen3-8B", "ranks": 16, "accumulate": "whole"}
    small = {"micro_batch_tokens_per_rank": 1536}
    full = timed(TWO_NODES, "fsdp", sharding="full", **sharded, **small)
    hybrid = timed(
        TWO_NODES, "fsdp", sharding="hybrid", shard_size=8, **sharded, **small
    )
    assert hybrid.seconds["measure"] < full.seconds["measure"] / 2


def test_a_pipeline_waits_for_its_first_and_last_micro_batch() -> None:
    whole = timed(NODE, "megatron", ranks=8, tensor_parallel=8, sequence_parallel=True)
    staged = timed(NODE, "megatron", ranks=8, pipeline_parallel=8)
    # 256 rows of 768 tokens, 6144 per micro-batch: 32. No tensors are exchanged.
    assert staged.seconds["measure"] < whole.seconds["measure"]
    alone = timed(NODE, "megatron", ranks=8)
    assert staged.seconds["measure"] / alone.seconds["measure"] == pytest.approx(
        1 + 7 / 32, rel=0.01
    )


def test_offloading_takes_time_and_only_on_shared_gpus() -> None:
    stays = configured(H100, "engine", ranks=1)
    leaves = offloaded(stays, "all")
    parameters = MATRICES + 24 * (896 * 2 + 64 * 18) + 896
    # The actor has 12 bytes per parameter, the reference 4; to the host and back.
    moved = 2 * 16 * parameters / (0.7 * 64e9)
    difference = (
        step_time(leaves, Links.of(H100)).total_s
        - step_time(stays, Links.of(H100)).total_s
    )
    assert difference == pytest.approx(moved, rel=1e-6)


def test_separate_roles_measure_together_and_shared_ones_in_turn() -> None:
    shared = timed(NODE, "fsdp", ranks=1, root="ppo").seconds["measure"]
    apart = timed(NODE, "fsdp", ranks=1, root="ppo", placement="separate")
    assert shared > 1.9 * apart.seconds["measure"]
    # Actor, critic and reference have a GPU each, and the engine one.
    assert (apart.trainer_gpus, apart.engine_gpus) == (3, 1)
    assert 0 < apart.idle_share_of(4) < 1
    # GPUs that no role uses are idle for the whole step.
    busy = 1 - apart.idle_share_of(apart.used_gpus)
    assert apart.idle_share_of(16) == pytest.approx(1 - busy / 4)
    total = apart.idle_share_of_engines + apart.seconds["generate"] / apart.total_s
    assert total == pytest.approx(1)


def test_a_small_cache_generates_in_turns() -> None:
    large = configured(H100, "engine", ranks=1, model="Qwen3-8B")
    # 147456 bytes per token, 768 per row: 8 GiB hold 75 rows, 1 GiB 9.
    slow = step_time(with_cache(large, 1.0), Links.of(H100)).seconds["generate"]
    assert slow > 3 * step_time(large, Links.of(H100)).seconds["generate"]


def test_engines_with_fewer_rows_than_others_are_idle_for_longer() -> None:
    config = configured(TWO_NODES, "fsdp", ranks=16)
    prompt = config.data.model_copy(update={"prompts_per_step": 1})
    eight_rows = config.model_copy(update={"data": prompt})
    links = Links.of(TWO_NODES)

    # Of 16 engines, 8 have a row and 8 have none.
    time = step_time(eight_rows, links)
    assert time.engine_gpu_s == pytest.approx(8 * time.seconds["generate"])
    idle = 1 - 0.5 * time.seconds["generate"] / time.total_s
    assert time.idle_share_of_engines == pytest.approx(idle)

    # Of 3 engines, 2 have 3 rows and the other has 2, as each of 4 has.
    three, four = (
        step_time(with_engines(eight_rows, count, 1), links) for count in (3, 4)
    )
    both = 2 * three.seconds["generate"] + four.seconds["generate"]
    assert three.engine_gpu_s == pytest.approx(both)


def test_megatron_fsdp_exchanges_what_fsdp_does() -> None:
    inputs = ("data.train_path=/t.jsonl", "data.validation_path=/v.jsonl")
    backend = compose(
        "grpo", ["model.path=/m", "backend=megatron_fsdp", *inputs]
    ).actor.backend  # type: ignore[attr-defined]
    settings = {"sharding": "all", "shard_size": 8, "reduce_in_float32": True}
    update = {
        "dtype": "bfloat16",
        "activation_checkpointing": False,
        "micro_batch_tokens_per_rank": 1536,
        **settings,
    }

    def learn_s(kind: str, **changes: Any) -> float:
        config = configured(
            TWO_NODES, "fsdp", ranks=16, model="Qwen3-8B", accumulate="sharded", sharding="hybrid",
            shard_size=8, micro_batch_tokens_per_rank=1536,
        )  # fmt: skip
        if kind == "megatron_fsdp":
            config = with_backend(config, backend.model_copy(update=update | changes))
        return step_time(config, Links.of(TWO_NODES)).seconds["learn"]

    # Gradients are summed between the groups in every micro-batch, over the slow links.
    assert learn_s("megatron_fsdp") == pytest.approx(learn_s("fsdp"), rel=0.01)
    # Without sharded gradients they are summed once.
    once = learn_s("megatron_fsdp", sharding="optimizer")
    assert once < learn_s("megatron_fsdp") * 2 / 3


def test_a_layout_that_does_not_divide_its_ranks_has_a_time_all_the_same() -> None:
    # A check refuses it, after the values of `auto` were chosen.
    time = timed(TWO_NODES, "fsdp", ranks=4, sharding="hybrid", shard_size=8)
    assert time.total_s > 0
