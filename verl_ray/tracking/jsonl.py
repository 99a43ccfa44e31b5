"""The record of a run: `metrics.jsonl` and `evaluations/`, and its repair.

`metrics.jsonl` has one JSON object per training step.

Invariant: there is exactly one whole line per step, steps increase, and no step is
beyond the one that the run continued from. So lines of steps that a killed run did not
commit, and all other damage, are repaired when the run is continued; every line that
was left out or is missing is reported. The record is not the state of a run, so no
damage to it prevents a run from continuing. The lines that a checkpoint counts are on
the disk before it exists.

A run cannot continue without this tracker, but it can wait for room on a disk: what is
not written yet stays in memory, in order, and every later call tries it again. That
alone never ends a run, since a line takes little memory and nothing depends on it until
a checkpoint counts it. A checkpoint is not written before its lines are, so
run.max_failed_checkpoints is the limit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_ray.disk import drop_after, replace_file, sync
from verl_ray.errors import TrackingError
from verl_ray.tracking.base import GLOBAL_STEP, Sample, Tracker
from verl_ray.tracking.evaluations import (
    FOLDER,
    HeldOutScores,
    recorded_evaluations,
    scores_path,
    write_scores,
)
from verl_ray.tracking.held_out_responses import (
    HeldOutResponse,
    encoded_responses,
    first_responses,
    recorded_responses,
    responses_path,
)
from verl_ray.tracking.rollouts import drop_rollouts

METRICS = "metrics.jsonl"

RECORDED_STEPS = "recorded_steps"
"""Key of a checkpoint's tracker state for the steps that have a line.

