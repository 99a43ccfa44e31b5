"""The loop around every step: begin or resume, step, evaluate, record, save, until the run ends, is stopped or fails.

Invariant: what comes next is a value, `decide` of where the run stands, and a move that breaks off is a place to stand,
too; every line of metrics.jsonl and every checkpoint belongs to a finished step. Deliberately not here: what a step
does (`controllers/trainers`), what a checkpoint holds (`recovery.py`), and what a stop means (`stopping.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from controllers.run.keeping import Keeping, Stepping
from controllers.trainers.base import Trainable
from controllers.watch.measures import Metrics
from verl_ray.cluster.signals import heed_signals, stop_requested
from verl_ray.config.run import RunConfig
from verl_ray.errors import Interrupted
from verl_ray.tracking.base import Sample, Tracker


class Move(Enum):
    """What a run does next."""

    BEGIN = auto()
    """Go on from the checkpoint, or from nothing where there is none."""
    STEP = auto()
    """Train one step more."""
    EVALUATE = auto()
    """Measure on held-out rows what the finished steps have learned; before the first, what was known already."""
    RECORD = auto()
    """Write the line of the last finished step; before the first, that of its evaluation."""
    SAVE = auto()
    """Write a checkpoint, or begin to."""
    FINISH_SAVE = auto()
    """Wait for the checkpoint that is being written."""
    RESCUE_SAVE = auto()
    """After a move has failed: let that checkpoint count if it is whole."""

    END = auto()
    """Nothing is left to do."""
    STOP = auto()
    """A signal came: save the last finished step."""
    FAIL = auto()
    """A move failed: nothing newer than the checkpoints is whole."""


ENDINGS = (Move.END, Move.STOP, Move.FAIL)


@dataclass(frozen=True)
class Position:
    """Where a run stands."""

    begun: bool = False
    """Whether the trainer is where the run begins, or goes on."""
    step: int = 0
    """Finished steps."""
    unrecorded: Metrics | None = None
    """What is known of the last finished step while its line is not written; None = it is."""
    evaluated: bool = False
    """Whether the evaluation of the last finished step is made."""
    saved: int = 0
    """The last step of which a checkpoint is written, or under way; 0 = none."""
    saving: bool = False
    """Whether that one may still be under way."""
    finished: bool = False
    """Whether enough is learned."""
    failure: BaseException | None = None
    """What broke the last move off."""
    stopped: bool = False
    """Whether a signal came by then."""


def decide(run: RunConfig, at: Position) -> Move:
    """What comes next."""
    if at.failure is not None:
        if at.saving:
            return Move.RESCUE_SAVE
        return Move.STOP if at.stopped else Move.FAIL

    if not at.begun:
        return Move.BEGIN
    if at.unrecorded is not None:
        return Move.EVALUATE if evaluation_due(run, at.step) and not at.evaluated else Move.RECORD

    is_last = at.finished or at.step >= run.total_steps
    if at.step > at.saved and run.checkpoint_every and (is_last or at.step % run.checkpoint_every == 0):
        return Move.SAVE
    if not is_last:
        return Move.STEP
    return Move.FINISH_SAVE if at.saving else Move.END


def evaluation_due(run: RunConfig, step: int) -> bool:
    """Before the first step, every run.evaluate_every steps, and after the last one; never where that is 0."""
    return run.evaluate_every > 0 and (step % run.evaluate_every == 0 or step == run.total_steps)


class Loop:
    """One run, from where its checkpoint left it to its end."""

    def __init__(
        self, run: RunConfig, trainer: Trainable, trackers: Tracker, keeping: Keeping, stepping: Stepping
    ) -> None:
        self._run, self._trainer, self._trackers = run, trainer, trackers
        self._keeping, self._stepping = keeping, stepping
        self.samples: list[Sample] = []
        """Of the newest evaluation."""

    def run(self) -> None:
        """All that is left to do. Raises what broke it off, once everything is kept that can be."""
        at = Position()
        while (move := decide(self._run, at)) not in ENDINGS:
            at = self._try(move, at)

        if move is Move.STOP:
            self._keeping.keep_finished(self._trainer, self._trackers)
        if at.failure is not None:
            raise at.failure

    def _try(self, move: Move, at: Position) -> Position:
        """Where the run stands after the move, or after what has become of it."""
        try:
            return self._make(move, at)
        except BaseException as failure:
            stopped = isinstance(failure, Interrupted) or stop_requested()
            return replace(at, failure=failure, stopped=stopped)

    def _make(self, move: Move, at: Position) -> Position:
        match move:
            case Move.BEGIN:
                return self._begin()
            case Move.STEP:
                return self._step(at)
            case Move.EVALUATE:
                return self._evaluate(at)
            case Move.RECORD:
                return self._record(at)
            case Move.SAVE:
                return self._save(at)
            case Move.FINISH_SAVE:
                self._keeping.finish_save()
                return replace(at, saving=False)
            case Move.RESCUE_SAVE:
                self._keeping.rescue_save()
                return replace(at, saving=False, stopped=at.stopped or stop_requested())
        raise AssertionError(f"{move} ends the loop")

    def _begin(self) -> Position:
        """A run begins with an evaluation; one that goes on makes the evaluation that a stop has left undone."""
        done = self._keeping.restore(self._trainer)
        self._trainer.begin(done)
        unrecorded = self._keeping.unrecorded
        if done == 0 and self._run.evaluate_every:
            unrecorded = {}
        return Position(begun=True, step=done, unrecorded=unrecorded, saved=done, finished=self._trainer.finished)

    def _step(self, at: Position) -> Position:
        number = at.step + 1
        with self._stepping.step(number):
            metrics = self._trainer.step(number)
            self._keeping.commit(number, self._trainer, unrecorded=metrics)
            self._keeping.finish_save()
        return replace(at, step=number, unrecorded=metrics, evaluated=False, saving=False)

    def _evaluate(self, at: Position) -> Position:
        """A stop gives up an evaluation, and then there is no line yet."""
        assert at.unrecorded is not None
        heed_signals()
        found, self.samples = self._trainer.evaluate()
        if self.samples:
            self._trackers.samples(at.step, self.samples)
        return replace(at, unrecorded=at.unrecorded | found, evaluated=True)

    def _record(self, at: Position) -> Position:
        assert at.unrecorded is not None
        self._trackers.log(at.step, at.unrecorded)
        self._keeping.commit_line(at.step, self._trainer, self._trackers)
        return replace(at, unrecorded=None, finished=self._trainer.finished)

    def _save(self, at: Position) -> Position:
        with self._trainer.timers("save_checkpoint"):  # on the next step's line: this one's is written first
            self._keeping.save(self._trainer, self._trackers)
        return replace(at, saved=at.step, saving=True)
