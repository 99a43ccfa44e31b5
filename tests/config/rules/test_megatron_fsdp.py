"""Settings of the megatron_fsdp backend that do not go together."""

from __future__ import annotations

import pytest

from scripts.configuration import compose
from tests.config.rules.cases import Case

SHARED = "ranks_fit_the_backend"
CASES = [
    Case(
        SHARED,
        "backend=megatron_fsdp actor.num_ranks=8 actor.backend.shard_size=3",
        "actor.backend.shard_size",
        "actor.num_ranks=8 ranks are cut into several groups of this size",
        "Use 2 or 4, or null",
    ),
    Case(
        SHARED,
        "backend=megatron_fsdp actor.num_ranks=2 actor.backend.shard_size=2",
        "actor.backend.shard_size",
        "several groups",
        "Set it to null",
    ),
    Case(
        SHARED,
        "backend=megatron_fsdp actor.num_ranks=4 actor.backend.sharding=none actor.backend.shard_size=2",
        "actor.backend.shard_size",
        "this setting would be ignored: actor.backend.sharding=none shares nothing out",
        "Set it to null",
    ),
    Case(
        SHARED,
        "backend=megatron_fsdp actor.num_ranks=4 actor.backend.outer_sharding=optimizer",
        "actor.backend.outer_sharding",
        "groups that hold copies",
        "actor.backend.shard_size",
    ),
    Case(
        SHARED,
        "backend=megatron_fsdp actor.num_ranks=4 actor.backend.outer_sharding=optimizer actor.backend.shard_size=2 "
        "actor.backend.sharding=optimizer",
        "actor.backend.outer_sharding",
        "once sharding=all",
        "actor.backend.sharding=all",
    ),
    Case(
        SHARED,
        "backend=megatron_fsdp actor.backend.overlap_param_gather=false",
        "actor.backend.overlap_param_gather",
        "actor.backend.sharding=all gathers each layer when it computes",
        "Set it to true",
    ),
    Case(
        SHARED,
        "backend=megatron_fsdp actor.backend.overlap_param_gather=false actor.backend.sharding=none",
        "actor.backend.overlap_param_gather",
        "actor.backend.sharding=none gathers nothing",
        "Set it to true",
    ),
    Case(
        SHARED,
        "backend=megatron_fsdp actor.backend.overlap_grad_reduce=false actor.backend.sharding=optimizer_gradients",
        "actor.backend.overlap_grad_reduce",
        "has no memory for all gradients",
        "sharding=none or optimizer",
    ),
    Case(
        SHARED,
        "backend=megatron_fsdp actor.backend.double_buffer=true actor.backend.sharding=optimizer",
        "actor.backend.double_buffer",
        "actor.backend.sharding=optimizer gathers no layer by itself",
        "Set it to false",
    ),
    Case(
        "frozen_models_do_not_learn",
        "backend=megatron_fsdp reference.backend.reduce_in_float32=false",
        "reference.backend.reduce_in_float32",
        "does not learn",
        "Leave it out",
    ),
]


@pytest.mark.parametrize(
    "settings",
    [
        "sharding=none overlap_grad_reduce=false",
        "sharding=optimizer overlap_param_gather=false overlap_grad_reduce=false shard_size=2",
        "sharding=all shard_size=2 outer_sharding=optimizer double_buffer=true bucket_size=null",
    ],
)
def test_what_goes_together_is_accepted(settings: str) -> None:
    overrides = [f"actor.backend.{setting}" for setting in settings.split()]
    compose(
        "quickstart",
        [
            "backend@actor.backend=megatron_fsdp",
            "actor.num_ranks=4",
            "placement=separate",
            *overrides,
        ],
    )