The value is text, see `format_ranges`.
"""


class JsonlTracker(Tracker):
    """Writes metrics.jsonl, and scores and responses in evaluations/."""

    required = True

    def __init__(
        self,
        run_dir: Path,
        committed_step: int | None = None,
        state: Mapping[str, str] | None = None,
    ) -> None:
        """Open the record, and repair it if the run continues.

        Args:
            run_dir: Folder of the run, created if missing.
            committed_step: Step that the run continues from; None if it starts from the
                beginning. What an earlier process recorded beyond it is dropped, since
                those steps run again.
            state: `state()` from the checkpoint, which the record is compared with;
                empty if there is nothing to compare.

        Raises:
            TrackingError: The record cannot be read or written.
        """
        self._path = run_dir / METRICS
        self._unwritten = b""
        """The lines, or the rest of one, that the file system has not taken yet."""

        self._unwritten_files: dict[Path, Callable[[], None]] = {}
        """What writes the files that it has not taken yet."""

        self._is_refused = False
        """Whether the file system has refused the last attempt."""

        self._last_step = -1 if committed_step is None else committed_step

        # The checkpoint lists the steps that had a line, so a missing one is noticed.
        recorded = parse_ranges((state or {}).get(RECORDED_STEPS, ""))
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._steps = repair(self._path, self._last_step, recorded)
            drop_after(recorded_evaluations(run_dir), self._last_step)
            drop_after(recorded_responses(run_dir), self._last_step)
            drop_rollouts(run_dir, self._last_step)
            # Without a buffer, what a full disk has taken of a line is known.
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Do nothing, since `responses` has them all."""

    def scores(self, step: int, scores: HeldOutScores) -> None:
        """Write the scores of `step`, in place of older ones."""
        path = scores_path(self._path.parent, step)
        self._unwritten_files[path] = functools.partial(write_scores, path, scores)
        self._write_or_wait()

    def responses(self, step: int, rows: Iterable[HeldOutResponse]) -> None:
        """Write the responses of `step`, in place of older ones."""
        path = responses_path(self._path.parent, step)
        # They are read while the processes that hold them run.
        content = encoded_responses(rows)

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)

        self._unwritten_files[path] = write
        self._write_or_wait()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of `step`.

        The operating system has the line when this returns, so it outlives the process.
        Where a disk has no room, the line is written later, and that is said.

        Raises:
            TrackingError: `step` has a line already.
        """
        # A second line would make the record ambiguous for a resumed run.
        if step <= self._last_step:
            raise TrackingError(
                f"{self._path}: step {step} logged after step {self._last_step}; steps"
                " must rise"
            )

        self._unwritten += _line(metrics).encode()
        self._last_step = step
        self._steps.append(step)
        self._write_or_wait()

    def state(self) -> dict[str, str]:
        """Return the steps that have a line."""
        return {RECORDED_STEPS: format_ranges(self._steps)}

    def sync(self) -> None:
        """Wait until the lines of these steps, and evaluations, are on the disk.

        Raises:
            TrackingError: They cannot be written to the disk.
        """
        self._write_all()

    def close(self, failed: bool) -> None:
        try:
            self._write_all()
        finally:
            self._file.close()

    def outputs(self) -> dict[str, str]:
        outputs = {"metrics": str(self._path)}
        folder = self._path.parent / FOLDER
        if folder.is_dir():
            outputs["evaluations"] = str(folder)
        return outputs

    def _write_all(self) -> None:
        """Wait until all lines and evaluations are on the disk.

        Raises:
            TrackingError: They cannot be written.
        """
        # Closing the file did the same.
        if self._file.closed:
            return
        try:
            self._write()
            os.fsync(self._file.fileno())
            sync(self._path.parent)
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def _write_or_wait(self) -> None:
        """Write what is not written yet, or say that it is tried again."""
        try:
            self._write()
        except OSError as error:
            if not self._is_refused:
                _say(
                    f"warning: {self._path.parent} cannot be written ({error}); the run"
                    " goes on, and writes its record as soon as there is room"
                )
            self._is_refused = True
            return
        if self._is_refused:
            _say(f"{self._path.parent} can be written again, and the record is whole")
        self._is_refused = False

    def _write(self) -> None:
        """Write what is not written yet, as far as the file system takes it.

        Raises:
            OSError: It does not take all.
        """
        # A full disk may take a part of a line. The rest follows it later.
        while self._unwritten:
            num_bytes = self._file.write(self._unwritten)
            self._unwritten = self._unwritten[num_bytes:]
        while self._unwritten_files:
            path, write = next(iter(self._unwritten_files.items()))
            write()
            del self._unwritten_files[path]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the lines of a `metrics.jsonl`, in order.

    null is read as nan, and a last line without its newline is left out.

    Raises:
        TrackingError: Another line is not a JSON object with a `training/global_step`,
            or the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TrackingError(f"{path}: cannot be read ({error})") from error

    lines: list[dict[str, float]] = []
    # Behind the last newline there is nothing, or a line that was cut short.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            fields = json.loads(line)
            step = fields[GLOBAL_STEP]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TrackingError(
                f"{path}, line {number}: not a JSON object with {GLOBAL_STEP}, which"
                " this file holds on every line; restore the line, or move the file"
                " away to start a new record"
            ) from error

        numbers = {
            name: math.nan if value is None else value for name, value in fields.items()
        }
        lines.append({**numbers, GLOBAL_STEP: step})
    return lines


def newest_samples(run_dir: Path, count: int) -> list[Sample]:
    """Return the first responses of the last evaluation; none where there are none.

    Raises:
        TrackingError: The file holds something else.
    """
    paths = [*recorded_responses(run_dir).values()]
    if not paths:
        return []
    return [Sample.of(response) for response in first_responses(paths[-1], count)]


def _line(fields: Mapping[str, object]) -> str:
    """Return a JSON object and a newline."""
    return json.dumps(finite(fields), allow_nan=False, ensure_ascii=False) + "\n"


def finite(fields: Mapping[str, object]) -> dict[str, object]:
    """Return fields as JSON takes them.

    JSON has neither nan nor infinity. Both become null, so that the key remains.
    """
    numbers: dict[str, object] = {}
    for name, value in fields.items():
        is_number = not isinstance(value, float) or math.isfinite(value)
        numbers[name] = value if is_number else None
    return numbers


def _say(text: str) -> None:
    """Print to stderr, which may be closed by now."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _cannot_write(path: Path, error: OSError) -> TrackingError:
    """Return the error for a file that the file system refuses to write."""
    return TrackingError(
        f"{path}: cannot be written ({error}); make room there, or choose another"
        " folder with run.dir"
    )


# ------------------------------------------------------------------------------- repair


