"""What comes next in a run, from where it stands."""

from __future__ import annotations

from pathlib import Path

from controllers.run.loop import Move, Position, decide, evaluation_due
from tests.controllers.runs import Inputs
from verl_ray.config.run import RunConfig


def run_of(inputs: Inputs, folder: Path, total: int, *, evaluate: int = 0, checkpoint: int = 0) -> RunConfig:
    every = [f"run.evaluate_every={evaluate}", f"run.checkpoint_every={checkpoint}"]
    return inputs.config("ppo", folder, f"run.total_steps={total}", *every).run


def moves(run: RunConfig, at: Position, enough_after: int | None = None) -> list[str]:
    """All that a run does, when every move does what it is for."""
    made = []
    while (move := decide(run, at)) is not Move.END:
        made.append(f"{move.name.lower()} {at.step + (move is Move.STEP)}")
        if move is Move.STEP:
            at.step, at.unrecorded = at.step + 1, {}
        elif move is Move.RECORD:
            at.unrecorded, at.finished = None, at.step == enough_after
        else:
            at.saved = at.step
    return made


def test_each_step_is_recorded_and_then_saved(inputs: Inputs, tmp_path: Path) -> None:
    run = run_of(inputs, tmp_path, 3, checkpoint=2)
    steps = ["step 1", "record 1", "step 2", "record 2", "save 2", "step 3", "record 3", "save 3"]
    assert moves(run, Position(0, None, saved=0)) == steps
    assert moves(run, Position(0, {}, saved=0)) == ["record 0", *steps]  # with an evaluation before the first
    assert moves(run, Position(2, {}, saved=2)) == ["record 2", *steps[-3:]]  # the evaluation that a stop left undone
    assert moves(run, Position(3, None, saved=3)) == []
    never = run_of(inputs, tmp_path, 2)
    assert moves(never, Position(0, None, saved=0)) == ["step 1", "record 1", "step 2", "record 2"]


def test_a_run_that_has_learned_enough_is_saved(inputs: Inputs, tmp_path: Path) -> None:
    run = run_of(inputs, tmp_path, 9, checkpoint=5)
    made = moves(run, Position(0, None, saved=0), enough_after=2)
    assert made == ["step 1", "record 1", "step 2", "record 2", "save 2"]


def test_when_evaluations_are_due(inputs: Inputs, tmp_path: Path) -> None:
    run = run_of(inputs, tmp_path, 7, evaluate=3)
    assert [step for step in range(8) if evaluation_due(run, step)] == [0, 3, 6, 7]
    assert not any(evaluation_due(run_of(inputs, tmp_path, 7), step) for step in range(8))
