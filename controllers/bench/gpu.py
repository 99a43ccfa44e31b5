"""`verl-ray bench gpu`: everything that only a GPU can show, in under ten minutes.

Invariant: each part is a process of its own with a deadline, so no part keeps another
from running; a part that was not run is listed with the reason. The figures are written
after every part, so a session that is cut off leaves what it has. Parts come in the
order of what most probably breaks. With `--device cpu` the parts that need no GPU run
at tiny sizes, which tests the suite and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

from controllers.bench.gpu_parts import Part, parts_of
from controllers.bench.inputs import FOLDER
from controllers.bench.suite import Flags, print_json, progress
from controllers.compose.listing import WIDTH
from verl_ray.engine.packages import missing_packages
from verl_ray.preflight.machine import Machine
from verl_ray.profiling.memory import GIB

Status = Literal["passed", "failed", "timed out", "not run"]

LIMIT_S = 580.0
SHORTEST_S = 10.0
"""With less time left, no further part is started."""
_GRACE_S = 10.0
"""Time to end for a part that is stopped, in addition to its own."""
_SHOWN_LINES = 15
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Outcome:
    """The end of a part.

    Attributes:
        name: The part.
        status: Whether its process ended well, ended in time, or was started.
        seconds: How long it ran.
        reason: Why it was not run or did not pass, or that its time was shortened.
        result: What it has printed as JSON on its last line.
        last_lines: The end of what it has said, unless it passed.
    """

    name: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    last_lines: list[str] = field(default_factory=list)


def main(argv: list[str]) -> int:
    """Run the parts, and print their figures.

    Returns:
        The exit code: 0, or 1 if a part failed or did not end in time.
    """
    options = _flags().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="verl-ray-gpu-") as folder:
        parts = parts_of(options.device, folder, _free_host_bytes())
        if options.only:
            parts = [part for part in parts if part.name in options.only]
        outcomes = run_parts(
            parts,
            gpus=Machine.here().gpus if options.device == "cuda" else 0,
            limit_s=options.limit_s,
            path=Path(options.out),
        )

    Console(stderr=True).print(_table(outcomes))
    print_json([asdict(outcome) for outcome in outcomes])
    return int(any(outcome.status in ("failed", "timed out") for outcome in outcomes))


def run_parts(
    parts: Sequence[Part], *, gpus: int, limit_s: float, path: Path
) -> list[Outcome]:
    """Run one part after another, whatever becomes of each.

    Args:
        parts: The parts, in their order.
        gpus: Number of GPUs that parts may use.
        limit_s: Seconds for all of them together.
        path: The JSON file of the outcomes, written after every part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + limit_s
    outcomes: list[Outcome] = []

    for part in parts:
        left_s = end - time.monotonic()
        reason = _obstacle(part, gpus)
        if not reason and left_s < SHORTEST_S:
            reason = f"{left_s:.0f} of {limit_s:.0f} s were left"

        if reason:
            outcome = Outcome(part.name, "not run", reason=reason)
        else:
            progress(f"{part.name}: {part.about} ...")
            outcome = _run(part, min(part.limit_s, left_s))
        outcomes.append(outcome)
        progress(f"{part.name}: {outcome.status}")
        path.write_text(json.dumps([asdict(each) for each in outcomes], indent=2))

    return outcomes


def _obstacle(part: Part, gpus: int) -> str:
    """Return what the part lacks on this machine, or nothing."""
    if part.gpus > gpus:
        noun = "GPU" if part.gpus == 1 else "GPUs"
        return f"needs {part.gpus} {noun}, and {gpus} may be used"
    missing = missing_packages(part.packages)
    if missing:
        return f"needs {' and '.join(missing)}, not installed here"
    free_gib = _free_host_bytes() / GIB
    if part.host_gib > free_gib:
        return f"needs {part.host_gib} GiB of host memory, {free_gib:.0f} are free"
    return ""


def _free_host_bytes() -> int:
    """Return the memory that parts may use, at most the limit of the container."""
    return min(int(psutil.virtual_memory().available), Machine.here().memory_bytes)


def _run(part: Part, limit_s: float) -> Outcome:
    """Run the process of a part and all that it starts, for at most `limit_s`."""
    start = time.monotonic()
    shortened = f"shortened to {limit_s:.0f} s" if limit_s < part.limit_s else ""

    # Output goes to a file: a process that the part leaves behind would keep a pipe
    # open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            # A driver ends its cluster, whose processes have sessions of their own.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:
            # The session is the part's own: this ends what it has left behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        seconds = round(time.monotonic() - start, 1)
        output.seek(0)
        lines = output.read().splitlines()

    result = _result(lines)
    last_lines = lines[-_SHOWN_LINES:]
    if code is None:
        reason = f"not done after {limit_s:.0f} s"
        reason += f", {shortened}" if shortened else ""
        return Outcome(part.name, "timed out", seconds, reason, result, last_lines)
    if code:
        reason = f"exit code {code}"
        return Outcome(part.name, "failed", seconds, reason, result, last_lines)
    # pytest ends well, too, if it has skipped all tests.
    last = lines[-1] if lines else ""
    if "skipped" in last and "passed" not in last:
        return Outcome(part.name, "not run", seconds, last.strip("= "))
    return Outcome(part.name, "passed", seconds, shortened, result)


def _result(lines: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object at the end of a part's output, on one line or on many."""
    for first in range(len(lines) - 1, -1, -1):
        if not lines[first].startswith("{"):
            continue
        with contextlib.suppress(json.JSONDecodeError):
            result: dict[str, Any] = json.loads("\n".join(lines[first:]))
            return result
    return {}


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("part", "", "s", "figures, or the reason")
    for outcome in outcomes:
        report = outcome.reason or json.dumps(outcome.result)
        if len(report) > _SHOWN_CHARACTERS:
            report = report[:_SHOWN_CHARACTERS] + " ..."
        table.add_row(outcome.name, outcome.status, f"{outcome.seconds:.1f}", report)
    return table


def _listed(parts: Sequence[Part]) -> str:
    """Return the parts for the help, as they are with `--device cpu`."""
    heading = "parts, in their order (* needs a GPU, with --device cpu, too):"
    column = max(len(part.name) for part in parts) + 4
    lines = []
    for part in parts:
        mark = "*" if part.gpus else " "
        first = f"{mark} {part.name}".ljust(column)
        rest = " " * column
        lines += textwrap.wrap(
            part.about, WIDTH, initial_indent=first, subsequent_indent=rest
        )
    return "\n".join([heading, *lines])


def _flags() -> Flags:
    parts = parts_of("cpu", "", _free_host_bytes())
    about = (
        "Run what only a GPU can show, in the order of what most probably breaks, from"
        " a checkout. Goes on after a failure."
    )
    flags = Flags("gpu", textwrap.fill(about, WIDTH))
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.epilog = _listed(parts)
    about = "cpu: the parts that need no GPU, at tiny sizes, to test the suite"
    flags.choice("--device", ("cuda", "cpu"), about)
    flags.add_argument(
        "--limit-s",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help=f"seconds for all parts together ({LIMIT_S:.0f})",
    )
    out = f"{FOLDER}/gpu.json"
    about = f"where the outcomes are written ({out})"
    flags.add_argument("--out", default=out, metavar="FILE", help=about)
    about = "these parts alone, of those below"
    names = [part.name for part in parts]
    flags.add_argument("--only", nargs="+", choices=names, metavar="PART", help=about)
    return flags
