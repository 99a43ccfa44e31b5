"""The command `watch`: the live block of a run, shown from another terminal.

Invariant: the run is asked nothing and notices nothing. Everything that is shown is in
its folder: config.yaml, metrics.jsonl, history.jsonl and the status that its driver
writes every few seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.text import Text

from controllers.commands.status import state_of_driver, status_of
from verl_ray.cluster.signals import Outlook, announcing
from verl_ray.errors import TrackingError
from verl_ray.ownership import Owner
from verl_ray.paths import OUTPUTS, RUN_HELP, run_folder
from verl_ray.profiling.phases import Doing
from verl_ray.profiling.process_table import FINAL, RunStatus, read_status
from verl_ray.report.lines import setting
from verl_ray.report.record import read_config
from verl_ray.tracking.block import Course, RunView
from verl_ray.tracking.console import step_parts
from verl_ray.tracking.history import RunSegment, read_history, wall_s
from verl_ray.tracking.jsonl import METRICS, step_of
from verl_ray.tracking.terminal import LiveLines, is_live

FAILED = 1
"""Exit code where the run has failed."""

STOPPED = 3
"""Exit code where the run was stopped by a signal."""

_LOOK_S = 1.0

_PATIENCE_S = 60.0
"""Seconds in which another driver may follow one that was killed or has failed."""

_START_S = 600.0
"""Seconds that a driver may take until it writes its first status."""

_CODES = dict(zip(FINAL, (0, STOPPED), strict=True))
"""Exit codes of the ends that no other driver follows."""


def main(argv: list[str]) -> int:
    """Show a run until it ends; return how it ended.

    Raises:
        ConfigError: There is no such run, or it has no status.
    """
    arguments = _parser().parse_args(argv)
    watched = WatchedRun(run_folder(arguments.run), status_of(arguments.run))
    outlook = Outlook("the watch ends, and the run goes on", "")
    with announcing(lambda: outlook):
        watched.look()
        if is_live(sys.stdout):
            _show_block(watched, sys.stdout)
        else:
            _print_steps(watched, sys.stdout)
    print(watched.ending)
    return watched.exit_code


def _print_steps(watched: WatchedRun, stream: TextIO) -> None:
    """Print the last step, and then each new one until the run ends."""
    lines = watched.take_lines()[-1:]
    # Ends with the run, whose last steps are printed as well.
    while True:
        for line in lines:
            print(line, file=stream, flush=True)
        if watched.has_ended:
            return
        time.sleep(_LOOK_S)
        watched.look()
        lines = watched.take_lines()


def _show_block(watched: WatchedRun, stream: TextIO) -> None:
    """Show the block until the run ends. Evaluations and the last step remain."""
    remaining = watched.take_lines()[-1:]
    block = LiveLines(stream, watched.view.lines)
    with block.shown():
        # Ends with the run. The terminal is painted in between, too.
        while not watched.has_ended:
            time.sleep(_LOOK_S)
            watched.look()
            for line in watched.take_lines():
                # An evaluation stays above the block, and the last step below it.
                remaining = [] if "held-out" in line else [line]
                block.paint([] if remaining else [Text(line)])
    for line in remaining:
        print(line, file=stream, flush=True)


class WatchedRun:
    """A run of another process, as its folder tells.

    Attributes:
        view: What is shown of it.
        ending: How it has ended, in words; empty while it goes on.
        exit_code: What the command returns then.
    """

    def __init__(self, folder: Path, status: RunStatus) -> None:
        """Take the folder of a run, and its last status."""
        self._folder = folder
        self._status = status
        self.view = RunView(folder.name)
        self.ending = ""
        self.exit_code = 0

        self._position = 0
        self._file = (0, 0)
        """Device and inode of the metrics.jsonl that was read last."""

        self._config_written_ns = 0
        """Time at which the config.yaml was written that was read last."""

        self._lines: list[str] = []
        """Lines of steps that were not taken yet."""

        self._gone_since_s: float | None = None
        """Time since which the driver is known to be gone, by the monotonic clock."""

        self._begun: tuple[str, float] = ("", 0.0)
        """Driver that starts, and the time of the first look at it, by that clock."""

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended, or its driver has been gone for a while."""
        return bool(self.ending)

    def take_lines(self) -> list[str]:
        """Return the lines of the steps that are new since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def look(self) -> None:
        """Read what the run has written since the last time."""
        # The driver may be about to write it, or the disk to come back.
        with contextlib.suppress(OSError, ValueError):
            self._status = read_status(self._folder) or self._status
        self._read_metrics()

        status = self._status
        view = self.view
        view.doing = Doing(status.phase, status.count, None)
        view.rows = status.rows
        view.warnings = status.warnings
        with contextlib.suppress(TrackingError):
            segments = read_history(self._folder)
            view.elapsed_s = wall_s(segments)
            if segments and self._is_starting(segments[-1], status):
                self._gone_since_s = None
                view.doing = Doing("starting", None, None)
                view.rows = ()
                return
        self._note_ending(status)

    def _is_starting(self, last: RunSegment, status: RunStatus) -> bool:
        """Return whether another driver than that of the status has begun."""
        if last.ending != "running" or last.has_written(status):
            return False
        owner = Owner.parse(last.driver)
        if owner is not None and owner.has_ended:
            return False
        if self._begun[0] != last.driver:
            self._begun = last.driver, time.monotonic()
        return time.monotonic() < self._begun[1] + _START_S

    @property
    def _sees_supervisor(self) -> bool:
        """Whether this machine would see a supervisor that still runs."""
        supervisor = Owner.parse(self._status.supervisor)
        return supervisor is None or supervisor.is_visible

    def _note_ending(self, status: RunStatus) -> None:
        state, is_gone = state_of_driver(status)
        if status.ended in FINAL:
            self.ending = state
            self.exit_code = _CODES[status.ended]
            return
        if status.is_followed:
            self._gone_since_s = None
            self.view.doing = Doing(state, None, None)
            self.view.rows = ()
            return
        if not status.ended and not is_gone:
            self._gone_since_s = None
            return

        now_s = time.monotonic()
        if status.ended:
            self._gone_since_s = now_s - status.age_s
        elif self._gone_since_s is None:
            self._gone_since_s = now_s
        patience_s = _PATIENCE_S if self._sees_supervisor else _START_S
        remaining_s = max(0.0, self._gone_since_s + patience_s - now_s)
        if not remaining_s:
            self.ending = state
            self.exit_code = FAILED
        follows = f"another driver may follow within {remaining_s:.0f} s"
        self.view.doing = Doing(f"{state}; {follows}", None, None)
        self.view.rows = ()

    def _read_metrics(self) -> None:
        """Read the lines of metrics.jsonl that are new."""
        path = self._folder / METRICS
        try:
            stat = path.stat()
            file = (stat.st_dev, stat.st_ino)
            course = self.view.course
            # A run that goes on from a checkpoint may have replaced the file.
            if course is None or file != self._file or stat.st_size < self._position:
                course = Course(None)
                self._config_written_ns = 0
                self._file = file
                self._position = 0
            self._read_total_steps(course)
            with path.open("rb") as stream:
                stream.seek(self._position)
                content = stream.read()
        except OSError:
            # The run has not come to its first line.
            return

        # Behind the last newline there is nothing, or the beginning of a line.
        *lines, _ = content.split(b"\n")
        self._position += sum(len(line) + 1 for line in lines)
        for line in lines:
            if step_of(line) is None:
                continue
            metrics = _numbers(json.loads(line))
            course.note(metrics)
            self._lines.append("  ".join(step_parts(course)))
        self.view.course = course

    def _read_total_steps(self, course: Course) -> None:
        """Read the number of steps if it may be another one than before."""
        with contextlib.suppress(OSError):
            written_ns = (self._folder / "config.yaml").stat().st_mtime_ns
            if written_ns != self._config_written_ns:
                self._config_written_ns = written_ns
                course.total_steps = _total_steps(self._folder)


def _numbers(fields: Mapping[str, float | None]) -> dict[str, float]:
    """Return the numbers of a line; null stands for one that was not finite."""
    return {
        name: math.nan if value is None else value for name, value in fields.items()
    }


def _total_steps(folder: Path) -> int | None:
    """Return the number of steps of a run; None if that is not known."""
    total = setting(read_config(folder, []), "run.total_steps")
    return total if isinstance(total, int) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray watch",
        description=(
            "Show a run until it ends, as its own terminal does: step, time, reward,"
            " held-out metrics, phases, processes and warnings. Where the output is no"
            " terminal, print a line per step. The run is asked nothing, and goes on"
            " when the watch is ended by Ctrl-C."
        ),
        epilog=(
            "examples:\n"
            f"  verl-ray watch {OUTPUTS}/first\n"
            "  verl-ray watch first | grep held-out\n\n"
            "exit codes:\n"
            "  0    the run has finished\n"
            f"  {FAILED}    it has failed, or its driver is gone, and no other driver"
            f" has followed within {_PATIENCE_S:.0f} s; a run that waits for what"
            " refuses its start goes on\n"
            "  2    there is no such run, or it has no status\n"
            f"  {STOPPED}    it was stopped, and can go on\n"
            "  130  the watch was ended by Ctrl-C\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    return parser
