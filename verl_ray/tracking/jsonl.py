"""The run's own record: `metrics.jsonl`, one JSON object per training step, and `samples/`.

Invariant: exactly one whole line per step, steps rising, and never a step beyond the one that the run continued
from. So lines of steps that a killed run did not commit, and whatever else happened to the file, are put right when the
run is continued (`record.py`). The lines that a checkpoint counts are on the disk before it exists. This is the tracker
a run cannot go on without. Deliberately not a log of events: free text goes elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from verl_ray.disk import replace_file, sync
from verl_ray.errors import TrackingError
from verl_ray.tracking.base import GLOBAL_STEP, Sample, Tracker
from verl_ray.tracking.record import as_ranges, mend, of_ranges

METRICS = "metrics.jsonl"
RECORDED_STEPS = "recorded_steps"
"""Key of a checkpoint's tracker state: the steps that metrics.jsonl had a line of, as `as_ranges` writes them."""

_SAMPLES = re.compile(r"step_(\d+)\.jsonl")


class JsonlTracker(Tracker):
    """Writes `<run dir>/metrics.jsonl` and `<run dir>/samples/step_<step>.jsonl`.

    Args:
        run_dir: created when missing.
        committed_step: the step that the run continues from; None = from its beginning. What an earlier process
            recorded beyond it is dropped, since those steps run again.
        state: `state()` out of that checkpoint, which the record is compared with; empty = nothing to compare with.
    """

    required = True

    def __init__(
        self, run_dir: Path, committed_step: int | None = None, state: Mapping[str, str] | None = None
    ) -> None:
        self._path = run_dir / METRICS
        self._samples = run_dir / "samples"
        self._last_step = -1 if committed_step is None else committed_step
        recorded = of_ranges((state or {}).get(RECORDED_STEPS, ""))
        try:
            self._samples.mkdir(parents=True, exist_ok=True)
            self._steps = mend(self._path, self._last_step, recorded)
            self._drop_samples()
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Write the file of `step` anew."""
        path = self._samples / f"step_{step:06d}.jsonl"
        try:
            replace_file(path, "".join(_line(asdict(row)) for row in rows).encode())
        except OSError as error:
            raise _cannot_write(path, error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of `step` and hand it to the operating system, so that a killed process has written it.

        Raises:
            TrackingError: the line cannot be written, or `step` has a line already.
        """
        if step <= self._last_step:
            raise TrackingError(f"{self._path}: step {step} logged after step {self._last_step}; steps must rise")
        try:
            self._file.write(_line(metrics))
            self._file.flush()
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        self._last_step = step
        self._steps.append(step)

    def state(self) -> dict[str, str]:
        """The steps that have a line; these lines, and the samples, are on the disk when this returns.

        Raises:
            TrackingError: the disk does not take them.
        """
        try:
            self._sync()
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        return {RECORDED_STEPS: as_ranges(self._steps)}

    def close(self, failed: bool) -> None:
        try:
            self._sync()
            self._file.close()
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def outputs(self) -> dict[str, str]:
        return {"metrics": str(self._path), "samples": str(self._samples)}

    def _sync(self) -> None:
        if not self._file.closed:  # closing it did the same
            os.fsync(self._file.fileno())
            sync(self._samples)
            sync(self._path.parent)

    def _drop_samples(self) -> None:
        """Of the steps that run again."""
        for path in self._samples.iterdir():
            name = _SAMPLES.fullmatch(path.name)
            if name and int(name[1]) > self._last_step:
                path.unlink()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a `metrics.jsonl`, in order; null reads as nan, and a last line without its newline is left out.

    Raises:
        TrackingError: another line is not a JSON object with a `training/global_step`, or the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TrackingError(f"{path}: cannot be read ({error})") from error
    lines: list[dict[str, float]] = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            fields = json.loads(line)
            step = fields[GLOBAL_STEP]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise TrackingError(
                f"{path}, line {number}: not a JSON object with {GLOBAL_STEP}, which this file holds on every line; "
                "restore the line, or move the file away to start a new record"
            ) from error
        numbers = {name: math.nan if value is None else value for name, value in fields.items()}
        lines.append({**numbers, GLOBAL_STEP: step})
    return lines


def _line(fields: Mapping[str, object]) -> str:
    """One JSON object and a newline. JSON knows neither nan nor infinity: both are null, so that the key is there."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    return json.dumps(finite, allow_nan=False, ensure_ascii=False) + "\n"


def _cannot_write(path: Path, error: OSError) -> TrackingError:
    return TrackingError(f"{path}: cannot be written ({error}); make room there, or choose another folder with run.dir")
