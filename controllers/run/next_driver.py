"""The words of a driver to its supervisor about another one that may follow it.

Invariant: a start is tried again only after what another start may not meet. What the
user has to change ends the run.
"""

from __future__ import annotations

from controllers.run.faults import FaultKind, ProcessFault
from controllers.supervisor import reports
from verl_ray.config.run import RunConfig
from verl_ray.errors import ClusterLost, VerlRayError, WorkerDied, is_passing
from verl_ray.shell import override_of


def allow_other_drivers(run: RunConfig) -> None:
    """Let another driver follow this one from now on if it is killed."""
    recovery = run.recovery
    if recovery.enabled:
        same_run = [
            override_of("run.name", run.name),
            override_of("run.dir", run.dir),
        ]
        reports().limit(recovery.max_restarts, recovery.max_wait_s, same_run)


def ask_for_another_driver(failure: BaseException) -> None:
    """Ask for one after a failure before the loop, or behind it, that it may not have.

    A process or a cluster that dies again as it starts does so for a reason.
    """
    if isinstance(failure, WorkerDied | ClusterLost):
        reason = str(failure).partition("\n")[0]
        reports().retry(reason, once=True)


def report_refusal(failure: Exception) -> None:
    """Report what refuses a driver that follows another one, if it may pass."""
    if not reports().restarts or reports().has_begun or not may_pass(failure):
        return
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    # The first line of a mistake counts the problems.
    reports().refused(" ".join(lines[1:3] or lines[:1]))


def may_pass(failure: BaseException) -> bool:
    """Return whether what failed a start may be gone after a while by itself."""
    if isinstance(failure, OSError):
        return is_passing(failure)
    if isinstance(failure, VerlRayError) and failure.may_pass:
        return True
    fault = ProcessFault.of(failure, 0)
    return fault is not None and fault.kind in (FaultKind.STALLED, FaultKind.EXHAUSTED)
