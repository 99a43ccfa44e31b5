"""The result of a run, read from its folder.

Invariant: it is made of what is on disk, so an old run has the same one as a new.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import yaml

from controllers.python_api.types import Result
from controllers.run.best import best_of, evaluations_of
from controllers.tasks import typed_config
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.renamed import migrated
from verl_ray.errors import CheckpointError
from verl_ray.tracking.base import GLOBAL_STEP
from verl_ray.tracking.history import read_history
from verl_ray.tracking.jsonl import METRICS, read_metrics


def result_of(run_dir: str, exit_code: int = 0) -> Result | None:
    """Return the result of a run, or None where it has not begun.

    Args:
        run_dir: The folder of the run.
        exit_code: What its command would return.

    Raises:
        TrackingError: The record cannot be read.
    """
    folder = Path(run_dir)
    written = folder / "config.yaml"
    history = read_history(folder)
    if not written.exists() or not history:
        return None

    config = typed_config(migrated(yaml.safe_load(written.read_text())))
    lines = []
    if (folder / METRICS).exists():
        lines = read_metrics(folder / METRICS)
    evaluations = evaluations_of(lines)

    checkpoint = None
    store = CheckpointStore(folder / "checkpoints", config.run.keep_checkpoints)
    with contextlib.suppress(CheckpointError):
        checkpoint = store.latest(verify=False).checkpoint

    return Result(
        state=history[-1].ending,
        steps=int(lines[-1][GLOBAL_STEP]) if lines else history[-1].first_step,
        folder=folder,
        checkpoint=None if checkpoint is None else checkpoint.path,
        best_step=best_of(config, evaluations).step,
        evaluations=evaluations,
        history=lines,
        exit_code=exit_code,
    )
