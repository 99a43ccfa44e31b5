"""A run as its folder records it, also while it goes on or after a crash.

Invariant: reading changes nothing. A file that is damaged, half-written or missing
leaves out its own part of the record, and `damage` names it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from verl_ray.errors import TrackingError
from verl_ray.json_lines import lines_of
from verl_ray.ownership import Owner
from verl_ray.profiling.process_table import STATUS, RunStatus, read_status
from verl_ray.profiling.trace import TRACE, events_in, read_trace
from verl_ray.report.credentials import without_credentials
from verl_ray.report.lines import (
    Line,
    MainMetric,
    setting,
    with_saves_in_their_steps,
)
from verl_ray.report.samples import SampledRows, read_rows
from verl_ray.tracking.base import GLOBAL_STEP, HELD_OUT
from verl_ray.tracking.evaluations import (
    HeldOutScores,
    read_scores,
    recorded_evaluations,
)
from verl_ray.tracking.held_out_names import accuracy_beside
from verl_ray.tracking.history import (
    FAULTS,
    HISTORY,
    RunSegment,
    killed_segment,
    read_history,
)
from verl_ray.tracking.jsonl import METRICS, read_metrics, step_of

State = Literal["finished", "stopped", "failed", "killed", "running", "silent", "new"]
"""How a run stands. `silent` runs, or did, where its driver cannot be seen from here;
`new` has recorded nothing yet."""

SILENCE_S = 600.0
"""Seconds without a sign of life after which a driver elsewhere counts as silent."""

# Pages show tens of thousands of events, each of about 150 bytes.
_TRACE_BYTES = 16 << 20
_TRACE_HEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class LogError:
    """Lines of a log that are alike but for their numbers: an error, or a warning."""

    file: str
    text: str
    """The last such line, at most 400 characters of it."""

    count: int
    is_warning: bool = False


@dataclass(frozen=True)
class LogEnd:
    """The last lines of a log."""

    file: str
    text: str
    written_s: float
    """Time of its last line, in seconds since 1970."""


@dataclass(frozen=True)
class HeldOutCourse:
    """A held-out metric over the evaluations of a run."""

    metric: str
    should_fall: bool
    """Whether it is better where it is lower."""

    values: Mapping[int, float]
    """Its finite values by step, at least one."""

    @property
    def best_step(self) -> int:
        """The first step at which it is best."""
        sign = -1 if self.should_fall else 1
        return max(self.values, key=lambda step: (sign * self.values[step], -step))


@dataclass(frozen=True, eq=False)
class RunRecord:
    """Record of a run, as its folder holds it."""

    folder: Path
    config: Mapping[str, Any]
    """Tree of config.yaml; empty where there is none."""

    lines: Sequence[Line]
    """Lines of metrics.jsonl, each with `training/global_step`, which increases. The
    time of a checkpoint is that of the step that saved."""

    segments: Sequence[RunSegment]
    status: RunStatus | None
    state: State
    scores: Mapping[int, HeldOutScores]
    """Scores of the first and of the last evaluation, by step."""

    sampled: SampledRows = field(default_factory=SampledRows)
    """Some of the prompts and responses, as many as were requested."""

    faults: Sequence[Mapping[str, Any]] = ()
    """Lines of faults.jsonl: failures of processes."""

    log_errors: Sequence[LogError] = ()
    """Errors and warnings in the logs, those of the newest log last."""

    log_ends: Sequence[LogEnd] = ()
    """Ends of the newest logs, the newest first."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of packages, by name, of the last process or the newest checkpoint."""

    trace: Sequence[Mapping[str, Any]] = ()
    """Events of trace.json in Chrome's format."""

    skipped_trace_bytes: int = 0
    """Bytes in the middle of a large trace.json that were not read."""

    damage: Sequence[str] = ()
    """What could not be read, a sentence each."""

    @property
    def name(self) -> str:
        """The name of the run, or that of its folder."""
        name = setting(self.config, "run.name")
        return str(name or self.folder.resolve().name)

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return int(self.lines[-1][GLOBAL_STEP]) if self.lines else 0

    @property
    def total_steps(self) -> int | None:
        """The number of steps that the run is to make; None if that is not known."""
        total = setting(self.config, "run.total_steps")
        return total if isinstance(total, int) else None

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """Main held-out metrics by the step of their evaluation."""
        return _evaluations(self.lines, MainMetric.of(self.config))

    @property
    def held_out(self) -> list[HeldOutCourse]:
        """Main held-out metrics, see `held_out_courses`."""
        return held_out_courses(self.lines, self.config)

    @property
    def command(self) -> str:
        """The command that started the last process; empty where none was noted."""
        return str(self.segments[-1].command) if self.segments else ""

    @property
    def reason(self) -> str:
        """Why the run has failed, as far as that is on record; else empty."""
        if self.state not in ("failed", "killed"):
            return ""
        parts = []
        if self.status is not None and ": " in self.status.ended:
            parts.append(self.status.ended.partition(": ")[2])
        if self.status is not None and self.status.refusal:
            parts.append(self.status.refusal)
        if self.faults:
            names = ("role", "rank", "kind", "step", "cause")
            role, rank, kind, step, cause = map(self.faults[-1].get, names)
            where = f"{role} rank {rank} {kind} at step {step}"
            parts.append(f"last fault: {where}: {cause}")
        return "; ".join(parts)


