"""The driver's part of a run's snapshots, which outlives the driver.

The ranks' parts lie in /dev/shm, and so does the driver's: the driver that follows a
killed one goes on from the newest step of which all parts are there. Each part is what
a checkpoint has of the driver, with what its ledger has not written yet.

Invariant: a part that can be read is whole, since its folder takes its name last.
Deliberately not here: the parts of the ranks (`verl_ray/checkpoint/snapshots.py`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ray.checkpoint.manifest import (
    TornCheckpoint,
    installed_versions,
    read_object,
    sealed,
    unsealed,
    write_json,
)
from verl_ray.checkpoint.snapshot_files import (
    SnapshotNames,
    left_by,
    remove,
    word_of_driver,
)
from verl_ray.errors import TrackingError
from verl_ray.ownership import Owner
from verl_ray.paths import digest_of_program
from verl_ray.preflight.changes import changed_keys
from verl_ray.tracking.history import first_begun_s

if TYPE_CHECKING:
    # It imports Ray, which the command that checks a run does without.
    from controllers.trainers.base import StateFiles

_STATE = "state.json"
_PARTIAL = "partial"
_SHOWN_KEYS = 3


@dataclass(frozen=True)
class FinishedStep:
    """The driver's state after a step."""

    step: int
    """Number of the step, counted from 1."""

    trainer: Mapping[str, Any]
    """State of the trainer, as JSON."""

    supply_memory: object
    """What the trainer had in the memory of the driver with this state."""

    unrecorded: dict[str, float] | None
    """Metrics of the step until its line is written, then None."""

    best: dict[str, Any] | None
    """State of the best evaluation."""

    files: StateFiles | None = None
    """The larger part of the trainer's state."""

    trackers: Mapping[str, str] | None = None
    """State of the trackers; None where it is not asked for."""

    left_in: Path | None = None
    """Folder of the files, if an earlier driver has written them."""

    @property
    def state(self) -> dict[str, Any]:
        """The driver's state as a checkpoint holds it, a JSON object."""
        return {
            "trainer": self.trainer,
            "trackers": self.trackers,
            "unrecorded": self.unrecorded,
            "best": self.best,
        }


class DriverSnapshots:
    """Writes the driver's part of each snapshot to a folder in /dev/shm."""

    def __init__(
        self, config: Mapping[str, Any], inherited: Mapping[int, FinishedStep]
    ) -> None:
        """Begin with those that an earlier driver has left.

        Args:
            config: Resolved configuration of the run, as a tree.
            inherited: They, by step.
        """
        self._about = {
            "config": _comparable(config),
            "versions": _versions(),
            "begun_s": first_begun_s(Path(config["run"]["dir"])),
        }
        self._is_off = False
        self._folders: dict[int, tuple[Path, FinishedStep]] = {
            step: (state.left_in, state)
            for step, state in inherited.items()
            if state.left_in is not None
        }

    def write(
        self, names: SnapshotNames, finished: FinishedStep, saved_step: int | None
    ) -> None:
        """Write the part of a step, in place of the one before.

        Args:
            names: Names of the run's snapshots.
            finished: The state.
            saved_step: Step of the newest checkpoint; None without one.
        """
        if self._is_off:
            return
        folder, before = self._folders.get(finished.step, (None, None))
        partial = names.of_driver(_PARTIAL)
        try:
            if folder is None or before is None or before.trainer != finished.trainer:
                remove(partial)
                partial.mkdir(mode=0o700)
                if finished.files is not None:
                    finished.files.keep(partial)
            else:
                # An evaluation, or the line of the step, changes no file.
                partial = folder
            about = self._about | {
                "step": finished.step,
                "state": finished.state,
                "saved_step": saved_step,
                "series": names.series,
                "courses": list(names.courses.items()),
                "run": names.run,
            }
            write_json(partial / _STATE, sealed(about))
            if partial is not folder:
                final = names.of_driver(f"{finished.step:08}-{time.time_ns()}")
                partial.rename(final)
                self.drop(finished.step)
                folder = final
        except (OSError, TrackingError) as error:
            self._give_up(names, error)
            return
        assert folder is not None, "it was written"
        self._folders[finished.step] = folder, finished

    def drop(self, step: int) -> None:
        """Remove the part of a step, if there is one."""
        if step in self._folders:
            remove(self._folders.pop(step)[0])

    def _give_up(self, names: SnapshotNames, error: Exception) -> None:
        """Write no more, since there is no room; say so once."""
        self._is_off = True
        for step in list(self._folders):
            self.drop(step)
        remove(names.of_driver(_PARTIAL))
        print(
            "warning: the driver's part of a snapshot cannot be written to"
            f" {names.of_driver(_PARTIAL).parent} ({error}), so a driver that follows"
            " this one goes on from the newest checkpoint. Enlarge /dev/shm (in a"
            " container: --shm-size), or set run.recovery.snapshot_every=0",
            file=sys.stderr,
            flush=True,
        )


