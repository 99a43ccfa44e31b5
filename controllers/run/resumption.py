"""What a run goes on from, known before anything starts: the newest whole checkpoint, or the one that run.resume names.

Invariant: a run that has checkpoints never starts anew by itself, and what its state means has not changed since.
Deliberately not here: bringing roles to where the checkpoint was written, and writing others (`recovery.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from verl_ray.checkpoint.changes import Change, changed_keys
from verl_ray.checkpoint.store import Checkpoint, CheckpointStore
from verl_ray.config.load import to_tree
from verl_ray.config.renamed import renewed
from verl_ray.config.schema import Config
from verl_ray.data.cursor import drawn_rows
from verl_ray.errors import CheckpointError, ConfigError, Problem
from verl_ray.tracking.jsonl import METRICS, RECORDED_STEPS
from verl_ray.tracking.record import free_name, steps_of


class Resumption:
    """Finds the checkpoint that run.resume asks for.

    Raises CheckpointError when there are checkpoints but none is whole, or when one has drawn other rows than its steps
    have used; ConfigError when the configuration changed in a key that may not, or when run.resume is none and run.dir
    already holds a run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        """As it was given, until `settle`."""
        self.store = CheckpointStore(Path(config.run.dir) / "checkpoints", config.run.keep_checkpoints)
        """Of this run.dir; a checkpoint that run.resume names may be elsewhere."""
        self.checkpoint = self._find(config.run.resume)
        """None = the run begins."""
        if self.checkpoint is not None:
            for one in self._changes(self.checkpoint):
                self._tell(one, self.checkpoint)
            self.check_cursor(self.checkpoint.step, self.checkpoint.state["trainer"])

    @property
    def step(self) -> int | None:
        """Finished steps of the checkpoint; None = the run begins."""
        return None if self.checkpoint is None else self.checkpoint.step

    @property
    def path(self) -> str | None:
        """The checkpoint that the run goes on from."""
        return None if self.checkpoint is None else str(self.checkpoint.path)

    @property
    def unrecorded(self) -> dict[str, float] | None:
        """The metrics of the checkpoint's step while its evaluation is not made; None = its line is written."""
        return None if self.checkpoint is None else self.checkpoint.state["unrecorded"]

    def settle(self, resolved: Config) -> None:
        """What the configuration has become on this cluster, which every checkpoint holds. Raises ConfigError if what a
        setting stands for has changed since the checkpoint, in a key that may not."""
        self.config = resolved
        if self.checkpoint is not None:
            self._changes(self.checkpoint)

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
        if self.checkpoint is None:
            return None
        state: dict[str, str] = self.checkpoint.state["trackers"]
        if self.is_here:
            return state
        return {name: value for name, value in state.items() if name != RECORDED_STEPS}

    def refuse_fewer(self, total_steps: int) -> None:
        """Raise ConfigError if the checkpoint is of a later step than the last one that training is to make."""
        if self.step is not None and self.step > total_steps:
            fix = f"give at least {self.step}, or continue from an earlier checkpoint: run.resume=PATH"
            raise ConfigError([Problem("run.total_steps", total_steps, f"{self.step} steps are done already", fix)])

    def set_aside(self) -> None:
        """Keep the record of a run that left no checkpoint out of the way of the one that begins anew."""
        if self.checkpoint is not None or not self._has_record():
            return
        steps = len(steps_of(self._record))
        aside = self._record.rename(free_name(self._record))
        print(
            f"warning: {self._record.parent} records {steps} steps but holds no checkpoint: the run begins anew, and "
            f"the old record is in {aside.name}",
            file=sys.stderr,
            flush=True,
        )

    @property
    def is_here(self) -> bool:
        """Whether the checkpoint is one of this run.dir."""
        return self.checkpoint is not None and self._holds(self.checkpoint.path)

    def check_cursor(self, step: int, state: Mapping[str, Any]) -> None:
        """Compare the rows that were drawn with those that the finished steps have used: a run is synchronous, so none
        is under way at the end of a step. Raises CheckpointError where they differ."""
        per_step = self.config.drawn_per_step
        drawn, expected = drawn_rows(state["cursor"]), step * per_step
        if drawn != expected:
            raise CheckpointError(
                f"the checkpoint after step {step} has drawn {drawn} rows of the data; expected {expected}, "
                f"{per_step} for each step. Rows would be used twice or left out, so continue from another "
                "checkpoint: run.resume=PATH"
            )

    def _find(self, resume: str) -> Checkpoint | None:
        here = self.store.root
        if resume not in ("auto", "none"):
            if not self._holds(Path(resume)) and (any(here.glob("step_*")) or self._has_record()):
                self._refuse(resume, "run.dir holds another run", "use another run.dir for what continues from here")
            return self.store.open(resume)
        found = self.store.latest()
        if resume == "none" and (found.checkpoint is not None or self._has_record()):
            what = found.checkpoint.path.name if found.checkpoint is not None else "the record of a run"
            fix = "use run.resume=auto to continue, or another run.dir to start anew"
            self._refuse(resume, f"{here.parent} already holds {what}", fix)
        for reason in found.skipped:
            print(f"warning: {reason}", file=sys.stderr, flush=True)
        return found.checkpoint

    @property
    def _record(self) -> Path:
        return self.store.root.parent / METRICS

    def _has_record(self) -> bool:
        """Whether this folder has a metrics.jsonl that is not empty, damaged or not."""
        return self._record.is_file() and self._record.stat().st_size > 0

    def _holds(self, checkpoint: Path) -> bool:
        return checkpoint.resolve().parent == self.store.root.resolve()

    def _refuse(self, resume: str, rule: str, fix: str) -> NoReturn:
        raise ConfigError([Problem("run.resume", resume, rule, fix)])

    def _changes(self, checkpoint: Checkpoint) -> list[Change]:
        allowed, refused = changed_keys(renewed(checkpoint.config), to_tree(self.config))
        if refused:
            fix = "set it back, or start anew in another run.dir"
            when = f"when {checkpoint.path.name} was written"
            raise ConfigError(
                [Problem(one.key, one.now, f"was {one.saved!r} {when}; {one.refused}", fix) for one in refused]
            )
        return allowed

    def _tell(self, change: Change, checkpoint: Checkpoint) -> None:
        print(f"changed since {checkpoint.path.name}: {change}", flush=True)
        if change.key == "run.total_steps" and "cosine" in str(to_tree(self.config)):
            warning = "warning: cosine schedules now end at another step, so the learning rate jumps"
            print(warning, file=sys.stderr, flush=True)
