"""When each process of a run began and ended (`history.jsonl`), and where time went.

Invariant: there is one line per process that trained, in order. The line of a process
that was killed says so once the next one begins; its end is then the time at which the
last line of metrics.jsonl was written.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from verl_ray.disk import replace_file
from verl_ray.errors import TrackingError
from verl_ray.json_lines import lines_of
from verl_ray.ownership import Owner
from verl_ray.profiling.process_table import RunStatus
from verl_ray.tracking.jsonl import METRICS

HISTORY = "history.jsonl"

FAULTS = "faults.jsonl"
"""File in a run's folder with a line for each failure of a process."""

Ending = Literal["running", "finished", "stopped", "failed", "killed"]
"""How a process ended. `running` is what it is until then."""


@dataclass(frozen=True)
class RunSegment:
    """The part of a run that one process made."""

    begun_s: float
    """Time at which it began, in seconds since 1970."""

    ended_s: float | None
    """Time at which it ended; None while it is running."""

    first_step: int
    """Number of steps that were finished when it began."""

    last_step: int | None
    """Number of steps that were finished when it ended; None if that is not known."""

    ending: Ending

    ready_s: float | None = None
    """Time at which everything was started and the first step could begin; None if it
    did not come to that, or in records of earlier versions."""

    preparing_s: float = 0.0
    """Part of the time until then in which the run made its inputs, in seconds."""

    command: str = ""
    """Command that was typed, quoted for a shell; empty where a program called verl_ray
    as a library, or in records of earlier versions."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that the process used, by name."""

    driver: str = ""
    """The process as an owner (`verl_ray/ownership.py`); empty in records of earlier
    versions."""

    saved_step: int | None = None
    """Step of the checkpoint that it wrote last; None for none, or in records of
    earlier versions."""

    saving_s: float = 0.0
    """Seconds for which it waited for that checkpoint."""

    def has_written(self, status: RunStatus) -> bool:
        """Return whether a status is of this process, and not of one before it."""
        if not self.driver:
            return status.written >= self.begun_s
        return self.driver == status.driver


def begin_segment(
    run_dir: Path,
    step: int,
    begun_s: float,
    command: str = "",
    versions: Mapping[str, str] | None = None,
    *,
    follows: bool = False,
) -> None:
    """Note that a process begins.

    Args:
        run_dir: Folder of the run.
        step: Number of finished steps. With 0 the run begins anew, and so does its
            history, unless the process before was killed.
        begun_s: Time at which the process began, in seconds since 1970.
        command: See `RunSegment`, like `versions`.
        versions: See there.
        follows: Whether the supervisor has started it after another one.

    Raises:
        TrackingError: The history cannot be written.
    """
    segments: list[RunSegment] = []
    # The history is not the state of a run, so damage to it ends none.
    try:
        segments = read_history(run_dir)
    except TrackingError as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)
    was_killed = bool(segments) and segments[-1].ending == "running"
    if was_killed:
        segments[-1] = killed_segment(segments[-1], run_dir / METRICS)
    # A driver that died before it had a state to leave was of the same run.
    if step == 0 and not (follows or was_killed):
        segments.clear()

    begun = RunSegment(begun_s, None, step, None, "running", command=command)
    driver = str(Owner.here())
    segments.append(replace(begun, versions=dict(versions or {}), driver=driver))
    _write(run_dir, segments)


def ready_segment(run_dir: Path, step: int, preparing_s: float = 0.0) -> None:
    """Note that the process that began last has started everything.

    Args:
        run_dir: Folder of the run.
        step: Number of finished steps, of which the process has the state.
        preparing_s: Seconds in which it made the inputs of the run.

    Raises:
        TrackingError: The history cannot be read or written.
    """
    segments = read_history(run_dir)
    if segments:
        ready = replace(
            segments[-1],
            first_step=step,
            ready_s=time.time(),
            preparing_s=preparing_s,
        )
        _write(run_dir, [*segments[:-1], ready])


def save_segment(run_dir: Path, step: int, saving_s: float) -> None:
    """Note the checkpoint that the process that began last has written last.

    Args:
        run_dir: Folder of the run.
        step: Its step.
        saving_s: Seconds for which the process waited for it.

    Raises:
        TrackingError: The history cannot be read or written.
    """
    segments = read_history(run_dir)
    if segments:
        saved = replace(segments[-1], saved_step=step, saving_s=saving_s)
        _write(run_dir, [*segments[:-1], saved])


def end_segment(run_dir: Path, step: int, ending: Ending) -> None:
    """Note that the process that began last has ended.

    Args:
        run_dir: Folder of the run.
        step: Number of finished steps.
        ending: How it ended.

    Raises:
        TrackingError: The history cannot be read or written.
    """
    segments = read_history(run_dir)
    # Somebody may have removed the file in the meantime.
    if not segments:
        return

    *before, last = segments
    ended = replace(last, ended_s=time.time(), last_step=step, ending=ending)
    _write(run_dir, [*before, ended])


def read_history(run_dir: Path) -> list[RunSegment]:
    """Return the processes of a run in order; none where there is no history.

    Raises:
        TrackingError: The file holds something else.
    """
    path = run_dir / HISTORY
    if not path.exists():
        return []
    try:
        return [RunSegment(**json.loads(line)) for line in lines_of(path.read_bytes())]
    except (OSError, ValueError, TypeError) as error:
        raise TrackingError(
            f"{path}: cannot be read ({error!r}); without it, nobody knows how long"
            " the earlier processes of the run took"
        ) from error


