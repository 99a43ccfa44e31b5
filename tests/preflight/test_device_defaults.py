"""Settings that follow from the memory of a GPU: Qwen3-8B, of 8.19 billion parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.compose.composition import compose
from verl_ray.config.rules import rule_violations
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.device_defaults import LEVELS, USED_SHARE, with_changes
from verl_ray.preflight.device_memory import (
    device_memory_problems,
    device_memory_warnings,
)
from verl_ray.preflight.facts import ClusterFacts
from verl_ray.preflight.findings import preflight
from verl_ray.preflight.machine import GIB, Machine
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.resolve import resolutions, resolve
from verl_ray.preflight.resources import resource_problems, resource_warnings
from verl_ray.preflight.savings import cheapest_change, in_words

MODELS = Path(__file__).parents[1] / "model_configs"
FIXED_TYPES = ("backend.dtype=float32", "rollout.dtype=bfloat16")
LONG = ("data.max_prompt_tokens=1024", "rollout.max_response_tokens=32768")
LEVEL_KEYS = (
    "placement.offload",
    "actor.backend.accumulate",
    "reference.backend.accumulate",
    "actor.backend.activation_checkpointing",
    "actor.backend.micro_batch_tokens_per_rank",
    "reference.backend.micro_batch_tokens_per_rank",
)
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


def facts(gib: float | None, gpus: int = 8) -> ClusterFacts:
    return ClusterFacts(
        nodes=1,
        cores=64,
        gpus=gpus,
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


def needed_gib(config: RLConfig) -> float:
    _, needed = memory_plan(config, on_gpus=True).fullest(on_device=True)
    return needed / GIB


@pytest.mark.parametrize("gib", [44.0, 79.0, 139.0, 178.0])
def test_the_fastest_level_that_fits_is_taken(gib: float) -> None:
    settled = resolve(grpo(), facts(gib))
    assert needed_gib(settled) <= USED_SHARE * gib
    assert rule_violations(settled) == []

    # Each level before it would be too large, all else being the same.
    own = {key: settled_value(settled, key) for key in LEVEL_KEYS}
    for level in LEVELS:
        changes = level.changes(settled, LEVEL_KEYS)
        if changes == own:
            return
        assert needed_gib(with_changes(settled, changes)) > USED_SHARE * gib
    raise AssertionError(f"{own} is no level")


def settled_value(config: RLConfig, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


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
    # 256 rows on 8 replicas are 32 each, of 512 + 1024 tokens; blocks take 2 % more.
    tokens = 32 * 1536
    settled = resolve(grpo(), facts(139.0))
    expected = 1.02 * tokens * ROW_BYTES / GIB
    assert settled.rollout.kv_cache_gib == pytest.approx(expected, abs=0.01)


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
    assert "no setting changes that" in problem.fix


def test_what_is_set_stays_and_the_rest_fits_around_it() -> None:
    settled = resolve(grpo("rollout.kv_cache_gib=30"), facts(79.0))
    assert settled.rollout.kv_cache_gib == 30
    assert needed_gib(settled) <= USED_SHARE * 79

    whole = resolve(grpo("backend.accumulate=whole"), facts(79.0))
    assert settled_value(whole, "actor.backend.accumulate") == "whole"


def test_an_estimate_above_the_device_warns_with_the_cheapest_change() -> None:
    dear = (
        *FIXED_TYPES, "backend.accumulate=whole", "backend.activation_checkpointing=false",
        "backend.micro_batch_tokens_per_rank=8192", "rollout.kv_cache_gib=2", "placement.offload=all",
    )  # fmt: skip
    config = resolve(grpo(*dear), facts(79.0))
    assert [
        p for p in resource_problems(config, node(79.0)) if p.key == "model.path"
    ] == []
    warning = next(
        text for text in resource_warnings(config, node(79.0)) if "estimated" in text
    )
    assert warning.endswith("actor.backend.activation_checkpointing=true")

    # What is named does fit, and without it the run does not.
    changes = cheapest_change(config, 79 * GIB)
    assert changes == {"actor.backend.activation_checkpointing": True}
    assert needed_gib(with_changes(config, changes)) <= 79 < needed_gib(config)
    assert cheapest_change(config, 12 * GIB) is None


def test_several_changes_are_named_together_where_one_is_not_enough() -> None:
    dear = (
        *FIXED_TYPES, "backend.accumulate=whole", "backend.activation_checkpointing=false",
        "backend.micro_batch_tokens_per_rank=8192", "rollout.kv_cache_gib=20", "placement.offload=none",
    )  # fmt: skip
    config = resolve(grpo(*dear), facts(79.0))
    changes = cheapest_change(config, 40 * GIB)
    assert changes is not None and len(changes) > 1
    assert needed_gib(with_changes(config, changes)) <= 40
    # None of them can be left out.
    kinds = {key.rpartition(".")[2] for key in changes}
    for kind in kinds:
        fewer = {key: value for key, value in changes.items() if not key.endswith(kind)}
        assert needed_gib(with_changes(config, fewer)) > 40


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


def test_a_row_that_cannot_fit_is_refused_although_the_rest_is_estimated() -> None:
    # Activations of 131,072 tokens, recomputed: each layer keeps its input alone, of
    # 4096 numbers in bfloat16, 1 GiB per layer.
    longest = ("data.max_prompt_tokens=1024", "rollout.max_response_tokens=130048")
    settled = resolve(grpo(*longest), facts(79.0))
    plan = memory_plan(settled, on_gpus=True)
    _, certain = plan.fullest(on_device=True, certain=True)
    kept = 36 * 131_072 * 4096 * 2
    assert plan.by_role["actor"]["learn"].of("activations") > kept

    small = node((certain + kept // 3) / GIB)
    (problem,) = device_memory_problems(plan, settled, small)
    assert "one row of the greatest length take at least" in problem.rule
    large = node(needed_gib(settled))
    assert list(device_memory_problems(plan, settled, large)) == []
    assert list(device_memory_warnings(settled, large)) == []


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


def test_a_cache_that_is_slightly_too_large_becomes_slightly_smaller() -> None:
    changed = grpo(
        "rollout.kv_cache_gib=62", "backend.micro_batch_tokens_per_rank=4096"
    )
    config = resolve(changed, facts(79.0))
    needed = needed_gib(config)
    available = needed - 0.4
    changes = cheapest_change(config, int(available * GIB))
    assert changes is not None
    assert changes["rollout.kv_cache_gib"] == pytest.approx(61.6, abs=0.011)
    assert needed_gib(with_changes(config, changes)) <= available
