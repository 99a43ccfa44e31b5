"""The driver's part of snapshots in /dev/shm, and what the next driver takes over."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from controllers.run.driver_snapshots import (
    DriverSnapshots,
    FinishedStep,
    left_snapshots,
)
from verl_ray.checkpoint.snapshot_files import (
    SnapshotNames,
    available_bytes,
    bytes_left,
    left_by,
    remove,
)
from verl_ray.errors import TrackingError
from verl_ray.ownership import Owner, remove_stale
from verl_ray.private_files import shared_folder
from verl_ray.tracking.history import HISTORY, begin_segment

RUN = {
    "name": "grpo-20260101-000000",
    "dir": "runs/one",
    "resume": "auto",
    "stall_s": 60.0,
}
CONFIG: dict[str, Any] = {"run": RUN, "seed": 1}


@dataclass(frozen=True)
class Files:
    """Files of a trainer with one text."""

    text: str

    def write(self, checkpoint: Path) -> None:
        raise AssertionError("a snapshot is no checkpoint")

    def keep(self, snapshot: Path) -> None:
        (snapshot / "groups").write_text(self.text)


@dataclass(frozen=True)
class NoRoom(Files):
    error: Exception

    def keep(self, snapshot: Path) -> None:
        (snapshot / "groups").write_text("a part")
        raise self.error


def finished(step: int, files: Files | None = None) -> FinishedStep:
    return FinishedStep(
        step,
        {"ordinal": 8 * step},
        "in memory alone",
        None,
        {"step": 1, "value": 0.5},
        files or Files(f"groups of {step}"),
        {"jsonl": "7"},
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path)
    for path in left_by(str(tmp_path)):
        remove(path)


def of_an_ended_process(run: str) -> SnapshotNames:
    """Return the names of a driver of before."""
    ended = replace(Owner.here(), started=Owner.here().started - 1)
    return SnapshotNames.of(run, ended)


def write(run: str, *steps: int, saved: int | None = None, **config: Any) -> None:
    """Leave the parts of steps as a driver that was killed after them does."""
    tree = {**CONFIG, "run": {**RUN, "dir": run}, **config}
    snapshots = DriverSnapshots(tree, {})
    names = of_an_ended_process(run)
    for step in steps:
        snapshots.write(names, finished(step), saved)


def test_the_next_driver_finds_each_part_as_it_was(run: str) -> None:
    write(run, 5, 6, saved=4)
    left = left_snapshots(run, 4, Owner.here())
    assert left is not None and sorted(left.steps) == [5, 6] and left.newest == 6

    for step, found in left.steps.items():
        folder = found.left_in
        assert found.state == finished(step).state and folder is not None
        assert (folder / "groups").read_text() == f"groups of {step}"
        # They are this process's now, so nobody removes them.
        assert str(Owner.here()) in folder.name
    remove_stale(shared_folder())
    assert len(left_by(run)) == 2


@pytest.mark.parametrize(
    ("saved", "before", "expected"),
    [
        (None, None, [5, 6]),  # no checkpoint at all
        (4, None, [5, 6]),  # one whose manifest came after the parts
        (5, 4, [6]),  # a checkpoint of step 5 that came after the parts
        (6, 4, None),  # a checkpoint as new as the parts
        (2, 4, None),  # step 4 was passed over, as its contents had changed
        (None, 4, None),  # the checkpoints have been removed
    ],
)
def test_a_part_follows_the_checkpoint(
    saved: int | None, before: int | None, expected: list[int] | None, run: str
) -> None:
    write(run, 5, 6, saved=before)
    left = left_snapshots(run, saved, Owner.here())
    assert (None if left is None else sorted(left.steps)) == expected


def test_only_the_same_run_goes_on_from_a_part(run: str) -> None:
    write(run, 5)
    left = left_snapshots(run, None, Owner.here())
    assert left is not None
    assert left.differs(CONFIG) is None
    # The same command has another run.resume later, and another run.name.
    later = {**RUN, "resume": "none", "name": "grpo-20260101-000001"}
    assert left.differs({**CONFIG, "run": later}) is None
    said = left.differs({**CONFIG, "seed": 2})
    assert said is not None and "the configuration has changed (seed" in said
    other = replace(left, about=left.about | {"versions": {"torch": "1.0"}})
    assert str(other.differs(CONFIG)).startswith("other versions of packages")
    changed = {"versions": {**left.about["versions"], "code": "another commit"}}
    assert replace(left, about=left.about | changed).differs(CONFIG) is not None
    # What a run does besides its steps is no part of its state.
    assert left.differs({**CONFIG, "run": {**RUN, "stall_s": 90.0}}) is None


def test_a_run_whose_folder_was_removed_does_not_come_back(run: str) -> None:
    begin_segment(Path(run), 0, begun_s=1.0)
    write(run, 5)
    assert left_snapshots(run, None, Owner.here()) is not None
    (Path(run) / HISTORY).unlink()
    assert left_snapshots(run, None, Owner.here()) is None
    begin_segment(Path(run), 0, begun_s=2.0)
    assert left_snapshots(run, None, Owner.here()) is None


def test_the_newest_series_counts(run: str) -> None:
    """A run that could not go on from step 9 has made its steps again."""
    write(run, 9)
    (former,) = left_by(run)
    os.utime(former / "state.json", (0, 0))
    write(run, 6, 7)
    left = left_snapshots(run, None, Owner.here())
    assert left is not None and sorted(left.steps) == [6, 7]
    left.names.remove_others()
    assert {path.name.count(left.names.series) for path in left_by(run)} == {1}


def test_what_follows_a_step_changes_its_part_and_no_file(run: str) -> None:
    names = of_an_ended_process(run)
    snapshots = DriverSnapshots(CONFIG, {})
    snapshots.write(names, finished(3), None)
    (folder,) = left_by(run)
    snapshots.write(
        names, replace(finished(3, Files("other")), trackers={"jsonl": "8"}), None
    )
    assert left_by(run) == [folder]
    left = left_snapshots(run, None, Owner.here())
    assert left is not None
    found = left.steps[3]
    assert found.trackers == {"jsonl": "8"} and found.left_in is not None
    assert (found.left_in / "groups").read_text() == "groups of 3"


def test_a_torn_part_is_none(run: str) -> None:
    write(run, 3, 4)
    for folder in left_by(run):
        if "-00000004-" in folder.name:
            state = folder / "state.json"
            state.write_text(
                state.read_text().replace('"ordinal": 32', '"ordinal": 33')
            )
    left = left_snapshots(run, None, Owner.here())
    assert left is not None and sorted(left.steps) == [3]


NO_SPACE = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [NO_SPACE, TrackingError(f"ledger: {NO_SPACE}")])
def test_without_room_a_run_goes_on_and_leaves_nothing(
    error: Exception, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ledger's part has its own error."""
    names = of_an_ended_process(run)
    snapshots = DriverSnapshots(CONFIG, {})
    snapshots.write(names, finished(3), None)
    for step in (4, 5):
        snapshots.write(names, finished(step, NoRoom("", error)), None)
    assert not left_by(run)
    said = capsys.readouterr().err
    assert said.count("No space left on device") == 1
    assert "set run.recovery.snapshot_every=0" in said


def test_memory_that_a_run_has_left_is_its_own(run: str, tmp_path: Path) -> None:
    names = of_an_ended_process(run)
    DriverSnapshots(CONFIG, {}).write(names, finished(3, Files("x" * (8 << 20))), None)
    assert 8 << 20 <= bytes_left(run) <= 9 << 20
    other = str(tmp_path / "another")
    before = shutil.disk_usage("/dev/shm").free
    # Whoever starts takes its place, but a look removes nothing.
    for each in (run, other, None):
        assert available_bytes(each) >= before + bytes_left(run)
    assert len(left_by(run)) == 1
    remove_stale(shared_folder())
    assert not left_by(run)
