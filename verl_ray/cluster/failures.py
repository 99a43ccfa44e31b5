"""From what Ray reports to errors that say who failed, where, why, and what it said last.

Invariant: looking for the reason never hangs (every question has a limit of seconds) and never hides the failure
itself. Deliberately not here: deciding that something failed (`calls.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ray.cluster.heartbeat import Heartbeat
from verl_ray.cluster.host import STACKS_SIGNAL, tail
from verl_ray.cluster.lanes import CONTROL
from verl_ray.cluster.messages import Facts, Failure
from verl_ray.cluster.waiting import TICK_S, wait
from verl_ray.errors import DeadlineExceeded, StaleIncarnation, WorkerDied, WorkerError

_QUESTION_S = 3.0
_TRACKER = "multiprocessing.resource_tracker"
_STACKS_BYTES = 32_768


@dataclass(frozen=True)
class Member:
    """One process as the driver knows it. `facts` is None until it has said where it runs."""

    role: str
    rank: int
    actor: Any
    facts: Facts | None
    heartbeat: Heartbeat

    @property
    def node(self) -> str:
        return self.facts.node if self.facts else "a node not known yet"


def raised(member: Member, method: str, failure: Failure) -> WorkerError:
    """A worker's method raised."""
    if isinstance(failure.error, StaleIncarnation):
        return failure.error
    what, detail = f"{method} raised {failure.what}", failure.trace
    if failure.error is not None and member.facts is not None:
        detail = f"its stack is in {member.facts.log_path}"
    error = WorkerError(
        what, role=member.role, rank=member.rank, node=member.node, detail=detail, output=failure.output
    )
    error.__cause__ = failure.error
    return error


def died(member: Member, method: str, error: Exception) -> WorkerDied:
    """A worker's process ended, or cannot be reached."""
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        # Ray saw a broken connection before it saw the reason; a second question tells.
        try:
            asked = member.actor.status.options(concurrency_group=CONTROL).remote()
            wait([asked], 1, _QUESTION_S)
            ray.get(asked, timeout=TICK_S)
        except ray.exceptions.ActorDiedError as reason:
            error = reason
        except Exception as other:
            error.add_note(f"asked again: {type(other).__name__}")
    output = _examine([member], stacks=False)[0][1]
    what = f"the process died during {method}"
    detail = _reason(error)
    if member.facts is not None:
        wrote = "wrote to" if output else "wrote nothing to"
        detail += f"\nProcess {member.facts.pid} {wrote} {member.facts.log_path}"
    return WorkerDied(what, role=member.role, rank=member.rank, node=member.node, detail=detail, output=output)


def _reason(error: Exception) -> str:
    """What Ray knows, without its names of the actor and its advice, which is of settings that a run does not have."""
    text = str(error)
    found = re.search(r"The actor is dead because (.*?)( Some common causes include|$)", text, re.DOTALL)
    return f"Ray says that {found[1].strip()}" if found else text


def stalled(
    members: Sequence[Member],
    method: str,
    limit: str,
    beside: Sequence[Member] = (),
    *,
    since: float = float("-inf"),
    mute: bool = False,
) -> DeadlineExceeded:
    """These make no progress in `method`. Carries their stacks, and those of the processes that wait `beside` them.

    Args:
        limit: the configuration's key and value that say for how long they may.
        since: when the first of them was called (monotonic clock); what it said before is of other work.
        mute: whether the first of them does not even answer on its control lane.
    """
    first = members[0]
    others = f" (nor do ranks {[member.rank for member in members[1:]]})" if len(members) > 1 else ""
    told = _last_of(first, method, since, mute)
    what = f"{method} makes no progress: {told} ({limit}){others}"
    detail = _stacks_of([*members, *beside])
    return DeadlineExceeded(what, role=first.role, rank=first.rank, node=first.node, detail=detail)


def _last_of(member: Member, method: str, since: float, mute: bool) -> str:
    """What a process did last, as it said itself."""
    status, silent_s = member.heartbeat.status_since(since), member.heartbeat.silent_s(since)
    if status is None:
        return f"the process has not answered for {silent_s:.1f} s"
    running = status.running
    ahead = ""
    if running is not None and method not in (running[1], f"start ({running[1]})"):
        ahead = f"{running[1]} of {running[0]} comes first, and "
    done = str(status.progress)
    if mute:
        return f"{ahead}the process, which had done {done}, has not answered for {silent_s:.1f} s"
    waits = " while it waited for others" if status.progress.waits_for_others else ""
    if done == "nothing":
        return f"{ahead}the process has done nothing for {status.progress.idle_s:.1f} s{waits}"
    return f"{ahead}the process did {done}, then nothing for {status.progress.idle_s:.1f} s{waits}"


