"""A picture of a run over its steps, drawn while it goes on: `reward_curve.png`.

It shows the reward, or the loss of a supervised run, and held-out results, beside them
KL divergence, response lengths and entropy.

Invariant: the picture shows what `metrics.jsonl` contains, and nothing that was
computed elsewhere. Drawing takes at most a fiftieth of the run's time, and a picture
that cannot be drawn never ends a run.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from verl_ray.disk import replace_file
from verl_ray.tracking.base import GLOBAL_STEP, HELD_OUT, Sample, Tracker
from verl_ray.tracking.comparison import is_lower_better
from verl_ray.tracking.jsonl import METRICS, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REWARD = "critic/rewards/mean"

PICTURE = "reward_curve.png"

PERIOD_S = 30.0
"""Shortest time between two pictures."""

LARGEST_SHARE = 0.02
"""Largest share of the time that may be spent on pictures."""

Points = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Steps and values of a metric, each [n]."""


_LOSSES = ("train/loss", "reward/loss")
"""Losses of tasks without rewards: SFT, and the training of a reward model."""


@dataclass(frozen=True)
class Panel:
    """One plot of the picture: some metrics of a kind, with their labels."""

    title: str
    labels: Mapping[str, str]


PANELS = (
    Panel("reward", {REWARD: "each step"}),
    Panel("loss", dict.fromkeys(_LOSSES, "training")),
    Panel("pairs in the right order", {"reward/accuracy": "training"}),
    Panel(
        "KL divergence",
        {
            "actor/kl_loss": "in the loss",
            "actor/reward_kl_penalty": "in the reward, per token",
        },
    ),
    Panel(
        "response length, tokens",
        {"response_length/mean": "mean", "response_length/max": "longest"},
    ),
    Panel("entropy, nats per token", {"actor/entropy_per_token": "policy"}),
)
"""Plots besides those of held-out results."""

_SHOWN = {name for panel in PANELS for name in panel.labels}


class CurveTracker(Tracker):
    """Draws the picture now and then, and once more at the end."""

    def __init__(
        self, run_dir: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with what is recorded already.

        Args:
            run_dir: Folder of the run. Its metrics.jsonl is repaired already.
            clock: Clock in seconds that only increases.
        """
        self._path = run_dir / PICTURE
        self._clock = clock
        self._lines: list[dict[str, float]] = []
        self._next_s = clock() + PERIOD_S

        record = run_dir / METRICS
        if record.exists():
            for line in read_metrics(record):
                self._keep(line)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        """Do nothing: samples are no curve."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the metrics of `step`, and draw if the last picture is old."""
        self._keep(metrics)

        start_s = self._clock()
        if start_s < self._next_s or not self._has_curve:
            return
        self._draw()
        end_s = self._clock()
        pause_s = max(PERIOD_S, (end_s - start_s) / LARGEST_SHARE)
        self._next_s = end_s + pause_s

    def close(self, failed: bool) -> None:
        """Draw the last picture."""
        if self._has_curve:
            self._draw()

    def outputs(self) -> dict[str, str]:
        if not self._has_curve:
            return {}
        return {"curve": str(self._path)}

    @property
    def _has_curve(self) -> bool:
        """Whether any step has a reward or a loss to draw."""
        return any(name in line for line in self._lines for name in (REWARD, *_LOSSES))

    def _keep(self, metrics: Mapping[str, float]) -> None:
        """Keep the metrics that are drawn."""
        line = {
            name: float(value)
            for name, value in metrics.items()
            if name in _SHOWN or name.startswith(HELD_OUT)
        }
        if line:
            self._lines.append({**line, GLOBAL_STEP: metrics[GLOBAL_STEP]})

    def _draw(self) -> None:
        replace_file(self._path, picture(self._lines))


def picture(lines: Sequence[Mapping[str, float]]) -> bytes:
    """Return the picture of some lines of metrics.jsonl as a PNG.

    Metrics that no line has get no plot. The reward has a running mean.
    """
    # Imported here because it takes a second.
    from matplotlib.figure import Figure

    panels = _panels(lines)
    num_columns = 1 if len(panels) == 1 else 2
    num_rows = -(-len(panels) // num_columns)

    figure = Figure(figsize=(5.5 * num_columns, 3 * num_rows), layout="constrained")
    grid = figure.add_gridspec(num_rows, num_columns)
    for number, panel in enumerate(panels):
        row, column = divmod(number, num_columns)
        # A last plot that is alone in its row is as wide as the row.
        is_alone = number == len(panels) - 1 and column == 0
        place = grid[row, :] if is_alone else grid[row, column]
        _plot(figure.add_subplot(place), panel, lines)

    png = io.BytesIO()
    figure.savefig(png, dpi=110, format="png")
    return png.getvalue()


def _panels(lines: Sequence[Mapping[str, float]]) -> list[Panel]:
    """Return the plots that there is something to draw for."""
    # A dictionary keeps the order in which the lines first name the data sources.
    names = dict.fromkeys(name for line in lines for name in line)
    held_out = {
        name: name.removeprefix(HELD_OUT) for name in names if name.startswith(HELD_OUT)
    }
    rising = {
        name: label for name, label in held_out.items() if not is_lower_better(name)
    }
    falling = {name: label for name, label in held_out.items() if name not in rising}

    panels = []
    for panel in PANELS:
        present = {name: label for name, label in panel.labels.items() if name in names}
        # Losses of training and of held-out rows have one scale.
        if present and panel.title == "loss":
            present |= falling
        if present:
            panels.append(Panel(panel.title, present))
    # The held-out results stand beside the reward.
    if rising:
        panels.insert(1, Panel("held out", rising))
    return panels


def _plot(axes: Axes, panel: Panel, lines: Sequence[Mapping[str, float]]) -> None:
    """Draw the metrics of one plot."""
    from matplotlib.ticker import MaxNLocator

    for name, label in panel.labels.items():
        steps, values = _series(lines, name)
        # Few points would hardly be seen without marks.
        marker = "o" if steps.size <= 30 else None
        window = steps.size // 10
        if name == REWARD and window > 1:
            mean = running_mean(values, window)
            axes.plot(steps, values, color="#9bb8d3", linewidth=1, label=label)
            label = f"mean of {window} steps"
            axes.plot(steps, mean, color="#1f4e79", linewidth=2, label=label)
        else:
            axes.plot(steps, values, marker=marker, markersize=4, label=label)

    if all("/acc/" in name or name.endswith("accuracy") for name in panel.labels):
        axes.set_ylim(-0.02, 1.02)
    # There is no step between two steps.
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel("training step", fontsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Return the mean of the last `window` values at each place.

    At the beginning there are fewer values.

    Args:
        values: Numbers, float64 [n].
        window: Number of values per mean.

    Returns:
        Means, float64 [n].
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, values.size + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts), dtype=np.float64)


def _series(lines: Sequence[Mapping[str, float]], name: str) -> Points:
    """Return the steps and values of one metric where it is finite."""
    points = np.array(
        [(line[GLOBAL_STEP], line[name]) for line in lines if name in line],
        dtype=np.float64,
    )
    # Without points the array has no second dimension.
    points = points.reshape(-1, 2)
    points = points[np.isfinite(points[:, 1])]
    return points[:, 0], points[:, 1]
