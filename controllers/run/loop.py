"""The loop around every step of a run.

A run begins or resumes, then steps, evaluates, records and saves, until it ends, is
stopped or fails.

Invariant: the next move is a function (`decide`) of the run's position alone, and a
move that fails or is interrupted also yields a position. So a run that is stepped by
hand makes the same moves as one that is not. The loop knows no more about checkpoints
and stops than the protocols at the end of this file say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

from controllers.run.best import BestEvaluation, held_out_metrics
from controllers.trainers.base import Trainable
from controllers.watch.held_out_measures import EvaluationFailed
from controllers.watch.measures import Metrics
from verl_ray.cluster.signals import heed_signals, stop_requested
from verl_ray.cluster.waiting import Background
from verl_ray.config.run import RunConfig
from verl_ray.errors import Interrupted
from verl_ray.profiling.phases import Timers, phase
from verl_ray.tracking.base import Tracker


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
    """End after a signal; the last finished step is saved first if any rank has it."""

    FAIL = auto()
    """End after a failure; the last finished step is saved first if any rank has it."""


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
    if position.step <= position.saved:
        return False
    if is_last and run.save_at_end:
        return True
    if not run.checkpoint_every:
        return False
    # After a failure the next step tries again, and the last one does until it stops.
    if position.failed:
        return is_last or position.step > position.failed
    return position.best or position.step % run.checkpoint_every == 0


def evaluation_due(run: RunConfig, step: int, *, is_last: bool) -> bool:
    """Return whether the model is evaluated after `step`.

    This is so before the first step (step 0), every run.evaluate_every steps, and after
    the last one, also where the run finishes early. With run.evaluate_every = 0 there
    are no evaluations.
    """
    if run.evaluate_every <= 0:
        return False
    return step % run.evaluate_every == 0 or is_last


class Loop:
    """Drives one run from its checkpoint to its end, at once or step by step.

    Attributes:
        line: Metrics of the last finished step, as its line in the record holds them;
            empty where this process has written none.
    """

    def __init__(
        self,
        run: RunConfig,
        trainer: Trainable,
        trackers: Tracker,
        persistence: Persistence,
        step_guard: StepGuard,
        restart: TrainerRestart | None = None,
    ) -> None:
        """Connect the parts of a run.

        Args:
            restart: What restores a run after a failure; without it any ends it.
        """
        self._run = run
        self._trainer = trainer
        self._trackers = trackers
        self._persistence = persistence
        self._step_guard = step_guard
        self._restart = restart

        self._position = Position()
        self.line: Metrics = {}

    def run(self) -> None:
        """Make moves until the run ends.

        Raises:
            BaseException: The failure that broke off the run, once all finished work
                that can be saved is saved.
        """
        self._move_until(ENDINGS)

    @property
    def trainer(self) -> Trainable:
        """The trainer, which is another one after the run went back."""
        return self._trainer

    # ------------------------------------------------------------------ step by step

    @property
    def finished_step(self) -> int:
        """Number of finished steps."""
        return self._position.step

    @property
    def has_ended(self) -> bool:
        """Whether no step remains."""
        return decide(self._run, self._position) in ENDINGS

    def begin(self) -> None:
        """Make all moves before the next step; raises as `run` does."""
        self._move_until(PAUSES)

    def step(self) -> Metrics:
        """Train for one more step, and make the moves that follow from it.

        These are an evaluation, the line of metrics and a checkpoint, as they are due.
        At least one step has to remain. Raises as `run` does.

        Returns:
            The metrics of the step.
        """
        self.begin()
        assert not self.has_ended, "a step remains"
        self._step_until(self._position.step + 1)
        return self.line

    def evaluate(self) -> Metrics:
        """Evaluate the last finished step, unless that was done; raises as `run` does.

        The evaluation is not recorded, since the step has its line already.
        """
        self.begin()
        step = self._position.step
        # Each round evaluates once. After a failure that is cured, the steps that the
        # run went back are made again, and another round follows.
        while not self._position.evaluated:
            try:
                return held_out_metrics(self._trainer.evaluate().metrics)
            except BaseException as failure:
                self._position = self._after_failure(self._position, failure, step)
                self._step_until(step)
        return held_out_metrics(self.line)

    def save(self) -> None:
        """Write the checkpoint of the last finished step, if it has none.

        Raises as `run` does.
        """
        self.begin()
        step = self._position.step
        # Each round writes once. It is repeated where the run went back meanwhile, or a
        # disk prevented it, which an error ends.
        while self._position.step > self._position.saved:
            self._position = self._attempt(Move.SAVE, self._position)
            self._step_until(step)
            if self._position.saving:
                self._position = self._attempt(Move.FINISH_SAVE, self._position)
                self._step_until(step)

    def leave(self) -> None:
        """Save the last finished step, as a stop does, where a step remains."""
        self._persistence.save_finished_step(self._trainer, self._trackers)

    # ------------------------------------------------------------------------- moves

    def _move_until(self, pauses: Collection[Move]) -> None:
        """Make moves until one of `pauses` is next; save and raise at a failure."""
        move = decide(self._run, self._position)
        while move not in pauses:
            self._position = self._attempt(move, self._position)
            move = decide(self._run, self._position)

        if move is Move.STEP:
            # A signal of the last moves does not wait until the caller steps again.
            with self._ending_with_failures():
                heed_signals()
        if move in (Move.STOP, Move.FAIL):
            restart = None if self._restart is None else self._restart.restart
            self._persistence.save_finished_step(self._trainer, self._trackers, restart)
        if self._position.failure is not None:
            raise self._position.failure

    def _step_until(self, step: int) -> None:
        """Make the moves that are due, and steps until this one is finished.

        More than one is missing where the run went back. Raises as `run` does.
        """
        self._move_until(PAUSES)
        while self._position.step < step and not self.has_ended:
            self._position = self._attempt(Move.STEP, self._position)
            self._move_until(PAUSES)

    @contextlib.contextmanager
    def _ending_with_failures(self) -> Iterator[None]:
        """End the run where the block fails or is interrupted, as after a move."""
        try:
            yield
        except BaseException as failure:
            step = self._position.step
            self._position = self._after_failure(self._position, failure, step)
            self._move_until(ENDINGS)

    def _attempt(self, move: Move, position: Position) -> Position:
        """Make a move. Return the new position, also where the move fails."""
        try:
            with phase(self._phase(move, position)):
                return self._make(move, position)
        except BaseException as failure:
            return self._after_failure(position, failure, _step_of(move, position))

    def _after_failure(
        self, position: Position, failure: BaseException, step: int
    ) -> Position:
        """Return the position after work of a step that failed or was interrupted."""
        # A signal may surface as another exception, such as that of a library whose
        # call it interrupted.
        stopped = isinstance(failure, Interrupted) or stop_requested()
        curable = False
        if self._restart is not None and not stopped:
            curable = self._restart.may_cure(failure, step)
        return replace(position, failure=failure, stopped=stopped, curable=curable)

    def _phase(self, move: Move, position: Position) -> str:
        """Return what a move is for a person who waits."""
        step = f"step {_step_of(move, position)}/{self._run.steps}"
        if move is Move.BEGIN:
            return "beginning"
        if move is Move.GO_BACK:
            return "starting lost processes again"
        if move in (Move.SAVE, Move.FINISH_SAVE, Move.RESCUE_SAVE):
            return f"{step}: saving"
        return step

    def _make(self, move: Move, position: Position) -> Position:
        """Make a move and return the position that it leads to."""
        match move:
            case Move.BEGIN:
                return self._begin()
            case Move.STEP:
                return self._step(position)
            case Move.EVALUATE:
                return self._evaluate(position)
            case Move.RECORD:
                return self._record(position)
            case Move.SAVE:
                return self._save(position)
            case Move.FINISH_SAVE:
                return self._after_save(position, self._persistence.finish_save())
            case Move.RESCUE_SAVE:
                self._persistence.rescue_save()
                # A signal may have arrived while the checkpoint was waited for.
                stopped = position.stopped or stop_requested()
                return replace(position, saving=False, stopped=stopped)
            case Move.GO_BACK:
                return self._go_back()

        raise AssertionError(f"{move} ends the loop")

    def _begin(self) -> Position:
        """Restore the trainer and return the position of its checkpoint."""
        with phase("loading the checkpoint"):
            done = self._persistence.restore(self._trainer)
        self._trainer.begin(done)

        # A resumed run makes the evaluation that a stop prevented. A new run starts
        # with an evaluation, whose line has no other metrics.
        unrecorded = self._persistence.unrecorded
        if done == 0 and self._run.evaluate_every:
            unrecorded = {}

        # After a failure the step may have no checkpoint yet.
        best = self._persistence.best
        return Position(
            begun=True,
            step=done,
            unrecorded=unrecorded,
            best=unrecorded is None and best is not None and best.step == done,
            saved=self._persistence.saved_step or 0,
            finished=self._is_finished,
        )

    def _go_back(self) -> Position:
        """Return to the position of a run that has not begun, with a new trainer."""
        assert self._restart is not None, "nothing is cured without it"
        self._persistence.go_back(self._trainer)
        self._trainer = self._restart.restart(self._trainer)
        return Position()

    def _step(self, position: Position) -> Position:
        """Train for one step and commit it."""
        number = position.step + 1

        with self._step_guard.step(number):
            metrics = self._trainer.step(number)
            self._persistence.commit(number, self._trainer, unrecorded=metrics)
            if self._restart is not None:
                self._restart.note_finished(number)
            # It is finished: what fails from here on does not spoil it.
            self._trainer.draw_ahead()
            self._persistence.take_snapshot(self._trainer, self._trackers)
            # The checkpoint of an earlier step was written while this step trained.
            with phase("saving"):
                is_saved = self._persistence.finish_save(self._trainer.background)

        return replace(
            self._after_save(position, is_saved),
            step=number,
            unrecorded=metrics,
            evaluated=False,
            best=False,
            finished=self._is_finished,
        )

    def _evaluate(self, position: Position) -> Position:
        """Evaluate the last finished step.

        A stop breaks an evaluation off. The step then has no line yet.
        """
        assert position.unrecorded is not None
        heed_signals()

        try:
            evaluation = self._trainer.evaluate()
        except EvaluationFailed as failure:
            self._trackers.responses(position.step, failure.responses)
            raise
        if evaluation.samples:
            self._trackers.samples(position.step, evaluation.samples)
        if evaluation.scores is not None:
            self._trackers.scores(position.step, evaluation.scores)
        metrics = position.unrecorded | evaluation.metrics
        if evaluation.responses:
            # They are decoded and written only here, which takes time where many are.
            timers = Timers()
            with timers.timed("recording held-out responses", "testing"):
                self._trackers.responses(position.step, evaluation.responses)
            for name, elapsed_s in timers.take().items():
                metrics[name] = metrics.get(name, 0.0) + elapsed_s

        return replace(position, unrecorded=metrics, evaluated=True)

    def _record(self, position: Position) -> Position:
        """Write the metrics line of the last finished step."""
        assert position.unrecorded is not None
        best = self._persistence.best
        # The best step is part of the state that goes with the line.
        if best is not None and position.evaluated:
            best.refuse_missing(position.unrecorded)
            best.note(position.step, position.unrecorded)

        self._trackers.log(position.step, position.unrecorded)
        self.line = dict(position.unrecorded)
        self._persistence.commit_line(position.step, self._trainer, self._trackers)
        return replace(
            position,
            unrecorded=None,
            best=best is not None and best.step == position.step,
            finished=self._is_finished,
        )

    @property
    def _is_finished(self) -> bool:
        """Whether the run ends before its last step."""
        best = self._persistence.best
        is_exhausted = best is not None and best.is_exhausted
        return self._trainer.finished or is_exhausted

    def _save(self, position: Position) -> Position:
        """Write a checkpoint of the last finished step, or begin to."""
        # The time appears on the next step's line, since this step's line is written
        # before its checkpoint.
        with self._trainer.timers("save_checkpoint"):
            has_begun = self._persistence.save(self._trainer, self._trackers)
        if not has_begun:
            return replace(position, failed=position.step)
        return replace(position, saved=position.step, saving=True, failed=0)

    def _after_save(self, position: Position, is_saved: bool) -> Position:
        """Return the position once the unfinished checkpoint, if any, is or is not."""
        if is_saved or not position.saving:
            return replace(position, saving=False)
        saved = self._persistence.saved_step or 0
        return replace(position, saving=False, saved=saved, failed=position.saved)


def _step_of(move: Move, position: Position) -> int:
    """Return the step that a move makes, or the last one that is finished."""
    return position.step + 1 if move is Move.STEP else position.step


# --------------------------------------------------------------------------- interfaces

RestartTrainer = Callable[[Trainable], Trainable]
"""Starts lost processes again; from the trainer that failed to a new one."""


class Persistence(Protocol):
    """The part of a run that outlives its processes.

    `Recovery` writes checkpoints; `NoPersistence` writes nothing.
    """

    unrecorded: Metrics | None
    """Metrics of the last finished step until its line is written, then None."""

    @property
    def best(self) -> BestEvaluation | None:
        """Best evaluation so far; None for a run that does not look for it."""

    def restore(self, trainer: Trainable, /) -> int:
        """Restore the trainer and return the number of finished steps."""

    def commit(
        self,
        number: int,
        trainer: Trainable,
        /,
        unrecorded: Mapping[str, float] | None = None,
    ) -> None:
        """Note that step `number` is finished.

        Args:
            number: Number of the step, counted from 1.
            trainer: Trainer whose state belongs to this step.
            unrecorded: Metrics of the step while its line is not written yet.
        """

    def commit_line(
        self, number: int, trainer: Trainable, trackers: Tracker, /
    ) -> None:
        """Note that the metrics line of step `number` is written."""

    @property
    def saved_step(self) -> int | None:
        """Last step that a checkpoint holds; None where there is no checkpoint."""

    def save(self, trainer: Trainable, trackers: Tracker, /) -> bool:
        """Write a checkpoint of the step that was committed last, or begin to.

        Returns:
            Whether that was possible.
        """

    def finish_save(self, background: Background | None = None) -> bool:
        """Wait for the checkpoint that is being written, if there is one.

        Args:
            background: Work that goes on meanwhile.

        Returns:
            Whether there is no checkpoint that could not be written.
        """

    def rescue_save(self) -> None:
        """Commit the unfinished checkpoint after a failure, if it is whole."""

    def take_snapshot(self, trainer: Trainable, trackers: Tracker, /) -> None:
        """Begin a snapshot of the step that was committed last, if one is due."""

    def go_back(self, former: Trainable, /) -> None:
        """Prepare to forget what came after the last state; `restore` follows.

        Args:
            former: The trainer that failed.
        """

    def save_finished_step(
        self,
        trainer: Trainable,
        trackers: Tracker,
        restart: RestartTrainer | None = None,
        /,
    ) -> None:
        """Save the last finished step as the run ends; say why if that cannot be done.

        This does nothing if a checkpoint holds the step and its line is written.

        Args:
            trainer: The trainer, which may have failed.
            trackers: The record of the run.
            restart: `TrainerRestart.restart`, of a run that can go back.
        """


class StepGuard(Protocol):
    """The rule by which a stop finishes or gives up the current step.

    `Stopping` finishes a step whose update has begun; `UnguardedSteps` gives up every
    step.
    """

    def step(self, number: int, /) -> AbstractContextManager[None]:
        """Return a context manager around step `number`, up to its commit."""


class TrainerRestart(Protocol):
    """The way back of a run after the failure of a process (`restart.py`)."""

    def note_finished(self, step: int, /) -> None:
        """Note that a step is finished, for the first time or again."""

    def may_cure(self, failure: BaseException, step: int, /) -> bool:
        """Return whether the run goes on after a failure in this step; say so."""

    def restart(self, trainer: Trainable, /) -> Trainable:
        """Start lost processes again.

        Args:
            trainer: The trainer that failed.

        Returns:
            A new trainer, whose state has to be restored.
        """


class NoPersistence:
    """Persistence of a run that starts anew whenever it was ended early."""

    unrecorded: Metrics | None = None
    best = None
    saved_step = None

    def restore(self, _: Trainable) -> int:
        return 0

    def commit(
        self, _: int, __: Trainable, unrecorded: Mapping[str, float] | None = None
    ) -> None: ...

    def commit_line(self, _: int, __: Trainable, ___: Tracker) -> None: ...

    def save(self, _: Trainable, __: Tracker) -> bool:
        return True

    def finish_save(self, _: Background | None = None) -> bool:
        return True

    def rescue_save(self) -> None: ...

    def take_snapshot(self, _: Trainable, __: Tracker) -> None: ...

    def go_back(self, _: Trainable) -> None: ...

    def save_finished_step(
        self, _: Trainable, __: Tracker, ___: RestartTrainer | None = None
    ) -> None: ...


class UnguardedSteps:
    """Steps that a stop gives up at any point, since none of them is saved."""

    def step(self, _: int) -> AbstractContextManager[None]:
        heed_signals()
        return contextlib.nullcontext()
