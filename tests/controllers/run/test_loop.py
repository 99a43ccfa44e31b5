"""What comes next in a run, from where it stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controllers.run.loop import (
    ENDINGS,
    Move,
    Position,
    decide,
    evaluation_due,
)
from tests.controllers.runs import Inputs
from verl_ray.config.run import RunConfig


def run_of(
    inputs: Inputs, folder: Path, total: int, *, evaluate: int = 0, checkpoint: int = 0
) -> RunConfig:
    every = [f"run.evaluate_every={evaluate}", f"run.checkpoint_every={checkpoint}"]
    if not checkpoint:
        every.append("run.save_at_end=false")
    return inputs.config("ppo", folder, f"run.total_steps={total}", *every).run


# --------------------------------------------------------------------- single decisions

BROKEN = RuntimeError("a reward worker died")


def standing(step: int, saved: int = 0, **rest: Any) -> Position:
    return Position(begun=True, step=step, saved=saved, **rest)


# Of a run of 6 steps that evaluates every 2 and saves every 3.
TRANSITIONS = [
    # It begins.
    (Position(), Move.BEGIN),
    (standing(0), Move.STEP),
    (standing(0, unrecorded={}), Move.EVALUATE),
    (standing(0, unrecorded={}, evaluated=True), Move.RECORD),
    # It goes on: from a checkpoint whose line is written, from one that lacks its
    # evaluation, from the last one.
    (standing(3, saved=3), Move.STEP),
    (standing(4, saved=4, unrecorded={}), Move.EVALUATE),
    (standing(4, saved=4, unrecorded={}, evaluated=True), Move.RECORD),
    (standing(6, saved=6), Move.END),
    (standing(6, saved=6, unrecorded={}), Move.EVALUATE),
    # A step without an evaluation, with one, and with a checkpoint.
    (standing(1, unrecorded={}), Move.RECORD),
    (standing(1), Move.STEP),
    (standing(2, unrecorded={}), Move.EVALUATE),
    (standing(2, unrecorded={}, evaluated=True), Move.RECORD),
    (standing(2, evaluated=True), Move.STEP),
    (standing(3, unrecorded={}), Move.RECORD),
    (standing(3), Move.SAVE),
    (standing(3, saved=3, saving=True), Move.STEP),
    (standing(4, saved=3), Move.STEP),
    # The last one.
    (standing(6, saved=3, unrecorded={}), Move.EVALUATE),
    (standing(6, saved=3, unrecorded={}, evaluated=True), Move.RECORD),
    (standing(6, saved=3), Move.SAVE),
    (standing(6, saved=6, saving=True), Move.FINISH_SAVE),
    # Enough is learned before. A step after which it is known is evaluated at once.
    (standing(3, saved=3, unrecorded={}), Move.RECORD),
    (standing(3, saved=3, unrecorded={}, finished=True), Move.EVALUATE),
    (standing(3, unrecorded={}, evaluated=True, finished=True), Move.RECORD),
    (standing(4, saved=3, finished=True), Move.SAVE),
    (standing(4, saved=4, finished=True, saving=True), Move.FINISH_SAVE),
    (standing(4, saved=4, finished=True), Move.END),
    (standing(0, finished=True), Move.END),
    # A checkpoint could not be written: the next step tries again, the last one at once.
    (standing(3, failed=3), Move.STEP),
    (standing(4, failed=3, unrecorded={}), Move.EVALUATE),
    (standing(4, failed=3), Move.SAVE),
    (standing(4, failed=4), Move.STEP),
    (standing(6, failed=6), Move.SAVE),
    # A move failed.
    (Position(failure=BROKEN, curable=True), Move.GO_BACK),
    (standing(1, failure=BROKEN, curable=True), Move.GO_BACK),
    (standing(3, saved=3, saving=True, failure=BROKEN, curable=True), Move.RESCUE_SAVE),
    (standing(3, failure=BROKEN, curable=True, stopped=True), Move.STOP),
    (Position(failure=BROKEN), Move.FAIL),
    (standing(1, failure=BROKEN), Move.FAIL),
    (standing(1, unrecorded={}, failure=BROKEN), Move.FAIL),
    (standing(3, saved=3, saving=True, failure=BROKEN), Move.RESCUE_SAVE),
    (standing(6, saved=6, failure=BROKEN), Move.FAIL),
    # A signal came.
    (Position(failure=BROKEN, stopped=True), Move.STOP),
    (standing(1, failure=BROKEN, stopped=True), Move.STOP),
    (standing(2, unrecorded={}, failure=BROKEN, stopped=True), Move.STOP),
    (standing(3, saved=3, saving=True, failure=BROKEN, stopped=True), Move.RESCUE_SAVE),
]


@pytest.mark.parametrize(("at", "move"), TRANSITIONS)
def test_where_a_run_stands_decides_what_comes(
    inputs: Inputs, tmp_path: Path, at: Position, move: Move
) -> None:
    assert decide(run_of(inputs, tmp_path, 6, evaluate=2, checkpoint=3), at) is move


@pytest.mark.parametrize(
    ("at", "move"),
    [
        (standing(2, unrecorded={}), Move.RECORD),
        (standing(3), Move.STEP),
        (standing(6), Move.END),
        (standing(4, finished=True), Move.END),
    ],
)
def test_what_is_turned_off_never_comes(
    inputs: Inputs, tmp_path: Path, at: Position, move: Move
) -> None:
    run = run_of(inputs, tmp_path, 6)
    assert decide(run, at) is move
    if move is Move.END:
        run = run.model_copy(update={"save_at_end": True})
        assert decide(run, at) is Move.SAVE
        assert decide(run, replace(at, saved=at.step)) is Move.END


def test_when_evaluations_are_due(inputs: Inputs, tmp_path: Path) -> None:
    run = run_of(inputs, tmp_path, 7, evaluate=3)
    due = [evaluation_due(run, step, is_last=step == 7) for step in range(8)]
    assert [step for step in range(8) if due[step]] == [0, 3, 6, 7]
    assert not evaluation_due(run_of(inputs, tmp_path, 7), 7, is_last=True)


# --------------------------------------------------------------------------- whole runs


def after(move: Move, at: Position, enough_after: int | None) -> Position:
    """Where a move leads that does what it is for."""
    match move:
        case Move.STEP:
            return replace(
                at, step=at.step + 1, unrecorded={}, evaluated=False, saving=False
            )
        case Move.EVALUATE:
            return replace(at, evaluated=True)
        case Move.RECORD:
            return replace(at, unrecorded=None, finished=at.step == enough_after)
        case Move.SAVE:
            return replace(at, saved=at.step, saving=True)
    assert move is Move.FINISH_SAVE
    return replace(at, saving=False)


def moves(run: RunConfig, at: Position, enough_after: int | None = None) -> list[str]:
    """All that a run does from here, the number of finished steps before each move."""
    made = []
    while (move := decide(run, at)) not in ENDINGS:
        made.append(f"{at.step} {move.name.lower()}")
        at = after(move, at, enough_after)
    assert move is Move.END
    return made


def test_each_step_is_recorded_and_then_saved(inputs: Inputs, tmp_path: Path) -> None:
    run = run_of(inputs, tmp_path, 3, checkpoint=2)
    third = ["2 step", "3 record", "3 save", "3 finish_save"]
    steps = ["0 step", "1 record", "1 step", "2 record", "2 save", *third]
    assert moves(run, standing(0)) == steps
    assert moves(run, standing(2, saved=2)) == third
    assert moves(run, standing(2, saved=2, unrecorded={})) == [
        "2 record",
        *third,
    ]  # the line that a stop left undone
    assert moves(run, standing(3, saved=3)) == []
    never = run_of(inputs, tmp_path, 2)
    assert moves(never, standing(0)) == ["0 step", "1 record", "1 step", "2 record"]


def test_evaluations_come_before_their_lines(inputs: Inputs, tmp_path: Path) -> None:
    run = run_of(inputs, tmp_path, 3, evaluate=2)
    made = moves(run, standing(0, unrecorded={}))
    first = ["0 evaluate", "0 record", "0 step", "1 record", "1 step"]
    assert made == [
        *first,
        "2 evaluate",
        "2 record",
        "2 step",
        "3 evaluate",
        "3 record",
    ]


def test_a_run_that_has_learned_enough_is_saved(inputs: Inputs, tmp_path: Path) -> None:
    run = run_of(inputs, tmp_path, 9, checkpoint=5)
    made = moves(run, standing(0), enough_after=2)
    assert made == [
        "0 step",
        "1 record",
        "1 step",
        "2 record",
        "2 save",
        "2 finish_save",
    ]
