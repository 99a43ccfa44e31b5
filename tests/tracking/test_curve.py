"""The picture of a run."""

import io
import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imread

from verl_ray.tracking.curve import (
    PERIOD_S,
    CurveTracker,
    _panels,
    _plot,
    picture,
    running_mean,
)

STEPS: list[dict[str, float]] = [
    {
        "training/global_step": step,
        "critic/rewards/mean": float("nan") if step == 3 else step / 40,
    }
    for step in range(1, 41)
]


def pixels(png: bytes) -> np.ndarray:
    return imread(io.BytesIO(png))[..., :3]


def dark_pixels(png: bytes) -> int:
    """Pixels of the line of running means (and of anything else as blue)."""
    red, green, blue = np.moveaxis(pixels(png), -1, 0)
    return int(((red < 0.3) & (green < 0.45) & (blue > 0.35)).sum())


def test_running_mean_by_hand() -> None:
    assert running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [
        1.0,
        2.0,
        4.0,
        6.0,
    ]


def test_there_is_a_plot_for_all_that_was_measured() -> None:
    alone = picture(STEPS)
    assert pixels(alone).shape[:2] == (330, 605)
    assert dark_pixels(alone) > 700

    evaluated = [{"training/global_step": 0, "val-core/sums/acc/mean@1": 0.4}, *STEPS]
    assert pixels(picture(evaluated)).shape[:2] == (330, 1210)  # beside the reward

    others = {
        "actor/kl_loss": 0.1,
        "response_length/mean": 9.0,
        "actor/entropy_per_token": 2.0,
    }
    full = [evaluated[0], *({**line, **others} for line in STEPS)]
    assert pixels(picture(full)).shape[:2] == (990, 1210)  # three rows of two


def test_it_is_drawn_during_the_run_but_not_at_every_step(tmp_path: Path) -> None:
    now = [100.0]
    png = tmp_path / "reward_curve.png"
    tracker = CurveTracker(tmp_path, clock=lambda: now[0])

    tracker.log(1, STEPS[0])
    assert not png.exists()
    now[0] += PERIOD_S
    tracker.log(2, STEPS[1])
    first = png.read_bytes()
    tracker.log(4, STEPS[3])
    assert png.read_bytes() == first
    tracker.close(False)
    assert png.read_bytes() != first
    assert tracker.outputs() == {"curve": str(png)}


def test_a_resumed_run_draws_the_steps_before_it_as_well(tmp_path: Path) -> None:
    rows = [
        {name: None if value != value else value for name, value in line.items()}
        for line in STEPS[:20]
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    tracker = CurveTracker(tmp_path)
    for line in STEPS[20:]:
        tracker.log(int(line["training/global_step"]), line)
    tracker.close(False)
    assert (tmp_path / "reward_curve.png").read_bytes() == picture(STEPS)


def test_a_supervised_run_has_its_losses(tmp_path: Path) -> None:
    held_out = {"val-core/held_out/loss": 2.0, "val-core/held_out/acc/mean@1": 0.1}
    lines: list[dict[str, float]] = [
        {"training/global_step": 0, **held_out},
        {"training/global_step": 1, "train/loss": 1.0},
    ]
    loss, accuracy = _panels(lines)
    assert (loss.title, accuracy.title) == ("loss", "held out")
    assert loss.labels == {
        "train/loss": "training",
        "val-core/held_out/loss": "held_out/loss",
    }

    tracker = CurveTracker(tmp_path)
    tracker.log(0, lines[0])
    assert tracker.outputs() == {}
    tracker.log(1, lines[1])
    tracker.close(False)
    assert (tmp_path / "reward_curve.png").read_bytes() == picture(lines)


def test_a_short_run_has_whole_steps_and_no_mean_of_one_step() -> None:
    figure = Figure()
    axes = figure.subplots()
    (reward,) = _panels(STEPS[:2])
    _plot(axes, reward, STEPS[:2])
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["each step"]


def test_a_last_plot_that_is_alone_is_as_wide_as_its_row() -> None:
    others = {"actor/reward_kl_penalty": 0.1, "actor/entropy_per_token": 2.0}
    three = pixels(picture([{**line, **others} for line in STEPS]))
    below = three[330:, 605:]
    assert below.min() < 0.9  # the right half of the second row is drawn on


def test_a_run_that_learned_nothing_yet_has_no_picture(tmp_path: Path) -> None:
    tracker = CurveTracker(tmp_path)
    tracker.log(0, {"training/global_step": 0, "val-core/sums/acc/mean@1": 0.4})
    tracker.close(False)
    assert not list(tmp_path.iterdir()) and tracker.outputs() == {}
