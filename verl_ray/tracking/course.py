"""The course of a run: what its lines of metrics say about its progress so far.

Invariant: it depends on the lines alone, and on the times at which they came where
those are known, so the driver and whoever reads metrics.jsonl see the same. One thread
notes lines, and any other one may look meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from verl_ray.rewards.health import ScoreHealth
from verl_ray.tracking.base import GLOBAL_STEP, HELD_OUT

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

_STEP_S = "timing_s/step"
_TIMES = (_STEP_S, "timing_s/testing", "timing_s/save_checkpoint")


@dataclass(frozen=True)
class ShownMetric:
    """A metric, and the first value that it had."""

    label: str
    value: float
    step: int
    first: float
    first_step: int


class Course:
    """The steps of a run so far."""

    def __init__(self, total_steps: int | None) -> None:
        """Begin before the first line.

        Args:
            total_steps: Number of steps of the whole run, with those before a resume;
                None where it is not known yet.
        """
        self.total_steps = total_steps
        self.step = 0
        self.line: Mapping[str, float] = {}
        """The last line."""

        self.last_step_line: Mapping[str, float] = {}
        """The last line of a step, since an evaluation may have a line of its own."""

        self._firsts: dict[str, tuple[int, float]] = {}
        """First step and value of each metric that is shown with its change."""

        self._lasts: dict[str, tuple[int, float]] = {}
        self._last_s: float | None = None
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)

    def note(self, line: Mapping[str, float], now_s: float | None = None) -> None:
        """Note the next line.

        Args:
            line: The metrics of a step, with `training/global_step`.
            now_s: Time at which the line came, in seconds of a rising clock; None if it
                was read later.
        """
        self.step = int(line[GLOBAL_STEP])
        self.line = line
        if _STEP_S in line:
            self.last_step_line = line

        shown = [name for _, name in first_shown(line)]
        for name in [*held_out_names(line), *shown]:
            value = line[name]
            # A score may not be a number where all have failed.
            if value == value:
                self._firsts.setdefault(name, (self.step, value))
                self._lasts[name] = (self.step, value)
        self._note_time(line, now_s)

    def _note_time(self, line: Mapping[str, float], now_s: float | None) -> None:
        """Note how long the step took."""
        if now_s is not None and self._last_s is not None:
            self._recent_s.append(now_s - self._last_s)
        elif _STEP_S in line:
            # The first line has no line before it, and lines of a file have no times.
            times = _TIMES if now_s is None else (_STEP_S,)
            self._recent_s.append(sum(line.get(name, 0.0) for name in times))
        self._last_s = now_s

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the last step; None where that cannot be told, or it is over.

        The next steps will take about as long as the recent ones.
        """
        if not self._recent_s or self.total_steps is None:
            return None
        if self.step >= self.total_steps:
            return None
        recent_s = list(self._recent_s)
        mean_s = sum(recent_s) / len(recent_s)
        return mean_s * (self.total_steps - self.step)

    @property
    def main(self) -> list[ShownMetric]:
        """The metrics of the last step that are shown, each with its first value."""
        return [
            self._since_first(label, name)
            for label, name in first_shown(self.last_step_line)
            if name in self._lasts
        ]

    @property
    def held_out(self) -> list[ShownMetric]:
        """The held-out metrics of the last evaluation, each with its first value."""
        return [
            self._since_first(held_out_label(name), name)
            for name in list(self._lasts)
            if name.startswith(HELD_OUT)
        ]

    def _since_first(self, label: str, name: str) -> ShownMetric:
        step, value = self._lasts[name]
        first_step, first = self._firsts[name]
        return ShownMetric(label, value, step, first, first_step)


def first_shown(line: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return which metrics of a line are shown, as (label, name)."""
    shown = []
    for group in _SHOWN:
        present = [(label, name) for label, name in group if name in line]
        shown += present[:1]
    return shown


def held_out_names(line: Mapping[str, float]) -> list[str]:
    """Return the names of the main held-out metrics of a line."""
    # Averages alone: best@N/mean and the like stand in the report.
    return [
        name
        for name in line
        if name.startswith(HELD_OUT) and not name.endswith("/mean")
    ]


def held_out_label(name: str) -> str:
    """Return the name of a held-out metric as it is shown."""
    # The data source of supervised runs is named as all of them are here.
    return name.removeprefix(HELD_OUT).removeprefix("held_out/")


def speed(line: Mapping[str, float]) -> list[str]:
    """Return how fast a step was, in words."""
    parts = []
    seconds = line.get(_STEP_S)
    if "perf/total_num_tokens" in line and seconds:
        tokens_per_s = line["perf/total_num_tokens"] / seconds
        parts.append(f"{tokens_per_s:,.0f} tokens/s")
    if seconds is not None:
        parts.append(f"{seconds:.2f} s")
    return parts


def failed_scores(line: Mapping[str, float]) -> str:
    """Return which share of the scores failed, with the kinds; empty if none did."""
    counts = {
        health: line.get(health.metric, 0)
        for health in ScoreHealth
        if line.get(health.metric, 0)
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
