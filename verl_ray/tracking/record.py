"""Repair of `metrics.jsonl` when a run is resumed.

Invariant: a repaired record holds only whole lines, one per step, in the order of the
steps, and none after the checkpoint. Every line that was left out or is missing is
reported. The record is not the state of a run, so no damage to it prevents a run from
continuing.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from verl_ray.disk import replace_file
from verl_ray.tracking.base import GLOBAL_STEP


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
