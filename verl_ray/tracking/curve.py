"""A picture of a run: reward and held-out accuracy over steps, drawn from `metrics.jsonl`.

Invariant: it shows what the file says and nothing that was computed elsewhere. Not a dashboard.
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
    """Draw reward per step, with its running mean, above held-out accuracy where the file has any, and write a PNG.

    Args:
        metrics_jsonl: the run's metrics.
        png: written, replacing an older one.

    Raises:
        TrackingError: the file holds no step with a reward.
    """
    # Imported here because it takes a second, at the end of a run.
    from matplotlib.figure import Figure

    lines = read_metrics(metrics_jsonl)
    steps, rewards = _series(lines, REWARD)
    if steps.size == 0:
        raise TrackingError(f"{metrics_jsonl}: none of its {len(lines)} lines has {REWARD}; there is no curve to draw")
    # A dictionary for its order: the data sources as the file first names them.
    held_out = dict.fromkeys(name for line in lines for name in line if name.startswith(HELD_OUT))

    figure = Figure(figsize=(8, 6), layout="constrained")
    panels = figure.subplots(2 if held_out else 1, 1, sharex=True, squeeze=False)[:, 0]
    above, bottom = panels[0], panels[-1]
    above.plot(steps, rewards, color="#9bb8d3", linewidth=1, label="each step")
    window = max(1, steps.size // 10)
    above.plot(steps, running_mean(rewards, window), color="#1f4e79", linewidth=2, label=f"mean of {window} steps")
    above.set_ylabel("reward")
    for name in held_out:
        bottom.plot(*_series(lines, name), marker="o", linewidth=2, label=name.removeprefix(HELD_OUT))
        bottom.set_ylabel("held-out accuracy")
        bottom.set_ylim(-0.02, 1.02)
    bottom.set_xlabel("training step")
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(png, dpi=130)


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The mean of the last `window` values at each place, of fewer at the beginning. Shape [n] to [n]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, values.size + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts), dtype=np.float64)


def _series(lines: Sequence[dict[str, float]], name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps and finite values of one metric, each [n]."""
    points = np.array([(line[GLOBAL_STEP], line[name]) for line in lines if name in line], dtype=np.float64)
    points = points.reshape(-1, 2)
    points = points[np.isfinite(points[:, 1])]
    return points[:, 0], points[:, 1]
