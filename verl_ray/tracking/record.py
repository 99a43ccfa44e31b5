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
    text = content.rstrip(b"\0")
    *pieces, end = text.split(b"\n")
    if step_of(end) is not None:  # a whole line that lacks its newline alone
        pieces.append(end)
        end = b""

    kept: dict[int, bytes] = {}
    dropped: set[int] = set()
    repeated: set[int] = set()
    damaged: list[int] = []
    order: list[int] = []
    for number, piece in enumerate(pieces, start=1):
        step = step_of(piece)
        if step is None:
            damaged.append(number)
        elif step > committed_step:
            dropped.add(step)
        else:
            if step in kept:
                repeated.add(step)
            order.append(step)
            kept[step] = piece
    missing = {step for step in recorded if step <= committed_step} - kept.keys()

    found: list[str] = []
    if zeros := len(content) - len(text):
        found.append(f"it ended in {zeros} zero bytes, as a loss of power leaves them, which were cut off")
    if end:
        found.append("its last line was torn and was cut off")
    if damaged:
        found.append(f"no JSON object with {GLOBAL_STEP} was in line {as_ranges(damaged)}, which was left out")
    if repeated:
        found.append(f"step {as_ranges(repeated)} had several lines, of which the last was kept")
    elif order != sorted(order):
        found.append("its lines were not in the order of the steps and were sorted")
    if missing:
        found.append(f"step {as_ranges(missing)} has no line: its metrics are lost, and nothing else is")
    if damaged or repeated:
        aside = free_name(path)
        shutil.copyfile(path, aside)
        found.append(f"the file as it was is {aside.name}")
    if found:
        print(f"warning: {path}: {'; '.join(found)}", file=sys.stderr, flush=True)
    if dropped:
        print(f"{path}: what it says of step {as_ranges(dropped)} is written anew", flush=True)

    steps = sorted(kept)
    mended = b"".join(kept[step] + b"\n" for step in steps)
    if mended != content:
        replace_file(path, mended)
    return steps


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
