"""Where a run continues: from the newest whole checkpoint, with nothing lost and nothing silently changed.

Invariant: a checkpoint holds the state of every role that learns (written by its ranks) and of the driver (data
cursor, KL controller, the trackers' run ids), and counts only once its manifest is written; a run that has checkpoints
never starts anew by itself. Deliberately not here: the format (`verl_ray/checkpoint`) and when to save (`loop.py`).
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from controllers.trainers.base import Resumable
from verl_ray.checkpoint.changes import Change, changed_keys
from verl_ray.checkpoint.store import Checkpoint, CheckpointStore
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.signals import finishing, leave_closed_outputs
from verl_ray.config.load import to_tree
from verl_ray.config.renamed import renewed
from verl_ray.config.schema import Config
from verl_ray.data.cursor import drawn_rows
from verl_ray.errors import CheckpointError, ConfigError, Problem
from verl_ray.tracking.base import Tracker
from verl_ray.tracking.jsonl import METRICS, RECORDED_STEPS
from verl_ray.tracking.record import free_name, steps_of
from workers.model_worker import ModelWorker


@contextlib.contextmanager
def claim(run_dir: str) -> Iterator[None]:
    """One run at a time writes to a folder: the lock ends with the process that holds it, however that ends.

    Raises ConfigError when another run holds it. A file system without locks is a warning.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                print(f"warning: {folder} cannot be locked against a second run: {error}", file=sys.stderr, flush=True)
            else:
                file.seek(0)
                rule = f"another run is writing to it ({file.read().strip() or 'not yet known which'})"
                fix = "wait for it to end, or use another run.dir"
                raise ConfigError([Problem("run.dir", run_dir, rule, fix)]) from None
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}")
            file.flush()
        yield


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
    """Finds the checkpoint that run.resume asks for before anything is started.

    Raises CheckpointError when there are checkpoints but none is whole, or when one has drawn other rows than its steps
    have used; ConfigError when the configuration changed in a key that may not, or when run.resume is none and run.dir
    already holds a run.
    """

    def __init__(self, config: Config) -> None:
        self._tree = to_tree(config)  # until `settle`
        self._drawn_per_step = config.drawn_per_step
        self._store = CheckpointStore(Path(config.run.dir) / "checkpoints", config.run.keep_checkpoints)
        self._behind = config.run.checkpoint_behind
        self._saves = config.run.checkpoint_every > 0
        self._unfinished: contextlib.ExitStack | None = None
        self._trainer_state: dict[str, Any] = {}
        self._checkpoint = self._find(config.run.resume)
        self.finished = self.saved = self.step
        """The last finished step, and the last one that a checkpoint holds; None = none is."""
        self.writing: int | None = None
        """The step whose checkpoint is being written."""
        self.unrecorded: dict[str, float] | None = self._checkpoint.state["unrecorded"] if self._checkpoint else None
        """The metrics of the last finished step while its evaluation is not made; None = its line is written."""
        self.spoiled: int | None = None
        """The step that failed after its update had begun: what the roles hold now is of no step. None = none did."""
        if self._checkpoint is not None:
            for one in self._changes(self._checkpoint):
                self._tell(one, self._checkpoint)
            self._check_cursor(self._checkpoint.step, self._checkpoint.state["trainer"])

    @property
    def step(self) -> int | None:
        """Finished steps of the checkpoint; None = the run begins."""
        return None if self._checkpoint is None else self._checkpoint.step

    @property
    def path(self) -> str | None:
        """The checkpoint that the run goes on from."""
        return None if self._checkpoint is None else str(self._checkpoint.path)

    def settle(self, resolved: Config) -> None:
        """What the configuration has become on this cluster, which every checkpoint holds. Raises ConfigError if what a
        setting stands for has changed since the checkpoint, in a key that may not."""
        self._tree = to_tree(resolved)
        if self._checkpoint is not None:
            self._changes(self._checkpoint)

    @property
    def recorded_step(self) -> int | None:
        """The last step whose line stays as it is: that of a step whose evaluation is missing is written anew."""
        if self.step is None or self.unrecorded is None:
            return self.step
        return self.step - 1

    @property
    def tracker_state(self) -> dict[str, str] | None:
        """What the trackers said when the checkpoint was written. Of a checkpoint in another folder the record of the
        steps stays there, too, so none of them is missed here."""
        if self._checkpoint is None:
            return None
        state: dict[str, str] = self._checkpoint.state["trackers"]
        if self._is_here(self._checkpoint.path):
            return state
        return {name: value for name, value in state.items() if name != RECORDED_STEPS}

    def refuse_fewer(self, total_steps: int) -> None:
        """Raise ConfigError if the checkpoint is of a later step than the last one that training is to make."""
        if self.step is not None and self.step > total_steps:
            fix = f"give at least {self.step}, or continue from an earlier checkpoint: run.resume=PATH"
            raise ConfigError([Problem("run.total_steps", total_steps, f"{self.step} steps are done already", fix)])

    def set_aside(self) -> None:
        """Keep the record of a run that left no checkpoint out of the way of the one that begins anew."""
        if self._checkpoint is not None or not self._has_record():
            return
        steps = len(steps_of(self._record))
        aside = self._record.rename(free_name(self._record))
        print(
            f"warning: {self._record.parent} records {steps} steps but holds no checkpoint: the run begins anew, and "
            f"the old record is in {aside.name}",
            file=sys.stderr,
            flush=True,
        )

    def restore(self, trainer: Resumable) -> int:
        """Bring the trainer to where the checkpoint was written. Returns the number of finished steps."""
        found = self._checkpoint
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
        found = self._checkpoint
        if found is not None and found.step == number and self._saves and self._is_here(found.path):
            self._store.restate(found, self._state(trackers))

    def save(self, trainer: Resumable, trackers: Tracker) -> None:
        """Write the checkpoint after the step that was committed last; with run.checkpoint_behind it is there once
        `finish_save` returned. A signal waits until it is written, or under way."""
        assert self.finished is not None, "there is something to save once a step is committed"
        self.finish_save()
        state = self._state(trackers)
        self._check_cursor(self.finished, self._trainer_state)
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
            with self._store.writing(number, state, self._tree, roles) as folder:
                yield folder
            self.saved = number
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
        if not self._saves:
            _say(f"nothing is saved (run.checkpoint_every=0): the {number} finished steps are lost")
            return
        if self.spoiled is not None:
            _say(f"step {self.spoiled} failed in its update, so nothing newer than step {self.saved or 0} is saved")
            return
        if number != self.saved:
            try:
                self.save(trainer, trackers)
                self.finish_save()
            except Exception as failure:
                _say(f"warning: step {number} could not be saved: {failure}")
                return
        later = "" if self.unrecorded is None else "; its evaluation is made when the run goes on"
        _say(f"step {number} is saved in {self._store.root}{later}")

    def _find(self, resume: str) -> Checkpoint | None:
        here = self._store.root
        if resume not in ("auto", "none"):
            if not self._is_here(Path(resume)) and (any(here.glob("step_*")) or self._has_record()):
                self._refuse(resume, "run.dir holds another run", "use another run.dir for what continues from here")
            return self._store.open(resume)
        found = self._store.latest()
        if resume == "none" and (found.checkpoint is not None or self._has_record()):
            what = found.checkpoint.path.name if found.checkpoint is not None else "the record of a run"
            fix = "use run.resume=auto to continue, or another run.dir to start anew"
            self._refuse(resume, f"{here.parent} already holds {what}", fix)
        for reason in found.skipped:
            print(f"warning: {reason}", file=sys.stderr, flush=True)
        return found.checkpoint

    @property
    def _record(self) -> Path:
        return self._store.root.parent / METRICS

    def _has_record(self) -> bool:
        """Whether this folder has a metrics.jsonl that is not empty, damaged or not."""
        return self._record.is_file() and self._record.stat().st_size > 0

    def _is_here(self, checkpoint: Path) -> bool:
        """Whether this is a checkpoint of this run.dir."""
        return checkpoint.resolve().parent == self._store.root.resolve()

    def _refuse(self, resume: str, rule: str, fix: str) -> NoReturn:
        raise ConfigError([Problem("run.resume", resume, rule, fix)])

    def _check_cursor(self, step: int, state: Mapping[str, Any]) -> None:
        """Compare the rows that were drawn with those that the finished steps have used: a run is synchronous, so none
        is under way at the end of a step. Raises CheckpointError where they differ."""
        drawn, expected = drawn_rows(state["cursor"]), step * self._drawn_per_step
        if drawn != expected:
            raise CheckpointError(
                f"the checkpoint after step {step} has drawn {drawn} rows of the data; expected {expected}, "
                f"{self._drawn_per_step} for each step. Rows would be used twice or left out, so continue from another "
                "checkpoint: run.resume=PATH"
            )

    def _changes(self, checkpoint: Checkpoint) -> list[Change]:
        allowed, refused = changed_keys(renewed(checkpoint.config), self._tree)
        if refused:
            fix = "set it back, or start anew in another run.dir"
            when = f"when {checkpoint.path.name} was written"
            raise ConfigError(
                [Problem(one.key, one.now, f"was {one.saved!r} {when}; {one.refused}", fix) for one in refused]
            )
        return allowed

    def _tell(self, change: Change, checkpoint: Checkpoint) -> None:
        print(f"changed since {checkpoint.path.name}: {change}", flush=True)
        if change.key == "run.total_steps" and "cosine" in str(self._tree):
            _say("warning: cosine schedules now end at another step, so the learning rate jumps")
