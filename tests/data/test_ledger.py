"""Each ordinal is settled once, over restarts too, and the parts hold what happened."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.data.ledger import (
    Event,
    History,
    Ledger,
    Settled,
    drop_later_parts,
    read_parts,
)
from verl_ray.errors import DataError, TrackingError


def ids(*ordinals: int) -> np.ndarray:
    return np.array(ordinals, np.int64)


def finish(ledger: Ledger, *ordinals: int, oldest: int = 0, newest: int = 0) -> None:
    count = len(ordinals)
    ledger.finish(ids(*ordinals), np.full(count, oldest), np.full(count, newest))


def finished(folder: Path, *ordinals: int) -> Ledger:
    """A ledger with these ordinals drawn and finished, of version 0."""
    ledger = Ledger(folder)
    ledger.draw(ids(*ordinals), 0)
    finish(ledger, *ordinals)
    return ledger


def resumed(ledger: Ledger, folder: Path, step: int = 0) -> Ledger:
    """The ledger of the process that goes on from the state of this one."""
    state = json.loads(json.dumps(ledger.state()))
    return from_state(state, folder, step)


def from_state(state: dict, folder: Path, step: int) -> Ledger:
    drop_later_parts(folder, step)
    following = Ledger(folder)
    following.load_state(state)
    return following


def events(history: History) -> list[tuple[str, int]]:
    return [(Event(row["event"]).name, int(row["ordinal"])) for row in history.rows]


# --------------------------------------------------------------------------- exactly once


def test_frontier_holes_and_waiting_groups_are_the_state(tmp_path: Path) -> None:
    ledger = finished(tmp_path, 0, 1, 2, 3, 4, 5, 7, 9)
    ledger.draw(ids(6, 8), 1)
    ledger.train(ids(1, 0, 2), 1)
    ledger.reject(ids(4, 5, 7), "all alike")
    ledger.reject(ids(10), "too long")
    assert ledger.state() == {
        "frontier": 3,
        "holes": [[4, 6], [7, 8], [10, 11]],
        "finished": [[3, 4], [9, 10]],
        "restarts": 0,
    }

    ledger.train(ids(3), 2)
    finish(ledger, 6)
    ledger.train(ids(6), 2)
    assert ledger.state()["frontier"] == 8
    assert ledger.state()["holes"] == [[10, 11]]


def test_what_is_settled_or_not_finished_cannot_be_trained(tmp_path: Path) -> None:
    ledger = finished(tmp_path, *range(4))
    ledger.train(ids(0, 1), 1)
    ledger.reject(ids(3), "too long")
    ledger.draw(ids(4, 5), 0)
    before = ledger.state()

    refusals = [
        ((1, 2), "ordinals 1 cannot be trained: they were trained or rejected before"),
        ((2, 3), "ordinals 3 cannot be trained: they were trained or rejected before"),
        ((2, 4, 5), "ordinals 4, 5 cannot be trained: they are not finished"),
        ((2, 6), "ordinals 6 cannot be trained: they were not drawn"),
        ((2, 2), "ordinals 2 cannot be trained: they are named twice"),
    ]
    for ordinals, message in refusals:
        with pytest.raises(DataError, match=message):
            ledger.train(ids(*ordinals), 2)
    for call in (
        lambda: ledger.draw(ids(0), 1),
        lambda: ledger.reject(ids(3), "again"),
        lambda: finish(ledger, 2),
        lambda: finish(ledger, 6),
    ):
        with pytest.raises(DataError):
            call()
    # A refused call notes nothing, not even of the ordinals that are right.
    assert ledger.state() == before
    ledger.train(ids(2), 2)


def test_a_resumed_run_trains_the_finished_and_draws_the_others_again(
    tmp_path: Path,
) -> None:
    ledger = finished(tmp_path, 0, 1, 2, 5)
    ledger.draw(ids(3, 4), 1)
    ledger.train(ids(0, 2), 1)

    following = resumed(ledger, tmp_path)
    assert following.state()["restarts"] == 1
    for gone in (3, 4):
        with pytest.raises(DataError, match="were not drawn"):
            finish(following, gone)
    with pytest.raises(DataError, match="were trained"):
        following.train(ids(2), 2)
    following.draw(ids(3, 4), 1)
    # A finished group may be trained as it is, or drawn again.
    following.draw(ids(5), 1)
    finish(following, 3, 4, 5)
    following.train(ids(1, 3), 2)
    following.train(ids(4, 5), 3)
    assert following.state() == {
        "frontier": 6,
        "holes": [],
        "finished": [],
        "restarts": 1,
    }


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 20))
def test_any_order_of_events_settles_each_ordinal_once(
    choices: list[int], seed: int
) -> None:
    """The state is that of plain sets, whatever comes when, over a resume each time."""
    rng = np.random.default_rng(seed)
    folder = Path("unused")
    ledger = Ledger(folder)
    drawn, done, settled, further = set(), set(), set(), 0
    for choice in choices:
        if choice == 0:
            new = set(range(further, further + 3))
            further += 3
            ledger.draw(ids(*new), 0)
            drawn |= new
        elif choice == 1 and drawn:
            some = set(rng.choice(sorted(drawn), 1 + len(drawn) // 2, replace=False))
            finish(ledger, *some)
            drawn, done = drawn - some, done | some
        elif choice == 2 and done:
            some = set(rng.choice(sorted(done), 1 + len(done) // 2, replace=False))
            ledger.train(ids(*some), 1)
            done, settled = done - some, settled | some
        elif choice == 3:
            state = json.loads(json.dumps(ledger.state()))
            ledger = Ledger(folder)
            ledger.load_state(state)
            if drawn:
                ledger.draw(ids(*drawn), 0)

    state = ledger.state()
    holes = {n for first, end in state["holes"] for n in range(first, end)}
    assert set(range(state["frontier"])) | holes == settled
    assert state["frontier"] not in settled
    assert not holes or min(holes) > state["frontier"]
    assert {n for a, b in state["finished"] for n in range(a, b)} == done


# ------------------------------------------------------------------------------- history


def test_the_parts_have_every_event_with_its_columns(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.parquet")
    ledger.draw(ids(0, 1, 2), 4)
    ledger.finish(ids(2, 0), ids(4, -1), ids(5, -1))
    ledger.train(ids(0), 6)
    ledger.reject(ids(2), "too long")
    ledger.state()
    ledger.write(6)

    part = tmp_path / "ledger.parquet" / "step_00000006.parquet"
    table = pyarrow.parquet.ParquetFile(part).read()
    assert {name: str(kind) for name, kind in zip(table.schema.names, table.schema.types, strict=True)} == {
        "event": "dictionary<values=string, indices=int8, ordered=0>",
        "ordinal": "int64",
        "step": "int32",
        "oldest_version": "int64",
        "newest_version": "int64",
        "restart": "int16",
        "reason": "dictionary<values=string, indices=int32, ordered=0>",
        "time": "double",
    }  # fmt: skip
    columns = table.drop(["time"]).to_pydict()
    assert [list(row) for row in zip(*columns.values(), strict=True)] == [
        ["drawn", 0, None, 4, 4, 0, None],
        ["drawn", 1, None, 4, 4, 0, None],
        ["drawn", 2, None, 4, 4, 0, None],
        ["finished", 2, None, 4, 5, 0, None],
        ["finished", 0, None, None, None, 0, None],
        ["trained", 0, 6, None, None, 0, None],
        ["rejected", 2, None, None, None, 0, "too long"],
    ]

    # What is read is what was written.
    history = read_parts(tmp_path / "ledger.parquet")
    assert history.rows["oldest_version"].tolist() == [4, 4, 4, 4, -1, -1, -1]
    assert history.rows["step"].tolist() == [-1, -1, -1, -1, -1, 6, -1]
    assert history.rows["reason"].tolist() == [-1] * 6 + [0]
    assert history.reasons == ["too long"]
    assert np.diff(history.rows["time"]).min() >= 0
    assert history.begins_at == Settled(0, [])


def test_a_part_ends_where_the_state_of_its_checkpoint_does(tmp_path: Path) -> None:
    """A part may be written late: events since the state belong to the next part."""
    ledger = finished(tmp_path, 0, 1)
    ledger.train(ids(0), 1)
    state = json.loads(json.dumps(ledger.state()))
    ledger.reject(ids(1), "too long")
    ledger.write(1)
    assert events(read_parts(tmp_path))[-1] == ("TRAINED", 0)

    # Killed here, the run rejects the ordinal again, and the history has it once.
    following = from_state(state, tmp_path, 1)
    following.reject(ids(1), "too long")
    following.state()
    following.write(2)
    assert events(read_parts(tmp_path)).count(("REJECTED", 1)) == 1
    assert read_parts(tmp_path).rows["restart"].tolist() == [0] * 5 + [1]

    # Without a kill the next part has it.
    ledger.state()
    ledger.write(2)
    assert events(read_parts(tmp_path))[-1] == ("REJECTED", 1)
    assert read_parts(tmp_path).rows["restart"].tolist() == [0] * 6


def test_a_checkpoint_that_is_written_again_has_the_events_of_the_first_time(
    tmp_path: Path,
) -> None:
    """A rank may die after the part was written and before the checkpoint counts."""
    ledger = finished(tmp_path, 0, 1)
    ledger.train(ids(0), 1)
    state = json.loads(json.dumps(ledger.state()))
    bookmark = ledger.bookmark
    ledger.write(1)

    following = Ledger(tmp_path)
    following.load_state(state)
    following.inherit(ledger, bookmark)
    # Finished meanwhile, and not generated again.
    following.draw(ids(2), 1)
    finish(following, 2)
    following.state()
    following.write(1)
    expected = [
        *(("DRAWN", 0), ("DRAWN", 1), ("FINISHED", 0), ("FINISHED", 1)),
        *(("TRAINED", 0), ("DRAWN", 2), ("FINISHED", 2)),
    ]
    assert events(read_parts(tmp_path)) == expected

    # The part of another step has what came since.
    following.train(ids(1), 2)
    following.state()
    following.write(2)
    assert events(read_parts(tmp_path)) == [*expected, ("TRAINED", 1)]


def test_a_run_goes_back_behind_a_part_whose_checkpoint_does_not_count(
    tmp_path: Path,
) -> None:
    """Another rank has lost the snapshot of its step."""
    ledger = finished(tmp_path, 0, 1)
    ledger.train(ids(0), 1)
    state = json.loads(json.dumps(ledger.state()))
    bookmark = ledger.bookmark
    ledger.train(ids(1), 2)
    ledger.state()
    ledger.write(2)

    drop_later_parts(tmp_path, 1)
    following = Ledger(tmp_path)
    following.load_state(state)
    following.inherit(ledger, bookmark)
    following.train(ids(1), 2)
    following.state()
    following.write(2)
    assert events(read_parts(tmp_path)) == [
        *(("DRAWN", 0), ("DRAWN", 1), ("FINISHED", 0), ("FINISHED", 1)),
        *(("TRAINED", 0), ("TRAINED", 1)),
    ]
    assert read_parts(tmp_path).rows["restart"].tolist() == [0] * 5 + [1]


@pytest.mark.parametrize("last_saved", [0, 1, 2])
def test_the_next_driver_has_the_events_that_no_part_has(
    last_saved: int, tmp_path: Path
) -> None:
    """A driver is killed whose snapshot of step 2 is whole, in whatever state the
    checkpoints of steps 1 and 2 are.
    """
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    earlier = finished(tmp_path, *range(6))
    earlier.train(ids(0), 1)
    earlier.state()
    if last_saved:
        earlier.write(1)
    earlier.train(ids(1), 2)
    earlier.state()
    earlier.keep(snapshot, 2)
    state = json.loads(json.dumps(earlier.state()))
    if last_saved == 2:
        earlier.write(2)
    earlier.train(ids(2), 3)

    def gone_on() -> Ledger:
        following = Ledger(tmp_path)
        following.load_state(state)
        following.take_back(snapshot)
        return following

    # It may be killed as well, before or after its next snapshot.
    following = gone_on()
    following.state()
    again = tmp_path / "again"
    again.mkdir()
    following.keep(again, 2)
    snapshot = again
    following = gone_on()
    following.train(ids(2), 3)
    following.state()
    following.write(3)
    assert events(read_parts(tmp_path)) == [
        *(("DRAWN", ordinal) for ordinal in range(6)),
        *(("FINISHED", ordinal) for ordinal in range(6)),
        *(("TRAINED", ordinal) for ordinal in range(3)),
    ]
    assert read_parts(tmp_path).rows["restart"].tolist() == [0] * 14 + [1]


def test_a_run_that_goes_back_forgets_the_parts_of_later_steps(tmp_path: Path) -> None:
    ledger = finished(tmp_path, *range(6))
    states = {}
    for step in (1, 2, 3):
        ledger.train(ids(2 * step - 2, 2 * step - 1), step)
        states[step] = ledger.state()
        ledger.write(step)
    ledger.draw(ids(6), 3)
    ledger.close()
    (tmp_path / "step_00000004.parquet.part").write_bytes(b"cut short")
    (tmp_path / "mine.parquet").write_bytes(b"no part")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.parquet",
        "step_00000001.parquet",
        "step_00000002.parquet",
        "step_00000003.parquet",
        "step_00000004.parquet.part",
        "unsaved.parquet",
    ]
    assert events(read_parts(tmp_path))[-1] == ("DRAWN", 6)

    following = from_state(states[1], tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.parquet",
        "step_00000001.parquet",
    ]
    following.train(ids(2, 3), 2)
    following.close()
    rows = read_parts(tmp_path).of(Event.TRAINED)
    assert rows["ordinal"].tolist() == [0, 1, 2, 3]
    assert rows["restart"].tolist() == [0, 0, 1, 1]


def test_a_run_without_checkpoints_writes_at_its_end(tmp_path: Path) -> None:
    ledger = finished(tmp_path, 0, 1)
    for step in (1, 2):
        ledger.train(ids(step - 1), step)
        ledger.state()
    assert not list(tmp_path.iterdir())
    ledger.close()
    ledger.close()
    assert read_parts(tmp_path).of(Event.TRAINED)["step"].tolist() == [1, 2]


def test_a_run_from_another_folder_begins_where_that_one_was(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", 0, 1, 2, 3)
    first.train(ids(0, 1), 1)
    first.reject(ids(3), "too long")

    following = resumed(first, tmp_path / "second", 1)
    following.train(ids(2), 2)
    following.state()
    following.write(2)
    following.draw(ids(4), 2)
    following.close()
    assert read_parts(tmp_path / "second").begins_at == Settled(2, [[3, 4]])


def test_a_part_that_is_damaged_is_named(tmp_path: Path) -> None:
    ledger = finished(tmp_path, 0)
    ledger.close()
    part = tmp_path / "unsaved.parquet"
    content = part.read_bytes()
    for damaged in (content[:-20], content[: len(content) // 2], b""):
        part.write_bytes(damaged)
        with pytest.raises(TrackingError, match=r"unsaved\.parquet: cannot be read"):
            read_parts(tmp_path)

    pyarrow.parquet.write_table(pyarrow.table({"event": ["drawn"]}), part)
    with pytest.raises(TrackingError, match=r"unsaved\.parquet: cannot be read"):
        read_parts(tmp_path)


def test_a_part_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    """The events stay until a part has them."""
    ledger = finished(tmp_path / "ledger.parquet", 0)
    (tmp_path / "ledger.parquet").write_text("a file in the place of the folder")
    ledger.state()
    with pytest.raises(TrackingError, match=r"run\.dir"):
        ledger.write(1)
    (tmp_path / "ledger.parquet").unlink()
    ledger.write(1)
    assert events(read_parts(tmp_path / "ledger.parquet")) == [
        ("DRAWN", 0),
        ("FINISHED", 0),
    ]


def test_the_memory_is_that_of_what_is_not_written(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    sizes = set()
    for step in range(1, 30):
        ordinals = np.arange(64) + 64 * step - 64
        ledger.draw(ordinals, step - 1)
        finish(ledger, *ordinals)
        ledger.train(ordinals, step)
        ledger.state()
        ledger.write(step)
        sizes.add((len(ledger._rows), len(ledger._last_events)))
    assert sizes == {(0, 0)}


def test_replayed_ordinals_stay_settled(tmp_path: Path) -> None:
    ledger = finished(tmp_path, 0, 1, 2)
    ledger.train(ids(0, 1), 1)
    with pytest.raises(
        DataError, match="ordinals 2 cannot be replayed: they are finished"
    ):
        ledger.replay(ids(0, 2), 2)
    ledger.replay(ids(1, 0), 2)
    ledger.train(ids(2), 2)
    ledger.state()
    ledger.write(2)
    history = read_parts(tmp_path)
    replayed = history.of(Event.REPLAYED)
    assert replayed["ordinal"].tolist() == [1, 0]
    assert replayed["step"].tolist() == [2, 2]
    assert history.of(Event.TRAINED)["ordinal"].tolist() == [0, 1, 2]
    assert ledger.state()["frontier"] == 3
