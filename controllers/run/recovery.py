"""The state of a run that its checkpoints and snapshots hold.

Invariant: a checkpoint holds the state of every role that learns (written by its ranks)
and of the driver (data cursor, KL controller, the trackers' run ids). It counts only
once its manifest is written. A snapshot holds the same in memory, for this driver.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from controllers.run.best import BestEvaluation
from controllers.run.checkpoint_check import CheckpointCheck
from controllers.run.checkpoint_writing import CheckpointContent, CheckpointWriting
from controllers.run.driver_snapshots import FinishedStep
from controllers.run.loop import RestartTrainer
from controllers.run.missed_checkpoints import SaveFailures
from controllers.run.resumption import Resumption
from controllers.run.snapshots import Snapshots
from controllers.supervisor import reports
from controllers.trainers.base import Resumable, Trainable
from verl_ray.checkpoint.manifest import (
    Checkpoint,
)
from verl_ray.checkpoint.snapshot_files import SnapshotNames
from verl_ray.cluster.calls import wait_all
from verl_ray.cluster.signals import finishing, print_error
from verl_ray.cluster.waiting import CLUSTER_LOSS, RAY_CALLS, Background
from verl_ray.config.load import to_tree
from verl_ray.errors import CheckpointError, TrackingError
from verl_ray.profiling.phases import phase
from verl_ray.tracking.base import Tracker
from verl_ray.tracking.history import save_segment
from verl_ray.tracking.jsonl import METRICS
from workers.model_worker import ModelWorker


class Recovery:
    """Restores a run from its checkpoint, and writes new checkpoints until its end.

    A step goes through three stages: `commit` notes that it is finished, `save` begins
    its checkpoint, and `finish_save` makes the checkpoint count.
    """

    def __init__(
        self, resumption: Resumption, snapshots: Snapshots | None = None
    ) -> None:
        """Stand where the run begins or goes on.

        Args:
            resumption: The checkpoint that the run continues from, if any.
            snapshots: The snapshots of its steps; None for a run that takes none.
        """
        run = resumption.config.run
        self._resumption = resumption
        self._store = resumption.store
        self._saves = run.checkpoint_every > 0
        self._failures = SaveFailures(run.max_failed_checkpoints)
        self._writing = CheckpointWriting(
            self._store, behind=run.checkpoint_behind, committed=self._note_saved
        )
        self._snapshots = snapshots or Snapshots(0, SnapshotNames.of(run.dir))

        self._committed = FinishedStep(0, {}, None, None, None)
        """State of the driver after the last finished step."""

        self._snapshot: FinishedStep | None = None
        """Snapshot that `restore` goes back to; None where it is the checkpoint."""

        self._former: Resumable | None = None
        """Trainer that failed, until another one has its state."""

        self._has_written = False
        """Whether this process has written a checkpoint."""

        self._first_state: dict[str, Any] | None = None
        """State of the trainer where the run began without a checkpoint."""

        self.best: BestEvaluation
        """Best evaluation so far. Its step has a checkpoint if any are written."""

        self.finished_step: int | None
        """Last finished step; None where no step is finished."""

        self.saved_step: int | None
        """Last step that a checkpoint holds; None where there is no checkpoint."""

        self.unrecorded: dict[str, float] | None
        """Metrics of the last finished step until its line is written, then None."""

        self.spoiled_step: int | None
        """Step that failed after its update had begun; None where there is none.

        The state of the roles then lies between two steps and must not be saved.
        """
        self._start_from_checkpoint()

    def _start_from_checkpoint(self) -> None:
        """Stand where the checkpoint of the resumption does, or at the beginning."""
        resumption = self._resumption
        self.best = BestEvaluation(resumption.config, resumption.best)
        self.finished_step = resumption.step
        self.saved_step = resumption.step
        self._saved_in = self._store.root
        if resumption.checkpoint is not None:
            self._saved_in = resumption.checkpoint.path.parent
        self.unrecorded = resumption.unrecorded
        self.spoiled_step = None

    def go_back(self, former: Resumable) -> None:
        """Prepare to forget what came after the last state; `restore` follows.

        Args:
            former: The trainer that failed.
        """
        # A trainer that fails before it has a state knows less than the one before it.
        if self._former is None:
            self._former = former
        # The folder may hold later steps of before, which this run does not go on from.
        if self._has_written:
            self._resumption.find_newest()

    def finds_state(self, trainer: Resumable) -> bool:
        """Choose the state to go on from, a snapshot or else the newest checkpoint.

        Args:
            trainer: The new trainer, whose processes have started.

        Returns:
            Whether there is one. If not, the run begins anew.
        """
        self._start_from_checkpoint()
        snapshot = self._snapshots.newest(trainer.groups)
        if snapshot is not None and snapshot.step < (self.saved_step or 0):
            snapshot = None
        self._snapshot = snapshot
        if snapshot is None:
            self._snapshots.forget_all()
            self._check_contents()
        else:
            self.best = BestEvaluation(self._resumption.config, snapshot.best)
            self.finished_step = snapshot.step
            self.unrecorded = snapshot.unrecorded
        self._resumption.drop_later_parts(self.finished_step or 0)
        return self.finished_step is not None

    def begins_anew(self) -> None:
        """Note that there is no state to go on from, so an old record is another's."""
        self._resumption.set_aside_old_record()

    def _check_contents(self) -> None:
        """Compare the contents of a checkpoint that this process has written.

        Raises:
            ConfigError: They have changed.
        """
        if self._has_written:
            CheckpointCheck(self._resumption).finish()

    @property
    def writing_step(self) -> int | None:
        """Step whose checkpoint is being written."""
        return self._writing.step

    @property
    def recorded_step(self) -> int | None:
        """Last step whose metrics line stays as it is.

        The line of a step that was not evaluated yet is written anew.
        """
        if self.finished_step is None or self.unrecorded is None:
            return self.finished_step
        return self.finished_step - 1

    @property
    def tracker_state(self) -> Mapping[str, str] | None:
        """State of the trackers that goes with the state to go on from."""
        if self._snapshot is not None:
            return self._snapshot.trackers
        return self._resumption.tracker_state

    def restore(self, trainer: Resumable) -> int:
        """Restore the trainer from the last state, or as it was at the beginning.

        Returns:
            The number of finished steps.
        """
        if self._snapshot is not None:
            return self._restore_snapshot(trainer, self._snapshot)

        self._former = None
        checkpoint = self._resumption.checkpoint
        if checkpoint is not None:
            load_checkpoint(checkpoint, trainer)
            return checkpoint.step

        # A run that goes back to its beginning finds the data cursor elsewhere.
        if self._first_state is not None:
            trainer.load_state(self._first_state)
        self._first_state = copy.deepcopy(trainer.state())
        return 0

    def _restore_snapshot(self, trainer: Resumable, snapshot: FinishedStep) -> int:
        """Restore the trainer from a snapshot. Return the number of finished steps."""
        self._snapshots.load(snapshot.step, trainer.groups)
        trainer.load_state(copy.deepcopy(dict(snapshot.trainer)))
        if snapshot.left_in is not None:
            trainer.take_back(snapshot.left_in)
        else:
            assert self._former is not None, "a trainer has failed"
            trainer.inherit(self._former, snapshot.supply_memory)
        # Rows that were finished since are part of the state by now.
        self.commit(snapshot.step, trainer, snapshot.unrecorded)
        self._snapshots.go_on()
        self._former = self._snapshot = None
        print(f"continuing after step {snapshot.step} from its snapshot", flush=True)
        return snapshot.step

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

        self._committed = FinishedStep(
            number,
            copy.deepcopy(trainer.state()),
            trainer.supply_memory if self._snapshots.are_taken else None,
            self.unrecorded,
            self.best.state(),
            trainer.files(number),
        )

    def take_snapshot(self, trainer: Resumable, trackers: Tracker) -> None:
        """Begin a snapshot of the step that was committed last, if one is due."""
        if self._snapshots.is_due(self._committed.step, trainer.groups):
            finished = replace(self._committed, trackers=trackers.state())
            self._snapshots.take(finished, trainer.groups, self.saved_step)

    def _update_snapshot(self, trackers: Tracker) -> None:
        """Let the snapshot of the last step, if there is one, know what followed."""
        if self._snapshots.has(self._committed.step):
            finished = replace(self._committed, trackers=trackers.state())
            self._snapshots.update(finished, self.saved_step)

    def commit_line(self, number: int, trainer: Resumable, trackers: Tracker) -> None:
        """Note that the metrics line of step `number` is written.

        If the run continues from a checkpoint that lacked this line, the checkpoint is
        updated, so that the evaluation is not repeated.
        """
        # The line before the first step belongs to no finished step.
        if number == 0:
            return

        self.commit(number, trainer)
        self._update_snapshot(trackers)

        checkpoint = self._resumption.checkpoint
        if checkpoint is None or checkpoint.step != number:
            return
        # A checkpoint in another run.dir belongs to another run and is left alone.
        if self._saves and self._resumption.is_in_run_dir:
            try:
                self._store.replace_state(checkpoint, self._state(trackers))
            except (CheckpointError, TrackingError) as error:
                self._failures.note(number, error)

    def save(self, trainer: Resumable, trackers: Tracker) -> bool:
        """Write the checkpoint of the step that was committed last.

        Rollouts go on meanwhile. With run.checkpoint_behind it exists only once
        `finish_save` has returned. A signal waits until the checkpoint is written, or
        until all ranks have begun.

        Returns:
            Whether it could be written, or begun.

        Raises:
            CheckpointError: Too many checkpoints in a row cannot be written, or the
                data cursor does not fit the number of steps.
        """
        step = self._check_cursor()
        try:
            self._write(trainer, trackers, trainer.background)
        except (CheckpointError, TrackingError) as error:
            self._failures.note(step, error)
            return False
        return True

    def _check_cursor(self) -> int:
        """Return the step to save, whose data cursor fits the number of steps."""
        assert self.finished_step is not None, "a step is committed"
        self._resumption.check_cursor(self.finished_step, self._committed.trainer)
        return self.finished_step

    def _write(
        self, trainer: Resumable, trackers: Tracker, background: Background | None
    ) -> None:
        assert self.finished_step is not None, "its data cursor was checked"
        content = CheckpointContent(
            self.finished_step,
            self._state(trackers),
            to_tree(self._resumption.config),
            trainer.groups,
            self._committed.files,
            self.best.step,
        )
        self._writing.write(content, background)

    def _state(self, trackers: Tracker) -> dict[str, Any]:
        """Return the driver's part of a checkpoint, which counts lines, as JSON."""
        trackers.sync()
        finished = replace(self._committed, trackers=trackers.state())
        return replace(
            finished, unrecorded=self.unrecorded, best=self.best.state()
        ).state

    def _note_saved(self, step: int, waited_s: float) -> None:
        """Note that the checkpoint of a step counts, and how long the run waited."""
        self.saved_step = step
        self._saved_in = self._store.root
        self._failures.clear()
        self._has_written = True
        reports().saved()
        # A history that cannot be written is named at the end; the checkpoint counts.
        with contextlib.suppress(TrackingError):
            save_segment(Path(self._resumption.config.run.dir), step, waited_s)

    def finish_save(self, background: Background | None = None) -> bool:
        """Wait for the checkpoint that is being written, if any, and commit it.

        Args:
            background: Work that goes on meanwhile.

        Returns:
            Whether there is none that could not be written.

        Raises:
            CheckpointError: Too many in a row could not.
        """
        step = self._writing.step or 0
        try:
            self._writing.finish(background)
        except CheckpointError as error:
            self._failures.note(step, error)
            return False
        return True

    def rescue_save(self) -> None:
        """Commit the unfinished checkpoint after a failure, if it is whole."""
        self._writing.rescue()

    def save_finished_step(
        self,
        trainer: Trainable,
        trackers: Tracker,
        restart: RestartTrainer | None = None,
    ) -> None:
        """Save the last finished step as the run ends, and raise nothing.

        The step is saved if no checkpoint holds it and the run writes any. Its metrics
        line is written if the end prevented its evaluation. Where roles do not hold it
        any more and their snapshots do, the run goes back to the newest snapshot first,
        as after a failure that is cured.

        Args:
            trainer: The trainer, which may have failed.
            trackers: The record of the run.
            restart: Starts lost processes again and makes a new trainer; None for a run
                that cannot go back.
        """
        with finishing():
            held = self._come_back(trainer, restart)
            if held is not None:
                self._save_if_unsaved(held, trackers)
                self._record_unevaluated(trackers)

    def _come_back(
        self, trainer: Trainable, restart: RestartTrainer | None
    ) -> Trainable | None:
        """Return the trainer, or one that has gone back to the newest snapshot.

        None is returned, and the reason is said, where nothing can be saved.
        """
        if self.finished_step is None:
            return None
        # Nothing that is part of a lost cluster can be reached, and Ray may hang.
        if CLUSTER_LOSS.has_happened or RAY_CALLS.hangs:
            if self.finished_step > (self.saved_step or 0):
                self._say_lost("the cluster is lost")
            return None
        try:
            if restart is not None and self._is_in_snapshots_alone(trainer):
                reason = self._spoiled or "a process is lost"
                newest = self._snapshots.newest_step
                print_error(f"{reason}, so the run goes back to step {newest}")
                with phase("going back to the last snapshot, to save it"):
                    self.go_back(trainer)
                    trainer = restart(trainer)
                    self.restore(trainer)
        except Exception as failure:
            # The failure that ends the run is the one to raise.
            self._say_lost(f"going back failed ({failure})")
            self._keep_snapshots()
            return None
        return trainer

    def _is_in_snapshots_alone(self, trainer: Resumable) -> bool:
        """Return whether snapshots hold a newer step than any checkpoint or role."""
        newest = self._snapshots.newest_step
        if not self._saves or newest <= (self.saved_step or 0):
            return False
        have_failed = any(group.has_failed for group in trainer.groups.values())
        return have_failed or bool(self._spoiled)

    @property
    def can_come_back(self) -> bool:
        """Whether the state of the last finished step, or of one soon before, is kept.

        A snapshot or a checkpoint has it, so the roles may lose theirs.
        """
        return (
            self._snapshots.newest_step > (self.saved_step or 0)
            or self.finished_step == self.saved_step
        )

    @property
    def _spoiled(self) -> str:
        """Why the roles hold the state of no finished step; empty where they do."""
        if self.spoiled_step is not None:
            return f"step {self.spoiled_step} did not come to the end of its update"
        if self._former is not None:
            return "the run has not come back to its last state"
        return ""

    def _say_lost(self, reason: str) -> None:
        print_error(
            f"{reason}, so nothing newer than step {self.saved_step or 0} is saved"
        )

    def _save_if_unsaved(self, trainer: Resumable, trackers: Tracker) -> None:
        """Save the last finished step, and report where it is or why it is lost."""
        number = self.finished_step
        # The reply to the signal has already reported that there is nothing to save.
        if number is None:
            return

        saved_step = self.saved_step or 0
        unsaved = number - saved_step
        if unsaved and not self._saves:
            print_error(
                f"nothing is saved (run.checkpoint_every=0): the {unsaved} finished"
                " steps are lost"
            )
            return

        if self._spoiled:
            self._say_lost(self._spoiled)
            return

        if unsaved and self._committed.step != number:
            print_error(
                f"step {number} was not loaded yet, and stays in its snapshot; the same"
                " command goes on from it"
            )
            return

        if unsaved:
            try:
                self._check_cursor()
                self._write(trainer, trackers, None)
                self._writing.finish()
            except Exception as failure:
                # The run is ending: the older checkpoints are still whole.
                print_error(f"warning: step {number} could not be saved: {failure}")
                self._keep_snapshots()
                return

        later = ""
        if self.unrecorded is not None:
            later = "; its evaluation is made when the run goes on"
        print_error(f"step {number} is saved in {self._saved_in}{later}")

    def _keep_snapshots(self) -> None:
        """Keep the snapshots where they have steps that no checkpoint has."""
        newest = self._snapshots.newest_step
        if newest > (self.saved_step or 0):
            self._snapshots.keep()
            print_error(
                f"step {newest} stays in its snapshot; the same command on this machine"
                " goes on from it"
            )

    def _record_unevaluated(self, trackers: Tracker) -> None:
        """Write the metrics line of a step whose evaluation the end prevented.

        The resumed run replaces this line after it has evaluated.
        """
        if self.finished_step is None or self.unrecorded is None:
            return

        try:
            trackers.log(self.finished_step, self.unrecorded)
        except Exception as failure:
            number = self.finished_step
            print_error(f"warning: step {number} has no line in {METRICS}: {failure}")


# --------------------------------------------------------------- the state of a trainer


def load_checkpoint(checkpoint: Checkpoint, trainer: Resumable) -> None:
    """Load a checkpoint, and print its step.

    Args:
        checkpoint: The checkpoint.
        trainer: Trainer that gets the state.
    """
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
        print(
            f"warning: this run is not continued bit for bit: {notes[0]}{others}",
            file=sys.stderr,
            flush=True,
        )

    trainer.load_state(checkpoint.state["trainer"])
    trainer.load_files(checkpoint.path)
    print(f"continuing after step {checkpoint.step} from {checkpoint.path}", flush=True)


def load_model(checkpoint: Checkpoint, trainer: Resumable, role: str) -> None:
    """Load the model of a role to measure it, and print its step.

    The rest of the checkpoint belongs to the run that wrote it: random streams, data
    cursor, ledger, groups and what the trainer has adapted.

    Args:
        checkpoint: The checkpoint.
        trainer: Trainer with the processes of the role.
        role: The role that is measured.
    """
    group = trainer.groups[role]
    group.broadcast(ModelWorker.load, checkpoint.role(role)).result()
    print(f"measuring step {checkpoint.step} from {checkpoint.path}", flush=True)
