"""A plot of reward and held-out accuracy over steps, drawn from `metrics.jsonl`.

Invariant: the plot shows what the file contains, and nothing that was computed
elsewhere.

Deliberately not here: a dashboard.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from verl_ray.errors import TrackingError
from verl_ray.tracking.base import GLOBAL_STEP, HELD_OUT
from verl_ray.tracking.jsonl import read_metrics

REWARD = "critic/rewards/mean"


def reward_curve(metrics_jsonl: Path, png: Path) -> None:
    """Draw reward per step and its running mean as a PNG.

    Held-out accuracy is drawn below, if the file has any.

    Args:
        metrics_jsonl: Metrics of the run.
        png: File to write; an older one is replaced.

    Raises:
        TrackingError: The file holds no step with a reward.
    """
    # Imported here because it takes a second, at the end of a run.
    from matplotlib.figure import Figure

    lines = read_metrics(metrics_jsonl)
    steps, rewards = _series(lines, REWARD)
    if steps.size == 0:
        raise TrackingError(
            f"{metrics_jsonl}: none of its {len(lines)} lines has {REWARD}; there is no"
            " curve to draw"
        )
    # A dictionary keeps the order in which the file first names the data sources.
    held_out = dict.fromkeys(
        name for line in lines for name in line if name.startswith(HELD_OUT)
    )

    figure = Figure(figsize=(8, 6), layout="constrained")
    num_panels = 2 if held_out else 1
    panels = figure.subplots(num_panels, 1, sharex=True, squeeze=False)[:, 0]
    upper = panels[0]
    lower = panels[-1]

    window = max(1, steps.size // 10)
    mean = running_mean(rewards, window)
    upper.plot(steps, rewards, color="#9bb8d3", linewidth=1, label="each step")
    upper.plot(
        steps, mean, color="#1f4e79", linewidth=2, label=f"mean of {window} steps"
    )
    upper.set_ylabel("reward")

    for name in held_out:
        evaluated_steps, accuracies = _series(lines, name)
        label = name.removeprefix(HELD_OUT)
        lower.plot(evaluated_steps, accuracies, marker="o", linewidth=2, label=label)
        lower.set_ylabel("held-out accuracy")
        lower.set_ylim(-0.02, 1.02)
    lower.set_xlabel("training step")

    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(png, dpi=130)


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


def _series(
    lines: Sequence[dict[str, float]], name: str
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the steps and values of one metric where it is finite, each [n]."""
    points = np.array(
        [(line[GLOBAL_STEP], line[name]) for line in lines if name in line],
        dtype=np.float64,
    )
    # Without points the array has no second dimension.
    points = points.reshape(-1, 2)
    points = points[np.isfinite(points[:, 1])]
    return points[:, 0], points[:, 1]