def read_run(folder: Path, most_rows: int = 0) -> RunRecord:
    """Read the record of a run.

    Args:
        folder: Folder of the run. It may hold anything, or nothing.
        most_rows: Number of prompts and responses to read, chosen evenly over the
            steps; 0 leaves them out, with the logs and the trace.
    """
    damage: list[str] = []
    config = read_config(folder, damage)
    lines = _lines(folder / METRICS, damage)
    segments, status, state = _processes(folder, bool(lines), damage)
    lines = with_saves_in_their_steps(lines, segments)
    record = RunRecord(
        folder, config, lines, segments, status, state, {}, damage=damage
    )
    if state in ("killed", "silent") and segments and segments[-1].ending == "running":
        lost = killed_segment(segments[-1], folder / METRICS)
        segments[-1] = replace(lost, last_step=record.step)
    if not most_rows:
        return record

    # A run that began anew may leave files of the one before.
    begun_s = segments[0].begun_s if segments else 0.0
    trace, skipped_bytes = _trace(folder / TRACE, begun_s, damage)
    log_errors, log_ends = _logs(folder / "logs", damage)
    return replace(
        record,
        scores=_scores(folder, record.evaluations, damage),
        sampled=read_rows(folder, most_rows, damage),
        faults=read_faults(folder, begun_s, damage),
        log_errors=log_errors,
        log_ends=log_ends,
        versions=_versions(segments, folder / "checkpoints"),
        trace=trace,
        skipped_trace_bytes=skipped_bytes,
    )


def fingerprint(folder: Path) -> tuple[object, ...]:
    """Return what changes when the record does.

    That is the state of the run, and the names, sizes and times of its files.
    """
    names = ("config.yaml", METRICS, HISTORY, FAULTS, TRACE)
    paths = [folder / name for name in names]
    paths += [folder / name for name in ("rollouts", "evaluations")]
    facts: list[object] = []
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.stat()
            facts.append((path.name, stat.st_size, stat.st_mtime_ns))
    # A run that is killed writes nothing more.
    has_lines = any(fact[0] == METRICS for fact in facts if isinstance(fact, tuple))
    facts.append(_processes(folder, has_lines, [])[2])
    return tuple(facts)


@contextlib.contextmanager
def noting(damage: list[str]) -> Iterator[None]:
    """Add a sentence to `damage` for a file that cannot be read, instead of failing."""
    try:
        yield
    except (TrackingError, OSError) as error:
        damage.append(str(error))


def read_config(folder: Path, damage: list[str]) -> Mapping[str, Any]:
    """Return the configuration of a run as a tree; empty where there is none.

    Args:
        folder: Folder of the run.
        damage: Receives a sentence if it cannot be read.
    """
    path = folder / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        damage.append(f"{path.name} cannot be read: {error}")
        return {}
    if isinstance(tree, dict):
        return tree
    damage.append(f"{path.name} holds no configuration")
    return {}


def _lines(path: Path, damage: list[str]) -> list[Line]:
    """Return the lines of metrics.jsonl that can be read, the last one of each step."""
    lines: list[dict[str, float]] = []
    try:
        if path.is_file():
            lines = read_metrics(path)
    # Numbers may be too long for Python, and values too deep.
    except (TrackingError, OSError, ValueError, RecursionError):
        lines = _whole_lines(path, damage)

    by_step: dict[int, Line] = {}
    for line in lines:
        numbers: dict[str, float] = {}
        for name, value in line.items():
            if isinstance(value, int | float):
                with contextlib.suppress(OverflowError):
                    numbers[name] = float(value)
        step = numbers.get(GLOBAL_STEP, math.nan)
        if math.isfinite(step):
            by_step[int(step)] = numbers
    return [by_step[step] for step in sorted(by_step)]


def _whole_lines(path: Path, damage: list[str]) -> list[dict[str, float]]:
    """Return the lines of a damaged metrics.jsonl that are whole."""
    # A killed run may leave a torn line, which the run repairs when it continues.
    try:
        content = path.read_bytes()
    except OSError as error:
        damage.append(f"{path.name} cannot be read: {error}")
        return []
    texts = [text for text in content.split(b"\n") if text.strip(b"\0 ")]
    lines = [json.loads(text) for text in texts if step_of(text) is not None]
    lost = len(texts) - len(lines)
    damage.append(f"{path.name}: {lost} lines of {len(texts)} cannot be read")
    return lines


