"""The cluster that a run uses.

Invariant: signals are handled from the moment that it is open.
"""

from __future__ import annotations

from pathlib import Path

from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import Outlook, announcing, stop_on_signals
from verl_ray.config.schema import Config
from verl_ray.profiling.phases import blocking


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
