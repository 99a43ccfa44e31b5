"""Control of processes on their own nodes: their output, inspection and termination.

Invariant: once a process keeps its output, all that it and its libraries print is in a
log file of its own, and so are its stacks when it crashes. Every request to a node
about a process that does not reply has a limit of seconds, so a lost node delays an
error only for a moment.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_ray.cluster.context import ProcessInfo, RankSpec
from verl_ray.cluster.members import Member
from verl_ray.cluster.waiting import RAY_CALLS, TICK_S, wait, wait_while_closing

# ------------------------------------------------------------------------------- output

STACKS_SIGNAL = signal.SIGUSR2
"""Signal that makes a process write all stacks to its log.

Its handler also runs while a thread holds the interpreter lock.
"""

_TAIL_BYTES = 4096
_STDOUT = 1
_STDERR = 2


def keep_output(rank_spec: RankSpec) -> Path:
    """Send this process's output to a log file and return the file's path.

    The file is in the run's folder, or in Ray's folder of logs where the run's folder
    cannot be written.
    """
    log_dir = Path(rank_spec.log_dir)
    name = _log_name(rank_spec)
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        path = log_dir / name
        log = path.open("ab", buffering=0)
    except OSError as error:
        ray_logs = ray._private.worker.global_worker.node.get_logs_dir_path()
        path = Path(ray_logs) / f"verl_ray-{os.getpid()}-{name}"
        print(f"{log_dir} cannot be written here ({error}); output is kept in {path}")
        log = path.open("ab", buffering=0)

    # Libraries in C write to the descriptors, so these are redirected and not only
    # Python's streams.
    for stream, descriptor in ((sys.stdout, _STDOUT), (sys.stderr, _STDERR)):
        stream.flush()
        os.dup2(log.fileno(), descriptor)
    log.close()

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=_STDERR)
    faulthandler.register(STACKS_SIGNAL, file=_STDERR)
    return path


def _log_name(rank_spec: RankSpec) -> str:
    # A name without blanks needs no quotes.
    name = f"{rank_spec.processes}-{rank_spec.rank}".replace(" ", "_")
    # A restarted process must not append to the log of the one before it.
    if rank_spec.incarnation > 1:
        name += f".{rank_spec.incarnation}"
    return f"{name}.log"


def tail(path: str | Path, size: int = _TAIL_BYTES) -> str:
    """The last lines of a file, at most `size` bytes; empty if there is no file."""
    try:
        with Path(path).open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""

    if end <= size:
        return text
    # The first line is cut off in the middle.
    return text.partition("\n")[2]


# ----------------------------------------------------------- inspection and termination

REPLY_S = 3.0
"""Seconds that a process or a node gets to reply to a question about a failure."""

# A process that Ray ends is gone within a tenth of a second; one that is stopped
# (SIGSTOP) never is.
_END_S = 2.0
_END_POLL_S = 0.01
_TRACKER = "multiprocessing.resource_tracker"
_STACKS_BYTES = 32_768


def examine(members: Sequence[Member], stacks: bool) -> list[tuple[str, str]]:
    """State and last output of processes that do not reply, looked up on their nodes.

    Args:
        members: Processes to examine.
        stacks: Whether to return the Python stacks instead of the last output where
            the process can still write them.
    """
    # Requests to other nodes run at the same time, so all are sent before the first
    # reply is waited for.
    pending: list[Any] = []
    for member in members:
        if member.process_info is None:
            pending.append(("it has not started", ""))
        else:
            info = member.process_info
            pending.append(on_node(info.node_id, examine_here, info, stacks))

    results: list[tuple[str, str]] = []
    deadline = time.monotonic() + 2 * REPLY_S
    for item in pending:
        if isinstance(item, tuple):
            results.append(item)
        else:
            results.append(_result_from_node(item, deadline))
    return results


def _result_from_node(reference: Any, deadline: float) -> tuple[str, str]:
    remaining_s = max(0.0, deadline - time.monotonic())
    try:
        wait([reference], 1, remaining_s)
        result: tuple[str, str] = RAY_CALLS.make(ray.get, reference, timeout=TICK_S)
        return result
    except Exception as error:
        return f"its node does not reply: {type(error).__name__}", ""


def examine_here(process_info: ProcessInfo, stacks: bool) -> tuple[str, str]:
    """State and last output, or stacks, of a process on this node."""
    ended = "the process has ended"
    if not process_info.owner.is_running:
        return ended, tail(process_info.log_path)
    try:
        return _examine_living(process_info, stacks)
    except psutil.NoSuchProcess:
        # The process ended during the examination.
        return ended, tail(process_info.log_path)


def _examine_living(process_info: ProcessInfo, stacks: bool) -> tuple[str, str]:
    process = psutil.Process(process_info.pid)
    log_path = process_info.log_path

    # A stopped process would not act on the signal below.
    if process.status() == psutil.STATUS_STOPPED:
        return "the process is stopped (SIGSTOP)", tail(log_path)

    if stacks:
        text = _stacks_by_signal(process_info)
        if text is not None:
            state = (
                "something holds the interpreter lock; stacks from the process's"
                " signal handler:"
            )
            return state, text
    return f"the process is {process.status()}", tail(log_path)


def _stacks_by_signal(process_info: ProcessInfo) -> str | None:
    """Stacks that the process writes to its log on a signal; None if it does not."""
    log = Path(process_info.log_path)
    size_before = log.stat().st_size
    os.kill(process_info.pid, STACKS_SIGNAL)

    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        time.sleep(0.1)
        size = log.stat().st_size
        if size > size_before:
            # The tail of a longer file starts after its first line break. The byte
            # more is the line break before the stacks.
            num_bytes = min(size - size_before + 1, _STACKS_BYTES)
            return tail(log, num_bytes)
    return None


def end(members: Sequence[Member]) -> None:
    """End processes whose workers are closed, in order: Ray ends them.

    Ray reports a process that was killed as one that died unexpectedly, so only what
    Ray could not end is killed. The function never raises, as `kill`.
    """
    _on_their_nodes(members, end_here)


def kill(members: Sequence[Member]) -> None:
    """Kill processes at once, also stopped ones (SIGSTOP) that Ray cannot reach.

    The function never raises, since the cluster may be gone already.
    """
    _on_their_nodes(members, kill_here)


def _on_their_nodes(
    members: Sequence[Member],
    function: Callable[[Sequence[ProcessInfo], Sequence[Any]], None],
) -> None:
    """Call `function(process_infos, actors)` on each node, then end what is left."""
    by_node: dict[str, list[Member]] = {}
    for member in members:
        if member.process_info is not None:
            by_node.setdefault(member.process_info.node_id, []).append(member)

    pending = []
    for node_id, neighbours in by_node.items():
        infos = [member.process_info for member in neighbours]
        actors = [member.actor for member in neighbours]
        with contextlib.suppress(Exception):
            reference = on_node(node_id, function, infos, actors)
            if reference is not None:
                pending.append(reference)

    if pending:
        wait_while_closing(pending, REPLY_S)

    actors = [member.actor for member in members]
    RAY_CALLS.attempt(REPLY_S, _forget_actors, actors)


def _forget_actors(actors: Sequence[Any]) -> None:
    """Let Ray end actors, as far as it still knows them."""
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)


def end_here(process_infos: Sequence[ProcessInfo], actors: Sequence[Any]) -> None:
    """Let Ray end processes of this node, then kill what is left of them.

    Args:
        process_infos: The processes.
        actors: Their actors.
    """
    # The descendants of a process cannot be found once it has ended.
    families = [process for info in process_infos for process in _family(info)]

    RAY_CALLS.attempt(REPLY_S, _forget_actors, actors)
    deadline = time.monotonic() + _END_S
    while any(info.owner.is_running for info in process_infos):
        if time.monotonic() > deadline:
            break
        time.sleep(_END_POLL_S)

    _kill_all(families)


def kill_here(process_infos: Sequence[ProcessInfo], actors: Sequence[Any]) -> None:
    """Kill processes of this node; their actors need nothing more."""
    for process_info in process_infos:
        terminate(process_info)


def terminate(process_info: ProcessInfo) -> None:
    """Kill a process of this node and the processes that it has started.

    Such a descendant, as a rank of an engine, may be stopped and would not notice the
    end of its parent. Python's tracker of shared resources is spared: it exits by
    itself when it has cleaned up.
    """
    _kill_all(_family(process_info))


def _family(process_info: ProcessInfo) -> list[psutil.Process]:
    """The process and its descendants, without Python's tracker; none if it ended."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(process_info.pid)
        # It may be a later process with the same id.
        if not process_info.owner.is_running:
            return []
        for relative in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                is_tracker = any(_TRACKER in word for word in relative.cmdline())
                if not is_tracker:
                    family.append(relative)
    return family


def _kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def on_node(node_id: str, function: Callable[..., Any], *args: object) -> Any:
    """Call `function(*args)` on a node.

    Returns:
        The result on this node; a reference to the result on another node.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    return task_on(node_id, function, *args)


def task_on(
    node_id: str, function: Callable[..., Any], *args: object, **options: Any
) -> Any:
    """Call `function(*args)` in a process of its own on a node.

    Args:
        node_id: Ray's id of the node.
        function: The function.
        args: Its arguments.
        options: Further options of the task, by Ray's names.

    Returns:
        A reference to the result, or what Ray returns with these options.
    """
    affinity = NodeAffinitySchedulingStrategy(node_id, soft=False)
    placed = _task(function).options(scheduling_strategy=affinity, **options)
    return RAY_CALLS.make(placed.remote, *args)


@functools.cache
def _task(function: Callable[..., Any]) -> Any:
    """Return a function as a task; Ray stores each new task for good."""
    return ray.remote(num_cpus=0, max_retries=0)(function)
