"""Settings that follow from the memory of a GPU: Qwen3-8B, of 8.19 billion parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.configuration import compose
from verl_ray.config.load import with_changes
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.facts import ClusterFacts
from verl_ray.preflight.findings import preflight
from verl_ray.preflight.machine import GIB, Machine
from verl_ray.preflight.memory_plan import USED_SHARE, memory_plan
from verl_ray.preflight.resolve import resolutions, resolve
from verl_ray.preflight.resources import resource_problems
from verl_ray.settings.section import resolved

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


def below(config: RLConfig, **changes: object) -> Config:
    """Return a resolved configuration of the actor with less saved."""
    keys = {f"actor.backend.{name}": value for name, value in changes.items()}
    return with_changes(config, keys)


# The rungs while models learn: micro-batches down to 4096 tokens, sums of gradients in
# shards, layers computed again, micro-batches of 2048.


def test_what_learns_climbs_no_further_than_it_must() -> None:
    """Of 71.1 GiB, which are nine tenths of 79."""
    settled = resolve(grpo(), facts(79.0))
    actor = settled.actor.backend
    assert (actor.micro_batch_tokens_per_rank, actor.activation_checkpointing) == (
        4096,
        False,
    )
    assert settled_value(settled, "actor.backend.accumulate") == "sharded"
    assert needed_gib(settled) <= 71.1
    # Without the last rung, and with larger micro-batches beside it.
    assert needed_gib(below(settled, accumulate="whole")) > 71.1
    assert needed_gib(below(settled, micro_batch_tokens_per_rank=8192)) > 71.1

    # On smaller GPUs no micro-batch of 4096 tokens fits, until layers are computed again,
    # which leaves room for larger ones.
    small = resolve(grpo(), facts(44.0))
    assert small.actor.backend.activation_checkpointing is True
    assert small.actor.backend.micro_batch_tokens_per_rank == 8192
    kept = below(
        small, activation_checkpointing=False, micro_batch_tokens_per_rank=4096
    )
    assert needed_gib(kept) > USED_SHARE * 44
    larger = below(small, micro_batch_tokens_per_rank=16384)
    assert needed_gib(larger) > USED_SHARE * 44


def test_state_leaves_for_half_of_the_rows_of_a_step() -> None:
    """16 rows of 8704 tokens are 19.1 GiB, and 32 are 38.2, in blocks 2 % more."""
    long = "rollout.max_response_tokens=8192"
    half_gib = 1.02 * 16 * 8704 * ROW_BYTES / GIB
    for gib, offload in ((79.0, "none"), (50.0, "optimizer"), (44.0, "all")):
        settled = resolve(grpo(long), facts(gib))
        assert settled.placement.offload == offload
        cache = resolved(settled.rollout.kv_cache_gib)
        assert needed_gib(settled) <= USED_SHARE * gib
        if offload != "none":
            # Less would leave too little for half of the rows.
            fewer = {"optimizer": "none", "all": "optimizer"}[offload]
            changes: dict[str, object] = {"placement.offload": fewer}
            wanted = {"rollout.kv_cache_gib": min(cache, half_gib)}
            assert (
                needed_gib(with_changes(settled, changes | wanted)) > USED_SHARE * gib
            )
    # Engines with GPUs of their own leave the trainers theirs.
    apart = grpo(long, "placement=separate", ranks=2)
    assert resolve(apart, facts(79.0)).placement.offload == "none"
    # Evaluations have more rows, for which no state leaves in every step.
    held_out = ("data.validation_path=/v.jsonl", "run.evaluate_every=5")
    assert resolve(grpo(long, *held_out), facts(79.0)).placement.offload == "none"


def test_tasks_without_rollouts_climb_too() -> None:
    inputs = ["data.train_path=/t.jsonl", "data.validation_path=/v.jsonl"]
    sizes = ["actor.num_ranks=16", "sft.batch_size=256", "sft.max_tokens=2048"]
    model = ["backend=fsdp", f"model.path={MODELS}/Qwen3-8B"]
    config = compose("sft", [*inputs, *sizes, *model])
    settled = resolve(config, facts(79.0, nodes=2))
    assert needed_gib(settled) <= USED_SHARE * 79
    backend = settled.model_roles["actor"].backend
    assert backend.micro_batch_tokens_per_rank == 4096


def test_each_value_says_why() -> None:
    settled = resolutions(grpo(), facts(79.0))
    reasons = {item.key: item.because for item in settled}
    to_fit = "to fit 71.1 GiB of a GPU"
    # With micro-batches of 4096 tokens and whole sums.
    config = resolve(grpo(), facts(79.0))
    whole = needed_gib(below(config, accumulate="whole"))
    assert reasons["actor.backend.accumulate"] == (
        f"else learn needs {whole:.1f}, {to_fit}"
    )
    assert reasons["placement.offload"] == f"nothing has to be saved {to_fit}"
    assert reasons["reference.backend.micro_batch_tokens_per_rank"] == (
        f"the most beside all else {to_fit}"
    )


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
    # bfloat16 weights of 8.19 billion parameters alone take 15.3 GiB, or 1.9 of each
    # GPU where eight share them.
    settled = resolve(grpo(), facts(3.0))
    reasons = {item.because for item in resolutions(grpo(), facts(3.0))}
    assert "nothing fits the 3 GiB of a GPU, and this needs least" in reasons
    (problem,) = (
        problem
        for problem in resource_problems(settled, node(3.0))
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
