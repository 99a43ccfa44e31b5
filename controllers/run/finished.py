"""The folder of a run before anything is started: reserved, or recognised as finished.

Invariant: neither torch nor ray is imported, so the result comes in a second. One run
at a time writes to a folder, and a run that was killed has released it. A run counts as
finished only if its last process said so, and the checkpoint of its last step, if it
was to write one, is whole by the sizes of its files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from controllers.run.best import BestEvaluation
from controllers.run.next_command import MODEL, next_in_words
from verl_ray.checkpoint.manifest import Checkpoint
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.load import to_tree
from verl_ray.config.renamed import migrated
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError, ConfigError, Problem, TrackingError
from verl_ray.preflight.changes import changed_keys
from verl_ray.report.record import read_config
from verl_ray.shell import override_of
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

    A run with other settings than before is not finished here, where they may not
    differ: what refuses them comes later.
    """
    total_steps = config.run.total_steps
    if config.run.resume != "auto":
        return None
    if total_steps is None:
        total_steps = _prepared_steps(config)
    if total_steps is None:
        return None

    # What comes after the last step, such as writing the model, is done as well.
    last_step = recorded_end(config)
    if last_step is None:
        return None

    checkpoint = _newest_checkpoint(config)
    if checkpoint is None or checkpoint.step != last_step:
        saved = unsaved_end(config)
        if saved is None:
            return None
        changed, refused = changed_keys(saved, to_tree(config))
        # Why it ended before its last step is not known any more.
        reached_goal = not changed
    else:
        if checkpoint.state["unrecorded"] is not None:
            return None
        _, refused = changed_keys(migrated(checkpoint.config), to_tree(config))
        # Earlier versions did not save the best evaluation.
        best = BestEvaluation(config, checkpoint.state.get("best"))
        reached_goal = checkpoint.state["trainer"].get("finished") or best.is_exhausted

    is_finished = last_step == total_steps or (reached_goal and last_step < total_steps)
    return last_step if is_finished and not refused else None


def _prepared_steps(config: Config) -> int | None:
    """Return the steps that run.total_epochs stood for in data that the run has made.

    None if it stood for another number of epochs. How many steps it stands for in other
    data is known when they are read.
    """
    saved = migrated(read_config(Path(config.run.dir), [])).get("run")
    if config.preparation is None or not isinstance(saved, dict):
        return None
    if saved["total_epochs"] != config.run.total_epochs:
        return None
    steps: int | None = saved["total_steps"]
    return steps


def recorded_end(config: Config) -> int | None:
    """Return the last step of a run whose last process finished it, else None."""
    try:
        history = read_history(Path(config.run.dir))
    except TrackingError:
        return None
    if not history or history[-1].ending != "finished":
        return None
    return history[-1].last_step


def unsaved_end(config: Config) -> Mapping[str, Any] | None:
    """Return the settings of a finished run that was not to save its last step.

    None if the last process in run.dir finished no run, or was to save its last step.
    """
    last_step = recorded_end(config)
    saved = migrated(read_config(Path(config.run.dir), []))
    if last_step is None or not isinstance(saved.get("run"), dict):
        return None
    every = saved["run"].get("checkpoint_every")
    is_due = bool(every) and last_step % every == 0
    return None if saved["run"]["save_at_end"] or is_due else saved


def refuse_other_end(config: Config) -> None:
    """Refuse to begin anew in the folder of a finished run that has no checkpoint.

    Raises:
        ConfigError: It holds one. What that run has written would be replaced.
    """
    saved = unsaved_end(config)
    if saved is None:
        return
    run = config.run
    changed, refused = changed_keys(saved, to_tree(config))
    others = ", ".join(change.key for change in [*changed, *refused])
    settings = f" with other settings ({others})" if others else ""
    rule = (
        f"it holds a finished run of {recorded_end(config)} steps{settings}, and no"
        " checkpoint that a run could go on from (run.save_at_end=false)"
    )
    fix = "Use another run.name or run.dir."
    model = Path(run.dir) / MODEL
    if model.is_dir():
        fix += (
            f" With {override_of('model.path', str(model))} it begins with its model."
        )
    raise ConfigError([Problem("run.dir", run.dir, rule, fix)])


def show_finished(config: Config, step: int) -> None:
    """Print that a run is finished, its report, and what to try next."""
    run_dir = Path(config.run.dir)
    report = run_dir / REPORT
    if report.is_file():
        print(report.read_text("utf-8", errors="replace"), end="")

    way_on = "For more steps, raise run.total_steps"
    if config.run.early_stop is not None:
        way_on += ", or run.early_stop where it stopped early"
    if _newest_checkpoint(config) is None:
        way_on = (
            "It saved no checkpoint (run.save_at_end=false), so no setting gives it"
            " more steps; another run.name trains again, and run.save_at_end=true lets"
            " that run go on later"
        )
    print(
        f"{run_dir} is finished: {step} steps are done and nothing is left to do."
        f"{_unused_in_words(config)} {way_on}"
    )
    print(next_in_words(config))


def _unused_in_words(config: Config) -> str:
    """Return a sentence on the settings that a finished run did not have, if any."""
    saved = unsaved_end(config)
    checkpoint = _newest_checkpoint(config)
    if saved is None and checkpoint is not None:
        saved = migrated(checkpoint.config)
    changed, _ = changed_keys(saved or to_tree(config), to_tree(config))
    # The name may hold the time at which the command was typed.
    changes = [str(change) for change in changed if change.key != "run.name"]
    if not changes:
        return ""
    return (
        f" It did not have these settings, and no step uses them: {'; '.join(changes)}."
    )


def _newest_checkpoint(config: Config) -> Checkpoint | None:
    """Return the newest checkpoint of a run if none was passed over, else None."""
    run = config.run
    store = CheckpointStore(Path(run.dir) / "checkpoints", run.keep_checkpoints)
    with contextlib.suppress(CheckpointError):
        newest = store.latest(verify=False)
        if not newest.skipped:
            return newest.checkpoint
    return None
