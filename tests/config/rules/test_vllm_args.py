"""The arguments that are passed on to vLLM, and the class of each."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.config.rules.cases import JUDGE, Case
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.config.vllm_args import (
    VLLM_ARGS_FIXED,
    VLLM_ARGS_FIXED_FOR_A_POLICY,
    VLLM_ARGS_FIXED_ON_A_CPU,
    VLLM_ARGS_OF_OTHER_KEYS,
    VLLM_ARGS_PROVEN,
    VLLM_ARGS_UNPROVEN,
    vllm_arguments,
)
from verl_ray.errors import ConfigError
from verl_ray.rollout.vllm_arguments import fixed_arguments

CASES = [
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.seed=1",
        "rollout.vllm_args.seed",
        "run.seed sets this argument",
        "set run.seed",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.logprobs_mode=raw_logprobs",
        "rollout.vllm_args.logprobs_mode",
        "may not change: the trainer compares",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.kv_sharing_fast_prefill=true",
        "rollout.vllm_args.kv_sharing_fast_prefill",
        "log-probs of prompts are wrong",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.scheduler_cls=own.Scheduler",
        "rollout.vllm_args.scheduler_cls",
        "vLLM's own scheduler",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "'rollout.vllm_args.kv_transfer_config={kv_role: kv_both}'",
        "rollout.vllm_args.kv_transfer_config",
        "what earlier weights computed",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.logits_processors=[own.penalty]",
        "rollout.vllm_args.logits_processors",
        "without penalties",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.override_generation_config.repetition_penalty=1.2",
        "rollout.vllm_args.override_generation_config",
        "rollout.temperature sets this argument",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.blok_size=32",
        "rollout.vllm_args.blok_size",
        "no such engine argument",
        "Did you mean block_size",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.zzz=32",
        "rollout.vllm_args.zzz",
        "no such engine argument",
        "vLLM's EngineArgs",
    ),
    Case(
        "vllm_args_are_free",
        f"{JUDGE} reward.engine.vllm_args.dtype=float16",
        "reward.engine.vllm_args.dtype",
        "reward.engine.dtype sets this argument",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        f"{JUDGE} reward.engine.vllm_args.max_model_len=64",
        "reward.engine.vllm_args.max_model_len",
        "reward.max_prompt_tokens sets this argument",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        f"{JUDGE} reward.engine.vllm_args.enable_sleep_mode=true",
        "reward.engine.vllm_args.enable_sleep_mode",
        "may not change: a judge shares its devices with nobody",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "'rollout.vllm_args.speculative_config={method: ngram, num_speculative_tokens: 3}'",
        "rollout.vllm_args.speculative_config",
        "depend on what was proposed, and so on the rows beside it",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.cpu_offload_gb=4",
        "rollout.vllm_args.cpu_offload_gb",
        "cannot reload weights that it has offloaded",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.hf_overrides.rope_theta=3",
        "rollout.vllm_args.hf_overrides",
        "compute what config.json says",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.enable_eplb=true",
        "rollout.vllm_args.enable_eplb",
        "experts that have moved",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.enable_mamba_cache_stochastic_rounding=true",
        "rollout.vllm_args.enable_mamba_cache_stochastic_rounding",
        "equal seeds",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        f"{JUDGE} reward.engine.vllm_args.kv_offloading_size=4",
        "reward.engine.vllm_args.kv_offloading_size",
        "what earlier weights computed",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.stream_interval=4",
        "rollout.vllm_args.stream_interval",
        "only vLLM's front-end reads it",
        "Leave it out",
    ),
    Case(
        "vllm_args_are_free",
        "rollout.vllm_args.num_gpu_blocks_override=40",
        "rollout.vllm_args.num_gpu_blocks_override",
        "rollout.kv_cache_gib sets this argument",
        "set rollout.kv_cache_gib",
    ),
]


def test_an_argument_of_the_installed_vllm_has_one_class() -> None:
    """A new one has to be looked at, and gets a class."""
    listed = [
        *VLLM_ARGS_OF_OTHER_KEYS,
        *VLLM_ARGS_FIXED,
        *VLLM_ARGS_FIXED_FOR_A_POLICY,
        *VLLM_ARGS_PROVEN,
        *VLLM_ARGS_UNPROVEN,
    ]
    assert len(set(listed)) == len(listed)
    assert set(listed) == set(vllm_arguments() or ())
    others = {*VLLM_ARGS_FIXED_FOR_A_POLICY, *VLLM_ARGS_PROVEN, *VLLM_ARGS_UNPROVEN}
    assert VLLM_ARGS_FIXED_ON_A_CPU.keys() <= others


def test_an_argument_is_one_of_the_installed_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "vllm" / "engine" / "arg_utils.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    file.write_text(
        "class EngineArgs:\n    block_size: int = 1\n    new_one: int = 2\n    _own: int = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    vllm_arguments.cache_clear()
    try:
        assert vllm_arguments() == ("block_size", "new_one")
        compose("quickstart", ["rollout.vllm_args.new_one=1"])
        with pytest.raises(ConfigError, match=r"the installed vLLM has no such"):
            compose("quickstart", ["rollout.vllm_args.enforce_eager=true"])
    finally:
        vllm_arguments.cache_clear()


def test_the_rules_know_the_arguments_that_the_engine_fixes() -> None:
    config = compose("quickstart", ["rollout.dtype=float32"])
    assert isinstance(config, RLConfig)
    cpu, gpu = (
        fixed_arguments(
            "/m", config.rollout, 24, 0, device, without_weights=True, sleeps=True
        ).keys()
        for device in ("cpu", "cuda")
    )
    everywhere = VLLM_ARGS_OF_OTHER_KEYS.keys() | VLLM_ARGS_FIXED.keys()
    assert cpu - everywhere <= VLLM_ARGS_FIXED_ON_A_CPU.keys()
    assert gpu <= everywhere


@pytest.mark.vllm
def test_the_names_of_the_engine_arguments_are_current() -> None:
    from vllm.engine.arg_utils import EngineArgs

    names = [field.name for field in dataclasses.fields(EngineArgs)]
    assert list(vllm_arguments() or ()) == [
        name for name in names if not name.startswith("_")
    ]
