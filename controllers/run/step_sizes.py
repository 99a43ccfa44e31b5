"""The courses of learning rates in a run whose steps get another number of updates.

Invariant: the learning rate of a training step does not depend on how many updates the
other steps have. Without such a change a rate follows the optimizer's own counter.
"""

from __future__ import annotations

from typing import Any

from verl_ray.checkpoint.manifest import Checkpoint
from verl_ray.config.load import with_changes
from verl_ray.config.optimizers import Pace
from verl_ray.config.renamed import migrated
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig

_SIZES = (
    "data.prompts_per_step",
    "rollout.group_size",
    "actor.mini_batch_size",
    "critic.mini_batch_size",
)


def with_paces(config: Config, checkpoint: Checkpoint | None) -> Config:
    """Return the configuration with the pace of each role whose steps have changed.

    Args:
        config: Resolved configuration.
        checkpoint: What the run goes on from; None where it begins.
    """
    paces: dict[str, Pace] = {}
    if checkpoint is not None and isinstance(config, RLConfig):
        saved = migrated(checkpoint.config)
        done = {key: _value(saved, key) for key in _SIZES}
        done["run.total_steps"] = checkpoint.step
        earlier = with_changes(config, done)
        recorded = with_changes(config, {"run.paces": saved["run"]["paces"]}).run.paces
        for role in config.learners:
            steps = max(earlier.learning_steps(role), 0)
            before = recorded.get(role) or Pace(
                began_with=_updates(earlier, role),
                now=_updates(earlier, role),
                steps=0,
                updates=0,
            )
            pace = before.changed(_updates(config, role), steps)
            if pace.now != pace.began_with or pace.steps:
                paces[role] = pace
    return with_changes(config, {"run.paces": paces})


def _updates(config: RLConfig, role: str) -> int:
    """Return the optimizer steps of a training step of a role that learns."""
    return config.learners[role].updates_per_step(config.rows_per_step)


def _value(tree: Any, key: str) -> Any:
    """Return the value of a dotted key of a tree."""
    for part in key.split("."):
        tree = tree[part]
    return tree
