"""A run that goes back in the middle of a move, whoever asked for the move.

Real processes that die are in `tests/test_drills.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.run.faults import Cure, FaultPolicy
from controllers.run.loop import Loop, NoPersistence, UnguardedSteps
from controllers.trainers.base import Trainable
from controllers.watch.held_out_measures import Evaluation
from tests.controllers.run.test_stopping import Cursor
from tests.controllers.runs import Inputs
from verl_ray.config.run import RecoveryConfig
from verl_ray.errors import WorkerDied
from verl_ray.tracking import Trackers
from verl_ray.tracking.jsonl import JsonlTracker, read_metrics


class Mortal(Cursor):
    """A trainer whose processes die at some moves, each time once."""

    def __init__(self, deaths: list[str], made: list[str]) -> None:
        super().__init__()
        self.deaths, self.made = deaths, made

    def _make(self, move: str) -> None:
        if move in self.deaths:
            self.deaths.remove(move)
            raise WorkerDied(f"died at {move}", role="actor", rank=0, node="a")
        self.made.append(move)

    def begin(self, done: int) -> None:
        super().begin(done)
        self._make("begin")

    def step(self, number: int) -> dict[str, float]:
        self._make(f"step {number}")
        return super().step(number)

    def evaluate(self) -> Evaluation:
        self._make(f"evaluate {self.drawn // 8}")
        return super().evaluate()


class AnotherTrainer:
    """The way back without processes: a new trainer."""

    def __init__(self, folder: Path) -> None:
        config = RecoveryConfig(
            enabled=True,
            max_restarts=3,
            max_wait_s=60,
            snapshot_every=0,
            snapshot_copies=1,
        )
        self._policy = FaultPolicy(config, folder)
        self.note_finished = self._policy.note_finished

    def may_cure(self, failure: BaseException, step: int) -> bool:
        return self._policy.cure_of(failure, step) is Cure.GO_BACK

    def restart(self, trainer: Trainable) -> Trainable:
        assert isinstance(trainer, Mortal)
        return Mortal(trainer.deaths, trainer.made)


def loop_of(inputs: Inputs, folder: Path, *deaths: str) -> tuple[Loop, list[str]]:
    """A run of four steps without checkpoints, and what its trainers do."""
    config = inputs.config("ppo", folder, "run.total_steps=4")
    made: list[str] = []
    trackers = Trackers([JsonlTracker(folder)])
    loop = Loop(
        config.run,
        Mortal(list(deaths), made),
        trackers,
        NoPersistence(),
        UnguardedSteps(),
        AnotherTrainer(folder),
    )
    return loop, made


def recorded(folder: Path) -> list[float]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [line["training/global_step"] for line in lines]


def test_steps_that_are_made_again_are_recorded_once(
    inputs: Inputs, tmp_path: Path
) -> None:
    loop, made = loop_of(inputs, tmp_path, "begin", "step 3")
    loop.run()
    steps = [f"step {number}" for number in range(1, 5)]
    assert made == ["begin", "step 1", "step 2", "begin", *steps]
    assert recorded(tmp_path) == [1, 2, 3, 4]


def test_a_step_by_hand_comes_to_its_end(inputs: Inputs, tmp_path: Path) -> None:
    loop, made = loop_of(inputs, tmp_path, "step 3")
    for number in range(1, 4):
        assert loop.step()["actor/loss"] == pytest.approx(0.1 * number)
        assert loop.finished_step == number
    assert made[-4:] == ["begin", "step 1", "step 2", "step 3"]


def test_an_evaluation_by_hand_is_of_the_step_that_it_was_asked_for(
    inputs: Inputs, tmp_path: Path
) -> None:
    loop, made = loop_of(inputs, tmp_path, "evaluate 2")
    loop.step()
    loop.step()
    assert loop.evaluate() == {"val-core/sums/acc/mean@1": 16 / 64}
    assert loop.finished_step == 2 and not loop.has_ended
    assert made[-4:] == ["begin", "step 1", "step 2", "evaluate 2"]


def test_what_is_not_cured_is_raised_by_hand(inputs: Inputs, tmp_path: Path) -> None:
    loop, _ = loop_of(inputs, tmp_path, "step 2", "step 2")
    loop.step()
    with pytest.raises(WorkerDied, match="died at step 2") as caught:
        loop.step()
    assert "second time at step 2" in caught.value.__notes__[0]
    assert loop.has_ended