# ----------------------------------------------------------------- in the next driver


@dataclass(frozen=True)
class LeftSnapshots:
    """The driver's parts that an earlier driver of a run has left.

    Attributes:
        steps: They, by their steps, at least one.
        names: Names of the snapshots of the run, which this driver has taken over.
        about: What the newest part says of its run.
    """

    steps: Mapping[int, FinishedStep]
    names: SnapshotNames
    about: Mapping[str, Any]

    @property
    def newest(self) -> int:
        """The last step."""
        return max(self.steps)

    def differs(self, config: Mapping[str, Any]) -> str | None:
        """Return how this run differs from the one that left them; None if it does not.

        Only the same rank of the same layout reads a snapshot.

        Args:
            config: Resolved configuration of the run, as a tree.
        """
        if self.about["versions"] != _versions():
            return "other versions of packages are installed, or of verl_ray itself"
        now = _comparable(config)
        if self.about["config"] == now:
            return None
        allowed, refused = changed_keys(self.about["config"], now)
        keys = [change.key for change in refused]
        # What a run does besides its steps changes no rank and no state.
        keys += [key for key in (change.key for change in allowed) if _matters(key)]
        if not keys:
            return None
        return f"the configuration has changed ({', '.join(keys[:_SHOWN_KEYS])})"


def left_snapshots(
    run: str, saved_step: int | None, owner: Owner
) -> LeftSnapshots | None:
    """Take over what an earlier driver has left of later steps.

    Args:
        run: Folder of the run.
        saved_step: Step of the checkpoint that the run would go on from; None if it
            would begin.
        owner: The owner of the snapshots from now on.

    Returns:
        What there is; None if there is nothing.
    """
    parts_of_series: dict[str, list[dict[str, Any]]] = {}
    begun_s = first_begun_s(Path(run))
    for about in _parts_of(run):
        # The user has removed the folder of that run, and this one has its name.
        if about["begun_s"] != begun_s:
            continue
        parts_of_series.setdefault(about["series"], []).append(about)
    if not parts_of_series:
        return None
    # A run that did not go on from a series has begun another one later.
    parts = max(
        parts_of_series.values(),
        key=lambda series: max(each["time"] for each in series),
    )
    usable = {
        about["step"]: about
        for about in sorted(parts, key=lambda about: about["time"])
        if about["step"] > (saved_step or 0) >= (about["saved_step"] or 0)
    }
    if not usable:
        return None
    newest = usable[max(usable)]
    earlier = SnapshotNames(
        newest["run"], owner, newest["series"], False, dict(newest["courses"])
    )
    names = earlier.taken_over(owner)
    steps = {
        step: FinishedStep(
            step,
            about["state"]["trainer"],
            None,
            about["state"]["unrecorded"],
            about["state"]["best"],
            trackers=about["state"]["trackers"],
            left_in=names.of_driver(about["word"]),
        )
        for step, about in usable.items()
    }
    return LeftSnapshots(steps, names, newest)


def _parts_of(run: str) -> Iterator[dict[str, Any]]:
    """Yield what each part of a driver says, its word, and when it was written."""
    for folder in left_by(run):
        path = folder / _STATE
        word = word_of_driver(folder)
        if word in (None, _PARTIAL) or not path.is_file():
            continue
        try:
            about = unsealed(path, read_object(path))
        except TornCheckpoint:
            continue
        yield about | {"word": word, "time": path.stat().st_mtime_ns}


def _matters(key: str) -> bool:
    """Return whether a setting may change what ranks have, or how they compute."""
    return not key.startswith(("run.", "tracking.")) or key == "run.threads_per_rank"


def _versions() -> dict[str, str]:
    """Return the versions of packages, and a digest of this program's own code."""
    return {**installed_versions(), "code": digest_of_program()}


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without what another driver of the same run may have.

    The name of a run may hold the time at which its command was typed.
    """
    run = {
        key: value
        for key, value in config["run"].items()
        if key not in ("name", "resume")
    }
    # As it is read again.
    plain: dict[str, Any] = json.loads(json.dumps({**config, "run": run}))
    return plain
