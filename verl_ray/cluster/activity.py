"""Words for what processes are doing while the driver waits for them.

Invariant: nothing here waits. The words come from the last replies of the processes,
which are requested when a report is due soon.
Deliberately not here: when a report is due (`verl_ray/profiling/phases.py`), and
whether a process makes progress (`stalls.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_ray.cluster.rank_calls import RankCall
from verl_ray.profiling.phases import PHASES
from verl_ray.profiling.progress import Progress

_MOST = 3
"""Processes that a report names."""
_MIB = 1 << 20


def request_activity(rank_calls: Sequence[RankCall]) -> None:
    """Request the status of the processes, if a report is due soon."""
    if PHASES.is_due_soon:
        for heartbeat in {rank_call.member.heartbeat for rank_call in rank_calls}:
            heartbeat.request()


def activity(rank_calls: Sequence[RankCall]) -> str:
    """Return what the processes of pending calls do: "actor 3/16 micro-batches".

    Of each role the process is named whose call was made first. Processes that have
    not said anything yet are left out, unless they are starting.
    """
    by_process = {
        rank_call.member.heartbeat: rank_call for rank_call in rank_calls[::-1]
    }
    texts: dict[str, str] = {}
    for heartbeat, rank_call in reversed(by_process.items()):
        status = heartbeat.status_since(rank_call.since)
        if status is None and not rank_call.starts:
            continue
        role = rank_call.member.role
        text = role
        if status is not None:
            if status.running is not None:
                role = status.running[0]
            text = f"{role} {amount(status.progress)}".strip()
        texts.setdefault(role, text)
    return ", ".join(list(texts.values())[:_MOST])


def amount(progress: Progress) -> str:
    """Return how much a process has done: "3/16 micro-batches", "120 MiB read"."""
    if not progress.unit:
        return ""
    if progress.unit.startswith("bytes"):
        return f"{progress.done // _MIB} MiB{progress.unit.removeprefix('bytes')}"
    if progress.total is None:
        return f"{progress.done} {progress.unit}"
    return f"{progress.done}/{progress.total} {progress.unit}"
