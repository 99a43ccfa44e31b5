"""Disk space that a run still needs in its folder.

Invariant: what the folder holds already is not asked for again. So a run that fits once
fits at each later start, unless somebody else has taken the space, and its checkpoints
never take more than was asked for.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from verl_ray.backends.base import FLOAT32
from verl_ray.checkpoint.manifest import Checkpoint
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.roles import SupervisedRole
from verl_ray.config.run import RolloutTrackingConfig
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError, Problem
from verl_ray.paths import nearest_existing
from verl_ray.preflight.device_defaults import waiting_bytes
from verl_ray.preflight.footprints import state_bytes, trained_parameters
from verl_ray.preflight.machine import GIB, MIB
from verl_ray.preflight.model_files import model_size
from verl_ray.tracking import evaluations, rollouts
from verl_ray.tracking.jsonl import METRICS

_ADDED_SHARE = 0.02
_ADDED_BYTES = 4 * MIB
"""What a checkpoint has beside parameters: the driver's state, names and checksums."""

LOG_BYTES = 256 * MIB
"""Disk space for the logs, evaluations and metrics of a run."""

_LOGS = ("logs", evaluations.FOLDER, METRICS)


def disk_problems(config: Config, *, learns: bool) -> Iterator[Problem]:
    """Yield a problem if the disk of run.dir is too small for what a run will write.

    Args:
        config: Configuration of the run.
        learns: Whether the job trains. An evaluation writes no checkpoints.
    """
    free = shutil.disk_usage(nearest_existing(config.run.dir)).free
    needed = bytes_to_come(config, learns=learns)
    if needed > free:
        rule = (
            f"the run will write up to {needed / GIB:.1f} GiB more there, and"
            f" {free / GIB:.1f} GiB are free"
        )
        fix = "Free some, choose another run.dir, or lower run.keep_checkpoints."
        yield Problem("run.dir", config.run.dir, rule, fix, may_pass=True)


def bytes_to_come(config: Config, *, learns: bool) -> int:
    """Return the bytes that a run will write at most beside what its folder holds.

    Args:
        config: Configuration of the run.
        learns: Whether the job trains.
    """
    folder = Path(config.run.dir)
    needed = max(0, LOG_BYTES - sum(_bytes_at(folder / name) for name in _LOGS))
    tracking = config.tracking
    if isinstance(tracking, RolloutTrackingConfig) and tracking.rollouts != "none":
        most = tracking.rollouts_max_mb * rollouts.BYTES_PER_MB
        needed += max(0, most - _bytes_at(folder / rollouts.FOLDER))
    if learns and (config.run.checkpoint_every or config.run.save_at_end):
        needed += checkpoint_bytes_to_come(config)
    return needed


def checkpoint_bytes_to_come(config: Config) -> int:
    """Return the bytes that checkpoints will take at most beside those that are there.

    The oldest checkpoint is removed only once the newest is whole, so for a while there
    is one more. That of the best step stays besides.
    """
    run = config.run
    store = CheckpointStore(Path(run.dir) / "checkpoints", run.keep_checkpoints)
    newest: Checkpoint | None = None
    # What is wrong with them is told elsewhere.
    with contextlib.suppress(CheckpointError):
        newest = store.latest(verify=False).checkpoint
    steps: float = math.inf
    if run.total_steps is not None:
        steps = max(0, run.total_steps - (newest.step if newest else 0))
    if not steps:
        return 0
    if not run.checkpoint_every:
        steps = 1

    size = _checkpoint_bytes(config)
    if newest is not None:
        size = max(size, _bytes_at(newest.path))
    best = (newest.state.get("best") or {}).get("step") if newest else None
    surplus = store.surplus(newest.step, best) if newest else []
    # Those that are torn, or of steps that are made again, stay until one is written.
    staying = sum(_bytes_at(path) for path in store.paths() if path not in surplus)
    most = run.keep_checkpoints + (run.evaluate_every > 0) + 1
    fullest = max(staying + size, min(most * size, staying + steps * size))
    return max(0, int(fullest) - _bytes_at(store.root))


def _checkpoint_bytes(config: Config) -> int:
    """Return the estimated bytes of a checkpoint."""
    weights = 0.0
    for name, role in config.model_roles.items():
        if not isinstance(role, SupervisedRole):
            continue
        width = FLOAT32
        if config.average_decay(name) is not None:
            width += FLOAT32
        model = model_size(name, role, config)
        saved = trained_parameters(role, model) * width + state_bytes(role, model)
        weights += saved * (1 + _ADDED_SHARE)
    return int(weights) + waiting_bytes(config) + _ADDED_BYTES


def _bytes_at(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder; 0 for none."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            # A run that goes on may remove it meanwhile.
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).stat().st_size
    return total
