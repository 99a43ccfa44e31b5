"""The option --multirun: one run after another, over overrides with several values.

Invariant: every configuration is checked before the first run starts; a signal reaches
the run that works, and no other one starts after it. Each run is a process, so that
nothing of one is in the next.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from controllers.commands.check import SeenData, checked_config
from controllers.compose.grammar import SweptRun, swept_runs
from controllers.run.best import BestEvaluation, best_of, evaluations_of
from controllers.run.next_command import (
    in_shell,
    next_in_words,
    shell_command,
    typed_words,
)
from verl_ray.config.schema import Config
from verl_ray.disk import replace_file
from verl_ray.errors import ConfigError, Interrupted, Problem, TrackingError
from verl_ray.paths import shown_path
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.tables import print_tables
from verl_ray.report.tracker import PAGE
from verl_ray.shell import override_of
from verl_ray.tracking.base import GLOBAL_STEP, HELD_OUT
from verl_ray.tracking.jsonl import METRICS, read_metrics

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_OUTCOMES = {0: "done", 1: "failed", 2: "refused", Interrupted.exit_code: "stopped"}


@dataclass
class _Result:
    """The end of a run; without a code it did not start."""

    code: int | None = None
    minutes: float = 0.0

    @property
    def outcome(self) -> str:
        if self.code is None:
            return "not started"
        return _OUTCOMES.get(self.code, f"exit code {self.code}")


@dataclass
class _Sweep:
    """The runs of a sweep, and where each writes."""

    runs: list[SweptRun]
    configs: list[Config]
    name: str
    has_own_folders: bool
    """Whether the swept overrides themselves name the folders."""
    results: list[_Result] = field(default_factory=list)

    def overrides_of(self, number: int) -> list[str]:
        """Return the overrides of a run, the place of its folder among them."""
        overrides = list(self.runs[number].overrides)
        if not self.has_own_folders:
            overrides.append(override_of("run.name", f"{self.name}-{number}"))
            overrides.append(override_of("run.dir", str(self.folder_of(number))))
        return overrides

    def config_of(self, number: int) -> Config:
        """Return the configuration of a run, with its own folder."""
        config = self.configs[number]
        run = config.run.model_copy(update={"dir": str(self.folder_of(number))})
        return config.model_copy(update={"run": run})

    def folder_of(self, number: int) -> Path:
        if self.has_own_folders:
            return Path(self.configs[number].run.dir)
        return Path(self.configs[0].run.dir) / str(number)


def multirun(
    command: str,
    arguments: Sequence[str],
    *,
    config_name: str,
    overrides: Sequence[str],
    config_dir: str | None,
    reads_data: bool,
    described: Machine | None = None,
) -> int:
    """Run a command once per combination of values, and return the worst exit code.

    Args:
        command: `train`, `evaluate`, or `check`, which lists the runs alone.
        arguments: all arguments of `verl-ray`, for a message at a stop.
        config_name: the root config.
        overrides: what the user typed; a value may be several, as in `key=1,2`.
        config_dir: a folder of the user's own, or None.
        reads_data: whether to read the data files as well.
        described: the machine that `check` checks for, in place of this one.

    Raises:
        ConfigError: the problems of all runs.
    """
    root = ["--config-name", config_name]
    if config_dir is not None:
        root += ["--config-dir", config_dir]

    sweep = _checked(
        command,
        config_name,
        overrides,
        config_dir,
        reads_data=reads_data,
        described=described,
    )
    sweep.results = [_Result() for _ in sweep.runs]
    if command == "check":
        _summarize(command, sweep)
        return 0

    _run_all([command, *root], sweep)
    _summarize(command, sweep)
    codes = [result.code for result in sweep.results if result.code is not None]
    if len(codes) < len(sweep.runs) or Interrupted.exit_code in codes:
        words = typed_words(arguments)
        # A name that holds the time of the start would be another one.
        if not any(word.startswith(("run.name=", "+run.name=")) for word in words):
            words.append(override_of("run.name", sweep.name))
        print(f"To go on:\n{in_shell(words, Path.cwd())}", flush=True)
        return Interrupted.exit_code
    return max(codes)


# ---------------------------------------------------------------------------- the runs


def _checked(
    command: str,
    config_name: str,
    overrides: Sequence[str],
    config_dir: str | None,
    *,
    reads_data: bool,
    described: Machine | None,
) -> _Sweep:
    """Return the runs of a sweep, each of which can run.

    Raises:
        ConfigError: the problems of all runs, each problem once.
    """
    runs = swept_runs(overrides)
    configs: list[Config] = []
    problems: dict[str, Problem] = {}
    seen = SeenData()

    for run in runs:
        try:
            checked = checked_config(
                config_name,
                run.overrides,
                config_dir,
                evaluates=command == "evaluate",
                reads_data=reads_data,
                seen=seen,
                described=described,
            )
            configs.append(checked.config)
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(str(problem), problem)

    if problems:
        raise ConfigError(list(problems.values()))

    own_keys = {text.partition("=")[0].lstrip("+") for text in runs[0].own}
    has_own_folders = not own_keys.isdisjoint({"run.name", "run.dir"})
    return _Sweep(runs, configs, configs[0].run.name, has_own_folders)


def _run_all(command: Sequence[str], sweep: _Sweep) -> None:
    """Start one run after another, until all have ended or one is stopped."""
    with _signals_to_the_run() as process:
        for number, result in enumerate(sweep.results):
            _announce(sweep, number)
            start = time.monotonic()
            words = [*command, *sweep.overrides_of(number)]
            result.code = process.run(_program(), words)
            result.minutes = (time.monotonic() - start) / 60
            if result.code == Interrupted.exit_code or process.is_stopped:
                break


def _announce(sweep: _Sweep, number: int) -> None:
    own = " ".join(sweep.runs[number].own) or "no override with several values"
    place = f"run {number + 1} of {len(sweep.runs)}"
    print(f"\n{place}: {own} -> {sweep.folder_of(number)}", flush=True)


def _program() -> list[str]:
    """Return the words that start this program, as its user did."""
    if Path(sys.argv[0]).name == "verl-ray":
        return [sys.argv[0]]
    return [sys.executable, "-m", "controllers"]


class _RunningProcess:
    """The process of the run that works, which signals are passed on to."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, program: Sequence[str], words: Sequence[str]) -> int:
        """Start a run, wait until it ends, and return its exit code."""
        with subprocess.Popen([*program, *words]) as self._process:
            code = self._process.wait()

        # A process that a signal ended has the code that a shell gives it.
        return code if code >= 0 else 128 - code

    def stop(self, number: int, _: FrameType | None) -> None:
        """Pass a signal on, and start no further run."""
        self.is_stopped = True
        # Ctrl-C reaches the run by itself, too; within a second two signals are one.
        if self._process is not None:
            self._process.send_signal(number)


