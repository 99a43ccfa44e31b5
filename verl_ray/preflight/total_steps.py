"""The number of steps that run.total_epochs becomes, once the data are counted.

Invariant: every example is used at least as often as the setting says. Deliberately not
here: settings that are `auto` (`resolve.py`).
"""

from __future__ import annotations

from typing import TypeVar

from verl_ray.config.schema import Config
from verl_ray.preflight.resolve import Resolution

C = TypeVar("C", bound=Config)


def with_total_steps(config: C, num_examples: int) -> C:
    """Return the configuration with run.total_epochs replaced by run.total_steps.

    A configuration with a number of steps stays as it is.

    Args:
        config: Configuration of the run.
        num_examples: Number of examples that the data cursor leads to.
    """
    resolution = resolution_of_steps(config, num_examples)
    if resolution is None:
        return config

    steps = {"total_steps": resolution.value, "total_epochs": None}
    run = config.run.model_copy(update=steps)
    return config.model_copy(update={"run": run})


def resolution_of_steps(config: Config, num_examples: int) -> Resolution | None:
    """Return what run.total_steps becomes, and why; None if it is a number.

    The cursor does not drop the tail of an epoch, so only the last step is rounded up.

    Args:
        config: Configuration of the run.
        num_examples: Number of examples that the data cursor leads to.
    """
    epochs = config.run.total_epochs
    if config.run.total_steps is not None or epochs is None:
        return None

    per_step = config.examples_per_step
    drawn = epochs * num_examples
    # Divide and round up.
    steps = -(-drawn // per_step)

    because = (
        f"run.total_epochs={epochs} x {num_examples} examples / {per_step} per step"
    )
    if drawn % per_step:
        because += (
            f" is {drawn / per_step:.1f}, rounded up so that each is used at least"
            f" {_times(epochs)}"
        )
    return Resolution("run.total_steps", steps, because)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
