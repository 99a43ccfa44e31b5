"""The process of the caller: what a call may do to it, and how it hears of a stop.

Invariant: after the block no signal handler is ours, and a stop is a KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from controllers.python_api.contract import Result, Stopped
from controllers.run.best import best_of, evaluations_of
from controllers.tasks import typed_config
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.cluster.session import refuse_connected
from verl_ray.cluster.signals import borrowing_signals, heed_signals, was_disturbed
from verl_ray.config.renamed import migrated
from verl_ray.errors import CheckpointError, ConfigError, Interrupted, VerlRayError
from verl_ray.paths import refuse_foreign_packages
from verl_ray.tracking.base import GLOBAL_STEP
from verl_ray.tracking.history import read_history
from verl_ray.tracking.jsonl import METRICS, read_metrics


@dataclass
class ForeignProcess:
    """The traces of a call in the process of its caller.

    Attributes:
        run_dir: The folder of the run; None while it is not known, or where nothing
            goes on in it.
    """

    run_dir: str | None = None


@contextlib.contextmanager
def in_foreign_process(*, starts: bool = True) -> Iterator[ForeignProcess]:
    """Borrow the process of the caller for the block.

    Args:
        starts: Whether the block opens a session of Ray's.

    Raises:
        Stopped: A signal came.
        VerlRayError: The block failed; a note says how a run goes on.
    """
    process = ForeignProcess()
    try:
        # Between the steps of an open run nothing of it can change.
        if starts:
            refuse_foreign_packages()
            refuse_connected()
        with borrowing_signals():
            try:
                yield process
            except Exception:
                # What fails after a signal is part of the stop.
                if was_disturbed():
                    heed_signals()
                raise
    except Interrupted as stop:
        raise _stopped(stop, process.run_dir) from None
    except VerlRayError as error:
        is_mistake = isinstance(error, ConfigError)
        if process.run_dir is not None and not is_mistake:
            error.add_note(_way_on(process.run_dir))
        raise


def _stopped(stop: Interrupted, run_dir: str | None) -> Stopped:
    if run_dir is None:
        return Stopped(str(stop))
    return Stopped(f"{stop}. {_way_on(run_dir)}", result_of(run_dir))


def _way_on(run_dir: str) -> str:
    """Return how a run goes on, as a sentence."""
    has_checkpoints = any((Path(run_dir) / "checkpoints").glob("step_*"))
    if not has_checkpoints:
        return f"The same call with run_dir={run_dir!r} begins again."
    return f"The same call with run_dir={run_dir!r} goes on from the newest checkpoint."


# ---------------------------------------------------------------- the result of a run

# It is made of what is on disk, so an old run has the same one as a new.


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