def _stacks_of(members: Sequence[Member]) -> str:
    """The stacks of each, or what can be learned of it from outside."""
    asked = [member.actor.stacks.options(concurrency_group=CONTROL).remote() for member in members]
    mute = all(
        member.heartbeat.unanswered_s > _QUESTION_S for member in members
    )  # one that is will not answer this either
    answered = wait(asked, len(asked), TICK_S if mute else _QUESTION_S)
    texts: dict[int, str] = {}
    for index, reference in enumerate(asked):
        if reference in answered:
            try:
                texts[index] = ray.get(reference)
            except ray.exceptions.RayError as error:
                texts[index] = f"cannot be asked: {error}"
    silent = [index for index in range(len(members)) if index not in texts]
    for index, (state, text) in zip(silent, _examine([members[i] for i in silent], stacks=True), strict=True):
        texts[index] = f"the control lane does not answer either: {state}\n{text}"
    return "\n".join(
        f"--- {member.role} rank {member.rank} on {member.node}\n{texts[index].rstrip()}"
        for index, member in enumerate(members)
    )


def _examine(members: Sequence[Member], stacks: bool) -> list[tuple[str, str]]:
    """State and last output of processes that cannot be asked, looked up on their nodes."""
    asked: list[Any] = [
        ("it has not started", "") if member.facts is None else _on_node(member.facts, examine, stacks)
        for member in members
    ]
    answers: list[tuple[str, str]] = []
    until = time.monotonic() + 2 * _QUESTION_S
    for item in asked:
        if isinstance(item, tuple):
            answers.append(item)
            continue
        try:
            wait([item], 1, max(0.0, until - time.monotonic()))
            answers.append(ray.get(item, timeout=TICK_S))
        except Exception as error:
            answers.append((f"its node cannot be asked: {type(error).__name__}", ""))
    return answers


def examine(facts: Facts, stacks: bool) -> tuple[str, str]:
    """On the node of a process: its state and its last output, or its stacks if it can still write them."""
    try:
        process = psutil.Process(facts.pid)
        alive = abs(process.create_time() - facts.started) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        alive = False
    if not alive:
        return "the process is gone", tail(facts.log_path)
    try:
        return _examine_living(process, facts, stacks)
    except psutil.NoSuchProcess:  # it ended while it was looked at
        return "the process is gone", tail(facts.log_path)


def _examine_living(process: psutil.Process, facts: Facts, stacks: bool) -> tuple[str, str]:
    if process.status() == psutil.STATUS_STOPPED:
        return "the process is stopped (SIGSTOP)", tail(facts.log_path)
    if stacks:
        before = Path(facts.log_path).stat().st_size
        os.kill(facts.pid, STACKS_SIGNAL)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            time.sleep(0.1)
            size = Path(facts.log_path).stat().st_size
            if size > before:
                # One byte more: the tail of a longer file starts behind its first line break.
                text = tail(facts.log_path, min(size - before + 1, _STACKS_BYTES))
                return "something holds the interpreter lock; stacks from the process's signal handler:", text
    return f"the process is {process.status()}", tail(facts.log_path)


def kill(members: Sequence[Member]) -> None:
    """End processes at once, also those that are stopped (SIGSTOP) and do not hear Ray. Never raises: the cluster may
    be gone already."""
    elsewhere = []
    for member in members:
        if member.facts is not None:
            with contextlib.suppress(Exception):
                ended = _on_node(member.facts, end)
                elsewhere += [] if ended is None else [ended]
    with contextlib.suppress(Exception):
        ray.wait(elsewhere, num_returns=len(elsewhere), timeout=_QUESTION_S) if elsewhere else None
    for member in members:
        with contextlib.suppress(Exception):
            ray.kill(member.actor)


def end(facts: Facts) -> None:
    """On the node of a process: end it, and those that it has started, such as the ranks of an engine, which may be
    stopped and would not see it go. Python's tracker of what they share ends by itself, when it has cleaned up."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(facts.pid)
        if abs(process.create_time() - facts.started) < 1.0:
            started = process.children(recursive=True)
            for one in (process, *started):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if not any(_TRACKER in word for word in one.cmdline()):
                        one.kill()


def _on_node(facts: Facts, act: Callable[..., Any], *more: object) -> Any:
    """`act(facts, *more)` on the node of the process: its answer here, a reference to it elsewhere."""
    if facts.node_id == ray.get_runtime_context().get_node_id():
        return act(facts, *more)
    affinity = NodeAffinitySchedulingStrategy(facts.node_id, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(act).options(scheduling_strategy=affinity).remote(facts, *more)
