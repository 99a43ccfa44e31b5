"""Sizes of copies of a model's state: the weights that are sent, and the snapshots.

Invariant: a pure function of the configuration and the models' directories.
Deliberately not here: which memory a copy takes in which phase (`role_memory.py`).
"""

from __future__ import annotations

from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.section import resolved
from verl_ray.preflight.footprints import trained_parameters
from verl_ray.preflight.model_sizes import model_size
from verl_ray.weight_sync import SLOTS


def sent_width(config: RolloutTaskConfig) -> int:
    """Return the bytes of a weight as it is sent to the rollout engines.

    It is sent in the type of the trainer or of the engines, whichever is narrower.
    """
    if resolved(config.rollout.dtype) == "bfloat16":
        return 2
    return config.actor.backend.sent_width


def sent_bytes(config: RolloutTaskConfig) -> int:
    """Return the size of all weights as they are sent to the rollout engines."""
    size = model_size("actor", config.actor, config)
    return sent_width(config) * size.parameters


def wire_bytes(config: RolloutTaskConfig) -> int:
    """Return the size of the shared memory through which weights are sent."""
    sync = config.rollout.sync
    if sync.wire != "shared_memory":
        return 0
    return SLOTS * min(sent_bytes(config), sync.bucket_bytes)


def snapshot_bytes(config: Config) -> dict[str, int]:
    """Return the size of a rank's snapshots, for each role that learns.

    There are two of them, each of what the rank holds of the weights that learn and of
    the state of the optimizer. With second copies a node has as many of other ranks.
    """
    num_snapshots = 2 * config.run.recovery.num_copies
    sizes = {}
    for name, role in config.model_roles.items():
        model = model_size(name, role, config)
        trained = trained_parameters(role, model)
        if trained:
            held = role.backend.rank_memory(role.num_ranks, model, trained).persistent
            weights = held.get("weights", 0) * trained // model.parameters
            sizes[name] = num_snapshots * (weights + held.get("optimizer", 0))
    return sizes
