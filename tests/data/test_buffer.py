"""The buffer hands on whole groups, in the order of their rows, and refuses what is too
old.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.rows import rollouts_of
from verl_ray.data.batch import Ragged
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.data.sharded import Receipt, Sharded
from verl_ray.data.stages import Rollouts, Scores, versions_of
from verl_ray.errors import DataError

SPANS = {"old": [[2, 3]], "new": [[2, 4]], "both": [[2, 3], [4, 4]]}
"""A prompt of two tokens, and responses of versions 3, 4, or first 3 and then 4."""


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
    with pytest.raises(DataError, match="group 0 gets 1 rows more than it waits for"):
        made.put(piece(0, 1, 1))
    with pytest.raises(DataError, match="group 7 gets 1 rows more"):
        made.put(piece(14))  # nobody asked for it
    with pytest.raises(DataError, match="group 7 gets 1 rows more"):
        made.put(piece(0, 14))
    assert made.missing(np.array([0])) == 2  # what was refused counts for nothing
    with pytest.raises(DataError, match="these are reserved already: 0"):
        made.reserve(np.array([0]))
    with pytest.raises(DataError, match="the groups 5 are not being generated"):
        made.take(np.array([5]), 4, never)


def test_groups_that_are_dropped_may_be_drawn_again() -> None:
    made = buffer(0, 1)
    made.put(piece(0, 2, 3))
    made.drop(np.array([0]))
    made.reserve(np.array([0]))
    made.put(piece(1, 0))
    assert scores(made.take(np.array([0, 1]), 4, never)) == [0, 1, 2, 3]


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


def test_a_response_without_tokens_has_no_age() -> None:
    made = buffer(0)
    made.put(piece(0, 1, tokens=0))
    assert made.take(np.array([0]), 9, never).rollouts.row(
        "oldest_version"
    ).tolist() == [-1, -1]
