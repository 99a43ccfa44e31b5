"""The checkpoint that a path stands for, on a command line.

Invariant: a path of a checkpoint means this one, and the folder of a run means its
newest whole checkpoint, or its best. Any other path is answered with what is there.

Deliberately not here: the checkpoint that a run continues from (`resumption.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from controllers.tasks import typed_config
from verl_ray.checkpoint.manifest import Checkpoint, TornCheckpoint
from verl_ray.checkpoint.store import (
    CheckpointStore,
    checkpoint_name,
    is_checkpoint_name,
)
from verl_ray.config.renamed import migrated
from verl_ray.errors import CheckpointError, ConfigError, Problem
from verl_ray.paths import path_suggestion, typed_path

# Key under which a problem with the path is reported, as the help of commands names it.
_KEY = "CHECKPOINT"


def named_checkpoint(path: str, *, best: bool) -> Checkpoint:
    """Return the checkpoint that a path stands for, with an absolute path.

    Args:
        path: Path of a checkpoint or of the folder of a run, as it was typed.
        best: Whether the best checkpoint of a run is meant, in place of the newest.

    Raises:
        ConfigError: There is no checkpoint, or the path is not of a run and `best`.
        CheckpointError: The checkpoint is not whole.
    """
    folder = typed_path(_KEY, path)
    if not folder.is_dir():
        _refuse_missing(path, folder)

    root = _checkpoints_of(folder)
    if root is not None:
        return _checkpoint_of_run(path, root, best=best)

    if not is_checkpoint_name(folder.name):
        names = sorted(entry.name for entry in folder.iterdir())
        contents = ", ".join(names[:5]) or "nothing"
        rule = f"this folder holds no checkpoint; found {contents}"
        fix = "Give the folder of a run (outputs/NAME), or a step_... folder in it."
        _refuse(path, rule, fix)

    if best:
        rule = (
            "--best chooses between the checkpoints of a run, and this is one of them"
        )
        fix = f"Give the folder of the run ({folder.parent.parent}), or no --best."
        _refuse(path, rule, fix)
    return _whole(folder)


def _checkpoints_of(folder: Path) -> Path | None:
    """Return the folder of all checkpoints of a run; None if this is no such run.

    Args:
        folder: Folder of the run, or that of its checkpoints.
    """
    for root in (folder / "checkpoints", folder):
        if root.is_dir() and any(
            is_checkpoint_name(entry.name) for entry in root.iterdir()
        ):
            return root
    return None


def _checkpoint_of_run(path: str, root: Path, *, best: bool) -> Checkpoint:
    """Return the newest whole checkpoint of a run, or its best one."""
    # The store is only read, so the number of checkpoints to keep does not matter.
    newest = CheckpointStore(root, keep=1).latest()
    for reason in newest.skipped:
        print(f"warning: {reason}", file=sys.stderr, flush=True)
    assert newest.checkpoint is not None, "the folder holds checkpoints"
    if not best:
        return newest.checkpoint

    # Every checkpoint knows the best evaluation up to its step.
    evaluation = newest.checkpoint.state.get("best")
    if evaluation is None:
        rule = f"the run had no evaluation up to {newest.checkpoint.path.name}"
        _refuse(path, rule, "Leave --best out to take the newest checkpoint.")

    step = evaluation["step"]
    measured = f"{evaluation['name']} = {evaluation['value']:.4g}"
    if step == 0:
        config = typed_config(migrated(newest.checkpoint.config))
        model = config.model_roles[config.evaluated_role].model.path
        rule = f"the training did not improve it: {measured} before the first step"
        fix = (
            f"Use the model that the run began with, {model}, or leave --best out"
            " for the newest checkpoint."
        )
        _refuse(path, rule, fix)

    folder = root / checkpoint_name(step)
    if not folder.is_dir():
        rule = f"the best step is {step} ({measured}), and its checkpoint is not here"
        fix = "Leave --best out to take the newest checkpoint."
        _refuse(path, rule, fix)

    print(f"the best step is {step}: {measured}", flush=True)
    return _whole(folder)


def _whole(folder: Path) -> Checkpoint:
    """Open a checkpoint of which every file has the contents that were written."""
    try:
        return CheckpointStore.open(folder)
    except TornCheckpoint as error:
        raise CheckpointError(
            f"{error}. Give another checkpoint, or the folder of the run for the"
            " newest whole one"
        ) from None


def _refuse_missing(path: str, folder: Path) -> NoReturn:
    if folder.exists():
        rule = "this is a file"
        _refuse(path, rule, "Give the folder of a run, or a step_... folder in it.")

    otherwise = "Give the folder of a run (outputs/NAME), or a step_... folder in it."
    _refuse(path, "there is no such folder", path_suggestion(folder, otherwise))


def _refuse(path: str, rule: str, fix: str) -> NoReturn:
    raise ConfigError([Problem(_KEY, path, rule, fix)])
