"""The folder of a run before anything is started: reserved, or recognised as finished.

Invariant: neither torch nor ray is imported, so the result comes in a second. One run
at a time writes to a folder, and a run that was killed has released it. A run counts as
finished only if its last process said so, and its newest checkpoint is whole by the
sizes of its files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from controllers.run.best import BestEvaluation
from controllers.run.next_command import next_in_words
from verl_ray.checkpoint.manifest import Checkpoint
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.load import to_tree
from verl_ray.config.renamed import migrated
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError, ConfigError, Problem, TrackingError
from verl_ray.preflight.changes import changed_keys
from verl_ray.tracking.history import read_history


@contextlib.contextmanager
def claim(run_dir: str) -> Iterator[None]:
    """Reserve a folder for this process in the block.

    The operating system releases the lock when the process exits, however it exits. On
    a file system without locks, a warning is printed and the block runs.

    Raises:
        ConfigError: Another run holds the folder.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)

    # The file is made if it is missing, and its content survives if another run holds
    # it. The lock itself is released with the file.
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            is_held = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            if not is_held:
                print(
                    f"warning: {folder} cannot be locked against a second run: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                file.seek(0)
                # The other run may hold the lock and not have written its name yet.
                holder = file.read().strip() or "not yet known which"
                rule = f"another run is writing to it ({holder})"
                fix = "wait for it to end, or use another run.dir"
                problem = Problem("run.dir", run_dir, rule, fix, may_pass=True)
                raise ConfigError([problem]) from None
        else:
            # A run that finds the lock held can name the process that holds it.
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}")
            file.flush()

        yield


REPORT = "report.txt"
"""File in run.dir with the report of the process that ended last."""


def finished_step(config: Config) -> int | None:
    """Return the last step of a run that has nothing left to do, else None.

    A run with other settings than its checkpoint is not finished here, where they may
    not differ: what refuses them comes later.
    """
    if config.run.resume != "auto":
        return None

    checkpoint = _newest_checkpoint(config)
    if checkpoint is None or checkpoint.state["unrecorded"] is not None:
        return None

    # What comes after the last step, such as writing the model, is done as well.
    try:
        history = read_history(Path(config.run.dir))
    except TrackingError:
        return None
    if not history or history[-1].ending != "finished":
        return None
    if history[-1].last_step != checkpoint.step:
        return None

    _, refused = changed_keys(migrated(checkpoint.config), to_tree(config))
    if refused:
        return None

    total_steps = config.run.total_steps
    # How many steps run.total_epochs stands for is known when the data are read.
    if total_steps is None:
        return None

    # Earlier versions did not save the best evaluation.
    best = BestEvaluation(config, checkpoint.state.get("best"))
    reached_goal = checkpoint.state["trainer"].get("finished") or best.is_exhausted
    is_finished = checkpoint.step == total_steps or (
        reached_goal and checkpoint.step < total_steps
    )
    return checkpoint.step if is_finished else None


def show_finished(config: Config, step: int) -> None:
    """Print that a run is finished, its report, and what to try next."""
    run_dir = Path(config.run.dir)
    report = run_dir / REPORT
    if report.is_file():
        print(report.read_text("utf-8", errors="replace"), end="")

    print(
        f"{run_dir} is finished: {step} steps are done and nothing is left to do. For"
        " more steps, raise run.total_steps, or run.early_stop where it stopped early"
    )
    print(next_in_words(config))


def _newest_checkpoint(config: Config) -> Checkpoint | None:
    """Return the newest checkpoint of a run if none was passed over, else None."""
    run = config.run
    store = CheckpointStore(Path(run.dir) / "checkpoints", run.keep_checkpoints)
    with contextlib.suppress(CheckpointError):
        newest = store.latest(verify=False)
        if not newest.skipped:
            return newest.checkpoint
    return None
