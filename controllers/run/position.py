"""The progress of a run, and the next move that follows from it.

Invariant: `decide` is a pure function. Every checkpoint belongs to a finished step, and
so does every line of metrics.jsonl, except line 0, which holds the evaluation before
the first step. Deliberately not here: making the moves (`loop.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from controllers.watch.measures import Metrics
from verl_ray.config.run import RunConfig


class Move(Enum):
    """A run's next action, or the way it ends."""

    BEGIN = auto()
    """Continue from the checkpoint, or start from nothing where there is none."""

    STEP = auto()
    """Train for one more step."""

    EVALUATE = auto()
    """Evaluate on held-out rows. Before the first step, this measures the model that
    the run started from."""

    RECORD = auto()
    """Write the metrics line of the last finished step. Before the first step, write
    the line of the first evaluation."""

    SAVE = auto()
    """Write a checkpoint, or begin to write one."""

    FINISH_SAVE = auto()
    """Wait for the checkpoint that is being written."""

    RESCUE_SAVE = auto()
    """Commit the checkpoint that was being written when a move failed, if it is
    whole."""

    GO_BACK = auto()
    """Start lost processes again after a failure, and begin from the last state."""

    END = auto()
    """End, because no work remains."""

    STOP = auto()
    """End after a signal; the last finished step is saved first."""

    FAIL = auto()
    """End after a failure without saving: the trainer's state may be inconsistent, so
    only existing checkpoints are valid."""


ENDINGS = (Move.END, Move.STOP, Move.FAIL)

PAUSES = (Move.STEP, *ENDINGS)
"""Moves before which a caller who steps by hand is asked."""


@dataclass(frozen=True)
class Position:
    """The progress of a run, from which its next move follows."""

    begun: bool = False
    """Whether the trainer has been restored, or has started anew."""

    step: int = 0
    """Number of finished steps."""

    unrecorded: Metrics | None = None
    """Metrics of the last finished step until its line is written, then None."""

    evaluated: bool = False
    """Whether the last finished step has been evaluated."""

    best: bool = False
    """Whether that evaluation is the best one so far, so that the step is saved."""

    saved: int = 0
    """Last step whose checkpoint is written or being written; 0 where there is none."""

    saving: bool = False
    """Whether the checkpoint of step `saved` may still be incomplete."""

    failed: int = 0
    """Step whose checkpoint could not be written; 0 where the last one could."""

    finished: bool = False
    """Whether the run ends before its last step: the trainer has reached its goal, or
    run.early_stop evaluations have brought no improvement."""

    failure: BaseException | None = None
    """Exception with which the last move failed or was interrupted."""

    stopped: bool = False
    """Whether a signal had arrived when the last move failed or was interrupted."""

    curable: bool = False
    """Whether the run goes on after that failure."""


def decide(run: RunConfig, position: Position) -> Move:
    """Return the next move of a run at this position."""
    if position.failure is not None:
        return _decide_after_failure(position)

    if not position.begun:
        return Move.BEGIN

    is_last = position.finished or position.step >= run.steps
    # A step's evaluation goes into its line, so it comes first.
    if position.unrecorded is not None:
        needs_evaluation = evaluation_due(run, position.step, is_last=is_last)
        if needs_evaluation and not position.evaluated:
            return Move.EVALUATE
        return Move.RECORD

    if _checkpoint_due(run, position, is_last=is_last):
        return Move.SAVE

    if not is_last:
        return Move.STEP
    if position.saving:
        return Move.FINISH_SAVE
    return Move.END


def _decide_after_failure(position: Position) -> Move:
    """Return the move after one that failed or was interrupted."""
    # A checkpoint that is being written holds a finished step, so the failed move
    # cannot have affected it.
    if position.saving:
        return Move.RESCUE_SAVE
    if position.stopped:
        return Move.STOP
    if position.curable:
        return Move.GO_BACK
    return Move.FAIL


def _checkpoint_due(run: RunConfig, position: Position, *, is_last: bool) -> bool:
    """Return whether the last finished step gets a checkpoint that it has not yet."""
    already_saved = position.step <= position.saved
    if already_saved or not run.checkpoint_every:
        return False
    # After a failure the next step tries again, and the last one does until it stops.
    if position.failed and not is_last:
        return position.step > position.failed
    is_due = position.step % run.checkpoint_every == 0
    return is_last or position.best or is_due


def evaluation_due(run: RunConfig, step: int, *, is_last: bool) -> bool:
    """Return whether the model is evaluated after `step`.

    This is so before the first step (step 0), every run.evaluate_every steps, and after
    the last one, also where the run finishes early. With run.evaluate_every = 0 there
    are no evaluations.
    """
    if run.evaluate_every <= 0:
        return False
    return step % run.evaluate_every == 0 or is_last
