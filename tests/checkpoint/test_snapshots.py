"""Snapshots of a rank in real files in /dev/shm, also of one that was killed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import resource
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.foreign_files import Planted, give_away
from verl_ray.checkpoint.sharded import Slices
from verl_ray.checkpoint.snapshot_files import SnapshotFiles, SnapshotNames
from verl_ray.checkpoint.snapshots import RankSnapshots
from verl_ray.errors import CheckpointError, UnsafeFile
from verl_ray.ownership import Owner, prefix
from verl_ray.private_files import shared_folder

NAMES = SnapshotNames.of("run")


@pytest.fixture
def place() -> Iterator[str]:
    name = f"{prefix('snapshot')}{secrets.token_hex(4)}-actor-0"
    yield str(shared_folder() / name)
    for path in shared_folder().glob(f"{name}*"):
        path.unlink()


def state_of(value: float) -> dict[str, Any]:
    """Return the state of an engine whose numbers all have one value."""
    box = (slice(2, 4), slice(0, 3))
    sliced = Slices((4, 3), torch.float32, [(box, torch.full((2, 3), value))])
    return {
        "steps": int(value),
        "model": {"a": torch.full((3, 5), value), "b": sliced},
        "optimizer": {
            "state": {"a": {"step": torch.tensor(value), "m": torch.full((7,), value)}},
            "param_groups": [{"lr": value, "betas": (0.9, value)}],
        },
        "rng_0_cpu": torch.full((9,), int(value), dtype=torch.uint8),
    }


def flat(state: dict[str, Any]) -> list[Any]:
    optimizer = state["optimizer"]
    return [
        state["steps"],
        state["model"]["a"].unique().tolist(),
        state["model"]["b"].parts[0][1].unique().tolist(),
        optimizer["state"]["a"]["step"].item(),
        optimizer["state"]["a"]["m"].unique().tolist(),
        optimizer["param_groups"][0]["lr"],
        optimizer["param_groups"][0]["betas"],
        state["rng_0_cpu"].unique().tolist(),
    ]


def test_the_last_two_steps_are_there_value_for_value(place: str) -> None:
    snapshots = RankSnapshots(place, NAMES)
    for step in (1, 2, 5):
        snapshots.begin(step, state_of(step))
    assert sorted(snapshots.steps()) == [2, 5]

    for step in (5, 2):
        state = state_of(0)
        in_place = state["model"]["a"]
        snapshots.load(step, state)
        assert flat(state) == flat(state_of(step))
        assert in_place.unique().tolist() == [step]
    # What followed the step that a run goes back to is void.
    snapshots.follow(NAMES.back_to(2))
    assert snapshots.steps() == [2]
    snapshots.follow(NAMES.anew())
    assert snapshots.steps() == []
    snapshots.close()
    assert not list(shared_folder().glob(f"{Path(place).name}*"))


@pytest.mark.parametrize("slot", [0, 1])
def test_what_another_user_planted_is_refused_and_does_nothing(
    place: str, tmp_path: Path, slot: int
) -> None:
    index = Path(f"{place}-{slot}-index")
    index.write_bytes(pickle.dumps(Planted(tmp_path / "made")))
    give_away(index)
    with pytest.raises(UnsafeFile, match=r"-index has the mode .* another user"):
        RankSnapshots(place, NAMES)

    # Nor does it where it looks as if it were this user's.
    index.unlink()
    index.write_bytes(pickle.dumps(Planted(tmp_path / "made")))
    index.chmod(0o600)
    with pytest.raises(ValueError, match=r"utf-8|Expecting value"):
        RankSnapshots(place, NAMES)
    assert not (tmp_path / "made").exists()


def _take_and_die(place: str, names: SnapshotNames) -> None:
    snapshots = RankSnapshots(place, names)
    snapshots.begin(3, state_of(3))
    snapshots.wait()
    os.kill(os.getpid(), 9)


def test_another_process_finds_what_a_killed_one_left(place: str) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_take_and_die, args=(place, NAMES)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -9

    # Another run of the same driver does not take it for its own.
    assert RankSnapshots(place, SnapshotNames.of("run")).steps() == []
    snapshots = RankSnapshots(place, NAMES)
    assert snapshots.steps() == [3]
    state = state_of(0)
    snapshots.load(3, state)
    assert flat(state) == flat(state_of(3))


def test_a_snapshot_that_is_not_whole_does_not_count(place: str) -> None:
    snapshots = RankSnapshots(place, NAMES)
    snapshots.begin(1, state_of(1))
    snapshots.begin(2, state_of(2))
    snapshots.wait()
    # A process that dies in the next copy has removed the index of the older one.
    Path(f"{place}-0-index").unlink()
    assert RankSnapshots(place, NAMES).steps() == [2]


def test_what_the_run_does_not_go_on_from_is_removed(tmp_path: Path) -> None:
    present = SnapshotNames.of(str(tmp_path))
    earlier = SnapshotNames.of(str(tmp_path))
    another = replace(present, run=str(tmp_path / "another"))
    places = [
        Path(names.place(role, 0))
        for names, role in ((earlier, "critic"), (another, "actor"), (present, "actor"))
    ]
    for place in places:
        place.touch()
    assert present.place("actor", 1).startswith(str(places[2])[:-1])
    assert [place.exists() for place in places] == [False, True, True]
    for place in places:
        place.unlink(missing_ok=True)


def test_the_owner_is_seen_on_the_node_of_the_rank() -> None:
    """Processes of another machine are not, so the parent stands for the driver."""
    elsewhere = replace(Owner.here(), boot=1)
    place = replace(NAMES, owner=elsewhere).place("actor", 0)
    assert str(Owner.of(os.getppid())) in place
    assert str(Owner.here()) in NAMES.place("a", 0)


def test_ranks_load_the_same_step_of_the_same_course(place: str) -> None:
    """Each is killed in a copy of its own, and the steps between are made again."""
    first, second = RankSnapshots(f"{place}a", NAMES), RankSnapshots(f"{place}b", NAMES)
    for step in (4, 5, 6):
        first.begin(step, state_of(step))
    for step in (4, 5):
        second.begin(step, state_of(step))
    assert (sorted(first.steps()), sorted(second.steps())) == ([5, 6], [4, 5])
    for snapshots in (first, second):
        snapshots.follow(NAMES.back_to(5))
        snapshots.load(5, state_of(0))

    # Step 6 is made again with other values, and step 7 is lost with one rank.
    for snapshots in (first, second):
        snapshots.begin(6, state_of(60))
    first.begin(7, state_of(70))
    for snapshots in (first, second):
        assert 6 in snapshots.steps()
        state = state_of(0)
        snapshots.load(6, state)
        assert flat(state) == flat(state_of(60))


def test_what_a_killed_process_still_writes_reaches_no_snapshot(place: str) -> None:
    before = RankSnapshots(place, NAMES)
    before.begin(1, state_of(1))
    before.begin(2, state_of(2))
    before.wait()
    old = before._files.of(1)._memory
    assert old is not None

    after = RankSnapshots(place, NAMES)
    after.begin(3, state_of(3))
    after.wait()
    old[:] = 0
    state = state_of(0)
    after.load(3, state)
    assert flat(state) == flat(state_of(3))


def test_a_copy_elsewhere_is_the_same_and_counts_only_when_whole(place: str) -> None:
    """Its place is the one of the rank on another node."""
    snapshots = RankSnapshots(f"{place}a", NAMES)
    snapshots.begin(3, state_of(3))
    snapshots.wait()
    here, there = SnapshotFiles(f"{place}a", NAMES), SnapshotFiles(f"{place}b", NAMES)
    there.oldest().receive(here.of(3).pieces())
    assert there.steps() == [3]
    state = state_of(0)
    RankSnapshots(f"{place}b", NAMES).load(3, state)
    assert flat(state) == flat(state_of(3))

    # The other place is taken while it is sent: the copy before stays.
    snapshots.begin(4, state_of(4))
    snapshots.wait()
    assert 4 in here.steps()
    pieces = here.of(4).pieces()
    first = next(pieces)
    for step in (5, 6):
        snapshots.begin(step, state_of(step))
    snapshots.wait()
    with pytest.raises(CheckpointError, match="a newer snapshot has taken its place"):
        there.oldest().receive(itertools.chain([first], pieces))
    assert there.steps() == [3]

    # A source that ends early.
    pieces = snapshots._files.of(6).pieces()
    with pytest.raises(
        CheckpointError, match=r"0 of \d+ bytes of a snapshot have come"
    ):
        there.oldest().receive(iter([next(pieces)]))
    assert there.steps() == [3]


def test_what_is_brought_for_a_process_is_not_lost_to_its_older_file(
    place: str,
) -> None:
    """The memory of a file that was replaced reaches nobody."""
    snapshots = RankSnapshots(place, NAMES)
    snapshots.begin(1, state_of(1))
    snapshots.begin(2, state_of(2))
    snapshots.wait()
    other = RankSnapshots(f"{place}b", NAMES)
    other.begin(5, state_of(5))
    other.wait()
    SnapshotFiles(place, NAMES).oldest().receive(other._files.of(5).pieces())
    assert sorted(snapshots.steps()) == [2, 5]
    for step in (6, 7):
        snapshots.begin(step, state_of(step))
    for step in snapshots.steps():
        state = state_of(0)
        RankSnapshots(place, NAMES).load(step, state)
        assert flat(state) == flat(state_of(step))


def test_too_little_memory_is_named_by_the_next_call(place: str) -> None:
    """The limit on the size of a file stands for a full /dev/shm."""
    snapshots = RankSnapshots(place, NAMES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        snapshots.begin(1, state_of(1))
        snapshots.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(CheckpointError, match=r"snapshot_every=0") as error:
        snapshots.begin(2, state_of(2))
    assert "a snapshot of 0 MiB cannot be written to /dev/shm: File too large" in str(
        error.value
    )
    assert snapshots.steps() == []

    snapshots.begin(3, state_of(3))
    assert snapshots.steps() == [3]
