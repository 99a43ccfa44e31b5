"""Data sets in the schemas of other systems train, unchanged, with rewards as there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.controllers.runs import Inputs, command_here
from tests.data.original_schemas import write_schema
from verl_ray.cluster.session import Session
from verl_ray.config.preparation import TinyModelConfig
from verl_ray.data.tokenizers import CHATML, train_bpe
from verl_ray.models.tiny import make_tiny_qwen3

pytestmark = [pytest.mark.cluster, pytest.mark.vllm, pytest.mark.slow]

RUNS = {
    "verl_rl": "grpo",
    "trl_solution": "grpo",
    "gsm8k": "grpo",
    "verl_sft_messages": "sft",
    "trl_prompt_completion_messages": "sft",
    "alpaca": "sft",
    "sharegpt": "sft",
    "text": "sft",
    "trl_preference": "reward_model",
    "trl_implicit_messages": "reward_model",
    "hh_rlhf": "reward_model",
}
"""Schema -> the run that learns from it."""

REWARDS = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info["question"]) == ("openai/gsm8k", f"{int(ground_truth) - 1}+1=")
    right = solution_str.strip() == ground_truth
    return {"score": len(solution_str), "acc": right, "index": extra_info["index"]}


def lengths(prompts, completions, solution, **columns):
    assert len({prompt[0]["content"] for prompt in prompts}) == len(set(solution)) == 1
    return [float(len(message["content"])) for (message,) in completions]


async def short(response, answer, num_tokens, finish_reason, step):
    assert finish_reason in ("stop", "length") and answer.isdigit()
    return {"score": 1 / num_tokens, "step": step}
"""

FUNCTIONS = {"verl_rl": "compute_score", "trl_solution": "lengths", "gsm8k": "short"}


@pytest.fixture(scope="module")
def chat_inputs(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("chat")
    train_bpe(folder / "tokenizer", ["1+1="], 300, CHATML)
    shape = TinyModelConfig(
        hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=96,
        tie_embeddings=True,
    )  # fmt: skip
    model = make_tiny_qwen3(folder / "model", folder / "tokenizer", shape, seed=0)
    return replace(inputs, model=model)


@pytest.mark.parametrize("name", RUNS)
def test_two_steps(
    name: str, chat_inputs: Inputs, tmp_path: Path, cluster: Session
) -> None:
    path = write_schema(name, tmp_path / "data")
    run_dir = tmp_path / "run"
    inputs = replace(chat_inputs, train=path, validation=path)
    overrides = inputs.overrides(run_dir)
    if RUNS[name] == "grpo":
        (tmp_path / "rewards.py").write_text(REWARDS)
        function = f"{tmp_path}/rewards.py:{FUNCTIONS[name]}"
        overrides = [
            *(text for text in inputs.rl(run_dir) if not text.startswith("reward.functions")),
            f"reward.functions={{default: {function}}}", "data.max_prompt_tokens=32",
        ]  # fmt: skip
    if RUNS[name] == "sft":
        overrides += ["sft.batch_size=4", "sft.max_tokens=64"]
    if RUNS[name] == "reward_model":
        overrides = [text.replace("actor.", "reward.") for text in overrides]
        overrides += ["preference.batch_size=4", "preference.max_tokens=64"]

    ended = command_here(
        cluster, "train", "--config-name", RUNS[name], *overrides, "run.total_steps=2",
    )  # fmt: skip
    # Two of them have our own names.
    is_ours = name in ("verl_sft_messages", "trl_preference")
    assert is_ours or "data.train_path read as " in ended.stderr
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert [step["training/global_step"] for step in steps] == [1, 2]
    if name == "verl_rl":
        assert all(0 <= step["reward/acc/mean"] <= 1 for step in steps)
        assert all(1 <= step["reward/index/mean"] <= 12 for step in steps)
    if name == "gsm8k":
        assert [step["reward/step/mean"] for step in steps] == [1, 2]
