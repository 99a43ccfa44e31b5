"""The kinds of runs there are."""

from __future__ import annotations

from typing import Any

from controllers.trainers.base import Task
from controllers.trainers.reinforcement import ReinforcementTask
from controllers.trainers.reward_model import RewardModelTask
from controllers.trainers.sft import SFTTask
from verl_ray.config.schema import Config
from verl_ray.lazy import Lazy

TASKS: dict[str, type[Task[Any]]] = {"rl": ReinforcementTask, "sft": SFTTask, "reward_model": RewardModelTask}
"""By the key `task` of a root config; a task that is not here is named there by its address, `module:Class`."""


def task_of(config: Config) -> Task[Any]:
    """The task of this run."""
    kind: type[Task[Any]] = TASKS.get(config.task) or Lazy(config.task).target
    return kind(config)
