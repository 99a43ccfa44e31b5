"""The proposed configuration fits, and an enumeration of settings has no faster one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from controllers.commands.plan import misfit_lines
from tests.preflight.plan_bases import bases, machine
from verl_ray.backends.base import BackendSettings
from verl_ray.config.load import parse, to_tree
from verl_ray.config.schema import rule_violations
from verl_ray.config.section import resolved
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.assumptions import Links
from verl_ray.preflight.facts import facts_of
from verl_ray.preflight.machine import GIB, GPUS, Machine
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.model_directories import backend_problems, engine_problems
from verl_ray.preflight.model_files import remembered_sizes
from verl_ray.preflight.plan_search import Misfit, Plan, search, smallest_machine
from verl_ray.preflight.resolve import resolve
from verl_ray.preflight.resources import resource_problems
from verl_ray.preflight.step_time import step_time


def planned(where: Machine, model: str, *overrides: str) -> Plan:
    outcome = search(bases(model, *overrides), where)
    assert isinstance(outcome, Plan)
    return outcome


# --------------------------------------------------------------------- every combination


def backends_of(base: BackendSettings, total: int) -> Iterator[dict[str, object]]:
    sizes = [size for size in (1, 2, 4, 8) if size <= total]
    tokens = (1536, 8192)
    if base.kind == "megatron":
        for tensor, pipeline, recompute, batch in itertools.product(
            sizes, sizes, ("none", "full"), tokens
        ):
            yield {
                "tensor_parallel": tensor, "sequence_parallel": tensor > 1, "pipeline_parallel": pipeline,
                "recompute": recompute, "micro_batch_tokens_per_rank": batch,
            }  # fmt: skip
        return
    for recompute, batch in itertools.product((False, True), tokens):
        common = {
            "activation_checkpointing": recompute,
            "micro_batch_tokens_per_rank": batch,
        }
        if base.kind == "engine":
            yield common
            continue
        for sharding, accumulate, host in itertools.product(
            ("full", "grad_op", "none"), ("whole", "sharded"), (False, True)
        ):
            yield common | {
                "sharding": sharding,
                "accumulate": accumulate,
                "host_parameters": host,
            }


def every_combination(model: str, where: Machine) -> Iterator[RLConfig]:
    """Configurations that pass every check, as trees that are parsed anew."""
    total = where.total_gpus
    placements = [("colocated", offload) for offload in ("all", "none")] + [
        ("separate", "none")
    ]
    for base, (placement, offload) in itertools.product(
        bases(model).values(), placements
    ):
        tree = to_tree(base)
        tree["placement"] = {"kind": placement, "offload": offload}
        facts = facts_of(
            parse(tree, RLConfig), cores=[where.cores], gpus=[total], checkpoint=None
        )
        tree = to_tree(resolve(parse(tree, RLConfig), facts))
        for backend in backends_of(base.actor.backend, total):
            for role in ("actor", "critic", "reference"):
                tree[role]["backend"] |= {"dtype": "bfloat16", **backend}  # type: ignore[index]
            for ranks, tensor in itertools.product((1, 2, 4, 6, 8), (1, 2, 4)):
                others = (ranks,) if placement == "colocated" else (1, 2, 4)
                for reference in others:
                    free = (
                        ranks if placement == "colocated" else total - ranks - reference
                    )
                    if free < tensor or ranks > total:
                        continue
                    tree["actor"]["num_ranks"] = tree["critic"]["num_ranks"] = ranks  # type: ignore[index]
                    tree["reference"]["num_ranks"] = reference  # type: ignore[index]
                    for cache in (2.0, 32.0):
                        tree["rollout"] |= {  # type: ignore[operator]
                            "num_replicas": free // tensor, "tensor_parallel": tensor, "dtype": "bfloat16",
                            "kv_cache_gib": cache,
                        }  # fmt: skip
                        yield parse(tree, RLConfig)


def divides(config: RLConfig) -> bool:
    """Whether layouts divide their ranks; no other configuration has a time."""
    return not any(
        problem
        for name, role in config.model_roles.items()
        for problem in role.backend.rank_problems(name, role.num_ranks)
    )


def passes(config: RLConfig, where: Machine) -> bool:
    problems = [*rule_violations(config), *resource_problems(config, where)]
    problems += backend_problems(config, None)
    for engine in config.engines.values():
        problems += engine_problems(engine, where)
    if problems:
        return False
    plan = memory_plan(config, on_gpus=True)
    assert where.gpu is not None
    return (
        plan.fullest(on_device=True)[1] <= 0.9 * where.gpu.memory_bytes
        and plan.fullest(on_device=False)[1] <= 0.9 * where.memory_bytes
    )


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("Qwen2.5-0.5B", "gpus=1,gpu=RTX-4090-24G"),
        ("Qwen2.5-1.5B", "gpus=2,gpu=A100-40G"),
        pytest.param("Qwen3-8B", "gpus=8,gpu=H100-80G,memory=2T", marks=pytest.mark.slow),
        pytest.param("Qwen3-32B", "gpus=8,gpu=B200-180G,memory=2T", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_no_combination_of_settings_is_a_tenth_faster(model: str, text: str) -> None:
    where = machine(text)
    best_s = planned(where, model).time.total_s
    compared = 0
    with remembered_sizes():
        for config in every_combination(model, where):
            if not divides(config):
                continue
            # Most are slower, so whether they would pass does not matter.
            if step_time(config, Links.of(where)).total_s < 0.9 * best_s:
                assert not passes(config, where)
            compared += 1
    assert compared > 50


# -------------------------------------------------------------------------- its proposals


def test_a_model_that_one_gpu_cannot_hold_gets_engines_of_several() -> None:
    plan = planned(machine("nodes=8,gpus=8,gpu=H100-80G"), "Llama-3.1-70B")
    # 141 GB of bfloat16 weights.
    assert plan.config.placement.kind == "separate"
    assert plan.config.rollout.tensor_parallel >= 2
    ranks = [role.num_ranks for role in plan.config.model_roles.values()]
    assert sum(ranks) + plan.config.engines["rollout"].ranks <= 64


def test_the_cache_holds_a_row_and_no_more_than_all_rows() -> None:
    plan = planned(machine("gpus=8,gpu=H100-80G"), "Qwen3-8B")
    # 36 layers x 2 x 8 heads x 128 x 2 bytes x 1536 tokens, for 32 rows per replica.
    row_gib = 36 * 2 * 8 * 128 * 2 * 1536 / GIB
    assert row_gib < plan.config.rollout.kv_cache_gib <= 1.1 * 32 * row_gib


def test_megatron_is_proposed_only_if_it_is_clearly_faster() -> None:
    where = machine("gpus=8,gpu=H100-80G")
    plan = planned(where, "Qwen3-8B", "rollout.max_response_tokens=8192")
    others = {
        kind: base
        for kind, base in bases("Qwen3-8B", "rollout.max_response_tokens=8192").items()
        if kind == "megatron"
    }
    megatron = search(others, where)
    assert isinstance(megatron, Plan)
    assert plan.config.actor.backend.kind == "fsdp"
    assert megatron.time.total_s > plan.time.total_s / 1.05


def test_where_hosts_are_short_what_they_lack_is_said_before_other_gpus() -> None:
    small = machine("gpus=1,gpu=H100-80G,memory=64G")
    misfit = search(bases("Qwen3-8B"), small)
    assert isinstance(misfit, Misfit) and misfit.larger is not None
    # Weights and reference in float32, gradients and two moments: 20 bytes per parameter.
    assert 20 * 8.19e9 < 0.9 * misfit.larger.memory_bytes < 1.1 * 20 * 8.19e9
    first, second, third = misfit_lines(misfit).splitlines()
    assert "of the host of a node; a plan may fill 57.6 GiB" in first
    assert second.startswith(
        "more memory of the hosts would do: --machine nodes=1,gpus=1,gpu=H100-80G,memory="
    )
    assert third.startswith(
        "the smallest listed machine that would do: --machine nodes="
    )
    assert isinstance(search(bases("Qwen3-8B"), misfit.larger), Plan)

    # No host makes up for an engine that does not fit.
    misfit = search(bases("Llama-3.1-70B"), machine("gpus=1,gpu=L40S-48G"))
    assert isinstance(misfit, Misfit) and misfit.larger is None
    assert misfit.shortage.place == "a GPU"


def test_a_reference_has_micro_batches_as_large_as_fit() -> None:
    plan = planned(machine("gpus=8,gpu=H100-80G"), "Qwen3-8B")
    actor, reference = plan.config.actor.backend, plan.config.reference.backend
    assert reference.micro_batch_tokens_per_rank == 32768
    assert resolved(actor.micro_batch_tokens_per_rank) < 32768


def smallest(options: Mapping[str, RLConfig], described: Machine) -> Machine | None:
    """The machine that a search names which finds nothing; it reads each model once."""
    with remembered_sizes():
        return smallest_machine(options, described)


@pytest.mark.parametrize(
    "text", ["gpus=8,gpu=H100-80G,memory=1G", "gpus=1,gpu=A100-40G"]
)
def test_no_smaller_machine_would_do_whatever_its_hosts_have(text: str) -> None:
    eight = bases("Qwen3-8B")
    named = smallest(eight, machine(text))
    assert named is not None and named.gpu is not None
    # Weights of 16 GB in bfloat16 fit the smallest GPU; the rest is on the host.
    assert (named.total_gpus, named.gpu.name) == (1, "RTX-4090-24G")
    assert 20 * 8.19e9 < 0.9 * named.memory_bytes < 1.1 * 20 * 8.19e9
    assert isinstance(search(eight, named), Plan)
    less = replace(named, memory_bytes=named.memory_bytes - 2 * GIB)
    assert isinstance(search(eight, less), Misfit)


def test_a_small_model_needs_no_more_than_the_usual_host() -> None:
    small = bases("Qwen2.5-0.5B")
    named = smallest(small, machine("gpus=8,gpu=H100-80G,memory=1G,cores=200"))
    assert named == machine("gpus=1,gpu=RTX-4090-24G,memory=128G")


@pytest.mark.slow
def test_no_smaller_machine_holds_an_engine_of_a_large_model() -> None:
    large = bases("Qwen3-235B-A22B")
    named = smallest(large, machine("gpus=1,gpu=L40S-48G,memory=64G"))
    assert named is not None and named.gpu is not None
    total = named.total_gpus * named.gpu.memory_bytes
    for gpu in GPUS.values():
        # Fewer GPUs of a kind hold no more.
        smaller = [n for n in (1, 2, 4, 8) if n * gpu.memory_bytes < total]
        if smaller:
            most = machine(f"gpus={smaller[-1]},gpu={gpu.name},memory=64T")
            assert isinstance(search(large, most), Misfit)
