"""The checkpoint that a run continues from: the newest whole one, or run.resume's.

Invariant: it is known before anything starts. A run that has checkpoints never starts
anew by itself, and the meaning of its saved state has not changed since. Its contents
may be compared while processes start, and are before anything reads them.

Deliberately not here: restoring the roles from the checkpoint, and writing other
checkpoints (`recovery.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from controllers.rollouts.dynamic_sampling import require_dynamic_sampling
from controllers.run.best import BestEvaluation
from controllers.run.driver_snapshots import LeftSnapshots, left_snapshots
from controllers.supervisor import reports
from verl_ray.checkpoint.manifest import Checkpoint
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.load import resolved_elsewhere, to_tree
from verl_ray.config.renamed import migrated
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.cursor import drawn_rows
from verl_ray.data.ledger import LEDGER, drop_later_parts
from verl_ray.errors import CheckpointError, ConfigError, Problem, file_problem
from verl_ray.ownership import Owner
from verl_ray.paths import shown_path
from verl_ray.preflight.changes import STEP_SIZES, Change, changed_keys
from verl_ray.preflight.savings import in_words
from verl_ray.shell import for_shell
from verl_ray.suggest import either
from verl_ray.tracking.jsonl import METRICS, RECORDED_STEPS, steps_of, unused_path


class Resumption:
    """Finds the checkpoint that run.resume names.

    Raises:
        ConfigError: There are checkpoints but none is whole, or the checkpoint has
            consumed other rows than its steps have used; the configuration changed in a
            key that may not change; or run.resume is none and run.dir already holds a
            run.
    """

    def __init__(self, config: Config, *, verify: bool = True) -> None:
        """Find the checkpoint.

        Args:
            config: Configuration of the run.
            verify: Whether to read the files of the checkpoint and compare checksums.
                Otherwise sizes are compared, and `CheckpointCheck` reads the files.
        """
        self._verify = verify
        self.config = config
        """Configuration as the user wrote it, until `settle` replaces it."""

        self.store = CheckpointStore(
            Path(config.run.dir) / "checkpoints", config.run.keep_checkpoints
        )
        """Checkpoints of this run.dir. run.resume may name one outside of it."""

        self.checkpoint = self._fitting_checkpoint(config)
        """Checkpoint to continue from; None where the run starts from the beginning."""

    @property
    def step(self) -> int | None:
        """Number of finished steps in the checkpoint; None where there is none."""
        if self.checkpoint is None:
            return None
        return self.checkpoint.step

    @property
    def path(self) -> str | None:
        """Path of the checkpoint that the run continues from."""
        if self.checkpoint is None:
            return None
        return str(self.checkpoint.path)

    @property
    def unrecorded(self) -> dict[str, float] | None:
        """Metrics of the checkpoint's step, which was not evaluated yet.

        None if its line is written.
        """
        if self.checkpoint is None:
            return None
        metrics: dict[str, float] | None = self.checkpoint.state["unrecorded"]
        return metrics

    @property
    def best(self) -> dict[str, Any] | None:
        """State of `BestEvaluation` in the checkpoint, if it has any."""
        if self.checkpoint is None:
            return None
        # Earlier versions did not save it.
        best: dict[str, Any] | None = self.checkpoint.state.get("best")
        return best

    def settle(self, resolved: Config) -> None:
        """Replace the configuration by the resolved one, which every checkpoint holds.

        Raises:
            ConfigError: An `auto` setting now stands for another value than when the
                checkpoint was written, in a key that may not change; or the checkpoint
                is of a later step than the last one of run.total_epochs.
        """
        counts_epochs = self.config.run.total_steps is None
        self.config = resolved
        if counts_epochs:
            self.refuse_fewer_steps(resolved.run.total_steps)
        if self.checkpoint is None:
            return

        for change in self._changes(self.checkpoint):
            # Other changes were reported when the checkpoint was found.
            if change.key == "run.total_steps" and counts_epochs:
                self._report_change(change, self.checkpoint)

    def report_other_device(self, *, on_gpus: bool) -> None:
        """Print what was resolved on another kind of device, before or in this run.

        Args:
            on_gpus: Whether this run computes on GPUs.
        """
        there, here = ("a CPU", "GPUs") if on_gpus else ("GPUs", "a CPU")
        record = self.config.run.resolved
        unchanged = resolved_elsewhere(self.config, on_gpus=on_gpus)
        before: Mapping[str, object] = {}
        if self.checkpoint is not None:
            saved = migrated(self.checkpoint.config)["run"]["resolved"]
            before = saved["cpu" if on_gpus else "gpu"]

        anew = {
            key: value
            for key, value in (record.gpu if on_gpus else record.cpu).items()
            if key in before and before[key] != value
        }
        if not unchanged and not anew:
            return

        lines = [f"warning: auto was resolved on {there}, and this run is on {here}"]
        if unchanged:
            lines.append(f"  kept (KEY=auto resolves one anew): {in_words(unchanged)}")
        if anew:
            was = {key: before[key] for key in anew}
            lines.append(f"  then: {in_words(was)}")
            lines.append(f"  now: {in_words(anew)}")
        print("\n".join(lines), file=sys.stderr, flush=True)

    @property
    def tracker_state(self) -> dict[str, str] | None:
        """State of the trackers when the checkpoint was written."""
        if self.checkpoint is None:
            return None

        state: dict[str, str] = self.checkpoint.state["trackers"]
        if self.is_in_run_dir:
            return state

        # The record of another folder's steps stays there, so their lines are not
        # missing here.
        return {name: value for name, value in state.items() if name != RECORDED_STEPS}

    def left_snapshots(self, owner: Owner) -> LeftSnapshots | None:
        """Take over the snapshots of later steps that an earlier driver has left.

        Args:
            owner: Their owner from now on.

        Returns:
            They; None if there are none, or the user has named another state.
        """
        if self.config.run.resume != "auto" and not reports().restarts:
            return None
        return left_snapshots(self.config.run.dir, self.step, owner)

    def find_newest(self) -> None:
        """Find the newest checkpoint of this run, which has written others by now.

        Its contents are compared once it is known that the run goes back to it.
        """
        newest = self.store.latest(verify=False)
        for reason in newest.skipped:
            print(f"warning: {reason}", file=sys.stderr, flush=True)
        if newest.checkpoint is not None:
            self.checkpoint = newest.checkpoint

    def drop_later_parts(self, step: int) -> None:
        """Remove what the ledger says of steps after this one, which are made again."""
        drop_later_parts(Path(self.config.run.dir) / LEDGER, step)

    def remove_surplus(self) -> None:
        """Remove older checkpoints that a driver that died was about to remove.

        Raises:
            CheckpointError: The file system refuses.
        """
        if self.step is not None and self.is_in_run_dir:
            best = BestEvaluation(self.config, self.best)
            self.store.remove_surplus(self.step, best.step)

    def refuse_fewer_steps(self, total_steps: int | None) -> None:
        """Refuse a run that would end before the step of its checkpoint.

        Args:
            total_steps: Last step of the run; None while it is not known yet.

        Raises:
            ConfigError: The checkpoint is of a later step than `total_steps`.
        """
        if total_steps is None or self.step is None or self.step <= total_steps:
            return

        rule = f"{self.step} steps are done already"
        fix = (
            f"Give at least {self.step}, or continue from an earlier checkpoint with"
            " run.resume=PATH."
        )
        raise ConfigError([Problem("run.total_steps", total_steps, rule, fix)])

    def set_aside_old_record(self) -> None:
        """Rename the record of an earlier run that left no checkpoint.

        The run in this folder begins anew and writes a record of its own. The ledger
        loses what is made again.
        """
        self.drop_later_parts(self.step or 0)
        if self.checkpoint is not None or not self._has_record():
            return

        steps = len(steps_of(self._record))
        renamed = self._record.rename(unused_path(self._record))
        print(
            f"warning: {self._record.parent} records {steps} steps but holds no"
            f" checkpoint: the run begins anew, and the old record is in"
            f" {renamed.name}",
            file=sys.stderr,
            flush=True,
        )

    @property
    def is_in_run_dir(self) -> bool:
        """Whether the checkpoint is in this run.dir."""
        return self.checkpoint is not None and self._holds(self.checkpoint.path)

    @property
    def may_choose(self) -> bool:
        """Whether another driver takes an older checkpoint if this one is damaged."""
        return self.config.run.resume == "auto" or reports().follows_saved

    def check_cursor(self, step: int, state: Mapping[str, Any]) -> None:
        """Compare the rows that were consumed with those that the finished steps used.

        What was drawn ahead of a step is drawn again; what was rejected is not.

        Args:
            step: Number of finished steps.
            state: The trainer's state, as JSON.

        Raises:
            CheckpointError: The numbers of rows differ.
        """
        per_step = self.config.examples_per_step
        drawn = drawn_rows(state["cursor"])
        expected, reason = step * per_step, f"{per_step} for each step"
        if isinstance(self.config, RLConfig) and state.get("trained") == step:
            require_dynamic_sampling(self.config, state["ledger"])
            expected = state["ledger"]["frontier"]
            reason = "which are trained or rejected"
        if drawn != expected:
            raise CheckpointError(
                f"the checkpoint after step {step} has drawn {drawn} rows of the data",
                fix=f"expected {expected}, {reason}. Rows would be used twice or left"
                " out, so continue from another checkpoint: run.resume=PATH",
            )

    def _fitting_checkpoint(self, config: Config) -> Checkpoint | None:
        """Return the checkpoint to continue from, which the configuration fits.

        Raises:
            ConfigError: There is none that is whole, or it does not fit.
        """
        try:
            checkpoint = self._find(config.run.resume)
            if checkpoint is None:
                return None

            for change in self._changes(checkpoint):
                self._report_change(change, checkpoint)
            self.check_cursor(checkpoint.step, checkpoint.state["trainer"])
        except CheckpointError as error:
            raise self.as_problem(error) from error
        return checkpoint

    def as_problem(self, error: CheckpointError) -> ConfigError:
        """Return an error about a checkpoint as one of the setting that names it."""
        run = self.config.run
        key, value = "run.resume", run.resume
        if run.resume == "auto":
            key, value = "run.dir", run.dir
        return ConfigError([file_problem(key, value, error)])

    def _find(self, resume: str) -> Checkpoint | None:
        """Return the checkpoint that `resume` (auto, none or a path) stands for."""
        # What an earlier driver of this command has saved comes before what was named.
        if reports().follows_saved:
            resume = "auto"

        # The folder of a run stands for its newest checkpoint.
        checkpoints = Path(resume) / "checkpoints"
        is_run = resume not in ("auto", "none") and checkpoints.is_dir()
        if is_run and checkpoints.resolve() == self.store.root.resolve():
            resume = "auto"
        elif is_run:
            self._refuse_other_run(resume)
            return self._newest_in(checkpoints)
        elif resume not in ("auto", "none"):
            return self._open_named(resume)

        newest = self.store.latest(verify=self._verify)
        if resume == "none":
            self._refuse_existing_run(newest.checkpoint)

        # Newer checkpoints that cannot be used are not passed over in silence.
        for reason in newest.skipped:
            print(f"warning: {reason}", file=sys.stderr, flush=True)
        return newest.checkpoint

    def _open_named(self, resume: str) -> Checkpoint:
        """Open the checkpoint at a path, unless run.dir belongs to another run."""
        if not self._holds(Path(resume)):
            self._refuse_other_run(resume)
        return self.store.open(resume, verify=self._verify)

    def _newest_in(self, checkpoints: Path) -> Checkpoint | None:
        """Return the newest checkpoint of another run."""
        store = CheckpointStore(checkpoints, self.config.run.keep_checkpoints)
        newest = store.latest(verify=self._verify)
        if newest.checkpoint is None:
            rule = f"{checkpoints} holds no checkpoint"
            self._refuse(str(checkpoints.parent), rule, "Name another run.")
        return newest.checkpoint

    def _refuse_other_run(self, resume: str) -> None:
        """Refuse to mix steps from elsewhere with those of the run in this folder."""
        has_checkpoints = any(self.store.root.glob("step_*"))
        has_record = self._has_record() and not reports().restarts
        if has_checkpoints or has_record:
            rule = "run.dir holds another run"
            fix = "Use another run.dir for what continues from here."
            self._refuse(resume, rule, fix)

    def _refuse_existing_run(self, checkpoint: Checkpoint | None) -> None:
        """Refuse run.resume=none in a folder that already holds a run."""
        if checkpoint is not None:
            existing = checkpoint.path.name
        elif self._has_record() and not reports().restarts:
            existing = "the record of a run"
        else:
            return

        rule = f"{self.store.root.parent} already holds {existing}"
        fix = "Use run.resume=auto to continue, or another run.dir to start anew."
        self._refuse("none", rule, fix)

    @property
    def _record(self) -> Path:
        return self.store.root.parent / METRICS

    def _has_record(self) -> bool:
        """Return whether this folder has a metrics.jsonl with any content."""
        return self._record.is_file() and self._record.stat().st_size > 0

    def _holds(self, checkpoint: Path) -> bool:
        return checkpoint.resolve().parent == self.store.root.resolve()

    def _refuse(self, resume: str, rule: str, fix: str) -> NoReturn:
        raise ConfigError([Problem("run.resume", resume, rule, fix)])

    def _changes(self, checkpoint: Checkpoint) -> list[Change]:
        """Return the settings that differ from the checkpoint's, and refuse some."""
        # It may have been written under older names of the settings.
        saved = migrated(checkpoint.config)
        allowed, refused = changed_keys(saved, to_tree(self.config))
        self._refuse_changes(refused, checkpoint)
        return allowed

    def _refuse_changes(self, refused: list[Change], checkpoint: Checkpoint) -> None:
        problems = []
        for change in refused:
            written = f"when {checkpoint.path.name} was written"
            rule = f"was {change.saved!r} {written}; {change.refused}"
            fix = (
                "Set it back, or begin another run with this model: verl-ray export"
                f" {for_shell([shown_path(checkpoint.path)])} FOLDER, then"
                " model.path=FOLDER and another run.name."
            )
            problems.append(Problem(change.key, change.now, rule, fix))
        if problems:
            raise ConfigError(problems)

    def _report_change(self, change: Change, checkpoint: Checkpoint) -> None:
        """Print a setting that differs from the checkpoint's."""
        is_size = any(fnmatchcase(change.key, each) for each in STEP_SIZES)
        then = f", from step {checkpoint.step + 1} on" if is_size else ""
        print(f"changed since {checkpoint.path.name}: {change}{then}", flush=True)

        # Schedules that end are stretched over the steps of the whole run.
        if change.key != "run.total_steps":
            return
        lengths = (change.saved, self.config.run.steps)
        progress = checkpoint.step / min(n for n in lengths if isinstance(n, int))
        schedules = {
            optimizer.schedule
            for optimizer in self.config.optimizers.values()
            if optimizer.decays(progress)
        }
        if schedules:
            print(
                f"warning: {either(sorted(schedules))} schedules now end at another"
                " step, so the learning rate jumps",
                file=sys.stderr,
                flush=True,
            )
