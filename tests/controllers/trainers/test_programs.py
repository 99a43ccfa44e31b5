"""Whole runs that learn from agents which are programs of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.agents.templates import PRESERVING, tokenizer_with
from tests.controllers.runs import Inputs, command_here, lasting
from tests.controllers.trainers.test_agents import TEMPLATE, lines_of, recorded
from verl_ray.cluster.session import Session
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.models.tiny import make_tiny_qwen3

pytestmark = [pytest.mark.cluster, pytest.mark.processes]

PROGRAMS = Path(__file__).parents[2] / "agents" / "gateway" / "programs"
TWO_TURNS = PROGRAMS / "two_turns.py"


def train(
    cluster: Session, inputs: Inputs, run_dir: Path, agent: str, *changes: str
) -> list[dict[str, Any]]:
    """The metrics of a run of four steps on an agent of two turns."""
    template = run_dir.with_suffix(".jinja")
    template.write_text(TEMPLATE)
    command_here(
        cluster, "train", "--config-name", "grpo", *inputs.rl(run_dir), "rollout.max_response_tokens=24",
        f"agent.environments.default={agent}", "reward.functions.default=environment",
        "agent.max_turn_tokens=6", f"data.chat_template={template}", "run.total_steps=3", *changes,
    )  # fmt: skip
    return lines_of(run_dir)


@pytest.mark.parametrize(
    "schedule",
    [
        "synchronous",
        pytest.param("one_step_off", marks=pytest.mark.slow),
    ],
)
def test_a_command_and_a_function_of_the_same_words_have_the_same_bits(
    cluster: Session, inputs: Inputs, tmp_path: Path, schedule: str
) -> None:
    """Over two protocols, and paid in two ways."""
    changes = [f"schedule={schedule}", "tracking.rollouts=all", "algorithm.kl=none"]
    if schedule == "one_step_off":
        changes.append("placement=separate")
    function = train(
        cluster, inputs, tmp_path / "function",
        f"{{function: {TWO_TURNS}:run, client: openai}}", *changes,
    )  # fmt: skip
    command = train(
        cluster, inputs, tmp_path / "command",
        f"{{command: python {TWO_TURNS}, reward: stdout}}", *changes,
    )  # fmt: skip
    for metrics, same in zip(function, command, strict=True):
        assert lasting(same) == lasting(metrics)
        assert metrics["episode/ends/completed"] == 1
        assert metrics["num_turns/mean"] == 4
    # The first step learns from what the same policy has sampled.
    assert function[0]["training/rollout_probs_diff_max"] < 1e-5
    assert function[-1]["critic/score/mean"] > function[0]["critic/score/mean"]

    # What it has printed is kept beside its last row; its last line is the score.
    rows = recorded(tmp_path / "command", 3)
    printed = [row for row in rows if row["output"]]
    assert len(printed) == len({row["trajectory"] for row in rows}) == 32
    for row in printed:
        ((_, score),) = row["scores"]
        _, first, second, last = row["output"].strip().splitlines()
        assert float(last) == pytest.approx(score, abs=1e-6)
        assert first.startswith("turn 0: ") and second.startswith("turn 1: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "reward"), [("by_openai_agents", "stdout"), ("by_smolagents", "post")]
)
def test_agents_of_frameworks_take_two_exact_steps(
    cluster: Session, inputs: Inputs, tmp_path: Path, program: str, reward: str
) -> None:
    tokenizer = Path(tokenizer_with(PRESERVING).name_or_path)
    shape = TinyModelConfig(
        hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_size=32, intermediate_size=48,
        tie_embeddings=False,
    )  # fmt: skip
    model = make_tiny_qwen3(tmp_path / "model", tokenizer, shape, seed=0)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 1 << 15})
    )
    policy = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        # At about half of all places the turn ends.
        policy.lm_head.weight[tokenizer_with(PRESERVING).eos_token_id] *= 8
    policy.save_pretrained(model)
    run_dir = tmp_path / "run"
    command_here(
        cluster, "train", "--config-name", "grpo", *inputs.rl(run_dir), f"model.path={model}",
        "data.prompts_per_step=2", "rollout.group_size=2", "rollout.max_response_tokens=16000",
        f"agent.environments.default={{command: python {PROGRAMS / program}.py, reward: {reward}}}",
        "reward.functions.default=environment", "agent.max_turn_tokens=32", "agent.tool_parser=hermes",
        "rollout.kv_cache_gib=0.25", "run.total_steps=2", "data.apply_chat_template=true", "data.max_prompt_tokens=64",
    )  # fmt: skip
    for metrics in lines_of(run_dir):
        assert metrics["episode/ends/completed"] == 1
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
