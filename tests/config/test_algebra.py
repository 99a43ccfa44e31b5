"""The batch algebra, by hand."""

from __future__ import annotations

from scripts.configuration import compose
from verl_ray.config.schema import batch_algebra

INPUTS = ["model.path=/m", "data.train_path=t.jsonl", "data.validation_path=v.jsonl"]


def test_ppo() -> None:
    sizes = batch_algebra(
        compose(
            "ppo",
            [
                *INPUTS,
                "data.prompts_per_step=12",
                "rollout.group_size=4",
                "actor.num_ranks=5",
                "actor.mini_batch_size=16",
                "actor.epochs=2",
                "critic.mini_batch_size=null",
                "critic.epochs=1",
            ],
        )
    )
    assert (sizes.rows, sizes.max_row_tokens) == (12 * 4, 512 + 1024)
    actor, critic, reference = sizes.roles
    assert (
        actor.rows_per_rank,
        actor.mini_batch_size,
        actor.mini_batch_size_per_rank,
    ) == (10, 16, 4)
    assert actor.updates_per_step == 2 * 3
    assert (critic.ranks, critic.mini_batch_size, critic.updates_per_step) == (5, 48, 1)
    assert (reference.mini_batch_size, reference.updates_per_step) == (None, 0)


def test_roles_that_are_not_made_have_no_part_in_it() -> None:
    grpo = batch_algebra(compose("quickstart", ["algorithm=grpo"]))
    assert [role.role for role in grpo.roles] == ["actor", "reference"]
    dr_grpo = batch_algebra(compose("quickstart", ["algorithm=dr_grpo"]))
    assert [role.role for role in dr_grpo.roles] == ["actor"]


def test_sft() -> None:
    sizes = batch_algebra(
        compose("sft", [*INPUTS, "sft.batch_size=30", "actor.num_ranks=4"])
    )
    (actor,) = sizes.roles
    assert (sizes.rows, sizes.max_row_tokens) == (30, 1536)
    assert (
        actor.rows_per_rank,
        actor.mini_batch_size,
        actor.mini_batch_size_per_rank,
    ) == (8, 30, 8)
    assert actor.updates_per_step == 1


def test_ranks_that_share_a_model_share_their_rows() -> None:
    layout = [
        "backend=megatron",
        "actor.num_ranks=8",
        "backend.tensor_parallel=2",
        "actor.backend.pipeline_parallel=2",
    ]
    rows = ["data.prompts_per_step=10", "rollout.group_size=4"]
    actor, critic, _ = batch_algebra(compose("ppo", [*INPUTS, *layout, *rows])).roles
    assert (actor.ranks, actor.dp_size, critic.dp_size) == (8, 2, 4)
    assert (actor.rows_per_rank, critic.rows_per_rank) == (20, 10)
