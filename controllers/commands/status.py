"""The command `status`: what every process of a run does, and what it waits for.

Invariant: the run is asked nothing. The driver's final output is in a file, so the
command works while the driver is stuck, stopped or gone, and says which of these it is,
and how old the words are.
"""

from __future__ import annotations

import argparse
import socket
from typing import NoReturn

import psutil

from verl_ray.checkpoint.snapshot_files import bytes_left
from verl_ray.errors import ConfigError, Problem
from verl_ray.ownership import Owner
from verl_ray.paths import OUTPUTS, RUN_HELP, run_folder
from verl_ray.preflight.machine import MIB
from verl_ray.private_files import SHARED_MEMORY
from verl_ray.profiling.output_lines import printable
from verl_ray.profiling.process_table import (
    STATUS,
    RunStatus,
    numbers,
    read_status,
    table_text,
)

_LATE = 3
"""How many times its interval a status may be old before the driver counts as stuck."""
_SLACK_S = 5.0


def main(argv: list[str]) -> int:
    """Print the status of a run; return 1 if its driver is gone without a word.

    Raises:
        ConfigError: there is no such run, or it has no status.
    """
    arguments = _parser().parse_args(argv)
    status = status_of(arguments.run)
    state, is_gone = state_of_driver(status)
    print(state)
    if is_gone or status.is_followed or status.ended:
        _print_snapshots(str(run_folder(arguments.run)))
    if status.ended or status.is_followed:
        return 0

    doing = status.phase or "starting"
    if status.count is not None:
        doing += f" ({status.count})"
    print(table_text(f"{doing}, {status.age_s:.0f} s ago", status.rows))
    for line in [] if is_gone else _changes(status):
        print(line)
    for warning in status.warnings:
        print(f"warning: {printable(warning)}")
    return 1 if is_gone else 0


def _print_snapshots(run: str) -> None:
    """Print what a driver has left for the next one, if it has left anything."""
    nbytes = bytes_left(run)
    if nbytes:
        print(
            f"its snapshots take {nbytes / MIB:.1f} MiB of {SHARED_MEMORY}. The next"
            " driver of the run goes on from them; without a supervisor, any other run"
            " removes them"
        )


def status_of(run: str) -> RunStatus:
    """Return the last status of a run, by its folder or its name.

    Raises:
        ConfigError: There is no such run, or it has no status.
    """
    folder = run_folder(run)
    try:
        status = read_status(folder)
    except (ValueError, OSError) as error:
        _refuse(run, f"{STATUS} cannot be read: {error}")
    if status is None:
        rule = f"this folder has no {STATUS}: it is no run, or of an earlier version"
        _refuse(run, rule)
    return status


def state_of_driver(status: RunStatus) -> tuple[str, bool]:
    """Return the state of the driver in words, and whether it is gone."""
    age_s = status.age_s
    driver = f"driver {status.pid} on {status.host}"
    if status.is_followed:
        supervisor = Owner.parse(status.supervisor)
        assert supervisor is not None, "it runs"
        reason = f"{driver} has ended"
        if status.refusal:
            reason = f"the run waits for what refuses its start: {status.refusal}"
        return f"{reason}; supervisor {supervisor.pid} starts another driver", False
    if status.ended:
        state = f"the run has {status.ended}, {age_s:.0f} s ago"
        return f"{state}: {status.refusal}" if status.refusal else state, False

    owner = Owner.parse(status.driver)
    if owner is not None and owner.has_ended:
        return f"{driver} does not run any more, and has not said why", True

    silent = f"has written nothing for {age_s:.0f} s"
    is_late = age_s > _LATE * status.interval_s + _SLACK_S
    if status.host == socket.gethostname() and owner is not None:
        if owner.is_visible and _is_stopped(status.pid):
            return f"{driver} is stopped (SIGSTOP), and {silent}", False
        if is_late:
            return f"{driver} runs, but {silent}", False
        return f"{driver} runs", False
    if is_late:
        return f"{driver} {silent}; ask on its node whether it still runs", False
    return f"{driver} ran {age_s:.0f} s ago", False


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _changes(status: RunStatus) -> list[str]:
    """Return what has become of processes of this node since the driver wrote."""
    ended: dict[str, list[int]] = {}
    stopped: dict[str, list[int]] = {}
    for located in status.processes:
        process = Owner.parse(located.owner)
        # That of another machine is not seen.
        if process is None or not process.is_visible:
            continue
        if process.has_ended:
            ended.setdefault(located.role, []).append(located.rank)
        elif _is_stopped(process.pid):
            stopped.setdefault(located.role, []).append(located.rank)
    return [
        f"now: {role} rank {numbers(ranks)} {what}"
        for what, by_role in (("has ended", ended), ("is stopped (SIGSTOP)", stopped))
        for role, ranks in by_role.items()
    ]


def _refuse(run: str, rule: str) -> NoReturn:
    fix = "Give the folder of a run that has started, or its name."
    raise ConfigError([Problem("RUN", run, rule, fix)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray status",
        description=(
            "Print what each process of a run does: its role, rank and node, the method"
            " that was called, how far it is, for how many seconds, what it waits for,"
            " and at which line it is. It works while the driver is stuck or stopped."
            " Nothing is started or changed."
        ),
        epilog=(
            "examples:\n"
            f"  verl-ray status {OUTPUTS}/first\n"
            "  verl-ray status first\n\n"
            "exit codes:\n"
            "  0  the run goes on, or has ended and said so\n"
            "  1  its driver does not run any more, and has not said why\n"
            "  2  there is no such run, or it has no status\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    return parser