def repair(path: Path, committed_step: int, recorded: Iterable[int]) -> list[int]:
    """Repair a record so that a run can continue it, and print what was changed.

    If a step has several lines, the last one remains: the step ran again, and the
    checkpoint continues from what was computed last. If lines are left out that nothing
    replaces, a copy of the damaged file remains under another name.

    Args:
        path: Path of the metrics.jsonl, which may be missing.
        committed_step: Step of the checkpoint. Lines of later steps are dropped, since
            these steps run again.
        recorded: Steps that had a line when the checkpoint was written.

    Returns:
        The steps that have a line now, in increasing order.

    Raises:
        OSError: The file cannot be read or written.
    """
    content = b""
    if path.exists():
        content = path.read_bytes()
    record = _parse(content, committed_step)
    missing = {step for step in recorded if step <= committed_step}
    missing -= record.lines.keys()

    warnings = record.faults()
    if missing:
        warnings.append(
            f"step {format_ranges(missing)} has no line: its metrics are lost, and"
            " nothing else is"
        )
    # Lines of steps that run again will be replaced. Damaged and repeated lines are
    # lost, so a copy of the file remains.
    if record.damaged or record.repeated:
        copy = unused_path(path)
        shutil.copyfile(path, copy)
        warnings.append(f"the file as it was is {copy.name}")
    if warnings:
        print(f"warning: {path}: {'; '.join(warnings)}", file=sys.stderr, flush=True)
    if record.dropped:
        steps_again = format_ranges(record.dropped)
        print(f"{path}: the lines of step {steps_again} are written again", flush=True)

    steps = sorted(record.lines)
    repaired = b"".join(record.lines[step] + b"\n" for step in steps)
    if repaired != content:
        replace_file(path, repaired)
    return steps


@dataclass
class _ParsedRecord:
    """The contents of a record, and its faults."""

    lines: dict[int, bytes] = field(default_factory=dict)
    """Line of each step, without its newline."""

    dropped: set[int] = field(default_factory=set)
    """Steps after the checkpoint, which run again."""

    repeated: set[int] = field(default_factory=set)
    """Steps with several lines."""

    damaged: list[int] = field(default_factory=list)
    """Numbers, from 1, of lines that contain no step."""

    order: list[int] = field(default_factory=list)
    """Steps of the lines in the order of the file."""

    zeros: int = 0
    """Number of zero bytes at the end."""

    is_torn: bool = False
    """Whether the last line is incomplete."""

    def faults(self) -> list[str]:
        """Return the faults in words; dropped lines are none."""
        faults: list[str] = []
        if self.zeros:
            faults.append(
                f"it ended in {self.zeros} zero bytes, as a loss of power leaves them,"
                " which were cut off"
            )
        if self.is_torn:
            faults.append("its last line was torn and was cut off")
        if self.damaged:
            faults.append(
                f"no JSON object with {GLOBAL_STEP} was in line"
                f" {format_ranges(self.damaged)}, which was left out"
            )
        if self.repeated:
            faults.append(
                f"step {format_ranges(self.repeated)} had several lines, of which the"
                " last was kept"
            )
        elif self.order != sorted(self.order):
            faults.append(
                "its lines were not in the order of the steps and were sorted"
            )
        return faults


def _parse(content: bytes, committed_step: int) -> _ParsedRecord:
    """Return the lines of a record up to the step of the checkpoint."""
    # A loss of power may leave a block of zeros where lines were not written yet.
    text = content.rstrip(b"\0")
    *lines, end = text.split(b"\n")
    # The last line may be whole and lack only its newline.
    if step_of(end) is not None:
        lines.append(end)
        end = b""

    record = _ParsedRecord(zeros=len(content) - len(text), is_torn=bool(end))
    for number, line in enumerate(lines, start=1):
        step = step_of(line)
        if step is None:
            record.damaged.append(number)
        elif step > committed_step:
            record.dropped.add(step)
        else:
            if step in record.lines:
                record.repeated.add(step)
            record.order.append(step)
            record.lines[step] = line
    return record


def steps_of(path: Path) -> list[int]:
    """Return the steps that have a whole line, in the order of the file.

    Everything else in the file is ignored.
    """
    steps = []
    for line in path.read_bytes().split(b"\n"):
        step = step_of(line)
        if step is not None:
            steps.append(step)
    return steps


def step_of(line: bytes) -> int | None:
    """Return the step of a line without its newline.

    None if the line is not a JSON object with a step.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None

    step = fields.get(GLOBAL_STEP)
    # A boolean is an int in Python, and no step.
    if type(step) is not int or step < 0:
        return None
    return step


def unused_path(path: Path) -> Path:
    """Return a path next to a record, under which its old contents can be kept.

    The name has the time at which the record was last written.
    """
    written = int(path.stat().st_mtime)
    for number in itertools.count(written):
        candidate = path.with_name(f"{path.stem}.{number}{path.suffix}")
        if not candidate.exists():
            return candidate
    raise AssertionError("an infinite sequence of names ended")


def format_ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as text, with runs shortened: 1-3,7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])

    texts = []
    for first, last in runs:
        texts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(texts)


def parse_ranges(text: str) -> list[int]:
    """Return the numbers that `format_ranges` was given, in increasing order."""
    numbers: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
