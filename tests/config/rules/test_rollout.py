"""Sampling, weight syncs, endpoints, and the arguments that are passed on to vLLM."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.config.rules.cases import JUDGE, Case
from verl_ray.config.rollout import (
    VLLM_ARGS_FIXED,
    VLLM_ARGS_FIXED_ON_A_CPU,
    VLLM_ARGS_OF_OTHER_KEYS,
    vllm_arguments,
)
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError
from verl_ray.rollout.vllm_arguments import fixed_arguments

CASES = [
    Case(
        "sampling_is_what_the_trainer_sees",
        "rollout.temperature=0",
        "rollout.temperature",
        "sampled",
        "Use 1.0",
    ),
    Case(
        "sampling_is_what_the_trainer_sees",
        "rollout.top_p=0.9",
        "rollout.top_p",
        "whole vocabulary",
        "Use 1.0",
    ),
    Case(
        "sampling_is_what_the_trainer_sees",
        "rollout.top_k=50",
        "rollout.top_k",
        "whole vocabulary",
        "Use -1",
    ),
    Case(
        "sampling_is_what_the_trainer_sees",
        "'rollout.vllm_args.speculative_config={method: ngram, rejection_sample_method: synthetic}'",
        "rollout.vllm_args.speculative_config.rejection_sample_method",
        "tokens that the model would not",
        "Use standard",
    ),
    Case(
        "temperature_is_not_too_low",
        "rollout.temperature=0.001",
        "rollout.temperature",
        "of 0.01",
        "at least 0.01.",
    ),
    Case(
        "temperature_is_not_too_low",
        "prepare.min_gain=0 evaluation.temperature=0.001",
        "evaluation.temperature",
        "vLLM samples from a temperature of 0.01",
        "or 0 for greedy",
    ),
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
        "adapters_can_be_sent_alone",
        "rollout.sync.adapter=merged",
        "rollout.sync.adapter",
        "with actor.lora.rank=0 there is no adapter",
        "Leave it out",
    ),
    Case(
        "adapters_can_be_sent_alone",
        "rollout.sync.adapter=alone actor.lora.rank=8 rollout.sleep=weights",
        "rollout.sync.adapter",
        "sleep=weights frees the model that the adapter is for",
        "rollout.sleep=kv_cache",
    ),
    Case(
        "adapters_can_be_sent_alone",
        "rollout.sync.adapter=alone actor.lora.rank=513",
        "rollout.sync.adapter",
        "adapters up to rank 512",
        "Use merged",
    ),
    Case(
        "adapters_can_be_sent_alone",
        "rollout.sync.adapter=alone actor.lora.rank=8 actor.lora.targets=[q_proj,lm_head]",
        "rollout.sync.adapter",
        "with an adapter on lm_head",
        "take lm_head from actor.lora.targets",
    ),
    Case(
        "transport_fits_the_placement",
        "rollout.sync.delta=true",
        "rollout.sync.delta",
        "auto may be memory",
        "broadcast",
    ),
    Case(
        "transport_fits_the_placement",
        "rollout.sync.delta=true rollout.sync.transport=cuda_ipc",
        "rollout.sync.delta",
        "cuda_ipc is memory that both sides see",
        "Use false",
    ),
    Case(
        "transport_fits_the_placement",
        "rollout.sync.folder=/shared",
        "rollout.sync.folder",
        "rollout.sync.transport=auto has no files",
        "Leave it out",
    ),
    Case(
        "transport_fits_the_placement",
        "rollout.sync.transport=cuda_ipc placement=separate",
        "rollout.sync.transport",
        "placement=separate gives each role its own",
        "placement=colocated",
    ),
    Case(
        "transport_fits_the_placement",
        "rollout.sync.transport=cuda_ipc rollout.num_replicas=2",
        "rollout.sync.transport",
        "rollout.num_replicas=2 are more than actor.num_ranks=1",
        "as many ranks",
    ),
    Case(
        "experts_have_ranks",
        "rollout.expert_parallel=true",
        "rollout.expert_parallel",
        "rollout.tensor_parallel is 1",
        "Use false",
    ),
    Case(
        "endpoint_settings_are_used",
        "rollout.endpoint.port=9000",
        "rollout.endpoint.port",
        "rollout.endpoint.enabled=false",
        "or set rollout.endpoint.enabled=true",
    ),
    Case(
        "endpoints_have_an_address",
        "rollout.endpoint.enabled=true rollout.endpoint.host=localhost",
        "rollout.endpoint.host",
        "no address to listen on",
        "127.0.0.1",
    ),
    Case(
        "endpoints_have_an_address",
        "rollout.endpoint.enabled=true rollout.endpoint.port=65534 rollout.num_replicas=3",
        "rollout.endpoint.port",
        "each of 3 replicas has the port behind the one before",
        "at most 65533",
    ),
]


@pytest.mark.parametrize("wire", ["broadcast", "disk"])
def test_changes_alone_travel_where_wires_are_slow(wire: str) -> None:
    config = compose(
        "quickstart", [f"rollout.sync.transport={wire}", "rollout.sync.delta=true"]
    )
    assert isinstance(config, RLConfig)
    assert config.rollout.sync.delta
    assert config.rollout.sync.folder == f"{config.run.dir}/weight_sync"


def test_an_engine_argument_is_listed_once_and_exists() -> None:
    listed = [*VLLM_ARGS_OF_OTHER_KEYS, *VLLM_ARGS_FIXED, *VLLM_ARGS_FIXED_ON_A_CPU]
    assert len(set(listed)) == len(listed)
    assert set(listed) <= set(vllm_arguments() or ())


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
    assert cpu - everywhere == VLLM_ARGS_FIXED_ON_A_CPU.keys()
    assert gpu <= everywhere


@pytest.mark.vllm
def test_the_names_of_the_engine_arguments_are_current() -> None:
    from vllm.engine.arg_utils import EngineArgs

    names = [field.name for field in dataclasses.fields(EngineArgs)]
    assert list(vllm_arguments() or ()) == [
        name for name in names if not name.startswith("_")
    ]
