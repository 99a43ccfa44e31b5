"""Settings that follow from the memory of a GPU: Qwen3-8B, of 8.19 billion parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from controllers.compose.composition import compose
from verl_ray.config.load import with_changes
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config, rule_violations
from verl_ray.config.section import resolved
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.assumptions import Links
from verl_ray.preflight.facts import ClusterFacts, facts_here
from verl_ray.preflight.findings import preflight
from verl_ray.preflight.machine import GIB, GPUS, Machine, parse_machine
from verl_ray.preflight.memory_plan import USED_SHARE, memory_plan
from verl_ray.preflight.model_files import remembered_sizes
from verl_ray.preflight.resolve import resolutions, resolve
from verl_ray.preflight.resources import resource_problems
from verl_ray.preflight.step_time import step_time

MODELS = Path(__file__).parents[1] / "model_configs"
LONG = ("data.max_prompt_tokens=1024", "rollout.max_response_tokens=32768")
ROW_BYTES = 36 * 8 * 128 * 2 * 2
"""Bytes of a token in a cache: 36 layers of 8 heads of 128, a key and a value."""


def grpo(*changes: str, ranks: int = 8) -> RLConfig:
    inputs = ["data.train_path=/t.jsonl", "data.validation_path=null"]
    model = [f"model.path={MODELS}/Qwen3-8B", f"actor.num_ranks={ranks}"]
    config = compose(
        "grpo", [*inputs, *model, "backend=fsdp", "run.evaluate_every=0", *changes]
    )
    assert isinstance(config, RLConfig)
    return config


def facts(gib: float | None, nodes: int = 1) -> ClusterFacts:
    return ClusterFacts(
        nodes=nodes,
        cores=64,
        gpus=8 * nodes,
        has_chat_template=True,
        sent_parameters=8_190_735_360,
        checkpoint=None,
        gpu_memory_bytes=None if gib is None else int(gib * GIB),
    )


def node(gib: float) -> Machine:
    return Machine(
        cores=64,
        gpus=8,
        memory_bytes=1024 * GIB,
        shm_free_bytes=512 * GIB,
        gpu_memory_bytes=int(gib * GIB),
    )


def needed_gib(config: Config) -> float:
    _, needed = memory_plan(config, on_gpus=True).fullest(on_device=True)
    return needed / GIB


def every_level(config: Config) -> Iterator[Config]:
    """Every combination of the settings that trade time for memory, with some caches."""
    sizes = (2048, 4096, 8192, 16384, 32768)
    rolls_out = isinstance(config, RolloutTaskConfig)
    offloads = ("none", "optimizer", "all") if rolls_out else (None,)
    caches = (0.25, 4.0, 6.89) if rolls_out else (None,)
    for recompute, accumulate, tokens, others, offload, cache in itertools.product(
        (False, True), ("whole", "sharded"), sizes, sizes[::2], offloads, caches
    ):
        changes: dict[str, object] = {}
        for name in config.model_roles:
            learns = name in config.learners
            changes |= {
                f"{name}.backend.accumulate": accumulate,
                f"{name}.backend.activation_checkpointing": recompute and learns,
                f"{name}.backend.micro_batch_tokens_per_rank": tokens
                if learns
                else others,
            }
        if rolls_out:
            changes |= {"placement.offload": offload, "rollout.kv_cache_gib": cache}
        yield with_changes(config, changes)


def assert_no_level_is_faster(settled: Config, links: Links, gib: float) -> None:
    own_s = step_time(settled, links).total_s
    with remembered_sizes():
        for config in every_level(settled):
            if step_time(config, links).total_s < own_s - 0.001:
                assert needed_gib(config) > USED_SHARE * gib


SLOW = "nodes=2,gpus=8,gpu=A100-80G,link=100G"
MACHINES = ("gpus=8,gpu=L40S-48G", "gpus=8,gpu=H100-80G", "gpus=8,gpu=H200-141G", SLOW)


@pytest.mark.parametrize("text", MACHINES)
def test_no_level_that_fits_is_faster(text: str) -> None:
    where = parse_machine(text)
    assert where.gpu is not None
    gib = where.gpu.memory_bytes / GIB
    config = grpo(ranks=where.total_gpus)
    settled = resolve(config, facts_here(config, where))
    assert needed_gib(settled) <= USED_SHARE * gib
    assert rule_violations(settled) == []
    assert_no_level_is_faster(settled, Links.of(where), gib)


def test_tasks_without_rollouts_have_the_fastest_level_too() -> None:
    where = parse_machine(SLOW)
    inputs = [
        "data.train_path=/t.jsonl",
        "data.validation_path=/v.jsonl",
        "backend=fsdp",
    ]
    sizes = ["actor.num_ranks=16", "sft.batch_size=256", "sft.max_tokens=2048"]
    config = compose("sft", [*inputs, *sizes, f"model.path={MODELS}/Qwen3-8B"])
    settled = resolve(config, facts_here(config, where))
    assert needed_gib(settled) <= USED_SHARE * 79
    assert_no_level_is_faster(settled, Links.of(where), 79)
    # 16 rows of up to 2048 tokens are a single micro-batch.
    assert settled.model_roles["actor"].backend.micro_batch_tokens_per_rank == 32768


def test_over_slow_links_layers_are_computed_again_rather_than_gathered_often() -> None:
    slow, fast = (
        resolve(grpo(ranks=16), facts_here(grpo(ranks=16), where))
        for where in map(parse_machine, (SLOW, SLOW.replace("100G", "10T")))
    )
    assert slow.actor.backend.activation_checkpointing is True
    assert fast.actor.backend.activation_checkpointing is False

    # To gather weights for every row, which needs no recomputation, takes twice as long.
    often = {
        "actor.backend.activation_checkpointing": False,
        "actor.backend.micro_batch_tokens_per_rank": 2048,
        "reference.backend.micro_batch_tokens_per_rank": 2048,
    }
    links = Links.of(parse_machine(SLOW))
    apart = step_time(with_changes(slow, often), links).total_s
    assert apart > 1.5 * step_time(slow, links).total_s


def test_what_is_not_known_of_the_gpus_is_assumed_and_said() -> None:
    def reason(known: ClusterFacts) -> str:
        (item,) = (
            item
            for item in resolutions(grpo(), known)
            if item.key == "placement.offload"
        )
        return item.because

    fits = "the fastest that fits the 79 GiB of a GPU, by estimate"
    assert reason(facts(79.0)) == f"{fits}; assumed is gpu=H100-80G"
    two_nodes = replace(facts(79.0, nodes=2), gpu=GPUS["A100-80G"])
    assert reason(two_nodes) == f"{fits}; assumed is link=400G"
    assert reason(replace(two_nodes, link_bytes_per_s=50e9)) == fits


def settled_value(config: RLConfig, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def test_where_nothing_leaves_a_tenth_free_all_of_the_device_is_used() -> None:
    # 5 % more than what the level needs that saves most, with the cache of one row.
    gib = 1.05 * needed_gib(resolve(grpo("rollout.kv_cache_gib=0.25"), facts(None)))
    settled = resolve(grpo(), facts(gib))
    assert USED_SHARE * gib < needed_gib(settled) <= gib
    reasons = {item.because for item in resolutions(grpo(), facts(gib))}
    assert any("nothing leaves a tenth" in reason for reason in reasons)


def test_a_role_that_does_not_learn_has_larger_micro_batches() -> None:
    settled = resolve(grpo(), facts(79.0))
    assert settled.actor.backend.micro_batch_tokens_per_rank == 4096
    assert settled.reference.backend.micro_batch_tokens_per_rank == 32768
    # The cache is as large as it can be of use.
    assert settled.rollout.kv_cache_gib == pytest.approx(
        1.02 * 32 * 1536 * ROW_BYTES / GIB, abs=0.01
    )
    # On stages of a pipeline they would wait for larger ones.
    staged = grpo("backend=megatron", "backend.pipeline_parallel=2")
    settled = resolve(staged, facts(139.0))
    assert (
        settled.reference.backend.micro_batch_tokens_per_rank
        == settled.actor.backend.micro_batch_tokens_per_rank
    )


def test_larger_gpus_need_fewer_savings() -> None:
    small, large = (resolve(grpo(), facts(gib)) for gib in (44.0, 1000.0))
    assert small.actor.backend.activation_checkpointing is True
    assert large.actor.backend.activation_checkpointing is False
    assert large.placement.offload == "none"
    assert large.actor.backend.micro_batch_tokens_per_rank == 32768
    # The reference keeps no activations that could be computed again.
    assert small.reference is not None
    assert small.reference.backend.activation_checkpointing is False


def test_a_cache_holds_what_the_rows_of_a_step_need_at_most() -> None:
    def rows(*changes: str) -> float:
        """Rows of 512 + 1024 tokens that the cache holds; blocks take 2 % more."""
        settled = resolve(grpo(*changes), facts(139.0))
        return resolved(settled.rollout.kv_cache_gib) * GIB / (1.02 * 1536 * ROW_BYTES)

    # 256 rows on 8 replicas are 32 each.
    assert rows() == pytest.approx(32, abs=0.1)
    # An evaluation has more, of 400 problems 50 on each replica, or all that vLLM takes.
    evaluates = ("data.validation_path=/v.jsonl", "run.evaluate_every=5")
    assert rows(*evaluates, "evaluation.num_prompts=400") == pytest.approx(50, abs=0.1)
    assert rows(*evaluates, "evaluation.num_prompts=40") == pytest.approx(32, abs=0.1)
    assert rows(*evaluates) == pytest.approx(256, abs=0.1)
    limit = "rollout.vllm_args={max_num_seqs: 64}"
    assert rows(*evaluates, limit) == pytest.approx(64, abs=0.1)
    # An evaluation alone is one, however often the run would evaluate.
    alone = resolve(grpo(), replace(facts(139.0), learns=False))
    assert resolved(alone.rollout.kv_cache_gib) > 100 * 1536 * ROW_BYTES / GIB
    # So do the clients of an endpoint.
    assert rows("rollout.endpoint.enabled=true", limit) == pytest.approx(64, abs=0.1)


def test_a_cache_holds_at_least_the_longest_row() -> None:
    # One row of 33,792 tokens takes 4.64 GiB, which a fixed cache of 2 GiB cannot hold.
    assert pytest.approx(4.64, abs=0.01) == 33_792 * ROW_BYTES / GIB
    for gib in (79.0, 139.0, 178.0):
        settled = resolve(grpo(*LONG), facts(gib))
        cache_gib = settled.rollout.kv_cache_gib
        assert cache_gib != "auto" and cache_gib >= 1.02 * 4.64
        assert needed_gib(settled) <= USED_SHARE * gib
        assert settled.actor.backend.micro_batch_tokens_per_rank == 33_792


def test_where_the_memory_is_not_known_everything_saves_it() -> None:
    settled = resolve(grpo(), facts(None))
    assert settled.actor.backend.activation_checkpointing is True
    assert settled.placement.offload == "all"
    assert settled.actor.backend.micro_batch_tokens_per_rank == 2048
    reasons = {item.because for item in resolutions(grpo(), facts(None))}
    assert "the memory of the GPUs is not known" in reasons


def test_where_nothing_fits_the_run_is_refused_with_what_is_short() -> None:
    # bfloat16 weights of 8.19 billion parameters alone take 15.3 GiB of an engine.
    settled = resolve(grpo(), facts(12.0))
    reasons = {item.because for item in resolutions(grpo(), facts(12.0))}
    assert "nothing fits the 12 GiB of a GPU, and this needs least" in reasons
    (problem,) = (
        problem
        for problem in resource_problems(settled, node(12.0))
        if problem.key == "model.path"
    )
    assert "no setting that was tried is enough" in problem.fix


def test_what_is_set_stays_and_the_rest_fits_around_it() -> None:
    settled = resolve(grpo("rollout.kv_cache_gib=30"), facts(79.0))
    assert settled.rollout.kv_cache_gib == 30
    assert needed_gib(settled) <= USED_SHARE * 79

    whole = resolve(grpo("backend.accumulate=whole"), facts(79.0))
    assert settled_value(whole, "actor.backend.accumulate") == "whole"


def test_on_a_cluster_of_which_nothing_is_known_auto_stays_open() -> None:
    # 2 GiB, which auto is on a CPU, hold no row of 33,792 tokens.
    def refused(*changes: str) -> set[str]:
        findings = preflight(grpo(*LONG, *changes), None)
        return {problem.key for problem in findings.problems}

    assert "rollout.kv_cache_gib" not in refused()
    assert "rollout.kv_cache_gib" in refused("rollout.kv_cache_gib=2")
    # A type that only one side names is no mismatch yet.
    warnings = preflight(grpo("rollout.dtype=bfloat16"), None).warnings
    assert not any("round differently" in text for text in warnings)
