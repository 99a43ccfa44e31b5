"""Processes of a benchmark: each is given its work as JSON and prints what it found as JSON, or is a copy of one.

Invariant: none outlives the call, and the first that fails ends the others, which would wait for it. Whoever asks loads
no torch: pages of it would count as shared with the processes that are measured. Deliberately not here: what they do.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any

from verl_ray.errors import VerlRayError

PATIENCE_S = 500.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # ranks are processes of one machine


def ask(
    module: str,
    works: Sequence[Mapping[str, object]],
    threads: int,
    settings: Mapping[str, str] | None = None,
    *,
    patience_s: float = PATIENCE_S,
) -> list[dict[str, Any]]:
    """What `python -m module` finds for each of these works, all at the same time, with `threads` threads each, and
    `settings` in its environment.

    Raises VerlRayError when a process fails (its own words are on stderr) or is not done after `patience_s`.
    """
    # Idle threads sleep, as those of the project's workers do: on a busy machine one that spins has them all wait.
    of_threads = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {**os.environ, **of_threads, **_LOOPBACK, "HF_HUB_OFFLINE": "1", **(settings or {})}
    give_up = time.monotonic() + patience_s
    with contextlib.ExitStack() as started:
        processes = [
            started.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", module, json.dumps(work)], stdout=subprocess.PIPE, env=environment
                )
            )
            for work in works
        ]
        for process in processes:
            started.callback(process.kill)
        while None in (codes := [process.poll() for process in processes]):  # what they print fits into a pipe
            if any(codes) or time.monotonic() > give_up:
                break
            time.sleep(_POLL_S)
        if any(code != 0 for code in codes):
            raise VerlRayError(
                f"processes of {module} ended with {codes}, where None was stopped after {patience_s:g} s or since "
                f"another had failed; expected 0. What they said is above. Their work: {json.dumps(works)}"
            )
        said = [process.communicate()[0].splitlines()[-1] for process in processes]
    return [json.loads(line) for line in said]


def fork(run: Callable[..., None], works: Sequence[Sequence[Any]]) -> None:
    """Call `run(*work)` for each of these works, all at the same time, each in a copy of this process: what that has
    imported is there. It may not have started a thread. Copies end with this process, whose caller limits its time.

    Raises VerlRayError when one fails; its own words are on stderr.
    """
    forking = multiprocessing.get_context("fork")
    copies = [forking.Process(target=_run, args=(run, work)) for work in works]
    try:
        for copy in copies:
            copy.start()
        running = {copy.sentinel for copy in copies}
        while running:
            running.difference_update(wait(list(running)))
            codes = [copy.exitcode for copy in copies]
            if any(codes):
                raise VerlRayError(f"processes ended with {codes}, where None was still at it; expected 0: {works}")
    finally:
        for copy in copies:
            copy.kill()


def _run(run: Callable[..., None], work: Sequence[Any]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # however the process ends whose copy this is
    run(*work)
