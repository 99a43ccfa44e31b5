"""A soak: a long run whose processes die and stop at random, one after another.

As a program this file makes one run that nothing happens to and one with faults, and
prints each fault with the seconds until the next new step. Then it says whether metrics
and weights have the same bits, whether every prompt was trained once and in order, and
what is left: processes, files in shared memory, and folders of Ray::

    python -m tests.soak [--faults 50] [--steps 200] [--seed 0] [OVERRIDE ...]

Faults come from outside: signals to processes of the run, its driver and its cluster
included. Deliberately not here: faults in a certain phase (`tests/drills.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from tests.controllers.runs import make_inputs
from tests.faults import process_behind
from tests.kills import ROOT, Run
from tests.layouts import LAYOUTS, differing
from verl_ray.cluster.session_folders import own_sessions
from verl_ray.private_files import SHARED_MEMORY, shared_folder
from verl_ray.tracking.jsonl import METRICS, read_metrics

STALL_S = 45
"""Limit of a process without progress, which a start keeps on an idle machine."""

PATIENCE_S = 300
"""Longest time without a new step."""

LATEST_S = 0.4
"""Longest time from the line of a step to the fault, which is longer than a step."""

RANKS = ("actor-0", "actor-1", "reward-0", "rollout-0")
CLUSTER_PROCESSES = ("raylet", "gcs_server")
TARGETS = (*2 * RANKS, "driver", *CLUSTER_PROCESSES)


class SoakedRun:
    """A run under its supervisor, to whose processes signals are sent."""

    def __init__(self, run: Run, output: Path) -> None:
        self._run = run
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("RAY_ADDRESS", None)
        with output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "controllers", *run.arguments],
                cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.family: set[psutil.Process] = set()
        """All processes that were seen."""
        self._noted_s = 0.0

    def finished_step(self) -> int:
        record = self._run.folder / METRICS
        lines = read_metrics(record) if record.exists() else []
        return int(lines[-1]["training/global_step"]) if lines else 0

    def wait_for(self, step: int) -> bool:
        """Wait for a step; return whether the run goes on after it."""
        until = time.monotonic() + PATIENCE_S
        while self.finished_step() < step:
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < until, f"no step {step} in {PATIENCE_S} s"
            self._note_family()
            time.sleep(0.02)
        return True

    def _note_family(self) -> None:
        """Note the processes that there are, now and then."""
        now_s = time.monotonic()
        if now_s - self._noted_s > 1.0:
            self._noted_s = now_s
            self.family.update(_descendants(psutil.Process(self.process.pid)))

    def processes(self, target: str) -> list[psutil.Process]:
        """Return the processes of this name; none while they start."""
        drivers = psutil.Process(self.process.pid).children()
        family = [child for driver in drivers for child in _descendants(driver)]
        self.family.update(drivers, family)
        if target == "driver":
            return drivers
        if target in CLUSTER_PROCESSES:
            return [child for child in family if child.name() == target]

        # Each driver counts the incarnations anew, so any of the logs may be the last.
        logs = (self._run.folder / "logs").glob(f"{target}*.log")
        behind = [process_behind(log) for log in logs]
        return [process for process in behind if process is not None]


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def soak(run: Run, output: Path, rng: random.Random, num_faults: int) -> SoakedRun:
    """Make a run with faults after steps that are drawn in advance."""
    soaked = SoakedRun(run, output)
    for step in sorted(rng.sample(range(1, run.steps - 1), num_faults)):
        after_s = LATEST_S * rng.random()
        target = rng.choice(TARGETS)
        is_frozen = target != "driver" and rng.random() < 0.2
        if not soaked.wait_for(step):
            break
        time.sleep(after_s)

        began_s = time.monotonic()
        before = soaked.finished_step()
        happened = _send(soaked, target, is_frozen)
        if not soaked.wait_for(min(before + 1, run.steps)):
            break
        seconds = time.monotonic() - began_s
        print(f"step {before}: {happened}; next step after {seconds:.1f} s", flush=True)
    soaked.process.wait(PATIENCE_S)
    return soaked


def _send(soaked: SoakedRun, target: str, is_frozen: bool) -> str:
    """Kill or stop the processes of a name once they are there; return what was done."""
    until = time.monotonic() + PATIENCE_S
    while not (found := soaked.processes(target)):
        if soaked.process.poll() is not None:
            return f"no {target}, since the run has ended"
        assert time.monotonic() < until, f"no {target} in {PATIENCE_S} s"
        time.sleep(0.02)
    number = signal.SIGSTOP if is_frozen else signal.SIGKILL
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return f"{number.name} to {target}"


def _left(soaked: SoakedRun, before: set[Path]) -> Iterator[str]:
    """Yield what the run has left behind."""
    for process in soaked.family:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            yield f"process {process.pid} {process.name()}"
    for path in _files() - before:
        yield f"file {path}"


def _files() -> set[Path]:
    """Return what there is in shared memory, and the sessions of Ray."""
    shared = {*shared_folder().iterdir(), *SHARED_MEMORY.iterdir()}
    return {*shared, *own_sessions().glob("session_*")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()

    folder = Path(tempfile.mkdtemp())
    outcome = _outcome(options, folder)
    print("\n".join(outcome) or "the same bits, and nothing is left", flush=True)
    if outcome:
        print(f"the runs stay in {folder}", flush=True)
        return 1
    shutil.rmtree(folder)
    return 0


def _outcome(options: argparse.Namespace, folder: Path) -> list[str]:
    """Make both runs; return what is wrong."""
    before = _files()
    layout = replace(LAYOUTS["fsdp"], stall_s=STALL_S, steps=options.steps)
    (folder / "inputs").mkdir()
    inputs = make_inputs(folder / "inputs")
    whole = layout.run(inputs, folder / "whole", *options.overrides)
    code, said = whole.process([])
    assert code == 0, said

    run = layout.run(inputs, folder / "run", *options.overrides)
    began_s = time.monotonic()
    output = folder / "output.log"
    soaked = soak(run, output, random.Random(options.seed), options.faults)
    code = soaked.process.returncode
    print(f"ended with {code} after {time.monotonic() - began_s:.0f} s", flush=True)
    if code:
        return [f"the run failed: {output}"]
    return [*differing(layout, whole, run), *_left(soaked, before)]


if __name__ == "__main__":
    sys.exit(main())
