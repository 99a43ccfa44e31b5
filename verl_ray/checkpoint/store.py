"""The checkpoints of one run on disk: which exist, which are whole, which are kept.

Invariant: a checkpoint's directory takes its final name only once its manifest is
written. A writer that dies at any moment leaves the earlier checkpoints as they were.
The directory is local or on a file system that all nodes share, and has one writer.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ray.checkpoint import manifest
from verl_ray.checkpoint.manifest import (
    Checkpoint,
    FileRecord,
    TornCheckpoint,
    read_object,
    sealed,
    unsealed,
    write_json,
)
from verl_ray.disk import sync
from verl_ray.errors import CheckpointError

NEWEST = "newest.json"
"""File that names the checkpoint written last, so that its absence is noticed."""

DAMAGED = "damaged.json"
"""File that names checkpoints whose contents had changed when they were read."""

_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ".partial"

# Number of damaged files that an error lists.
_LISTED_FILES = 3


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"step_{step:08}"


def is_checkpoint_name(name: str) -> bool:
    """Return whether a folder of this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class LatestCheckpoint:
    """The newest usable checkpoint, and why newer ones were passed over."""

    checkpoint: Checkpoint | None
    """None if the run has no checkpoint yet."""

    skipped: list[str]


class CheckpointStore:
    """A directory with the last checkpoints of a run.

    Each is a folder `step_00000010` with `manifest.json` and a folder per role.
    """

    def __init__(self, root: str | Path, keep: int) -> None:
        """Open a store; the directory need not exist yet.

        Args:
            root: Directory of the checkpoints.
            keep: Number of newest checkpoints that remain after one is written.
        """
        self.root = Path(root)
        self.keep = keep

    @contextlib.contextmanager
    def writing(
        self,
        step: int,
        state: Mapping[str, Any],
        config: Mapping[str, Any],
        roles: Collection[str],
        *,
        best: int | None = None,
        hashed: Mapping[str, FileRecord] | None = None,
    ) -> Iterator[Path]:
        """Yield a directory for the files of a checkpoint, and commit it at the end.

        After the commit, older checkpoints are removed except for the last `keep` and
        that of step `best`.
        Checkpoints of later steps are removed, too, since this run went back and will
        make these steps anew. If the block or the commit fails, the directory is
        removed and all checkpoints are as before.

        Args:
            step: Number of finished steps.
            state: State of the driver, a JSON object.
            config: Configuration of the run, a JSON object.
            roles: Roles that write files under their names in the block.
            best: Step whose checkpoint stays as well, if there is one.
            hashed: Files by their relative paths, which the block fills in. They are on
                the disk, and are not read again.

        Raises:
            CheckpointError: A role has written no files, or the file system refuses,
                for example because the disk is full.
        """
        final = self.root / checkpoint_name(step)
        folder = final.with_name(final.name + _UNFINISHED)
        try:
            with _readable_errors(folder):
                self.root.mkdir(parents=True, exist_ok=True)
                # There is one writer, so nobody else is writing these.
                for remains in self._unfinished():
                    shutil.rmtree(remains)
                folder.mkdir()

                yield folder

                manifest.write_manifest(
                    folder, step, state, config, roles, hashed or {}
                )
                # The same step may have been written before the run went back.
                self._remove(final)
                folder.rename(final)
                sync(self.root)
        except BaseException:
            # After the rename there is nothing to remove under this name.
            shutil.rmtree(folder, ignore_errors=True)
            raise

        # The checkpoint exists from here on, even if this part fails.
        with _readable_errors(final):
            write_json(self.root / NEWEST, sealed({"step": step}))
            self._prune(step, best)

    def replace_state(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """Replace the driver's state in a checkpoint; its files stay as they are.

        Args:
            checkpoint: Checkpoint to change.
            state: New state of the driver, a JSON object.

        Raises:
            CheckpointError: The manifest is not the one that was written, or the file
                system refuses.
        """
        with _readable_errors(checkpoint.path):
            manifest.replace_state(checkpoint, state)

    def latest(self, *, verify: bool = True) -> LatestCheckpoint:
        """Return the newest checkpoint that is whole.

        Args:
            verify: Whether every file is read and its checksum compared. A checkpoint
                that `note_damaged` was called for is read in any case.

        Raises:
            CheckpointError: There are checkpoints but none is usable, or a checkpoint
                has another schema. A run never starts anew in silence.
        """
        unfinished = [
            f"{path.name} remains of a write or a removal that was cut short"
            for path in self._unfinished()
        ]
        steps = self._steps()
        torn = self._missing_newest(steps)
        damaged = self._damaged()

        # From the newest to the oldest, until a checkpoint is whole.
        for step in sorted(steps, reverse=True):
            try:
                reads = verify or step in damaged
                checkpoint = self._open_step(step, steps[step], verify=reads)
                return LatestCheckpoint(checkpoint, torn + unfinished)
            except TornCheckpoint as error:
                torn.append(str(error))

        if torn:
            raise CheckpointError(
                f"has no usable checkpoint: {'; '.join(torn)}",
                fix="Restore one of them, or start anew in another run.dir",
                subject=self.root,
            )
        return LatestCheckpoint(None, unfinished)

    def _missing_newest(self, steps: Mapping[int, Path]) -> list[str]:
        """Return a reason if the checkpoint written last is missing, or unknown."""
        try:
            last = self._newest()
        except TornCheckpoint as error:
            return [
                f"{error}, so whether the newest checkpoint is still there is not"
                " known: the newest one here is taken"
            ]
        if last is None or last in steps:
            return []
        return [f"{checkpoint_name(last)} was written, but is missing"]

    def _open_step(self, step: int, path: Path, *, verify: bool) -> Checkpoint:
        """Open a checkpoint by its path, which must be that of its step."""
        checkpoint = self.open(path, verify=verify)
        if checkpoint.step != step:
            raise TornCheckpoint(
                f"{path.name} was renamed: it is the checkpoint after step"
                f" {checkpoint.step}"
            )
        return checkpoint

    @staticmethod
    def open(path: str | Path, *, verify: bool = True) -> Checkpoint:
        """Return the checkpoint in a directory.

        Args:
            path: Directory of the checkpoint.
            verify: Whether every file is read and its checksum compared.

        Raises:
            CheckpointError: The checkpoint is missing, torn or of another schema.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise TornCheckpoint(
                "there is no such checkpoint; run.resume takes the path of a step_..."
                " directory",
                place=folder,
            )

        checkpoint = manifest.read_manifest(folder)
        faults = manifest.differences(checkpoint, verify=verify)
        if faults:
            raise TornCheckpoint(torn_in_words(checkpoint, faults))
        return checkpoint

    def note_damaged(self, checkpoint: Checkpoint) -> None:
        """Remember that the contents of a checkpoint have changed.

        Where the disk does not take this, they are read once more when they are used.
        """
        steps = sorted({*self._damaged(), checkpoint.step})
        with contextlib.suppress(OSError):
            write_json(self.root / DAMAGED, sealed({"steps": steps}))

    def _damaged(self) -> set[int]:
        """Return the steps of checkpoints whose contents had changed."""
        path = self.root / DAMAGED
        if not path.exists():
            return set()
        try:
            return set(unsealed(path, read_object(path))["steps"])
        except TornCheckpoint:
            # All are read again then.
            return set(self._steps())

    def _steps(self) -> dict[int, Path]:
        """Return the directories of all checkpoints by their steps."""
        if not self.root.is_dir():
            return {}

        steps = {}
        for path in self.root.iterdir():
            name = _NAME.fullmatch(path.name)
            if name is not None:
                steps[int(name[1])] = path
        return steps

    def _unfinished(self) -> list[Path]:
        """Return what a write or a removal left behind that was cut short."""
        return sorted(self.root.glob(f"step_*{_UNFINISHED}"))

    def _newest(self) -> int | None:
        """Return the step of the checkpoint written last; None before the first.

        Raises:
            TornCheckpoint: The file was damaged.
        """
        path = self.root / NEWEST
        if not path.exists():
            return None
        newest = unsealed(path, read_object(path))
        return int(newest["step"])

    def paths(self) -> list[Path]:
        """Return the folders of all checkpoints, also of those that are torn."""
        return list(self._steps().values())

    def surplus(self, step: int, best: int | None) -> list[Path]:
        """Return the checkpoints up to `step` but the last `keep` and the best one."""
        steps = self._steps()
        past = sorted(known for known in steps if known <= step)
        return [steps[known] for known in past[: -self.keep] if known != best]

    def remove_surplus(self, step: int, best: int | None) -> None:
        """Remove what the writer of a checkpoint that died behind it has left over.

        Otherwise the next one would take more space than a run has asked for.

        Args:
            step: Step of the newest whole checkpoint.
            best: Step of the best evaluation up to then, if there is one.

        Raises:
            CheckpointError: The file system refuses.
        """
        with _readable_errors(self.root):
            for path in self.surplus(step, best):
                self._remove(path)

    def _prune(self, step: int, best: int | None) -> None:
        """Remove the surplus up to `step`, and the checkpoints of later steps."""
        later = [path for known, path in self._steps().items() if known > step]
        for path in [*self.surplus(step, best), *later]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint if it exists.

        It is renamed first, since a checkpoint that is half removed would look torn.
        """
        if path.exists():
            renamed = path.with_name(f"{path.name}.removed{_UNFINISHED}")
            path.rename(renamed)
            shutil.rmtree(renamed)


def torn_in_words(checkpoint: Checkpoint, faults: Sequence[str]) -> str:
    """Return what is wrong with the files of a checkpoint, in words.

    Args:
        checkpoint: The checkpoint.
        faults: How its files differ from its manifest, at least one.
    """
    listed = ", ".join(faults[:_LISTED_FILES])
    more = ""
    if len(faults) > _LISTED_FILES:
        more = f" and {len(faults) - _LISTED_FILES} more"
    return f"{checkpoint.path.name} is torn: {listed}{more}"


@contextlib.contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    """Raise CheckpointError in place of the errors of the file system."""
    try:
        yield
    except (ConnectionError, TimeoutError):
        # These come from a worker, not from the file system.
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error}); the checkpoints before it are whole",
            fix="Free some space or lower run.keep_checkpoints, then continue with"
            " run.resume=auto",
        ) from error
