"""A run as its folder records it, also while it goes on or after a crash.

Invariant: reading changes nothing. A file that is damaged, half-written or missing
leaves out its own part of the record, and `damage` names it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from verl_ray.errors import TrackingError
from verl_ray.ownership import Owner
from verl_ray.profiling.process_table import STATUS, RunStatus, read_status
from verl_ray.profiling.trace import TRACE, read_trace
from verl_ray.report.samples import RecordedRow, read_rows
from verl_ray.tracking.base import GLOBAL_STEP, HELD_OUT
from verl_ray.tracking.evaluations import (
    HeldOutScores,
    read_scores,
    recorded_evaluations,
)
from verl_ray.tracking.history import Stint, read_history
from verl_ray.tracking.jsonl import METRICS, read_metrics, step_of

State = Literal["finished", "stopped", "failed", "killed", "running", "silent", "new"]
"""How a run stands. `silent` runs, or did, where its driver cannot be seen from here;
`new` has recorded nothing yet."""

SILENCE_S = 600.0
"""Seconds without a sign of life after which a driver elsewhere counts as silent."""

Metrics = Mapping[str, float]

_LOG_BYTES = 1 << 20
_LOG_ERRORS = 100
_ERROR = re.compile(r"\w(?:Error|Exception): |CRITICAL|Segmentation fault|ut of memory")
_NUMBERS = re.compile(r"\d+")
_LONGEST_ERROR = 400
_TRACE_BYTES = 64 << 20


@dataclass(frozen=True)
class LogError:
    """Lines of a log that are alike but for their numbers, and name an error."""

    file: str
    text: str
    """The last such line, at most 400 characters of it."""

    count: int


@dataclass(frozen=True, eq=False)
class RunRecord:
    """Record of a run, as its folder holds it."""

    folder: Path
    config: Mapping[str, Any]
    """Tree of config.yaml; empty where there is none."""

    lines: Sequence[Metrics]
    """Lines of metrics.jsonl, each with `training/global_step`, which increases."""

    stints: Sequence[Stint]
    status: RunStatus | None
    state: State
    scores: Mapping[int, HeldOutScores]
    """Scores of the first and of the last evaluation, by step."""

    rows: Sequence[RecordedRow] = ()
    """Some of the prompts and responses, as many as were requested."""

    recorded_rows: int = 0
    """How many there are in the files."""

    faults: Sequence[Mapping[str, Any]] = ()
    """Lines of faults.jsonl: failures of processes."""

    log_errors: Sequence[LogError] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of packages, by name, from the newest checkpoint."""

    trace: Sequence[Mapping[str, Any]] = ()
    """Events of trace.json in Chrome's format."""

    damage: Sequence[str] = ()
    """What could not be read, a sentence each."""

    @property
    def name(self) -> str:
        """The name of the run, or that of its folder."""
        run = self.config.get("run")
        name = run.get("name") if isinstance(run, Mapping) else None
        return str(name or self.folder.resolve().name)

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return int(self.lines[-1][GLOBAL_STEP]) if self.lines else 0

    @property
    def total_steps(self) -> int | None:
        """The number of steps that the run is to make; None if that is not known."""
        run = self.config.get("run")
        total = run.get("total_steps") if isinstance(run, Mapping) else None
        return total if isinstance(total, int) else None

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """Main held-out metrics by the step of their evaluation."""
        evaluations = {}
        for line in self.lines:
            held_out = {
                name: value for name, value in line.items() if name.startswith(HELD_OUT)
            }
            if held_out:
                evaluations[int(line[GLOBAL_STEP])] = held_out
        return evaluations


def read_run(folder: Path, most_rows: int = 0) -> RunRecord:
    """Read the record of a run.

    Args:
        folder: Folder of the run. It may hold anything, or nothing.
        most_rows: Number of prompts and responses to read, chosen evenly over the
            steps; 0 leaves them out, with the logs and the trace.
    """
    damage: list[str] = []
    config = _config(folder, damage)
    lines = _lines(folder / METRICS, damage)
    stints: list[Stint] = []
    with _noting(damage):
        stints = read_history(folder)
    status = None
    try:
        status = read_status(folder)
    except (ValueError, OSError) as error:
        damage.append(f"{STATUS} cannot be read: {error}")

    state = _state(folder, stints, status, lines)
    if not most_rows:
        return RunRecord(
            folder, config, lines, stints, status, state, {}, damage=damage
        )

    rows, recorded_rows = read_rows(folder, most_rows, damage)
    return RunRecord(
        folder=folder,
        config=config,
        lines=lines,
        stints=stints,
        status=status,
        state=state,
        scores=_scores(folder, damage),
        rows=rows,
        recorded_rows=recorded_rows,
        faults=_faults(folder / "faults.jsonl", damage),
        log_errors=_log_errors(folder / "logs", damage),
        versions=_versions(folder / "checkpoints"),
        trace=_trace(folder / TRACE, damage),
        damage=damage,
    )


