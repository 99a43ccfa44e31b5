"""The words of a driver to its supervisor about another one that may follow it.

Invariant: a start is tried again only after what another start may not meet. What the
user has to change ends the run. Where people look for the run, in its status and in
W&B, it says what it waits for.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from controllers.run.faults import FaultKind, ProcessFault
from controllers.supervisor import reports
from verl_ray.cluster.signals import raising_signals
from verl_ray.config.run import RunConfig, WandbConfig
from verl_ray.errors import (
    ClusterLost,
    Interrupted,
    TrackingError,
    VerlRayError,
    WorkerDied,
    is_passing,
)
from verl_ray.ownership import Owner
from verl_ray.profiling.process_table import read_status, uptime_s, write_status
from verl_ray.report.record import read_config
from verl_ray.shell import override_of
from verl_ray.tracking.wandb_run import send_alert

_PASSING = (FaultKind.DIED, FaultKind.STALLED, FaultKind.EXHAUSTED)
"""Failures of processes that the next start may not have."""


def allow_other_drivers(run: RunConfig) -> None:
    """Let another driver follow this one from now on if it is killed."""
    recovery = run.recovery
    if recovery.enabled:
        same_run = [
            override_of("run.name", run.name),
            override_of("run.dir", run.dir),
        ]
        reports().limit(recovery.max_restarts, recovery.max_wait_s, same_run, run.dir)


def supervisor_of_run() -> str:
    """Return the supervisor of this driver as an owner; empty without one."""
    supervisor = reports().supervisor
    return "" if supervisor is None else str(Owner.of(supervisor))


def ask_for_another_driver(failure: BaseException) -> None:
    """Ask for one after a failure before the loop, or behind it, that it may not have.

    A process or a cluster that dies again as it starts does so for a reason. Where it
    has run before, the reason may pass, such as memory that is not free yet: this is a
    refusal (`report_refusal`).
    """
    is_refused = reports().follows_begun and not reports().has_begun
    if isinstance(failure, WorkerDied | ClusterLost) and not is_refused:
        reason = str(failure).partition("\n")[0]
        reports().retry(reason, once=True)


def report_refusal(failure: Exception) -> None:
    """Report what refuses a driver that follows another one, if it may pass.

    Nothing is reported where the driver has asked for another one.
    """
    to_supervisor = reports()
    is_start = to_supervisor.restarts and not to_supervisor.has_begun
    if not is_start or to_supervisor.has_asked or not may_pass(failure):
        return
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    # The first line of a mistake counts the problems.
    reason = " ".join(lines[1:3] or lines[:1])
    reports().refused(reason)

    folder = Path(reports().run_dir)
    _note_refusal(folder, reason, failure)
    if not reports().has_alerted:
        _alert(folder, reason)


def _note_refusal(folder: Path, reason: str, failure: Exception) -> None:
    """Write to the status of the run what it waits for."""
    try:
        status = read_status(folder)
    except (OSError, ValueError):
        return
    # What may refuse the start is that somebody else has started the run.
    if status is None or status.supervisor != supervisor_of_run():
        return
    refused = replace(
        status,
        ended=f"ended: {type(failure).__name__}",
        refusal=reason,
        rows=(),
        processes=(),
        written=time.time(),
        uptime_s=uptime_s(),
    )
    write_status(folder, refused)


def _alert(folder: Path, reason: str) -> None:
    """Send W&B's alert about what the run waits for, where W&B is online.

    Whatever fails is a warning: the cause of the refusal is what the user has to see.
    """
    try:
        is_sent = _send(folder, reason)
    except Interrupted:
        raise
    except Exception as error:
        print(f"warning: W&B's alert was not sent: {error}", file=sys.stderr)
        return
    if is_sent:
        reports().alerted()


def _send(folder: Path, reason: str) -> bool:
    """Send the alert; return whether one was sent.

    Raises:
        Exception: The record of the configuration, or W&B, cannot be used.
    """
    damage: list[str] = []
    tree = read_config(folder, damage)
    if damage:
        raise TrackingError(damage[0])
    # A driver may have died before it has written it.
    if not tree:
        return False
    config = WandbConfig.model_validate(tree["tracking"]["wandb"], strict=False)
    name = tree["run"]["name"]
    recovery = tree["run"]["recovery"]
    text = (
        f"{name} waits for what refuses its start: {reason}. It starts again by itself,"
        f" for {recovery['max_wait_s']:g} s at most (run.recovery.max_wait_s)."
    )
    # It may wait for its server.
    with raising_signals():
        return send_alert(config, folder, name, tree, text)


def may_pass(failure: BaseException) -> bool:
    """Return whether what failed a start may be gone after a while by itself."""
    if isinstance(failure, OSError):
        return is_passing(failure)
    if isinstance(failure, VerlRayError) and failure.may_pass:
        return True
    fault = ProcessFault.of(failure, 0)
    return fault is not None and fault.kind in _PASSING
