"""The cheapest change that fits: of Qwen3-8B, with 8.19 billion parameters, 15.3 GiB in
bfloat16.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from controllers.compose.composition import examine
from controllers.compose.trees import interpolations
from tests.preflight.configs import job_on
from tests.preflight.published import published
from verl_ray.config.load import to_tree, with_auto_again, with_changes
from verl_ray.config.schema import rule_violations
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.device_memory import device_shortage
from verl_ray.preflight.devices import device_problems
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.host_memory import host_shortage
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import Job
from verl_ray.preflight.model_files import remembered_sizes
from verl_ray.preflight.resolve import resolve
from verl_ray.preflight.resources import resource_problems
from verl_ray.preflight.savings import (
    FOLLOWERS,
    as_overrides,
    cheapest_change,
    in_words,
    single_rows,
)

NODE = "gpus=8,gpu=H100-80G"
FSDP = ("backend=fsdp", "actor.num_ranks=8")


def changed(job: Job, changes: dict[str, object]) -> Job:
    """Return the run with changes, for which every `auto` is resolved anew."""
    typed = with_changes(with_auto_again(job.config), changes)
    assert rule_violations(typed, changes.keys()) == []
    return replace(job, config=resolve(typed, facts_here(typed, job.machine)))


def settings_at(job: Job, keys: Iterable[str]) -> Iterator[tuple[str, object]]:
    for key in keys:
        node: Any = to_tree(with_auto_again(job.config))
        for part in key.split("."):
            node = node[part]
        yield key, node


def is_fitting(job: Job) -> bool:
    """Return whether GPUs and hosts are large enough."""
    return device_shortage(job) is None and host_shortage(job) is None


def cheapest(job: Job) -> dict[str, object]:
    """Return the cheapest change, which fits and of which nothing can be left out."""
    with remembered_sizes():
        assert not is_fitting(job)
        changes = dict(cheapest_change(job) or {})
        after = changed(job, changes)
        assert is_fitting(after) and not any(device_problems(after))
        if len(changes) == 1:
            return changes
        was = dict(settings_at(job, changes))
        # What only stays as it is keeps other settings from dragging it along.
        for key in [key for key in changes if changes[key] != was[key]]:
            fewer = {other: changes[other] for other in changes if other != key}
            typed = with_changes(with_auto_again(job.config), fewer)
            if not rule_violations(typed):
                less = changed(job, fewer)
                assert any(device_problems(less)) or not is_fitting(less)
        return changes


def test_idle_gpus_cost_nothing_so_they_come_first() -> None:
    # 16 bytes of each parameter are 122 GiB on one GPU, and an eighth on eight.
    job = job_on(NODE, "backend=fsdp")
    changes = cheapest(job)
    assert changes == {"actor.num_ranks": 8, "reference.num_ranks": 8}
    # Engines on auto follow.
    assert changed(job, changes).config.engines["rollout"].replicas == 8


def test_a_judge_keeps_its_gpu() -> None:
    judge = f"reward.model.path={published('Qwen2.5-0.5B')}"
    sizes = ("reward.max_prompt_tokens=99", "reward.max_response_tokens=99")
    job = job_on(NODE, "backend=fsdp", "reward=judge", judge, *sizes)
    assert cheapest(job) == {"actor.num_ranks": 7, "reference.num_ranks": 7}


def test_more_ranks_of_megatron_share_matrices_where_copies_are_too_large() -> None:
    # Each rank has a copy of weights and gradients, 6 bytes of a parameter: 46 GiB.
    assert cheapest(job_on(NODE, "backend=megatron")) == {
        "actor.num_ranks": 8,
        "reference.num_ranks": 8,
        "actor.backend.tensor_parallel": 2,
    }


def test_ranks_share_nothing_out_on_a_backend_with_whole_copies() -> None:
    assert cheapest_change(job_on(NODE)) is None


@pytest.mark.parametrize(
    ("overrides", "root", "ranks"),
    [
        # The reference needs an eighth of what the actor does, and one engine is set.
        (
            ("rollout.num_replicas=1",),
            "grpo",
            {"actor.num_ranks": 6, "reference.num_ranks": 1},
        ),
        # Engines on auto give up as few GPUs as will do.
        ((), "grpo", {"actor.num_ranks": 2, "reference.num_ranks": 1}),
        (
            (),
            "ppo",
            {"actor.num_ranks": 2, "critic.num_ranks": 2, "reference.num_ranks": 1},
        ),
    ],
)
def test_gpus_of_their_own_go_to_the_roles_that_are_short(
    overrides: tuple[str, ...], root: str, ranks: dict[str, int]
) -> None:
    separate = ("backend=fsdp", "placement=separate", *overrides)
    assert cheapest(job_on(NODE, *separate, root=root)) == ranks


def test_an_engine_that_no_cache_would_make_fit_gets_more_ranks() -> None:
    # 70.6 billion parameters take 131 GiB in bfloat16, half of it on each of two ranks.
    judge = (
        "reward=judge", f"reward.model.path={published('Llama-3.1-70B')}",
        "reward.max_prompt_tokens=1024", "reward.max_response_tokens=512",
    )  # fmt: skip
    job = job_on(f"nodes=2,{NODE}", *FSDP, *judge)
    assert cheapest(job) == {"reward.engine.tensor_parallel": 2}
    # Two engines on two GPUs become one.
    two = (
        "placement=separate",
        "rollout.num_replicas=2",
        "actor.num_ranks=24",
        "reference.num_ranks=6",
    )
    wide = job_on(f"nodes=4,{NODE}", "backend=fsdp", *two, model="Llama-3.1-70B")
    assert cheapest(wide) == {"rollout.tensor_parallel": 2, "rollout.num_replicas": 1}


def test_what_was_left_to_auto_is_no_setting_to_change() -> None:
    # Weights of an engine and 70 GiB do not fit, whatever auto becomes.
    (key,) = cheapest(job_on(NODE, *FSDP, "rollout.kv_cache_gib=70"))
    assert key == "rollout.kv_cache_gib"
    # Each rank keeps 30.5 GiB of gradients and as much of weights and optimizer, and
    # auto has all that saves memory already, until rows are smaller than auto makes
    # micro-batches.
    least = job_on("gpus=8,gpu=A100-80G", "backend=megatron", "actor.num_ranks=8")
    assert "auto" not in str(least.config.actor)
    assert "actor.backend.recompute" not in cheapest(least)


def test_several_cheap_changes_come_before_a_dear_one() -> None:
    job = job_on(
        NODE, *FSDP, "backend.accumulate=whole", "backend.activation_checkpointing=false",
        "backend.micro_batch_tokens_per_rank=8192",
    )  # fmt: skip
    assert is_fitting(changed(job, {"actor.backend.activation_checkpointing": True}))
    # Whole gradients in float32 are 30.5 GiB, and 8192 tokens keep 62 GiB.
    assert cheapest(job) == {
        "actor.backend.accumulate": "sharded",
        "actor.backend.micro_batch_tokens_per_rank": 4096,
    }


def test_a_cache_that_is_too_large_leaves_a_tenth_of_the_gpu_free() -> None:
    job = job_on(
        NODE,
        *FSDP,
        "rollout.kv_cache_gib=62",
        "backend.micro_batch_tokens_per_rank=4096",
    )
    _, needed = job.memory.fullest(on_device=True)
    small = replace(job.machine, gpu_memory_bytes=needed - int(0.4 * GIB))
    changes = cheapest(replace(job, machine=small))
    # As much as leaves a tenth of the GPU free, as auto does.
    freed = 0.4 + 0.1 * (needed / GIB - 0.4)
    assert changes == {"rollout.kv_cache_gib": pytest.approx(62 - freed, abs=0.011)}


def test_ranks_share_a_row_that_is_too_long_for_one() -> None:
    # 131,072 tokens are 16,384 on each of eight ranks, and as many at once.
    long = ("data.max_prompt_tokens=1024", "rollout.max_response_tokens=130048")
    changes = cheapest(job_on(NODE, *FSDP, *long))
    assert changes == {"actor.backend.sequence_parallel": 2}
    tokens = "backend.micro_batch_tokens_per_rank=131072"
    changes = cheapest(job_on(NODE, *FSDP, *long, tokens))
    assert changes == {
        "actor.backend.sequence_parallel": 2,
        "actor.backend.micro_batch_tokens_per_rank": 65_536,
    }


def test_nothing_else_becomes_too_small() -> None:
    # 16 bytes of each parameter of the actor are 122 GiB of the host.
    gpus = "gpus=8,gpu=RTX-4090-24G"
    large, small = (
        job_on(f"{gpus},memory={size}", *FSDP, "placement.offload=none")
        for size in ("200G", "100G")
    )
    assert cheapest(large) == {"actor.backend.host_parameters": True}
    assert cheapest_change(small) is None


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (("placement.offload=all",), {"placement.offload": "none"}),
        (("backend.host_parameters=true",), {"actor.backend.host_parameters": False}),
        (
            ("reward.num_ranks=400", "placement.offload=none"),
            # 8 x 0.3 and 8 x 0.45 GiB of trainers and engines, and 0.8 of the node, leave
            # 93.2, at 0.25 each.
            {"reward.num_ranks": 372},
        ),
    ],
)
def test_a_host_is_relieved_by_what_gpus_can_take(
    overrides: tuple[str, ...], changes: dict[str, object]
) -> None:
    job = job_on(f"{NODE},memory=100G", *FSDP, *overrides)
    assert cheapest(job) == changes


def test_nothing_fits() -> None:
    small = job_on("gpus=8,gpu=RTX-4090-24G", *FSDP, model="Llama-3.1-70B")
    assert cheapest_change(small) is None
    assert cheapest_change(job_on(f"{NODE},memory=2G", *FSDP)) is None


def test_micro_batches_never_grow() -> None:
    # The rows of a model that grades are as short as it likes.
    grader = (
        "reward=model", f"reward.model.path={published('Qwen2.5-0.5B')}",
        "reward.backend.micro_batch_tokens_per_rank=256",
    )  # fmt: skip
    config = job_on(NODE, *FSDP, *grader).config
    assert isinstance(config, RLConfig)
    # Those that learn have rows of 512 + 1024.
    assert set(single_rows(config).values()) <= {1536}
    assert not any(key.startswith("reward.") for key in single_rows(config))


def test_changes_are_told_as_overrides() -> None:
    changes = {
        "actor.backend.micro_batch_tokens_per_rank": 1536,
        "reference.backend.micro_batch_tokens_per_rank": 1536,
        "actor.backend.activation_checkpointing": True,
        "placement.offload": "all",
    }
    assert in_words(changes) == (
        "backend.micro_batch_tokens_per_rank=1536"
        " actor.backend.activation_checkpointing=true placement.offload=all"
    )


# ------------------------------------------------------------ typed as they are printed


def typed(machine: str, root: str, model: str, *overrides: str) -> tuple[Job, str]:
    """Return the run with its cheapest change typed behind its overrides."""
    job = job_on(machine, *overrides, root=root, model=model)
    words = as_overrides(cheapest_change(job) or {})
    again = (*overrides, *words.split())
    return job_on(machine, *again, root=root, model=model), words


def test_more_ranks_of_the_actor_leave_those_that_would_follow() -> None:
    job, words = typed(
        NODE, "ppo", "Qwen3-8B", "backend=megatron_fsdp", "placement=separate",
        "actor.num_ranks=2", "rollout.max_response_tokens=4096",
        "backend.micro_batch_tokens_per_rank=65536",
    )  # fmt: skip
    assert "actor.num_ranks=3" in words and "reference.num_ranks=2" in words
    assert is_fitting(job) and not any(device_problems(job))


def test_settings_that_follow_others_are_known() -> None:
    found: dict[str, list[str]] = {}
    for reward in ("model", "judge"):
        given = (f"reward={reward}", "reward.model.path=/m", "model.path=/m")
        tree = examine("ppo", [*given, "data.train_path=/t.jsonl"]).tree
        for follower, sources in interpolations(tree).items():
            for source in sources:
                if source.endswith((".num_ranks", ".dtype", ".kv_cache_gib")):
                    found.setdefault(source, []).append(follower)
    assert {key: set(followers) for key, followers in found.items()} == {
        key: set(followers) for key, followers in FOLLOWERS.items()
    }


def random_overrides(choose: random.Random) -> tuple[str, ...]:
    backend = choose.choice(["fsdp", "megatron", "megatron_fsdp"])
    placement = choose.choice(["separate", "colocated"])
    ranks = choose.choice([1, 2] if placement == "separate" else [1, 4, 8])
    overrides = [
        f"backend={backend}",
        f"placement={placement}",
        f"actor.num_ranks={ranks}",
        f"rollout.kv_cache_gib={choose.choice([4, 60])}",
        f"rollout.max_response_tokens={choose.choice([1024, 8192])}",
        f"backend.micro_batch_tokens_per_rank={choose.choice([16384, 65536])}",
        # What was typed for one role holds beside what is typed for all.
        f"actor.backend.micro_batch_tokens_per_rank={choose.choice([16384, 131072])}",
    ]
    if backend == "megatron":
        overrides.append("backend.recompute=none")
    else:
        overrides.append("backend.activation_checkpointing=false")
    if placement == "colocated":
        overrides.append(f"placement.offload={choose.choice(['none', 'all'])}")
    return tuple(overrides)


def test_a_change_that_is_typed_as_it_is_printed_passes_the_check() -> None:
    choose = random.Random(1)
    fitted = 0
    with remembered_sizes():
        for _ in range(12):
            root = choose.choice(["grpo", "ppo"])
            memory = choose.choice(["200G", "32G"])
            machine = f"{NODE},memory={memory}"
            job, words = typed(machine, root, "Qwen2.5-1.5B", *random_overrides(choose))
            if words:
                fitted += 1
                assert is_fitting(job), words
                assert not any(resource_problems(job.config, job.machine)), words
    assert fitted >= 8
