"""The resources of a run while it lasts: its cluster, and the trackers of its record.

Invariant: both are released however the run ends, and the trackers then know whether it
failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from controllers.run.resumption import Resumption
from controllers.supervisor import reports
from controllers.watch.learning import LearningWatch
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import (
    Outlook,
    announcing,
    raising_signals,
    stop_on_signals,
)
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.profiling.phases import blocking
from verl_ray.tracking import Trackers, open_trackers
from verl_ray.tracking.jsonl import METRICS, read_metrics


def open_session(config: Config) -> Session:
    """Open the cluster to run on, and make the run's folder.

    The processes of the cluster keep their logs in this folder. Signals are handled
    from here on.
    """
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with (
        announcing(lambda: Outlook("stopping as soon as Ray has started", "")),
        blocking("starting Ray"),
    ):
        session = Session.open(
            config.ray.address,
            log_dir=Path(config.run.dir) / "logs",
            stall_s=config.run.stall_s,
        )

    # `ray.init` has installed a signal handler of its own, which this call replaces.
    stop_on_signals()
    return session


@contextlib.contextmanager
def recording(config: Config, resumption: Resumption) -> Iterator[Trackers]:
    """Yield the trackers of the run, and close them as failed if the block raises."""
    trackers = Trackers([])
    try:
        # W&B may wait for its server, and knows nothing of signals.
        with raising_signals(), blocking("opening the record (tracking)"):
            trackers = open_trackers(
                config.tracking,
                config.run,
                to_tree(config),
                committed_step=resumption.recorded_step,
                state=resumption.tracker_state,
                follows=reports().restarts > 0,
            )
        # The record is repaired by now, and so are its last lines.
        recorded = read_metrics(Path(config.run.dir) / METRICS)
        trackers = Trackers([trackers, LearningWatch(config, recorded)])
        yield trackers
    except BaseException:
        trackers.close(failed=True)
        raise
    trackers.close(failed=False)