def held_out_courses(
    lines: Sequence[Line], config: Mapping[str, object]
) -> list[HeldOutCourse]:
    """Return main held-out metrics, those first that the best step is chosen by.

    A mean reward stands after the accuracy of the same responses, and is left out
    where it equals that in all evaluations.
    """
    main = MainMetric.of(config)
    evaluations = _evaluations(lines, main)
    by_name: dict[str, dict[int, float]] = {}
    for step, values in evaluations.items():
        for name, value in values.items():
            if math.isfinite(value):
                by_name.setdefault(name, {})[step] = value

    def rank(name: str) -> tuple[bool, str, bool]:
        beside = accuracy_beside(name) or name
        is_meant = main.is_meant(name) or main.is_meant(beside)
        return not is_meant, beside, beside != name

    return [
        HeldOutCourse(name, main.should_fall(name), by_name[name])
        for name in sorted(by_name, key=rank)
        if main.is_meant(name)
        or by_name[name] != by_name.get(accuracy_beside(name) or "")
    ]


def _evaluations(
    lines: Sequence[Line], main: MainMetric
) -> dict[int, dict[str, float]]:
    """Return held-out metrics, the core ones and the main ones, by their step."""
    evaluations = {}
    for line in lines:
        held_out = {
            name: value
            for name, value in line.items()
            if name.startswith(HELD_OUT)
            or accuracy_beside(name) in line
            or (name.startswith("val-") and main.is_meant(name))
        }
        if held_out:
            evaluations[int(line[GLOBAL_STEP])] = held_out
    return evaluations


def _processes(
    folder: Path, has_lines: bool, damage: list[str]
) -> tuple[list[RunSegment], RunStatus | None, State]:
    """Return the processes of a run, the status of the last one, and how it stands."""
    segments: list[RunSegment] = []
    with noting(damage):
        segments = read_history(folder)
    status = None
    try:
        status = read_status(folder)
    except (ValueError, OSError) as error:
        damage.append(f"{STATUS} cannot be read: {error}")
    # Its supervisor starts the next process, or waits for what refuses it.
    if status is not None and status.is_followed:
        return segments, None, "running"
    # While a process starts, the status is still that of the one before.
    if segments and status is not None and not segments[-1].has_written(status):
        status = None
    return segments, status, _state(folder, segments, status, has_lines)


def _state(
    folder: Path,
    segments: Sequence[RunSegment],
    status: RunStatus | None,
    has_lines: bool,
) -> State:
    """Return how the run stands, from its last process."""
    if not segments:
        return "silent" if has_lines else "new"
    ending = segments[-1].ending
    if ending != "running":
        return ending

    owner = None if status is None else Owner.parse(status.driver)
    if owner is not None and owner.is_visible:
        return "killed" if owner.has_ended else "running"
    # Its driver is on another machine, so the age of its last output has to do.
    last_s = max(segments[-1].begun_s, 0.0 if status is None else status.written)
    with contextlib.suppress(OSError):
        last_s = max(last_s, (folder / METRICS).stat().st_mtime)
    return "silent" if time.time() - last_s > SILENCE_S else "running"


def _scores(
    folder: Path, steps: Collection[int], damage: list[str]
) -> dict[int, HeldOutScores]:
    """Return the scores of the first and of the last evaluation among some steps."""
    # A process may end between the scores of an evaluation and its line.
    paths = recorded_evaluations(folder)
    scores = {}
    for step in {min(steps), max(steps)} & paths.keys() if steps else ():
        with noting(damage):
            scores[step] = read_scores(paths[step])
    return scores


def read_faults(
    folder: Path, begun_s: float, damage: list[str]
) -> list[Mapping[str, Any]]:
    """Return the lines of faults.jsonl: failures of processes.

    Args:
        folder: Folder of the run.
        begun_s: Time at which the run began, in seconds since 1970. Older faults are
            those of a run that this one took the place of.
        damage: Receives a sentence if the file cannot be read.
    """
    path = folder / FAULTS
    faults: list[Mapping[str, Any]] = []
    try:
        text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    except OSError as error:
        damage.append(f"{path.name} cannot be read: {error}")
        text = ""
    for line in lines_of(text):
        with contextlib.suppress(ValueError, RecursionError):
            fault = json.loads(line)
            if isinstance(fault, dict) and not _is_before(fault.get("time"), begun_s):
                faults.append(fault)
    return faults


def _is_before(time_s: object, begun_s: float) -> bool:
    return isinstance(time_s, int | float) and time_s < begun_s


