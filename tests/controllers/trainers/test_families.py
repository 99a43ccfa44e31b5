"""Families that no list names learn in whole runs, and vLLM samples from what they learn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.tiny_families import tiny_config
from tests.controllers.runs import Inputs, command
from verl_ray.data.arithmetic import ALPHABET
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.proofs.cut_model import random_model
from verl_ray.tracking.jsonl import read_metrics


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("family", "settings", "rounding"),
    [
        ("mixtral", ["backend=fsdp", "actor.num_ranks=2"], 1e-3),
        (
            "gemma3",
            ["actor.lora.rank=4", "actor.lora.targets=[q_proj,v_proj]"],
            1e-3,
        ),
        ("gpt_oss", [], 1e-3),
        ("granitemoehybrid", [], 1e-3),
        # vLLM computes gated delta nets on a CPU in bfloat16 alone.
        ("qwen3_next", ["rollout.dtype=bfloat16"], 1.0),
    ],
)
def test_two_steps_are_learned_and_every_sync_is_verified(
    inputs: Inputs, tmp_path: Path, family: str, settings: list[str], rounding: float
) -> None:
    model = tmp_path / family
    random_model(tiny_config(family), seed=1).save_pretrained(model)
    character_tokenizer(model, ALPHABET)
    run = tmp_path / "run"
    ended = command(
        None, "train", "--config-name", "grpo", *replace(inputs, model=model).rl(run),
        "run.total_steps=2", *settings,
    )  # fmt: skip
    assert "finished after 2 steps" in ended.stdout
    for line in read_metrics(run / "metrics.jsonl"):
        assert line["weight_sync/probe_difference"] < rounding
        assert line["actor/grad_norm"] > 0
