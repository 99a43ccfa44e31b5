"""Layouts that no model makes possible, and what the megatron backend cannot train."""

from __future__ import annotations

from scripts.configuration import compose
from tests.config.rules.cases import Case

FOUR = "backend=megatron actor.num_ranks=4"

CASES = [
    Case(
        "ranks_fit_the_backend",
        f"{FOUR} backend.tensor_parallel=3",
        "actor.backend.tensor_parallel",
        "one copy of the model takes tensor_parallel = 3 ranks, which must divide num_ranks=4",
        "nearest layout that works has actor.backend.tensor_parallel=4; this one works with actor.num_ranks=3 or 6.",
    ),
    Case(
        "ranks_fit_the_backend",
        "backend=megatron actor.num_ranks=6 critic.backend.tensor_parallel=2 critic.backend.pipeline_parallel=2",
        "critic.backend.pipeline_parallel",
        "one copy of the model takes tensor_parallel x pipeline_parallel = 4 ranks, which must divide num_ranks=6",
        "has critic.backend.pipeline_parallel=3; this one works with critic.num_ranks=4 or 8.",
    ),
    Case(
        "ranks_fit_the_backend",
        f"{FOUR} backend.pipeline_parallel=2 backend.expert_parallel=4",
        "actor.backend.expert_parallel",
        "one copy of the experts takes pipeline_parallel x expert_parallel = 8 ranks, which must divide num_ranks=4",
        "has actor.backend.expert_parallel=2; this one works with actor.num_ranks=8.",
    ),
    Case(
        "ranks_fit_the_backend",
        f"{FOUR} backend.expert_tensor_parallel=8",
        "reference.backend.expert_tensor_parallel",
        "one copy of the experts takes expert_tensor_parallel = 8 ranks",
        "has reference.backend.expert_tensor_parallel=4; this one works with reference.num_ranks=8.",
    ),
    Case(
        "ranks_fit_the_backend",
        f"{FOUR} actor.backend.sequence_parallel=true",
        "actor.backend.sequence_parallel",
        "this setting would be ignored: tensor_parallel=1 shares no tokens out",
        "The nearest layout that works has actor.backend.sequence_parallel=false.",
    ),
    Case(
        "ranks_fit_the_backend",
        f"{FOUR} actor.backend.virtual_stages=2",
        "actor.backend.virtual_stages",
        "this setting would be ignored: pipeline_parallel=1 has one stage",
        "The nearest layout that works has actor.backend.virtual_stages=1.",
    ),
    Case(
        "adapters_have_a_backend",
        "backend@actor.backend=megatron actor.lora.rank=8",
        "actor.lora.rank",
        "actor.backend=megatron trains all parameters, and has no adapters",
        "Set it to 0, or choose backend@actor.backend=engine, backend@actor.backend=fsdp",
    ),
]


def test_layouts_of_one_kind_may_differ_by_role() -> None:
    compose(
        "quickstart",
        [
            *FOUR.split(),
            "backend.tensor_parallel=2",
            "critic.backend.tensor_parallel=4",
        ],
    )
    compose(
        "quickstart",
        [
            *FOUR.split(),
            "backend.pipeline_parallel=2",
            "reference.backend.pipeline_parallel=1",
        ],
    )


def test_an_adapter_may_learn_on_another_backend_beside_it() -> None:
    compose(
        "quickstart",
        ["backend=megatron", "backend@actor.backend=fsdp", "actor.lora.rank=8"],
    )
