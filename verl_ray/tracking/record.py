"""`metrics.jsonl` as a resumed run finds it: compared with the checkpoint, and mended.

Invariant: what is left holds whole lines only, one per step, in the order of the steps, and none after the checkpoint;
whatever was left out or is missing was said. The record is not the state of a run, so no damage to it keeps a run from
going on. Deliberately not here: writing lines (`jsonl.py`).
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


def mend(path: Path, committed_step: int, recorded: Iterable[int]) -> list[int]:
    """Make the record one that a run can go on with after `committed_step`, and print what that took.

    A step that has several lines keeps the last one: the step ran again, and the checkpoint goes on from what was
    computed last. Where lines are left out that nothing replaces, the file as it was stays under another name.

    Args:
        path: the metrics.jsonl; may be missing.
        committed_step: the step of the checkpoint. Lines of later steps are dropped, since these steps run again.
        recorded: the steps that had a line when the checkpoint was written.

    Returns:
        The steps that have a line now, rising.

    Raises:
        OSError: the file cannot be read or written.
    """
    content = path.read_bytes() if path.exists() else b""
    read = _read(content, committed_step)
    missing = {step for step in recorded if step <= committed_step} - read.kept.keys()

    told = read.wrongs()
    if missing:
        told.append(f"step {as_ranges(missing)} has no line: its metrics are lost, and nothing else is")
    if read.damaged or read.repeated:
        aside = free_name(path)
        shutil.copyfile(path, aside)
        told.append(f"the file as it was is {aside.name}")
    if told:
        print(f"warning: {path}: {'; '.join(told)}", file=sys.stderr, flush=True)
    if read.dropped:
        print(f"{path}: what it says of step {as_ranges(read.dropped)} is written anew", flush=True)

    steps = sorted(read.kept)
    mended = b"".join(read.kept[step] + b"\n" for step in steps)
    if mended != content:
        replace_file(path, mended)
    return steps


@dataclass
class _Read:
    """What a record holds, and what is wrong with it."""

    kept: dict[int, bytes] = field(default_factory=dict)
    """The line of each step, without its newline."""
    dropped: set[int] = field(default_factory=set)
    """Steps that run again."""
    repeated: set[int] = field(default_factory=set)
    """Steps with several lines."""
    damaged: list[int] = field(default_factory=list)
    """Numbers of lines, from 1, that say no step."""
    order: list[int] = field(default_factory=list)
    """The steps of the lines as they stand."""
    zeros: int = 0
    """Bytes at the end."""
    is_torn: bool = False
    """Whether the last line has no end."""

    def wrongs(self) -> list[str]:
        """In words; nothing of what is dropped."""
        told: list[str] = []
        if self.zeros:
            told.append(f"it ended in {self.zeros} zero bytes, as a loss of power leaves them, which were cut off")
        if self.is_torn:
            told.append("its last line was torn and was cut off")
        if self.damaged:
            told.append(f"no JSON object with {GLOBAL_STEP} was in line {as_ranges(self.damaged)}, which was left out")
        if self.repeated:
            told.append(f"step {as_ranges(self.repeated)} had several lines, of which the last was kept")
        elif self.order != sorted(self.order):
            told.append("its lines were not in the order of the steps and were sorted")
        return told


def _read(content: bytes, committed_step: int) -> _Read:
    text = content.rstrip(b"\0")
    *lines, end = text.split(b"\n")
    if step_of(end) is not None:  # a whole line that lacks its newline alone
        lines.append(end)
        end = b""

    read = _Read(zeros=len(content) - len(text), is_torn=bool(end))
    for number, line in enumerate(lines, start=1):
        step = step_of(line)
        if step is None:
            read.damaged.append(number)
        elif step > committed_step:
            read.dropped.add(step)
        else:
            if step in read.kept:
                read.repeated.add(step)
            read.order.append(step)
            read.kept[step] = line
    return read


def steps_of(path: Path) -> list[int]:
    """The steps that have a whole line, in the order of the file, whatever else is in it."""
    steps = map(step_of, path.read_bytes().split(b"\n"))
    return [step for step in steps if step is not None]


def step_of(line: bytes) -> int | None:
    """The step of a line without its newline; None if the line is not a JSON object with a step."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = fields.get(GLOBAL_STEP) if isinstance(fields, dict) else None
    return step if type(step) is int and step >= 0 else None


def free_name(path: Path) -> Path:
    """A name beside the record for what it has held until now."""
    written = int(path.stat().st_mtime)
    names = (path.with_name(f"{path.stem}.{written + later}{path.suffix}") for later in itertools.count())
    return next(name for name in names if not name.exists())


def as_ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as text, runs of neighbours shortened: 1-3,7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def of_ranges(text: str) -> list[int]:
    """What `as_ranges` was given, rising."""
    numbers: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
