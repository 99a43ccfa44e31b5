"""Two steps of GRPO with a tiny model of a family, as a user runs them.

Invariant: every family has the same command, problems and rewards; what a family has of
its own stands in `SETTINGS`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.tiny_families import tiny_config
from verl_ray.data.arithmetic import ALPHABET, write_arithmetic
from verl_ray.data.tokenizers import character_tokenizer
from verl_ray.errors import ModelError
from verl_ray.proofs.cut_model import random_model
from verl_ray.tracking.jsonl import read_metrics

_SHARDED = ("backend=fsdp", "actor.num_ranks=2")

SETTINGS: dict[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": (),
    "mixtral": _SHARDED,
    "gemma3": ("actor.lora.rank=4", "actor.lora.targets=[q_proj,v_proj]"),
    "phi3": (),
    "olmo3": (),
    "glm4_moe": _SHARDED,
    "gpt_oss": (),
    "deepseek_v3": _SHARDED,
    "granitemoehybrid": (),
    "falcon_h1": (),
    "qwen3_next": ("rollout.dtype=bfloat16",),
}
"""Families, with what their runs set."""

_REWARD = '''"""A reward that models without training differ in."""


def digits(response, answer, /, **more):
    """The fraction of characters that are 1 or 2."""
    return sum(character in "12" for character in response) / 8
'''


def learn(family: str, folder: Path, *settings: str) -> list[dict[str, float]]:
    """Train a model of a family for two steps, and return the metrics of each.

    Args:
        family: One of `SETTINGS`.
        folder: An empty folder for the inputs of the run and what it writes.
        settings: Further settings of the run.

    Raises:
        ModelError: The run did not end after two steps.
    """
    random_model(tiny_config(family), seed=1).save_pretrained(folder / "model")
    character_tokenizer(folder / "model", ALPHABET)
    files = write_arithmetic(
        folder, max_operand=19, num_train=64, num_validation=16, seed=0
    )
    (folder / "reward.py").write_text(_REWARD)

    run = folder / "run"
    overrides = [
        *("train", "--config-name", "grpo"),
        f"run.dir={run}",
        f"model.path={folder / 'model'}",
        f"data.train_path={files.train.jsonl}",
        f"data.validation_path={files.validation.jsonl}",
        *("run.total_steps=2", "run.evaluate_every=0"),
        *("run.checkpoint_every=0", "run.save_at_end=false"),
        *("run.threads_per_rank=1", "tracking.wandb.mode=disabled"),
        f"reward.functions.default={folder / 'reward.py'}:digits",
        *("data.prompts_per_step=8", "data.max_prompt_tokens=8"),
        *("rollout.group_size=4", "rollout.max_response_tokens=6"),
        *("rollout.kv_cache_gib=0.03125", "actor.optimizer.lr=1e-4"),
        *SETTINGS[family],
        *settings,
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "controllers", *overrides],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    if "finished after 2 steps" not in ended.stdout:
        raise ModelError(f"{family} did not learn:\n{ended.stdout}{ended.stderr}")
    return list(read_metrics(run / "metrics.jsonl"))
