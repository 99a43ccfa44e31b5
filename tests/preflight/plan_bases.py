"""Configurations and machines that plans begin with."""

from __future__ import annotations

from pathlib import Path

from controllers.compose.composition import examine
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.machine import Machine, parse_machine
from verl_ray.preflight.plan_candidates import PLANNED_BACKENDS

MODELS = Path(__file__).parents[1] / "model_configs"


def machine(text: str) -> Machine:
    return parse_machine(text)


def bases(model: str, *overrides: str, root: str = "grpo") -> dict[str, RLConfig]:
    """The configuration of a model by its backend; micro-batches may be too small."""
    configs = {}
    for kind in PLANNED_BACKENDS:
        words = [
            f"model.path={MODELS / model}", "data.train_path=train.jsonl", "data.validation_path=null",
            "run.evaluate_every=0", f"backend={kind}", *overrides,
        ]  # fmt: skip
        config = examine(root, words).config
        assert isinstance(config, RLConfig)
        configs[kind] = config
    return configs
