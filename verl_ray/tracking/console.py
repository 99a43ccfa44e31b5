"""What a person sees while a run goes on: a live line on a terminal, one plain line per step elsewhere.

Invariant: nothing of a rollout or a metric is ever read as markup or sent to the terminal as a control sequence.
Not a record: whatever it shows is in the other trackers.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Column

from verl_ray.tracking.base import HELD_OUT, Sample, Tracker

# Of each group the first metric that is there is shown, under its label.
_SHOWN = (
    (("reward", "critic/rewards/mean"), ("reward", "critic/score/mean"), ("loss", "actor/loss")),
    (("kl", "actor/kl_loss"), ("kl", "actor/reward_kl_penalty")),
    (("loss", "reward/loss"),),
    (("pairs right", "reward/accuracy"),),
)

# Steps that the time left is estimated from: recent ones, because responses grow and shrink during a run.
_RECENT_STEPS = 20


class ConsoleTracker(Tracker):
    """Shows the progress of a run of `total_steps` steps.

    Args:
        total_steps: of the whole run, those before a resume included.
        stream: where to write; None = stdout at this moment.
        clock: seconds, rising.
    """

    def __init__(
        self, total_steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._clock = clock
        self._last_s: float | None = None
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._live: Progress | None = None
        if self._stream.isatty():
            self._live = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
                console=Console(file=self._stream),
                refresh_per_second=2,
            )
            self._task = self._live.add_task("waiting for the first step", total=None)
            self._live.start()

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Nothing: the report at the end shows samples."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show `step`: on a terminal only evaluations leave a line behind."""
        now_s = self._clock()
        if self._last_s is not None:
            self._recent_s.append(now_s - self._last_s)
        elif "timing_s/step" in metrics:
            self._recent_s.append(metrics["timing_s/step"])
        self._last_s = now_s
        line = self._line(step, metrics)
        if self._live is None:
            print(line, file=self._stream, flush=True)
            return
        if any(name.startswith(HELD_OUT) for name in metrics):
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._live.update(self._task, description=line, refresh=True)

    def close(self, failed: bool) -> None:
        if self._live is not None:
            self._live.stop()

    def outputs(self) -> dict[str, str]:
        return {}

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"]
        for group in _SHOWN:
            parts += [f"{label} {metrics[name]:.4g}" for label, name in group if name in metrics][:1]
        for name, value in metrics.items():
            if name.startswith(HELD_OUT):
                parts.append(f"held-out {name.removeprefix(HELD_OUT)} {value:.4g}")
        if "perf/total_num_tokens" in metrics and metrics.get("timing_s/step"):
            parts.append(f"{metrics['perf/total_num_tokens'] / metrics['timing_s/step']:,.0f} tokens/s")
        if "timing_s/step" in metrics:
            parts.append(f"{metrics['timing_s/step']:.2f} s")
        if self._recent_s and step < self._total_steps:
            left_s = sum(self._recent_s) / len(self._recent_s) * (self._total_steps - step)
            parts.append(f"{_duration(left_s)} left")
        return "  ".join(parts)


def _duration(seconds: float) -> str:
    """Seconds as 45s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
