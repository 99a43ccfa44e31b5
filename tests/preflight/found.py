"""Configurations over inputs that nobody reads in full, and what preflight finds of them."""

from __future__ import annotations

from pathlib import Path

from controllers.compose.composition import compose
from verl_ray.config.schema import Config
from verl_ray.preflight.findings import Findings
from verl_ray.preflight.machine import GIB, Machine

NO_GAIN = "prepare.min_gain=0"  # of an accuracy that these rewards do not measure
BIG = Machine(cores=64, gpus=0, memory_bytes=512 * GIB, shm_free_bytes=64 * GIB)


def ppo(model: Path, data: Path, *overrides: str) -> Config:
    inputs = [f"model.path={model}", f"data.train_path={data}/train.jsonl", f"data.validation_path={data}/test.jsonl"]
    return compose("ppo", [*inputs, *overrides])


def judged(model: Path, data: Path, judge: Path, *overrides: str) -> Config:
    sizes = ["reward.max_prompt_tokens=1024", "reward.max_response_tokens=512"]
    return ppo(model, data, "reward=judge", f"reward.model.path={judge}", *sizes, *overrides)


def found(findings: Findings) -> dict[str, str]:
    return {problem.key: f"{problem.rule} | {problem.fix}" for problem in findings.problems}
