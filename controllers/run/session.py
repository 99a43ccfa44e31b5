"""What a run holds while it lasts: a cluster to run on, and the places that receive its record.

Invariant: both are given back however the run ends; the trackers then know whether it failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from controllers.run.resumption import Resumption
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import Outlook, raising, stop_on_signals, telling
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.tracking import Trackers, open_trackers


def open_session(config: Config) -> Session:
    """The cluster to run on; the run's folder, where its processes keep their logs."""
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with telling(lambda: Outlook("stopping as soon as Ray has started", "")):
        session = Session.open(config.ray.address)
    stop_on_signals()
    return session


@contextlib.contextmanager
def recording(config: Config, found: Resumption) -> Iterator[Trackers]:
    """The trackers of the run, closed as failed if anything raises."""
    trackers = Trackers([])
    try:
        with raising():  # W&B may wait for its server
            trackers = open_trackers(
                config.tracking,
                config.run,
                to_tree(config),
                committed_step=found.recorded_step,
                state=found.tracker_state,
            )
        yield trackers
    except BaseException:
        trackers.close(failed=True)
        raise
    trackers.close(failed=False)
