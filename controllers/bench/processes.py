"""Processes of a benchmark: separate programs, or forks of the present process.

Invariant: no process outlives the call, and the first that fails ends the others, which
would wait for it. The calling process loads no torch, because its pages would count as
shared with the processes that are measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import IO, Any

from verl_ray.errors import VerlRayError

PATIENCE_S = 500.0
_POLL_S = 0.05
_OUTPUT_S = 30.0
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

# Ranks are processes of one machine.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def run_processes(
    module: str,
    tasks: Sequence[Mapping[str, object]],
    threads: int,
    settings: Mapping[str, str] | None = None,
    *,
    patience_s: float = PATIENCE_S,
) -> list[dict[str, Any]]:
    """Run `python -m module TASK` for all tasks at the same time.

    Args:
        module: The module to run. It reads its task as JSON from its only argument and
            prints its result as JSON on the last line.
        tasks: One task per process.
        threads: OpenMP threads of each process.
        settings: Additional environment variables.
        patience_s: Seconds until processes that are still running are ended.

    Returns:
        The result of each process, in the order of the tasks.

    Raises:
        VerlRayError: A process failed, with its own messages on stderr, or did not end
            in time.
    """
    # Idle threads sleep, like those of the product's workers. On a busy machine a
    # thread that spins makes all others wait.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        **_LOOPBACK,
        "HF_HUB_OFFLINE": "1",
        **(settings or {}),
    }
    deadline = time.monotonic() + patience_s

    with contextlib.ExitStack() as cleanup:
        processes = []
        for task in tasks:
            command = [sys.executable, "-m", module, json.dumps(task)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
            processes.append(cleanup.enter_context(process))
        for process in processes:
            cleanup.callback(process.kill)

        codes = _exit_codes(processes, deadline)
        if any(code != 0 for code in codes):
            raise VerlRayError(
                f"processes of {module} ended with {codes}; expected 0. None means that"
                f" a process was stopped, after {patience_s:g} s or because another"
                " one failed. Their messages are above. Their tasks:"
                f" {json.dumps(tasks)}"
            )
        last_lines = [_last_line(process) for process in processes]

    return [json.loads(line) for line in last_lines]


def _last_line(process: subprocess.Popen[bytes]) -> bytes:
    """Return the last line of a process that has ended."""
    try:
        return process.communicate(timeout=_OUTPUT_S)[0].splitlines()[-1]
    except subprocess.TimeoutExpired:
        raise VerlRayError(
            f"the output of process {process.pid} has no end, though the process has"
            " ended: a process that it started keeps it open"
        ) from None


def _exit_codes(
    processes: Sequence[subprocess.Popen[bytes]], deadline: float
) -> list[int | None]:
    """Wait until all processes ended, one failed, or the deadline passed.

    Nothing is read meanwhile, because the output of a process fits into a pipe.
    """
    codes = [process.poll() for process in processes]
    while None in codes:
        if any(codes) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
        codes = [process.poll() for process in processes]
    return codes


def fork(run: Callable[..., Any], tasks: Sequence[Sequence[Any]]) -> list[Any]:
    """Call `run(*task)` for all tasks at the same time, each in a fork of this process.

    Modules that this process imported are imported in the forks. This process may not
    have started a thread. Forks end with this process, whose caller limits its time.

    Returns:
        What the calls return, in the order of the tasks.

    Raises:
        VerlRayError: A fork failed; its own messages are on stderr.
    """
    forking = multiprocessing.get_context("fork")
    with contextlib.ExitStack() as cleanup:
        # A file holds a result of any size, which nobody reads meanwhile.
        files = [cleanup.enter_context(tempfile.TemporaryFile()) for _ in tasks]
        forks = []
        for task, file in zip(tasks, files, strict=True):
            process = forking.Process(target=_run_fork, args=(run, task, file))
            process.start()
            cleanup.callback(process.kill)
            forks.append(process)

        running = {process.sentinel for process in forks}
        while running:
            running.difference_update(wait(list(running)))
            codes = [process.exitcode for process in forks]
            if any(codes):
                raise VerlRayError(
                    f"processes ended with {codes}; expected 0. None means that a"
                    f" process was still running. Their tasks: {tasks}"
                )
        for file in files:
            file.seek(0)
        return [pickle.load(file) for file in files]


def _run_fork(run: Callable[..., Any], task: Sequence[Any], result: IO[bytes]) -> None:
    # The fork ends with its parent, however the parent ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pickle.dump(run(*task), result)
    result.flush()
