"""Learning rate as a pure function of the optimizer steps taken, so that a checkpoint holds a number, not an object."""

from __future__ import annotations

import math

from verl_ray.config.roles import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of the optimizer step that follows `step` finished ones.

    Linear warm-up over `warmup_steps` (the first step already learns), then constant, or a cosine to
    `min_lr_fraction * lr` at `total_steps`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    floor = config.min_lr_fraction
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
