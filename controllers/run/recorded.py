"""The configuration that a run's checkpoint has recorded, commits of the hub included.

Invariant: nothing is refused here; a checkpoint that cannot be used has recorded
nothing. Deliberately not here: which checkpoint fits (`resumption.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError


def recorded_tree(config: Config) -> Mapping[str, Any]:
    """Return the configuration in the checkpoint that a run continues from.

    It is empty where the run begins anew.
    """
    resume = config.run.resume
    folder = Path(config.run.dir if resume in ("auto", "none") else resume)
    # The folder of a run stands for its newest checkpoint.
    checkpoints = folder / "checkpoints"
    if resume == "none" or not folder.is_dir():
        return {}

    try:
        if checkpoints.is_dir():
            store = CheckpointStore(checkpoints, config.run.keep_checkpoints)
            checkpoint = store.latest(verify=False).checkpoint
        elif resume != "auto":
            checkpoint = CheckpointStore.open(folder, verify=False)
        else:
            checkpoint = None
    except (CheckpointError, OSError):
        return {}
    return {} if checkpoint is None else checkpoint.config
