"""Event files read back with TensorBoard's own reader."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from verl_ray.tracking.tensorboard import TensorBoardTracker


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_scalars_read_back(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(0, {"val-core/sums/acc/mean@1": 0.25})
    tracker.log(1, {"critic/rewards/mean": 0.5, "training/global_step": 1})
    assert scalars(tmp_path, "critic/rewards/mean") == [
        (1, 0.5)
    ]  # before the file is closed
    tracker.close(failed=False)
    assert scalars(tmp_path, "val-core/sums/acc/mean@1") == [(0, 0.25)]
    assert scalars(tmp_path, "training/global_step") == [(1, 1.0)]


@pytest.mark.parametrize(
    ("committed_step", "expected"),
    [(1, [(0, 0.0), (1, 1.0), (2, 20.0)]), (None, [(2, 20.0)])],
)
def test_a_continued_run_takes_back_the_steps_that_it_runs_again(
    tmp_path: Path, committed_step: int | None, expected: list[tuple[int, float]]
) -> None:
    killed = TensorBoardTracker(tmp_path)
    for step in range(4):
        killed.log(step, {"x": float(step)})
    killed.close(failed=True)
    continued = TensorBoardTracker(tmp_path, committed_step)
    continued.log(2, {"x": 20.0})
    continued.close(failed=False)
    assert scalars(tmp_path, "x") == expected
