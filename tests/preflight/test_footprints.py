"""Bytes of one rank, by hand: a model of 2 layers of 10 million parameters, and 4
million beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scripts.configuration import compose
from tests.preflight.configs import settled
from verl_ray.backends.base import BytesPerPart
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.footprints import Workload, engine_footprint, footprint
from verl_ray.preflight.model_files import ModelSize
from verl_ray.profiling.flops import ModelShape

M = 10**6
SHAPE = ModelShape(
    num_layers=2,
    hidden_size=100,
    num_heads=4,
    num_kv_heads=2,
    head_size=50,
    intermediate_size=300,
    vocab_size=1000,
)
MODEL = ModelSize(
    parameters=24 * M,
    in_experts=0,
    in_layers=20 * M,
    largest_layer=10 * M,
    adapter=M,
    factors=2 * M,
    shape=SHAPE,
    tied=False,
)
CHOSEN = "optimizer@actor.optimizer"
WORK = Workload(tokens=1000, logit_tokens=500, batches=1)


def config(*overrides: str) -> RLConfig:
    found = compose(
        "ppo",
        [
            "model.path=/m",
            "data.train_path=/t.jsonl",
            "data.validation_path=/v.jsonl",
            *overrides,
        ],
    )
    assert isinstance(found, RLConfig)
    return settled(found)


def of_actor(
    *overrides: str,
    work: Workload = WORK,
    model: ModelSize = MODEL,
    device: str = "cpu",
) -> Any:
    return footprint(config(*overrides).actor, model, work, work, device)


def in_millions(sizes: BytesPerPart) -> dict[str, float]:
    return {part: size / M for part, size in sizes.items() if size}


@pytest.mark.parametrize(
    ("overrides", "held", "gradients"),
    [
        ((), {"weights": 96, "optimizer": 192}, 96),
        (
            ("actor.num_ranks=2",),
            {"weights": 96, "optimizer": 192, "gradients": 96},
            0,
        ),  # the buckets of DDP stay
        (("backend=fsdp", "actor.num_ranks=4"), {"weights": 24, "optimizer": 48}, 24),
        (
            ("backend=fsdp", "actor.num_ranks=4", "backend.sharding=none"),
            {"weights": 96, "optimizer": 192},
            96,
        ),
        (
            (
                "backend=fsdp",
                "actor.num_ranks=4",
                "backend.sharding=hybrid",
                "backend.shard_size=2",
            ),
            {"weights": 48, "optimizer": 96},
            48,
        ),
        (
            ("actor.lora.rank=2",),
            {"weights": 104, "optimizer": 16},
            8,
        ),  # 2 million of the adapter learn
        (
            (
                "backend=megatron",
                "actor.num_ranks=4",
                "backend.tensor_parallel=2",
                "backend.dtype=bfloat16",
            ),
            {
                "weights": 24,
                "gradients": 48,
                "optimizer": 72,
            },  # 2 + 4 of 12 million; 12 of a quarter
            0,
        ),
        (
            (
                "backend=megatron_fsdp",
                "actor.num_ranks=2",
                "backend.sharding=optimizer",
            ),
            {"weights": 96, "gradients": 96, "optimizer": 96},
            0,
        ),
        # 20 million parameters are in blocks, and the matrices have 2 million sides.
        ((f"{CHOSEN}=muon",), {"weights": 96, "optimizer": 112}, 96),
        (
            (f"{CHOSEN}=muon", "backend=fsdp", "actor.num_ranks=4"),
            {"weights": 24, "optimizer": 28},
            24,
        ),
        ((f"{CHOSEN}=adafactor",), {"weights": 96, "optimizer": 8}, 96),
        ((f"{CHOSEN}=sgd",), {"weights": 96, "optimizer": 96}, 96),
        ((f"{CHOSEN}=sgd", "actor.optimizer.momentum=0"), {"weights": 96}, 96),
        # An adapter of rank 2 has 2 million parameters and a million sides.
        (("actor.lora.rank=2", f"{CHOSEN}=muon"), {"weights": 104, "optimizer": 8}, 8),
    ],
)
def test_state_between_calls(
    overrides: tuple[str, ...], held: dict[str, float], gradients: float
) -> None:
    found = of_actor(*overrides)
    assert in_millions(found.persistent) == held
    assert found.update["gradients"] / M == gradients


@pytest.mark.parametrize(
    ("overrides", "average"),
    [
        ((), 96),
        (("actor.lora.rank=2",), 8),
        (("backend=fsdp", "actor.num_ranks=4"), 24),
        (("backend=megatron", "actor.num_ranks=4"), 24),
        (("backend=megatron", "actor.num_ranks=4", "backend.dtype=bfloat16"), 24),
        (("backend=megatron_fsdp", "actor.num_ranks=2"), 48),
        ((f"{CHOSEN}=sgd", "actor.optimizer.momentum=0"), 96),
    ],
)
def test_an_average_of_the_weights_is_as_large_as_a_moment(
    overrides: tuple[str, ...], average: float
) -> None:
    actor = config(*overrides).actor
    with_average, without = (
        footprint(actor, MODEL, WORK, WORK, "cpu", averages=averages)
        for averages in (True, False)
    )
    more = with_average.persistent["optimizer"] - without.persistent["optimizer"]
    assert more / M == average and with_average.update == without.update


def test_a_role_that_does_not_learn_has_weights_alone() -> None:
    found = footprint(config("actor.num_ranks=2").reference, MODEL, WORK, WORK, "cpu")
    assert in_millions(found.persistent) == {"weights": 96} and not found.update


def test_nothing_is_predicted_of_layers_that_are_unknown() -> None:
    unknown = ModelSize(M, 0, M, M, 0, 0, None, False)
    assert of_actor(model=unknown).update["activations"] == 0


def test_buffers_of_what_is_gathered() -> None:
    fsdp = ("backend=fsdp", "actor.num_ranks=4")
    assert (
        in_millions(of_actor(*fsdp).forward)["buffers"] == 4 * 24
    )  # both layers, and what is beside
    on_their_way = 8 * 10  # of a layer, as computed and in float32
    assert of_actor(*fsdp).update["buffers"] / M == 4 * 24 + on_their_way
    several = of_actor(*fsdp, work=Workload(1000, 500, 3)).update["buffers"] / M
    assert (
        several == 4 * 24 + on_their_way + 4 * 24
    )  # whole gradients from one batch to the next
    assert (
        of_actor(
            *fsdp, "backend.accumulate=sharded", work=Workload(1000, 500, 3)
        ).update["buffers"]
        / M
        == several - 96
    )
    assert (
        of_actor("backend.dtype=bfloat16").update["buffers"] / M == 2 * 24
    )  # what autocast keeps


def test_candidates_that_are_learned_from() -> None:
    """With 48 bytes each, of so many that they are more than a layer."""
    few, more = (
        of_actor(work=Workload(1000, 500, 1, candidates=count)).update["activations"]
        for count in (10_000, 20_000)
    )
    assert more - few == 48 * 10_000 * 500


def test_weights_that_are_cast_for_a_computation() -> None:
    narrow = ("backend.dtype=bfloat16", "actor.lora.rank=2")
    adapted = of_actor(*narrow)
    # A layer at a time; the backward pass needs all that an adapter is in.
    assert adapted.forward["buffers"] / M == 2 * 10
    assert adapted.update["buffers"] / M == 2 * 24
    again = of_actor(*narrow, "backend.activation_checkpointing=true")
    assert again.update["buffers"] / M == 2 * 10


def test_the_ends_of_a_pipeline_have_more_than_the_mean() -> None:
    # The head is half of the 4 million beside the layers, and a stage's mean a quarter.
    megatron = ("backend=megatron", "actor.num_ranks=4")
    assert of_actor(*megatron, "backend.pipeline_parallel=2").update["buffers"] == 0
    # Its weights, gradients and moments in float32; those of two copies are shared.
    four = of_actor(*megatron, "backend.pipeline_parallel=4")
    assert four.update["buffers"] / M == 4 + 4 + 8
    eight = ("backend=megatron", "actor.num_ranks=8", "backend.pipeline_parallel=4")
    assert of_actor(*eight).update["buffers"] / M == 4 + 4 + 8 / 2
    frozen = footprint(config(*eight).reference, MODEL, WORK, WORK, "cpu")
    assert frozen.forward["buffers"] / M == 4


def test_a_tied_embedding_has_two_gradients_and_their_sum() -> None:
    wide = replace(MODEL, tied=True, shape=replace(SHAPE, vocab_size=M))
    few = Workload(tokens=2, logit_tokens=1, batches=1)
    # Of a million words of 100 numbers, beside one that counts as gradients.
    assert of_actor(model=wide, work=few).update["activations"] / M == 2 * 4 * 100
    adapted = of_actor("actor.lora.rank=2", model=wide, work=few)
    assert adapted.update["activations"] / M < 2 * 4 * 100
    # megatron-core adds to one gradient.
    megatron = of_actor("backend=megatron", model=wide, work=few)
    assert megatron.update["activations"] / M < 2 * 4 * 100


def test_an_adapter_makes_no_gradient_of_the_head() -> None:
    # Of 100 million logits none are kept, and the head's gradient is a sum.
    wide = replace(MODEL, shape=replace(SHAPE, vocab_size=M))
    work = Workload(tokens=200, logit_tokens=100, batches=1)
    whole, adapted = (
        of_actor(*overrides, model=wide, work=work).update["activations"]
        for overrides in ((), ("actor.lora.rank=2",))
    )
    assert (whole - adapted) / M == 4 * 100


def test_a_rollout_engine() -> None:
    run = config(
        "rollout.kv_cache_gib=2", "rollout.tensor_parallel=2", "rollout.dtype=bfloat16"
    )
    found = engine_footprint(run.rollout, MODEL, 10**6, 10**4, "cuda")
    assert found.persistent == {"weights": 24 * M, "cache": 2 << 30}
    # Half of 20 million in the layers at a byte and of 4 million at two.
    fp8 = run.rollout.model_copy(update={"quantization": "fp8"})
    quantized = engine_footprint(fp8, MODEL, 10**6, 10**4, "cuda")
    assert quantized.persistent["weights"] == 14 * M
    # 8192 tokens with 2 bytes of 4 x 100, and half of 2 x 200 + 2 x 100 + 3 x 300
    assert found.forward["activations"] == 8192 * 2 * (400 + 750)
    fewer = config(
        "rollout.vllm_args={max_num_batched_tokens: 100, max_num_seqs: 8}"
    ).rollout
    assert engine_footprint(fewer, MODEL, 10**6, 10**4, "cpu").forward[
        "activations"
    ] == 100 * 4 * (400 + 1500)
    # The logits of 8 requests and 100 tokens of a prompt, three float32 copies.
    wide = replace(MODEL, shape=replace(SHAPE, vocab_size=M))
    scored = engine_footprint(fewer, wide, 10**6, 10**4, "cuda", scored_tokens=2048)
    assert scored.forward["activations"] == 3 * 4 * (8 + 100) * M