@contextlib.contextmanager
def _signals_to_the_run() -> Iterator[_RunningProcess]:
    process = _RunningProcess()
    before = {
        number: signal.signal(number, process.stop)
        for number in _SIGNALS
        # Under `nohup` the end of a terminal is ignored.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }

    try:
        yield process
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------- the summary

# It is made from the files of the runs alone, so a sweep that goes on shows the runs
# before it as well.

SUMMARY = "sweep.txt"
"""File in the folder of a sweep with the summary of its runs."""

FILE_WIDTH = 80


def _summarize(command: str, sweep: _Sweep) -> None:
    """Print how each run ended, and write it to the folder of the sweep."""
    title = f"{len(sweep.runs)} runs"
    folder = None
    if not sweep.has_own_folders:
        folder = Path(sweep.configs[0].run.dir)
        title += f" in {folder}/"

    ends = []
    for number, result in enumerate(sweep.results):
        minutes = None if result.code is None else result.minutes
        config = sweep.config_of(number)
        ends.append(RunEnd(sweep.runs[number].own, config, result.outcome, minutes))
    # A check starts no run, so there is no folder yet.
    has_run = folder is not None and folder.is_dir() and command != "check"
    print_summary(title, command, ends, folder if has_run else None)


@dataclass(frozen=True)
class RunEnd:
    """The end of a run of a sweep."""

    own: Sequence[str]
    """The overrides that set it apart from the others."""

    config: Config
    """Its configuration, with the folder that it wrote to."""

    outcome: str

    minutes: float | None
    """How long it took; None if it did not start."""


@dataclass(frozen=True)
class _Measured:
    """The evaluations of a run."""

    best: BestEvaluation
    before: float | None
    last: float | None


def print_summary(
    title: str, command: str, ends: Sequence[RunEnd], folder: Path | None
) -> None:
    """Print the summary of a sweep, and write it to a folder.

    Args:
        title: What the runs are.
        command: The command that ran each of them.
        ends: The runs in order.
        folder: The folder of the sweep; None where its runs have no common one.
    """
    measured = [_measured(end, command) for end in ends]
    table = _table(title, ends, measured)
    lines = list(_way_on(command, ends, measured, folder))
    print_tables(table)
    if folder is not None:
        print(f"this summary: {folder / SUMMARY}", flush=True)
    print_tables(*lines)
    if folder is None:
        return

    text = io.StringIO()
    console = Console(file=text, force_jupyter=False, width=FILE_WIDTH, highlight=False)
    for part in (table, *lines):
        console.print(part, soft_wrap=isinstance(part, str), markup=False)
    replace_file(folder / SUMMARY, text.getvalue().encode(errors="backslashreplace"))


def _table(
    title: str, ends: Sequence[RunEnd], measured: Sequence[_Measured | None]
) -> Table:
    """Return a row per run: what sets it apart, how it ended, what it reached."""
    table = Table(title=title, title_justify="left")
    for heading in ("run", "settings", "outcome", "minutes", "before", "last", "best"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "settings")

    for number, (end, result) in enumerate(zip(ends, measured, strict=True)):
        cells = ["-", "-", "-"]
        if result is not None:
            best = f"{result.best.value:.4g}\nstep {result.best.step}"
            cells = [_cell(result.before), _cell(result.last), best]
        minutes = "-" if end.minutes is None else f"{end.minutes:.1f}"
        settings = "\n".join(end.own)
        table.add_row(str(number), settings, end.outcome, minutes, *cells)
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _way_on(
    command: str,
    ends: Sequence[RunEnd],
    measured: Sequence[_Measured | None],
    folder: Path | None,
) -> Iterator[str]:
    """Yield what to try next, a report over all runs, and which run is the best."""
    best = _best_run(measured)
    if command == "train":
        if best is not None:
            yield next_in_words(ends[best].config)
        yield from _report_line(ends, folder)

    if best is not None and (result := measured[best]) is not None:
        metric = result.best.name.removeprefix(HELD_OUT)
        yield (
            f"best: run {best}, with {metric} {result.best.value:.4g} at step"
            f" {result.best.step}, in {shown_path(Path(ends[best].config.run.dir))}"
        )


def _report_line(ends: Sequence[RunEnd], folder: Path | None) -> Iterator[str]:
    """Yield the command that compares the runs that have begun, if several have."""
    folders = [Path(end.config.run.dir) for end in ends if end.minutes is not None]
    folders = [each for each in folders if (each / METRICS).is_file()]
    if len(folders) < 2:
        return
    words = ["report", *map(shown_path, folders)]
    if folder is not None:
        words += ["--output", shown_path(folder / PAGE)]
    yield f"one report over all runs:\n{shell_command(*words)}"


def _best_run(measured: Sequence[_Measured | None]) -> int | None:
    """Return the number of the best run; None where they cannot be compared."""
    bests = {number: result.best for number, result in enumerate(measured) if result}
    # Values of different metrics cannot be compared.
    if len({best.name for best in bests.values()}) != 1:
        return None

    number, best = next(iter(bests.items()))
    for other, candidate in bests.items():
        if best.is_worse_than(candidate.value):
            number, best = other, candidate
    return number


def _measured(end: RunEnd, command: str) -> _Measured | None:
    """Return the evaluations of a run; None without any."""
    if end.minutes is None:
        return None
    try:
        evaluations = evaluations_of(_lines(Path(end.config.run.dir), command))
    except TrackingError:
        return None

    best = best_of(end.config, evaluations)
    if best.step is None:
        return None
    before = evaluations.get(0) if command == "train" else None
    return _Measured(
        best=best,
        before=None if before is None else best.value_in(before),
        last=best.value_in(evaluations[max(evaluations)]),
    )


def _lines(folder: Path, command: str) -> list[dict[str, float]]:
    """Return the lines of a run's record, or its newest evaluation as a line."""
    if command == "train":
        return read_metrics(folder / METRICS)

    results = list((folder / "evaluated").glob("step_*/metrics.json"))
    if not results:
        return []
    newest = max(results, key=lambda path: path.stat().st_mtime)
    result = json.loads(newest.read_text("utf-8"))
    metrics = result["metrics"].items()
    # What is not finite is null.
    numbers = {name: value for name, value in metrics if value is not None}
    return [{**numbers, GLOBAL_STEP: result["step"]}]
