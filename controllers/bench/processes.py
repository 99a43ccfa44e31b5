"""Processes of a benchmark: each is given its work as JSON and prints what it found as JSON.

Invariant: none outlives the call, and the first that fails ends the others, which would wait for it. Whoever asks loads
no torch: pages of it would count as shared with the processes that are measured. Deliberately not here: what they do.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verl_ray.errors import VerlRayError

PATIENCE_S = 500.0
_POLL_S = 0.05
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # ranks are processes of one machine


def ask(
    module: str, works: Sequence[Mapping[str, object]], threads: int, settings: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """What `python -m module` finds for each of these works, all at the same time, with `threads` threads each, and
    `settings` in its environment.

    Raises VerlRayError when a process fails (its own words are on stderr) or is not done after PATIENCE_S.
    """
    # Idle threads sleep, as those of the project's workers do: on a busy machine one that spins has them all wait.
    of_threads = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {**os.environ, **of_threads, **_LOOPBACK, "HF_HUB_OFFLINE": "1", **(settings or {})}
    give_up = time.monotonic() + PATIENCE_S
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
                f"processes of {module} ended with {codes}, where None was stopped after {PATIENCE_S:g} s or since "
                f"another had failed; expected 0. What they said is above. Their work: {json.dumps(works)}"
            )
        said = [process.communicate()[0].splitlines()[-1] for process in processes]
    return [json.loads(line) for line in said]
