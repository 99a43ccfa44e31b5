"""What remains of a GPU where an evaluation leaves out what learns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.preflight.test_device_defaults import MODELS, facts, grpo
from verl_ray.preflight.device_defaults import CPU_KV_CACHE_GIB
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import USED_SHARE, memory_plan
from verl_ray.preflight.resolve import resolutions, resolve


def test_an_evaluation_fits_where_training_does_not() -> None:
    one = replace(facts(79.0), gpus=1)
    config = grpo(ranks=1)
    learning = {item.because for item in resolutions(config, one)}
    assert "nothing fits the 79 GiB of a GPU, and this needs least" in learning

    settled = resolve(config, replace(one, learns=False))
    plan = memory_plan(settled, on_gpus=True, learns=False)
    actor, rollout = (plan.by_role[name]["generate"] for name in ("actor", "rollout"))
    # Beside them half of 256 rows would not fit, so they leave.
    assert settled.placement.offload == "all"
    assert actor.on_host["weights"] == 4 * 8_190_735_360
    assert rollout.persistent["weights"] == 2 * 8_190_735_360
    # The cache takes what is left of nine tenths, to a hundredth of a GiB.
    _, needed = plan.fullest(on_device=True)
    assert needed / GIB == pytest.approx(USED_SHARE * 79, abs=0.011)


def test_the_cache_of_a_judge_that_is_idle_does_not_matter() -> None:
    judge = ("reward=judge", f"reward.model.path={MODELS}/Qwen3-8B")
    own = ("evaluation.functions={default: exact_match}", "rollout.kv_cache_gib=3")
    held_out = ("data.validation_path=/v.jsonl", "run.evaluate_every=1")
    config = grpo(*judge, *own, *held_out, "reward.engine.kv_cache_gib=auto")
    settled = resolve(config, replace(facts(79.0), learns=False))
    assert settled.engines["reward"].config.kv_cache_gib == CPU_KV_CACHE_GIB
    assert "reward" not in memory_plan(settled, on_gpus=True, learns=False).by_role
