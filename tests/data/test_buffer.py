"""The buffer hands on whole groups, in the order of their rows, and refuses what is too
old.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.rows import rollouts_of
from verl_ray.columns.batch import Ragged
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.columns.stages import Rollouts, Scores, versions_of
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.errors import DataError

SPANS = {"old": [[2, 3]], "new": [[2, 4]], "both": [[2, 3], [4, 4]], "none": []}
"""A prompt of two tokens, and responses of versions 3, 4, first 3 and then 4, or none."""


def piece(*rows: int, spans: str = "new", tokens: int = 4) -> Experience:
    """Scored rows, of groups of two. Their scores are their numbers."""
    drawn = rollouts_of([tokens] * len(rows), groups=[row // 2 for row in rows])
    versions = Ragged.of_rows(
        [np.reshape(SPANS[spans] if tokens else [], (-1, 2)) for _ in rows], np.int64
    )
    drawn = drawn.replace(
        row_id=np.array(rows), version_spans=versions, **versions_of(versions)
    )
    return Experience(
        stored(drawn), {"reward": stored(Scores.ok(np.array(rows, np.float32)))}
    )


def stored(batch: Rollouts | Scores) -> Sharded:
    return Sharded.stored(batch, Receipt.of(batch))


def never() -> None:
    raise AssertionError("nothing is missing")


def buffer(*groups: int, staleness: int = 0) -> RolloutBuffer:
    made = RolloutBuffer(2, staleness)
    made.reserve(np.array(groups))
    return made


def scores(taken: Experience) -> list[float]:
    assert (
        taken.rollouts.row("row_id").tolist()
        == taken.scores["reward"].row("score").tolist()
    )
    return taken.rollouts.row("row_id").tolist()


def test_groups_come_whole_in_any_order_of_rows() -> None:
    made = buffer(0, 1, 2)
    for rows in ((5, 0), (3,), (1, 2, 4)):
        made.put(piece(*rows))
    assert scores(made.take(np.array([0, 2]), 4, never)) == [0, 1, 4, 5]
    assert scores(made.take(np.array([1]), 4, never)) == [2, 3]
    made.reserve(np.array([0]))  # taken, so it may be drawn again
    assert made.missing(np.array([0])) == 2


def test_take_waits_for_what_is_missing() -> None:
    made = buffer(0, 1)
    coming = [piece(3), piece(0), piece(1, 2)]
    assert made.missing(np.array([0])) == 2
    wait: Callable[[], None] = lambda: made.put(coming.pop(0))  # noqa: E731
    assert scores(made.take(np.array([0]), 4, wait)) == [0, 1]
    assert not coming and scores(made.take(np.array([1]), 4, never)) == [2, 3]


def test_each_row_is_put_once() -> None:
    made = buffer(0)
    with pytest.raises(DataError, match="the rows 1 came twice"):
        made.put(piece(0, 1, 1))
    with pytest.raises(DataError, match="group 7 gets 1 responses more"):
        made.put(piece(14))  # nobody asked for it
    with pytest.raises(DataError, match="group 7 gets 1 responses more"):
        made.put(piece(0, 14))
    assert made.missing(np.array([0])) == 2  # what was refused counts for nothing
    with pytest.raises(DataError, match="these are reserved already: 0"):
        made.reserve(np.array([0]))
    with pytest.raises(DataError, match="the groups 5 are not being generated"):
        made.take(np.array([5]), 4, never)


def test_whole_groups_stay_where_they_are() -> None:
    made = buffer(0, 1, 2, 3)
    assert made.whole() is None and made.whole_groups.tolist() == []
    made.put(piece(7, 0, 3))
    assert made.whole() is None  # no group has both of its rows
    made.put(piece(2))
    made.put(piece(4, 6))

    whole = made.whole()
    assert whole is not None and scores(whole) == [2, 3, 6, 7]
    assert made.whole_groups.tolist() == [1, 3]
    made.put(piece(1))
    assert scores(made.take(np.array([0, 1]), 4, never)) == [0, 1, 2, 3]
    whole = made.whole()
    assert whole is not None and scores(whole) == [6, 7]


def test_whole_groups_are_taken_back_in_another_process() -> None:
    before = buffer(0, 1, 2, staleness=1)
    before.put(piece(3, 0, 2, spans="both"))
    whole = before.whole()
    assert whole is not None

    resumed = RolloutBuffer(2, staleness=1)
    resumed.restore(whole)
    assert resumed.whole_groups.tolist() == [1]
    with pytest.raises(DataError, match="these are reserved already: 1"):
        resumed.reserve(np.array([1, 2]))
    resumed.reserve(np.array([0, 2]))
    resumed.put(piece(0, 1))
    taken = resumed.take(np.array([0, 1]), 4, never)
    assert scores(taken) == [0, 1, 2, 3]
    assert taken.rollouts.row("oldest_version").tolist() == [4, 4, 3, 3]


def test_unfinished_groups_may_be_generated_again() -> None:
    made = buffer(0, 1, 2, staleness=1)
    made.put(piece(0, 2, 3, spans="old"))
    made.drop_unfinished()
    assert made.whole_groups.tolist() == [1]
    with pytest.raises(DataError, match="group 0 gets 1 responses more"):
        made.put(piece(1))
    with pytest.raises(DataError, match="these are reserved already: 1"):
        made.reserve(np.array([0, 1]))

    made.reserve(np.array([0, 2]))
    made.put(piece(1, 0))
    assert scores(made.take(np.array([0, 1]), 4, never)) == [0, 1, 2, 3]
    # What was dropped was sampled earlier, and is no part of the group.
    finished = made.take_finished()
    assert finished.ordinals.tolist() == [0, 1]
    assert finished.oldest.tolist() == [4, 3]

    made.drop_unfinished()
    assert made.whole() is None


def test_finished_groups_are_told_once_with_the_versions_of_their_tokens() -> None:
    made = buffer(0, 1, 2, 3, staleness=1)
    made.put(piece(2, spans="new"))
    made.put(piece(0, 1, 5, spans="new"))
    made.put(piece(3, spans="both"))
    taken = made.take(np.array([1]), 4, never)
    assert scores(taken) == [2, 3]

    # Also those that were taken before anybody looked.
    finished = made.take_finished()
    assert finished.ordinals.tolist() == [0, 1]
    assert finished.oldest.tolist() == [4, 3]
    assert finished.newest.tolist() == [4, 4]
    assert made.take_finished().ordinals.tolist() == []

    made.put(piece(4, tokens=0))
    made.put(piece(6, 7, tokens=0))
    finished = made.take_finished()
    assert finished.ordinals.tolist() == [2, 3]
    assert finished.oldest.tolist() == [4, -1]
    assert finished.newest.tolist() == [4, -1]


def test_what_was_taken_is_forgotten() -> None:
    """The memory is that of the groups that are here."""
    made = RolloutBuffer(2, staleness=1)
    for group in range(9):
        made.reserve(np.array([group]))
        made.put(piece(2 * group, 2 * group + 1))
        made.take(np.array([group]), 4, never)
        made.take_finished()
    made.take_queue_s()
    kept = (made._missing, made._stored, made._versions, made._whole_since)
    assert not any(kept) and not made._finished and not made._queue_s


def test_the_time_in_the_queue_is_from_the_last_row_to_the_taking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, 12.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr("verl_ray.data.buffer.time.monotonic", lambda: next(clock))
    made = buffer(0, 1, 2)
    made.put(piece(0, 2))  # 10
    made.put(piece(1))  # 12: group 0 is whole
    made.put(piece(3, 4, 5))  # 13: groups 1 and 2 are
    made.take(np.array([0, 1]), 4, never)  # 20
    assert made.take_queue_s() == ((20 - 12) + (20 - 13)) / 2
    assert made.take_queue_s() == 0.0
    made.take(np.array([2]), 4, never)  # 21
    assert made.take_queue_s() == 21 - 13


@pytest.mark.parametrize(
    ("spans", "staleness", "version", "refused"),
    [
        ("new", 0, 4, None),
        (
            "old",
            0,
            4,
            "versions 3 to 3 were taken for version 4; they may be at most rollout.staleness = 0",
        ),
        (
            "both",
            0,
            4,
            "versions 3 to 4 were taken for version 4",
        ),  # the age is the oldest token's, not the row's
        ("both", 1, 4, None),
        ("both", 1, 5, "versions 3 to 4 were taken for version 5"),
        (
            "new",
            1,
            3,
            "versions 4 to 4 were taken for version 3",
        ),  # a version that is yet to come
    ],
    ids=[
        "now",
        "before",
        "before and now",
        "one behind",
        "two behind",
        "from the future",
    ],
)
def test_every_token_is_young_enough(
    spans: str, staleness: int, version: int, refused: str | None
) -> None:
    made = buffer(0, staleness=staleness)
    made.put(piece(0, 1, spans=spans))
    if refused is None:
        assert scores(made.take(np.array([0]), version, never)) == [0, 1]
    else:
        with pytest.raises(DataError, match=refused):
            made.take(np.array([0]), version, never)


@pytest.mark.parametrize("version", [0, 4])
def test_tokens_without_a_version_are_refused_at_every_version(version: int) -> None:
    made = buffer(0, staleness=1)
    made.put(piece(0, spans="none"))
    made.put(piece(1, tokens=0))
    with pytest.raises(DataError, match="1 responses have tokens without a policy"):
        made.take(np.array([0]), version, never)


def test_a_response_without_tokens_has_no_age() -> None:
    made = buffer(0)
    made.put(piece(0, 1, tokens=0))
    assert made.take(np.array([0]), 9, never).rollouts.row(
        "oldest_version"
    ).tolist() == [-1, -1]
