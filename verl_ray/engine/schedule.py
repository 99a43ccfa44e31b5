"""The learning-rate schedule.

Invariant: the learning rate is a pure function of the number of optimizer steps taken,
so a checkpoint stores a number and no scheduler object.
"""

from __future__ import annotations

import math

from verl_ray.config.roles import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of the optimizer step after `step` finished ones.

    The rate rises linearly over `warmup_steps`; the first step already has a rate above
    0. It then stays constant, or follows a cosine to `min_lr_fraction * lr` at
    `total_steps`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr

    span = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    floor = config.min_lr_fraction
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
