"""The state of a run that its checkpoints hold.

Invariant: a checkpoint holds the state of every role that learns (written by its ranks)
and of the driver (data cursor, KL controller, the trackers' run ids). It counts only
once its manifest is written.

Deliberately not here: the choice of the checkpoint that a run continues from
(`resumption.py`), the format (`verl_ray/checkpoint`) and the time to save (`loop.py`).
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from controllers.run.best import BestEvaluation
from controllers.run.resumption import Resumption
from controllers.trainers.base import Resumable
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.signals import finishing
from verl_ray.cluster.terminals import leave_closed_outputs
from verl_ray.config.load import to_tree
from verl_ray.tracking.base import Tracker
from verl_ray.tracking.jsonl import METRICS
from workers.model_worker import ModelWorker


def _wait_for(calls: Sequence[Call[Any]]) -> None:
    """Wait for each call, whatever happened to the calls that were made after it."""
    for call in calls:
        call.result()


def _print_error(message: str) -> None:
    """Print to stderr, where signals are answered, even if nobody reads it any more."""
    leave_closed_outputs()
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


class Recovery:
    """Restores a run from its checkpoint, and writes new checkpoints until its end.

    A step goes through three stages: `commit` notes that it is finished, `save` begins
    its checkpoint, and `finish_save` makes the checkpoint count.
    """

    def __init__(self, resumption: Resumption) -> None:
        run = resumption.config.run
        self._resumption = resumption
        self._store = resumption.store
        self._behind = run.checkpoint_behind
        self._saves = run.checkpoint_every > 0
        self._unfinished: contextlib.ExitStack | None = None
        self._trainer_state: dict[str, Any] = {}

        self.best = BestEvaluation(resumption.config, resumption.best)
        """Best evaluation so far. Its step has a checkpoint if any are written."""

        self.finished_step = resumption.step
        """Last finished step; None where no step is finished."""

        self.saved_step = resumption.step
        """Last step that a checkpoint holds; None where there is no checkpoint."""

        self._saved_in = self._store.root
        if resumption.checkpoint is not None:
            self._saved_in = resumption.checkpoint.path.parent

        self.writing_step: int | None = None
        """Step whose checkpoint is being written."""

        self.unrecorded = resumption.unrecorded
        """Metrics of the last finished step until its line is written, then None."""

        self.spoiled_step: int | None = None
        """Step that failed after its update had begun; None where there is none.

        The state of the roles then lies between two steps and must not be saved.
        """

    def restore(self, trainer: Resumable, doing: str = "continuing after") -> int:
        """Restore the trainer from the checkpoint, and print its step.

        Args:
            trainer: Trainer to restore.
            doing: What follows, as the words before the step.

        Returns:
            The number of finished steps; 0 where there is no checkpoint.
        """
        checkpoint = self._resumption.checkpoint
        if checkpoint is None:
            return 0

        loads = []
        for name, group in trainer.groups.items():
            loads.append(group.broadcast(ModelWorker.load, checkpoint.role(name)))

        # Every rank reports what it could not restore exactly.
        notes: list[str] = []
        for ranks in wait_all(loads):
            for notes_of_rank in ranks:
                notes.extend(notes_of_rank)

        if notes:
            others = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
            _print_error(
                f"warning: this run is not continued bit for bit: {notes[0]}{others}"
            )

        trainer.load_state(checkpoint.state["trainer"])
        print(
            f"{doing} step {checkpoint.step} from {checkpoint.path}",
            flush=True,
        )
        return checkpoint.step

    def commit(
        self,
        number: int,
        trainer: Resumable,
        unrecorded: Mapping[str, float] | None = None,
    ) -> None:
        """Note that step `number` is finished, and copy the trainer's state.

        A checkpoint holds this copy. The trainer itself may go on to draw prompts for
        the next step, which may then be given up.

        Args:
            number: Number of the step, counted from 1.
            trainer: Trainer whose state belongs to this step.
            unrecorded: Metrics of the step, if it is evaluated before its line is
                written. If a stop comes first, the resumed run evaluates. None if the
                line is written.
        """
        self.finished_step = number

        self.unrecorded = None
        if unrecorded is not None:
            self.unrecorded = {name: float(value) for name, value in unrecorded.items()}

        self._trainer_state = copy.deepcopy(trainer.state())

    def commit_line(self, number: int, trainer: Resumable, trackers: Tracker) -> None:
        """Note that the metrics line of step `number` is written.

        If the run continues from a checkpoint that lacked this line, the checkpoint is
        updated, so that the evaluation is not repeated.
        """
        # The line before the first step belongs to no finished step.
        if number == 0:
            return

        self.commit(number, trainer)

        checkpoint = self._resumption.checkpoint
        if checkpoint is None or checkpoint.step != number:
            return
        # A checkpoint in another run.dir belongs to another run and is left alone.
        if self._saves and self._resumption.is_in_run_dir:
            self._store.replace_state(checkpoint, self._state(trackers))

    def save(self, trainer: Resumable, trackers: Tracker) -> None:
        """Write the checkpoint of the step that was committed last.

        With run.checkpoint_behind it exists only once `finish_save` has returned. A
        signal waits until the checkpoint is written, or until all ranks have begun.

        Raises:
            CheckpointError: The checkpoint cannot be written, or the data cursor does
                not fit the number of steps.
        """
        assert self.finished_step is not None, (
            "there is something to save once a step is committed"
        )
        # Only one checkpoint is written at a time.
        self.finish_save()
        state = self._state(trackers)
        self._resumption.check_cursor(self.finished_step, self._trainer_state)

        method = ModelWorker.begin_save if self._behind else ModelWorker.save
        groups = trainer.groups

        with finishing(), contextlib.ExitStack() as writing:
            folder = writing.enter_context(
                self._writing(self.finished_step, state, groups)
            )
            saves = []
            for name, group in groups.items():
                saves.append(group.broadcast(method, str(folder / name)))
            wait_all(saves)

            if self._behind:
                # The calls are made now, while all ranks live. If a rank dies later,
                # its reply still shows whether its part is whole.
                calls = [
                    group.broadcast(ModelWorker.finish_save)
                    for group in groups.values()
                ]
                writing.push(lambda *_: _wait_for(calls))
                # The manifest is written when `finish_save` closes this stack.
                self._unfinished = writing.pop_all()

    def _state(self, trackers: Tracker) -> dict[str, Any]:
        """Return the driver's part of a checkpoint, as JSON."""
        return {
            "trainer": self._trainer_state,
            "trackers": trackers.state(),
            "unrecorded": self.unrecorded,
            "best": self.best.state(),
        }

    @contextlib.contextmanager
    def _writing(
        self, number: int, state: Mapping[str, Any], roles: Collection[str]
    ) -> Iterator[Path]:
        """Yield the folder for a step's checkpoint, and commit it at the end."""
        config = to_tree(self._resumption.config)
        self.writing_step = number
        try:
            with self._store.writing(
                number, state, config, roles, best=self.best.step
            ) as folder:
                yield folder
            self.saved_step = number
            self._saved_in = self._store.root
        finally:
            self.writing_step = None

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if any, and commit it."""
        # A second call must not close the stack again, even if the first one failed.
        unfinished = self._unfinished
        self._unfinished = None

        if unfinished is not None:
            with finishing():
                unfinished.close()

    def rescue_save(self) -> None:
        """Commit the unfinished checkpoint after a failure, if it is whole."""
        number = self.writing_step
        if self._unfinished is None:
            return

        try:
            self.finish_save()
        except Exception as failure:
            _print_error(
                f"warning: the checkpoint of step {number} is not whole and was"
                f" removed: {failure}"
            )
        else:
            _print_error(
                f"the checkpoint of step {number}, which was being written, is whole"
                " and counts"
            )

    def save_finished_step(self, trainer: Resumable, trackers: Tracker) -> None:
        """Save the last finished step after a signal.

        The step is saved if no checkpoint holds it and the run writes any. Its metrics
        line is written if the stop prevented its evaluation.
        """
        with finishing():
            self._save_if_unsaved(trainer, trackers)
            self._record_unevaluated(trackers)

    def _save_if_unsaved(self, trainer: Resumable, trackers: Tracker) -> None:
        """Save the last finished step, and report where it is or why it is lost."""
        number = self.finished_step
        # The reply to the signal has already reported that there is nothing to save.
        if number is None:
            return

        saved_step = self.saved_step or 0
        unsaved = number - saved_step
        if unsaved and not self._saves:
            _print_error(
                f"nothing is saved (run.checkpoint_every=0): the {unsaved} finished"
                " steps are lost"
            )
            return

        # The roles hold half of an update, so their state is that of no step.
        if self.spoiled_step is not None:
            _print_error(
                f"step {self.spoiled_step} failed in its update, so nothing newer than"
                f" step {saved_step} is saved"
            )
            return

        if unsaved:
            try:
                self.save(trainer, trackers)
                self.finish_save()
            except Exception as failure:
                # The run is stopping: the older checkpoints are still whole.
                _print_error(f"warning: step {number} could not be saved: {failure}")
                return

        later = ""
        if self.unrecorded is not None:
            later = "; its evaluation is made when the run goes on"
        _print_error(f"step {number} is saved in {self._saved_in}{later}")

    def _record_unevaluated(self, trackers: Tracker) -> None:
        """Write the metrics line of a step whose evaluation the stop prevented.

        The resumed run replaces this line after it has evaluated.
        """
        if self.finished_step is None or self.unrecorded is None:
            return

        try:
            trackers.log(self.finished_step, self.unrecorded)
        except Exception as failure:
            _print_error(
                f"warning: step {self.finished_step} has no line in {METRICS}:"
                f" {failure}"
            )