def fingerprint(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return what changes when the record does: names, sizes and times of its files."""
    names = ("config.yaml", METRICS, "history.jsonl", "faults.jsonl", TRACE)
    paths = [folder / name for name in names]
    paths += [folder / name for name in ("rollouts", "evaluations")]
    facts = []
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.stat()
            facts.append((path.name, stat.st_size, stat.st_mtime_ns))
    return tuple(facts)


@contextlib.contextmanager
def _noting(damage: list[str]) -> Iterator[None]:
    """Note what cannot be read, instead of failing."""
    try:
        yield
    except TrackingError as error:
        damage.append(str(error))


def _config(folder: Path, damage: list[str]) -> Mapping[str, Any]:
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


def _lines(path: Path, damage: list[str]) -> list[Metrics]:
    """Return the lines of metrics.jsonl that can be read, the last one of each step."""
    if not path.is_file():
        return []
    lines: list[dict[str, float]] = []
    try:
        lines = read_metrics(path)
    except TrackingError:
        # A killed run may leave a torn line, which the run repairs when it continues.
        content = path.read_bytes() if path.is_file() else b""
        texts = [text for text in content.split(b"\n") if text.strip(b"\0 ")]
        lines = [json.loads(text) for text in texts if step_of(text) is not None]
        lost = len(texts) - len(lines)
        damage.append(f"{path.name}: {lost} lines of {len(texts)} cannot be read")

    by_step: dict[int, Metrics] = {}
    for line in lines:
        numbers = {
            name: float(value)
            for name, value in line.items()
            if isinstance(value, int | float)
        }
        step = numbers.get(GLOBAL_STEP)
        if step is not None and step == step:
            by_step[int(step)] = numbers
    return [by_step[step] for step in sorted(by_step)]


def _state(
    folder: Path,
    stints: Sequence[Stint],
    status: RunStatus | None,
    lines: Sequence[Metrics],
) -> State:
    """Return how the run stands, from its last process."""
    if not stints:
        return "silent" if lines else "new"
    ending = stints[-1].ending
    if ending != "running":
        return ending

    owner = None if status is None else Owner.parse(status.driver)
    if owner is not None and owner.is_visible:
        return "killed" if owner.has_ended else "running"
    # Its driver is on another machine, so the age of its last words has to do.
    last_s = max(stints[-1].begun_s, 0.0 if status is None else status.written)
    with contextlib.suppress(OSError):
        last_s = max(last_s, (folder / METRICS).stat().st_mtime)
    return "silent" if time.time() - last_s > SILENCE_S else "running"


def _scores(folder: Path, damage: list[str]) -> dict[int, HeldOutScores]:
    """Return the scores of the first and of the last evaluation."""
    paths = recorded_evaluations(folder)
    scores = {}
    for step in {min(paths), max(paths)} if paths else ():
        with _noting(damage):
            scores[step] = read_scores(paths[step])
    return scores


def _faults(path: Path, damage: list[str]) -> list[Mapping[str, Any]]:
    faults: list[Mapping[str, Any]] = []
    try:
        text = path.read_text("utf-8", errors="replace") if path.is_file() else ""
    except OSError as error:
        damage.append(f"{path.name} cannot be read: {error}")
        text = ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            fault = json.loads(line)
            if isinstance(fault, dict):
                faults.append(fault)
    return faults


def _log_errors(folder: Path, damage: list[str]) -> list[LogError]:
    """Return the errors in the ends of the logs, alike ones once, the newest last."""
    errors = []
    for path in sorted(folder.glob("*.log")):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LOG_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError as error:
            damage.append(f"logs/{path.name} cannot be read: {error}")
            continue

        counts: Counter[str] = Counter()
        last: dict[str, str] = {}
        for line in text.splitlines():
            if _ERROR.search(line):
                kind = _NUMBERS.sub("0", line)[:_LONGEST_ERROR]
                counts[kind] += 1
                last[kind] = line[:_LONGEST_ERROR]
        errors += [
            LogError(path.name, last[kind], count) for kind, count in counts.items()
        ]
    return errors[-_LOG_ERRORS:]


def _versions(folder: Path) -> dict[str, str]:
    """Return the versions of packages that the newest whole checkpoint names."""
    for path in sorted(folder.glob("step_*/manifest.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
            versions = json.loads(path.read_text("utf-8"))["versions"]
            return {str(name): str(version) for name, version in versions.items()}
    return {}


def _trace(path: Path, damage: list[str]) -> Sequence[Mapping[str, Any]]:
    """Return the events of a trace."""
    if not path.is_file():
        return []
    if path.stat().st_size > _TRACE_BYTES:
        damage.append(f"{path.name} is too large for a page; open it in Perfetto")
        return []
    try:
        return read_trace(path)
    except OSError as error:
        damage.append(f"{path.name} cannot be read: {error}")
        return []
