"""What is kept of a run while it goes on: the state of its last finished step, as a checkpoint holds it.

Invariant: a checkpoint holds the state of every role that learns (written by its ranks) and of the driver (data
cursor, KL controller, the trackers' run ids), and counts only once its manifest is written. Deliberately not here:
which checkpoint a run goes on from (`resumption.py`), the format (`verl_ray/checkpoint`) and when to save (`loop.py`).
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from controllers.run.resumption import Resumption
from controllers.trainers.base import Resumable
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.signals import finishing, leave_closed_outputs
from verl_ray.config.load import to_tree
from verl_ray.tracking.base import Tracker
from verl_ray.tracking.jsonl import METRICS
from workers.model_worker import ModelWorker


def _wait_for(asked: Sequence[Call[Any]]) -> None:
    """Each answer, whatever became of the calls that have been made since."""
    for call in asked:
        call.result()


def _say(what: str) -> None:
    """On stderr, where signals are answered; nobody may read it any more."""
    leave_closed_outputs()
    with contextlib.suppress(OSError):
        print(what, file=sys.stderr, flush=True)


class Recovery:
    """Of one run, from what it goes on from to its end."""

    def __init__(self, found: Resumption) -> None:
        run = found.config.run
        self._found, self._store = found, found.store
        self._behind = run.checkpoint_behind
        self._saves = run.checkpoint_every > 0
        self._unfinished: contextlib.ExitStack | None = None
        self._trainer_state: dict[str, Any] = {}
        self.finished = self.saved = found.step
        """The last finished step, and the last one that a checkpoint holds; None = none is."""
        self._saved_in = self._store.root if found.checkpoint is None else found.checkpoint.path.parent
        self.writing: int | None = None
        """The step whose checkpoint is being written."""
        self.unrecorded = found.unrecorded
        """The metrics of the last finished step while its evaluation is not made; None = its line is written."""
        self.spoiled: int | None = None
        """The step that failed after its update had begun: what the roles hold now is of no step. None = none did."""

    def restore(self, trainer: Resumable) -> int:
        """Bring the trainer to where the checkpoint was written. Returns the number of finished steps."""
        found = self._found.checkpoint
        if found is None:
            return 0
        loads = [group.broadcast(ModelWorker.load, found.role(name)) for name, group in trainer.groups.items()]
        notes = [note for ranks in wait_all(loads) for rank in ranks for note in rank]
        if notes:
            others = f" (and {len(notes) - 1} more)" if len(notes) > 1 else ""
            _say(f"warning: this run does not go on to the bit: {notes[0]}{others}")
        trainer.load_state(found.state["trainer"])
        print(f"continuing after step {found.step} from {found.path}", flush=True)
        return found.step

    def commit(self, number: int, trainer: Resumable, unrecorded: Mapping[str, float] | None = None) -> None:
        """Step `number` is finished. What a checkpoint says of the trainer is what it is now: later the next step may
        have drawn prompts, and be given up.

        Args:
            unrecorded: its metrics, if it is evaluated before its line is written. If a stop comes first, the resumed
                run evaluates. None = the line is written.
        """
        self.finished = number
        self.unrecorded = None if unrecorded is None else {name: float(value) for name, value in unrecorded.items()}
        self._trainer_state = copy.deepcopy(trainer.state())

    def commit_line(self, number: int, trainer: Resumable, trackers: Tracker) -> None:
        """The line of step `number` is written. Where the checkpoint that the run goes on from lacked it, it says so
        now, so that the evaluation is not made again."""
        if number == 0:  # a line before the first step: nothing is finished yet
            return
        self.commit(number, trainer)
        found = self._found.checkpoint
        if found is not None and found.step == number and self._saves and self._found.is_here:
            self._store.restate(found, self._state(trackers))

    def save(self, trainer: Resumable, trackers: Tracker) -> None:
        """Write the checkpoint after the step that was committed last; with run.checkpoint_behind it is there once
        `finish_save` returned. A signal waits until it is written, or under way."""
        assert self.finished is not None, "there is something to save once a step is committed"
        self.finish_save()
        state = self._state(trackers)
        self._found.check_cursor(self.finished, self._trainer_state)
        verb = ModelWorker.begin_save if self._behind else ModelWorker.save
        groups = trainer.groups
        with finishing(), contextlib.ExitStack() as writing:
            folder = writing.enter_context(self._written(self.finished, state, groups))
            wait_all([group.broadcast(verb, str(folder / name)) for name, group in groups.items()])
            if self._behind:
                # Asked now, while all ranks live: the answer of one that dies later says that its part is whole.
                asked = [group.broadcast(ModelWorker.finish_save) for group in groups.values()]
                writing.push(lambda *_: _wait_for(asked))
                self._unfinished = writing.pop_all()

    def _state(self, trackers: Tracker) -> dict[str, Any]:
        return {"trainer": self._trainer_state, "trackers": trackers.state(), "unrecorded": self.unrecorded}

    @contextlib.contextmanager
    def _written(self, number: int, state: Mapping[str, Any], roles: Collection[str]) -> Iterator[Path]:
        self.writing = number
        try:
            with self._store.writing(number, state, to_tree(self._found.config), roles) as folder:
                yield folder
            self.saved, self._saved_in = number, self._store.root
        finally:
            self.writing = None

    def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and commit it."""
        writing, self._unfinished = self._unfinished, None
        if writing is not None:
            with finishing():
                writing.close()

    def rescue_save(self) -> None:
        """After a failure: commit the checkpoint that is being written, if there is one and it is whole."""
        number = self.writing
        if self._unfinished is None:
            return
        try:
            self.finish_save()
        except Exception as failure:
            _say(f"warning: the checkpoint of step {number} is not whole and was removed: {failure}")
        else:
            _say(f"the checkpoint of step {number}, which was being written, is whole and counts")

    def keep_finished(self, trainer: Resumable, trackers: Tracker) -> None:
        """After a signal: save the last finished step, if no checkpoint holds it and the run writes any, and write its
        line, if a stop has left its evaluation undone."""
        with finishing():
            self._save_finished(trainer, trackers)
            self._record_finished(trackers)

    def _record_finished(self, trackers: Tracker) -> None:
        """The line of a step whose evaluation the stop has left undone; the resumed run writes it anew."""
        if self.finished is None or self.unrecorded is None:
            return
        try:
            trackers.log(self.finished, self.unrecorded)
        except Exception as failure:
            _say(f"warning: step {self.finished} has no line in {METRICS}: {failure}")

    def _save_finished(self, trainer: Resumable, trackers: Tracker) -> None:
        number = self.finished
        if number is None:  # the answer to the signal has said that there is nothing to save
            return
        unsaved = number - (self.saved or 0)
        if unsaved and not self._saves:
            _say(f"nothing is saved (run.checkpoint_every=0): the {unsaved} finished steps are lost")
            return
        if self.spoiled is not None:
            _say(f"step {self.spoiled} failed in its update, so nothing newer than step {self.saved or 0} is saved")
            return
        if unsaved:
            try:
                self.save(trainer, trackers)
                self.finish_save()
            except Exception as failure:
                _say(f"warning: step {number} could not be saved: {failure}")
                return
        later = "" if self.unrecorded is None else "; its evaluation is made when the run goes on"
        _say(f"step {number} is saved in {self._saved_in}{later}")
