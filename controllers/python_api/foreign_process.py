"""The process of the caller: what a call may do to it, and how it hears of a stop.

Invariant: after the block no signal handler is ours, and a stop is a KeyboardInterrupt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controllers.python_api.results import result_of
from controllers.python_api.types import Stopped
from verl_ray.cluster.session import refuse_connected
from verl_ray.cluster.signals import borrowing_signals, heed_signals, was_disturbed
from verl_ray.errors import ConfigError, Interrupted, VerlRayError
from verl_ray.paths import refuse_foreign_packages


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
