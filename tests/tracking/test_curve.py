"""The picture of a run."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from verl_ray.errors import TrackingError
from verl_ray.tracking.curve import reward_curve, running_mean


def write(path: Path, lines: list[dict[str, float | None]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def dark_pixels(png: Path) -> int:
    """Pixels of the line of running means (and of anything else as blue)."""
    red, green, blue = np.moveaxis(imread(png)[..., :3], -1, 0)
    return int(((red < 0.3) & (green < 0.45) & (blue > 0.35)).sum())


def test_running_mean_by_hand() -> None:
    assert running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [
        1.0,
        2.0,
        4.0,
        6.0,
    ]


def test_the_picture_shows_the_rewards_and_the_held_out_accuracy(
    tmp_path: Path,
) -> None:
    steps: list[dict[str, float | None]] = [
        {
            "training/global_step": step,
            "critic/rewards/mean": None if step == 3 else step / 40,
        }
        for step in range(1, 41)
    ]
    png = tmp_path / "curve.png"
    reward_curve(write(tmp_path / "m.jsonl", steps), png)
    alone = imread(png)
    assert alone.shape[:2] == (780, 1040)
    assert dark_pixels(png) > 1000

    evaluated = [{"training/global_step": 0, "val-core/sums/acc/mean@1": 0.4}, *steps]
    reward_curve(write(tmp_path / "m.jsonl", evaluated), png)
    assert not np.array_equal(imread(png), alone)


def test_a_record_without_rewards_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", [{"training/global_step": 0, "x": 1.0}])
    with pytest.raises(
        TrackingError, match="none of its 1 lines has critic/rewards/mean"
    ):
        reward_curve(path, tmp_path / "curve.png")