def _versions(segments: Sequence[RunSegment], folder: Path) -> dict[str, str]:
    """Return the versions of packages that the last process has noted.

    Records of earlier versions have them only in the newest whole checkpoint.
    """
    noted = segments[-1].versions if segments else None
    # The file may hold anything.
    if noted and isinstance(noted, Mapping):
        return {str(name): str(version) for name, version in noted.items()}
    for path in sorted(folder.glob("step_*/manifest.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
            versions = json.loads(path.read_text("utf-8"))["versions"]
            return {str(name): str(version) for name, version in versions.items()}
    return {}


def _trace(
    path: Path, begun_s: float, damage: list[str]
) -> tuple[Sequence[Mapping[str, Any]], int]:
    """Return the newest events of a trace, and how many bytes before them are skipped.

    The names of processes stand at the beginning, which is read, too.
    """
    try:
        if not path.is_file() or path.stat().st_mtime < begun_s:
            return [], 0
        skipped_bytes = path.stat().st_size - _TRACE_BYTES - _TRACE_HEAD_BYTES
        if skipped_bytes <= 0:
            return read_trace(path), 0
        with path.open("rb") as file:
            head = file.read(_TRACE_HEAD_BYTES)
            file.seek(len(head) + skipped_bytes)
            tail = file.read(_TRACE_BYTES)
    except OSError as error:
        damage.append(f"{path.name} cannot be read: {error}")
        return [], 0

    begun = events_in(head.decode("utf-8", "replace"))
    names = [event for event in begun if event.get("ph") == "M"]
    # The first line of the rest is a part of one.
    newest = tail.partition(b"\n")[2].decode("utf-8", "replace")
    return [*names, *events_in(newest)], skipped_bytes


# ------------------------------------------------------------------------------- logs

_BYTES_PER_LOG = 1 << 20
_LOG_BYTES = 16 << 20
_MOST_ERRORS = 100
_LONGEST = 400
_MOST_ENDS = 20
_END_CHARACTERS = 4_000
# An exception with its message, the name of one alone, a level, and what no exception
# says.
_ERROR = re.compile(
    r"\b\w*(?:Error|Exception): |\b\w+(?:Error|Exception)\s*$"
    r"|\bERROR\b|CRITICAL|Traceback \(most recent call last\)"
    r"|Segmentation fault|ut of memory"
)
_WARNING = re.compile(r"\bWARN(?:ING)?\b|\b\w*[Ww]arning: ")
_NUMBERS = re.compile(r"\d+")


def _logs(folder: Path, damage: list[str]) -> tuple[list[LogError], list[LogEnd]]:
    """Return errors and warnings in the logs, and the ends of the newest ones.

    A bounded number of bytes is read, those written last.
    """
    written: list[tuple[int, Path]] = []
    for path in sorted(folder.glob("*.log")):
        try:
            written.append((path.stat().st_mtime_ns, path))
        except OSError as error:
            damage.append(f"logs/{path.name} cannot be read: {error}")

    newest_first = sorted(written, reverse=True)
    errors: list[LogError] = []
    ends: list[LogEnd] = []
    remaining_bytes = _LOG_BYTES
    for place, (time_ns, path) in enumerate(newest_first):
        if remaining_bytes <= 0:
            count = len(newest_first) - place
            damage.append(f"logs/: the {count} oldest were not searched for errors")
            break
        try:
            content = _end_of(path, min(_BYTES_PER_LOG, remaining_bytes))
        except OSError as error:
            damage.append(f"logs/{path.name} cannot be read: {error}")
            continue
        remaining_bytes -= len(content)
        text = content.decode("utf-8", errors="replace")
        errors = [*_errors_in(path.name, text), *errors]
        if text.strip() and len(ends) < _MOST_ENDS:
            # A key that the cut would divide is recognized by its beginning.
            end = without_credentials(text[-_END_CHARACTERS - _LONGEST :])
            ends.append(LogEnd(path.name, end[-_END_CHARACTERS:], time_ns / 1e9))

    warnings = [error for error in errors if error.is_warning]
    errors = [error for error in errors if not error.is_warning]
    return [*errors[-_MOST_ERRORS:], *warnings[-_MOST_ERRORS:]], ends


def _end_of(path: Path, num_bytes: int) -> bytes:
    """Return the last bytes of a file.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        # It may grow meanwhile.
        return file.read(num_bytes)


def _errors_in(name: str, text: str) -> list[LogError]:
    counts: Counter[str] = Counter()
    last: dict[str, LogError] = {}
    for line in text.splitlines():
        is_error = _ERROR.search(line) is not None
        if is_error or _WARNING.search(line):
            kind = _NUMBERS.sub("0", line)[:_LONGEST]
            counts[kind] += 1
            shown = without_credentials(line[: 2 * _LONGEST])[:_LONGEST]
            last[kind] = LogError(name, shown, counts[kind], is_warning=not is_error)
    return list(last.values())
