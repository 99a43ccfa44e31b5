"""Configurations for preflight, and its findings in a form that tests compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from scripts.configuration import compose
from tests.preflight.published import published
from verl_ray.config.load import with_changes
from verl_ray.config.schema import Config
from verl_ray.preflight.facts import facts_here, facts_of
from verl_ray.preflight.findings import Findings
from verl_ray.preflight.machine import GIB, Machine, parse_machine
from verl_ray.preflight.memory_plan import Job, MemoryPlan, memory_plan
from verl_ray.preflight.resolve import resolutions, resolve

C = TypeVar("C", bound=Config)

# These rewards do not measure the accuracy that the gain is about.
NO_GAIN = "prepare.min_gain=0"
BIG = Machine(cores=64, gpus=0, memory_bytes=512 * GIB, shm_free_bytes=64 * GIB)


def ppo(model: Path, data: Path, *overrides: str) -> Config:
    inputs = [
        f"model.path={model}",
        f"data.train_path={data}/train.jsonl",
        f"data.validation_path={data}/test.jsonl",
    ]
    return compose("ppo", [*inputs, *overrides])


def with_judge(model: Path, data: Path, judge: Path, *overrides: str) -> Config:
    sizes = ["reward.max_prompt_tokens=1024", "reward.max_response_tokens=512"]
    return ppo(
        model, data, "reward=judge", f"reward.model.path={judge}", *sizes, *overrides
    )


def distilling(
    teacher: str = "null", decay: str = "null", *, top_k: int = 8, longest: int = 9
) -> list[str]:
    """Return the overrides of a run that learns from a teacher with its own prompts."""
    prompts = Path(__file__).parents[1] / "config/rules/teacher_prompt_file.py"
    section = (
        f"divergence: jsd, weight: 1, top_k: {top_k}, beta: null, teacher: {teacher},"
        f" average_decay: {decay}, teacher_prompt: '{prompts}:hint',"
        f" max_prompt_tokens: {longest}"
    )
    return ["algorithm=distill", f"distill={{{section}}}"]


def settled(config: C, *, gpus: int = 0) -> C:
    """Return the configuration as it is resolved on a machine with four cores.

    Types and sizes are those of a CPU on GPUs, too, so that they can be calculated by
    hand.
    """
    on_cpu = facts_of(config, cores=[4], gpus=[0], checkpoint=None)
    sizes = {
        resolution.key: resolution.value
        for resolution in resolutions(config, on_cpu)
        if not resolution.key.startswith(("run.", "data.", "placement.", "rollout.s"))
    }
    return resolve(with_changes(config, sizes), replace(on_cpu, gpus=gpus))


def planned(config: Config, *, on_gpus: bool) -> MemoryPlan:
    """Return the memory plan of a configuration on one machine."""
    return memory_plan(settled(config, gpus=8 if on_gpus else 0), on_gpus=on_gpus)


def problems_by_key(findings: Findings) -> dict[str, str]:
    return {
        problem.key: f"{problem.rule} | {problem.fix}" for problem in findings.problems
    }


def job_on(
    machine: str, *overrides: str, root: str = "grpo", model: str = "Qwen3-8B"
) -> Job:
    """Return a run of a published model on a described machine, resolved for it."""
    inputs = [
        f"model.path={published(model)}",
        "data.train_path=/train.jsonl",
        "data.validation_path=null",
        "run.evaluate_every=0",
    ]
    config = compose(root, [*inputs, *overrides])
    where = parse_machine(machine)
    return Job(resolve(config, facts_here(config, where)), where)
