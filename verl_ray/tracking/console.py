"""Progress of a run for a person: a live line on a terminal, else a line per step.

Above the live line stands the phase of the run that is under way. Evaluated steps, the
last step and some others remain on the terminal when the live lines are gone.

Invariant: nothing of a rollout or a metric is interpreted as markup or sent to the
terminal as a control sequence. Everything that is shown is in the other trackers, too.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Column

from verl_ray.profiling.phases import PHASES
from verl_ray.rewards.health import ScoreHealth
from verl_ray.tracking.base import HELD_OUT, Sample, Tracker

# The first metric of each group that exists is shown, with its label.
_SHOWN = (
    (
        ("reward", "critic/rewards/mean"),
        ("reward", "critic/score/mean"),
        ("loss", "actor/loss"),
    ),
    (("kl", "actor/kl_loss"), ("kl", "actor/reward_kl_penalty")),
    (("loss", "reward/loss"),),
    (("pairs right", "reward/accuracy"),),
)

# Number of steps that the remaining time is estimated from. They are recent ones, since
# responses grow and shrink during a run.
_RECENT_STEPS = 20

_GAP = "  "

# Number of steps, spread over a run, that at least remain on a terminal.
_REMAINING_STEPS = 20


class ConsoleTracker(Tracker):
    """Shows the progress of a run."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to show progress.

        Args:
            total_steps: Number of steps of the whole run, with those before a resume.
            stream: Stream to write to; None for the current stdout.
            clock: Clock in seconds that only increases.
        """
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._clock = clock
        self._last_s: float | None = None
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)

        # The parts of the last line while only the live line shows it.
        self._passing: list[str] = []

        self._live: Progress | None = None
        self._showing = contextlib.ExitStack()
        if self._stream.isatty():
            description = TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis"),
            )
            self._live = Progress(
                SpinnerColumn(),
                description,
                console=Console(file=self._stream),
                refresh_per_second=2,
                transient=True,
            )
            # Two lines: the phase that is under way, and the last step.
            self._phase_task = self._live.add_task("starting", total=None)
            self._task = self._live.add_task("", total=None, visible=False)
            self._live.start()
            self._showing.enter_context(PHASES.show_on(self._show_phase))

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Do nothing, since the report at the end shows samples."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show `step`. On a terminal not every step leaves a line behind."""
        self._note_time(metrics)
        parts = self._parts(step, metrics)
        line = _GAP.join(parts)

        if self._live is None:
            print(line, file=self._stream, flush=True)
            return

        self._live.update(self._task, description=line, visible=True, refresh=True)
        # The live line is overwritten by the next step; this copy stays above it.
        self._passing = parts
        is_evaluated = any(name.startswith(HELD_OUT) for name in metrics)
        if is_evaluated or step % max(1, self._total_steps // _REMAINING_STEPS) == 0:
            self._print_passing()

    def close(self, failed: bool) -> None:
        self._showing.close()
        if self._live is not None:
            self._print_passing()
            self._live.stop()

    def outputs(self) -> dict[str, str]:
        return {}

    def _print_passing(self) -> None:
        """Print the last line above the live line, if it is not there yet."""
        assert self._live is not None
        console = self._live.console
        for line in _wrapped(self._passing, console.width):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._passing = []

    def _show_phase(self, text: str) -> None:
        """Show what the run is doing above the line of the last step."""
        if self._live is not None:
            self._live.update(self._phase_task, description=text)

    def _note_time(self, metrics: Mapping[str, float]) -> None:
        """Note how long the step took."""
        now_s = self._clock()
        if self._last_s is not None:
            self._recent_s.append(now_s - self._last_s)
        elif "timing_s/step" in metrics:
            # The first line has no line before it.
            self._recent_s.append(metrics["timing_s/step"])
        self._last_s = now_s

    def _parts(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return the parts of the line of a step."""
        width = len(str(self._total_steps))
        parts = [f"step {step:>{width}}/{self._total_steps}"]

        for group in _SHOWN:
            for label, name in group:
                if name in metrics:
                    parts.append(f"{label} {metrics[name]:.4g}")
                    break

        for name, value in metrics.items():
            # Averages alone: best@N/mean and the like stand in the report.
            if name.startswith(HELD_OUT) and not name.endswith("/mean"):
                # The data source of supervised runs is named as all of them are here.
                short = name.removeprefix(HELD_OUT).removeprefix("held_out/")
                parts.append(f"held-out {short} {value:.4g}")

        if failures := _failures(metrics):
            parts.append(failures)

        seconds = metrics.get("timing_s/step")
        if "perf/total_num_tokens" in metrics and seconds:
            tokens_per_s = metrics["perf/total_num_tokens"] / seconds
            parts.append(f"{tokens_per_s:,.0f} tokens/s")
        if seconds is not None:
            parts.append(f"{seconds:.2f} s")

        # The next steps will take about as long as the recent ones.
        remaining_steps = self._total_steps - step
        if self._recent_s and remaining_steps > 0:
            mean_s = sum(self._recent_s) / len(self._recent_s)
            parts.append(f"{duration_text(mean_s * remaining_steps)} left")
        return parts


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Return the lines of a step, which are broken only between two parts."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(_GAP) + len(part) <= width:
            lines[-1] += _GAP + part
        else:
            lines.append(_GAP + part if lines else part)
    return lines


def _failures(metrics: Mapping[str, float]) -> str:
    """Return which share of the scores failed, with the kinds; empty if none did."""
    counts = {
        health: metrics.get(health.metric, 0)
        for health in ScoreHealth
        if metrics.get(health.metric, 0)
    }
    total = sum(counts.values())
    failed = total - counts.pop(ScoreHealth.OK, 0)
    if not failed:
        return ""
    kinds = ", ".join(
        f"{health.name.lower()} {count:.0f}" for health, count in counts.items()
    )
    share = failed / total
    # One failure of a thousand is not 0%.
    percentage = f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"
    return f"{percentage} of rewards failed ({kinds})"


def duration_text(seconds: float) -> str:
    """Return seconds as 45s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
