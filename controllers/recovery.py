"""Where a run continues: from the newest whole checkpoint, with nothing lost and nothing silently changed.

Invariant: a checkpoint holds the state of every role that learns (written by its ranks) and of the driver (data
cursor, KL controller, the trackers' run ids), and counts only once its manifest is written; a run that has checkpoints
never starts anew by itself. Deliberately not here: the format (`verl_ray/checkpoint`) and when to save (`training.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from verl_ray.checkpoint.changes import changed_keys
from verl_ray.checkpoint.store import Checkpoint, CheckpointStore
from verl_ray.cluster.calls import wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem
from verl_ray.tracking.jsonl import read_metrics
from workers.model_worker import ModelWorker


class Resumable(Protocol):
    """What a trainer tells, so that it can continue."""

    @property
    def groups(self) -> Mapping[str, WorkerGroup[Any]]:
        """The roles whose state a checkpoint holds, by name."""

    def state(self) -> dict[str, Any]:
        """The driver's part, as JSON."""

    def load_state(self, state: dict[str, Any]) -> None: ...


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


class Recovery:
    """Finds the checkpoint that run.resume asks for before anything is started.

    Raises CheckpointError when there are checkpoints but none is whole, ConfigError when the configuration changed in
    a key that may not, or when run.resume is none and run.dir already holds a run.
    """

    def __init__(self, config: Config) -> None:
        self._tree = to_tree(config)
        self._store = CheckpointStore(Path(config.run.dir) / "checkpoints", config.run.keep_checkpoints)
        self._behind = config.run.checkpoint_behind
        self._unfinished: contextlib.ExitStack | None = None
        self._checkpoint = self._find(config.run.resume)
        if self._checkpoint is not None:
            self._compare(self._checkpoint)

    @property
    def step(self) -> int | None:
        """Finished steps of the checkpoint; None = the run begins."""
        return None if self._checkpoint is None else self._checkpoint.step

    @property
    def tracker_state(self) -> dict[str, str] | None:
        return None if self._checkpoint is None else self._checkpoint.state["trackers"]

    def set_aside(self) -> None:
        """Keep the record of a run that left no checkpoint out of the way of the one that begins anew."""
        steps = self._recorded()
        if self._checkpoint is not None or not steps:
            return
        record = self._store.root.parent / "metrics.jsonl"
        aside = record.with_name(f"metrics.{int(record.stat().st_mtime)}.jsonl")
        record.rename(aside)
        print(
            f"warning: {record.parent} records {steps} steps but holds no checkpoint: the run begins anew, and the old "
            f"record is in {aside.name}",
            file=sys.stderr,
            flush=True,
        )

    def restore(self, trainer: Resumable) -> int:
        """Bring the trainer to where the checkpoint was written. Returns the number of finished steps."""
        found = self._checkpoint
        if found is None:
            return 0
        wait_all([group.broadcast(ModelWorker.load, found.role(name)) for name, group in trainer.groups.items()])
        trainer.load_state(found.state["trainer"])
        print(f"continuing after step {found.step} from {found.path}", flush=True)
        return found.step

    def save(self, number: int, trainer: Resumable, trackers: dict[str, str]) -> None:
        """Write the checkpoint after step `number`; with run.checkpoint_behind it is there once `finish` returned."""
        self.finish()
        state = {"trainer": trainer.state(), "trackers": trackers}
        verb = ModelWorker.begin_save if self._behind else ModelWorker.save
        with contextlib.ExitStack() as writing:
            folder = writing.enter_context(self._store.writing(number, state, self._tree))
            wait_all([group.broadcast(verb, str(folder / name)) for name, group in trainer.groups.items()])
            if self._behind:
                writing.push(lambda *_: self._wait_for(trainer))
                self._unfinished = writing.pop_all()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and commit it."""
        writing, self._unfinished = self._unfinished, None
        if writing is not None:
            writing.close()

    @staticmethod
    def _wait_for(trainer: Resumable) -> None:
        wait_all([group.broadcast(ModelWorker.finish_save) for group in trainer.groups.values()])

    def _find(self, resume: str) -> Checkpoint | None:
        found = self._store.latest()
        here = self._store.root
        if resume not in ("auto", "none"):
            if Path(resume).resolve().parent != here.resolve() and (found.checkpoint is not None or self._recorded()):
                self._refuse(resume, "run.dir holds another run", "use another run.dir for what continues from here")
            return self._store.open(resume)
        if resume == "none" and (found.checkpoint is not None or self._recorded()):
            what = found.checkpoint.path.name if found.checkpoint is not None else "the record of a run"
            fix = "use run.resume=auto to continue, or another run.dir to start anew"
            self._refuse(resume, f"{here.parent} already holds {what}", fix)
        for reason in found.skipped:
            print(f"warning: {reason}", file=sys.stderr, flush=True)
        return found.checkpoint

    def _recorded(self) -> int:
        """Steps that metrics.jsonl of this folder holds."""
        record = self._store.root.parent / "metrics.jsonl"
        return len(read_metrics(record)) if record.is_file() else 0

    def _refuse(self, resume: str, rule: str, fix: str) -> NoReturn:
        raise ConfigError([Problem("run.resume", resume, rule, fix)])

    def _compare(self, checkpoint: Checkpoint) -> None:
        allowed, refused = changed_keys(checkpoint.config, self._tree)
        if refused:
            fix = "set it back, or start anew in another run.dir"
            when = f"when {checkpoint.path.name} was written"
            raise ConfigError(
                [Problem(one.key, one.now, f"was {one.saved!r} {when}; {one.refused}", fix) for one in refused]
            )
        for one in allowed:
            print(f"changed since {checkpoint.path.name}: {one}", flush=True)
            if one.key == "run.total_steps" and "cosine" in str(self._tree):
                print(
                    "warning: cosine schedules now end at another step, so the learning rate jumps",
                    file=sys.stderr,
                    flush=True,
                )