def first_begun_s(run_dir: Path) -> float | None:
    """Return when the first process of a run began, in seconds since 1970.

    No other run that had the same folder has the same time. It is None where there is
    no history, or none that can be read.
    """
    with contextlib.suppress(TrackingError):
        segments = read_history(run_dir)
        if segments:
            return segments[0].begun_s
    return None


def killed_segment(segment: RunSegment, metrics: Path) -> RunSegment:
    """Return the part of a process that could not note its end.

    Args:
        segment: The part as it is on record, which still runs.
        metrics: The metrics.jsonl of the run, which was written last before the end.
    """
    ended_s = segment.begun_s
    with contextlib.suppress(OSError):
        ended_s = max(ended_s, metrics.stat().st_mtime)
    return replace(segment, ended_s=ended_s, ending="killed")


def wall_s(segments: list[RunSegment]) -> float:
    """Return how long all processes of a run took together, in seconds."""
    now_s = time.time()
    total_s = 0.0
    for segment in segments:
        ended_s = now_s if segment.ended_s is None else segment.ended_s
        total_s += max(0.0, ended_s - segment.begun_s)
    return total_s


def preparing_s(segments: list[RunSegment]) -> float:
    """Return how long the processes of a run made its inputs, in seconds."""
    return sum(segment.preparing_s for segment in segments)


def starting_s(segments: list[RunSegment]) -> float:
    """Return how long the processes of a run took until all was started, in seconds.

    The time in which they made its inputs is not a part of it. A process that has ended
    before it was ready did nothing else.
    """
    total_s = 0.0
    for segment in segments:
        ready_s = segment.ended_s if segment.ready_s is None else segment.ready_s
        if ready_s is not None and (
            segment.ready_s or segment.last_step == segment.first_step
        ):
            total_s += max(0.0, ready_s - segment.begun_s - segment.preparing_s)
    return total_s


def _write(run_dir: Path, segments: list[RunSegment]) -> None:
    lines = "".join(json.dumps(asdict(segment)) + "\n" for segment in segments)
    path = run_dir / HISTORY
    try:
        replace_file(path, lines.encode())
    except OSError as error:
        raise TrackingError(
            f"{path}: cannot be written ({error}); make room there, or choose another"
            " folder with run.dir"
        ) from error


# -------------------------------------------------------------------------- the phases

_TIMING = "timing_s/"

STEP = "step"

TESTING = f"{_TIMING}testing"
"""Metric of the time of an evaluation."""

# The step holds all other times but these.
_OUTSIDE_STEP = ("testing", "save_checkpoint")

# The driver's own share of a step lies within the other phases, and it records rollouts
# while models are updated. Groups wait in the queue, and engines generate, while all
# else goes on.
_NO_PHASE = (STEP, "controller", "queue", "rollouts", "record_rollouts")

_IN_WORDS = {
    "gen": "generation",
    "reward": "waiting for scores",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "values",
    "adv": "advantages",
    "update_actor": "update of the actor",
    "update_critic": "update of the critic",
    "update_reward": "update of the reward model",
    "update_weights": "publishing the weights",
    "testing": "evaluation",
    "save_checkpoint": "checkpoints",
}

REST_OF_STEPS = "the rest of the steps"
STARTING = "starting"
PREPARING = "making the inputs (warm start)"
REST = "ending, and work that was repeated"


def phase_names(names: Iterable[str]) -> dict[str, str]:
    """Return the metrics of a step's phases among some names, with words for them.

    Phases that lie within others are left out.
    """
    words = {}
    for name in names:
        phase = name.removeprefix(_TIMING)
        # A name with a slash is of a part of a phase.
        if name.startswith(_TIMING) and "/" not in phase and phase not in _NO_PHASE:
            words[name] = _IN_WORDS.get(phase, phase.replace("_", " "))
    return words


def phase_durations(
    lines: Iterable[Mapping[str, float]],
    total_s: float | None,
    starting_s: float = 0.0,
    preparing_s: float = 0.0,
) -> dict[str, float]:
    """Return the seconds of each phase of a run in words, the longest first.

    Phases that run at the same time count each, so they may add up to more than their
    steps.

    Args:
        lines: Lines of metrics.jsonl.
        total_s: Wall time of the run; None if it is not known.
        starting_s: Wall time before the loop around the steps began.
        preparing_s: Wall time before that in which the run made its inputs.
    """
    sums: dict[str, float] = {}
    for line in lines:
        for name, seconds in line.items():
            # A time that is not a number is not equal to itself.
            if name.startswith(_TIMING) and seconds == seconds:
                sums[name] = sums.get(name, 0.0) + seconds

    step_s = sums.get(_TIMING + STEP, 0.0)
    outside_s = sum(sums.get(_TIMING + phase, 0.0) for phase in _OUTSIDE_STEP)
    durations = {words: sums[name] for name, words in phase_names(sums).items()}
    inside_s = sum(durations.values()) - outside_s
    durations[REST_OF_STEPS] = max(0.0, step_s - inside_s)
    if total_s is not None:
        durations[STARTING] = starting_s
        durations[PREPARING] = preparing_s
        known_s = starting_s + preparing_s + step_s + outside_s
        durations[REST] = max(0.0, total_s - known_s)

    longest_first = sorted(durations.items(), key=lambda item: -item[1])
    return {name: seconds for name, seconds in longest_first if seconds > 0}
