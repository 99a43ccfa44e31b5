"""The version of each token, and the two bounds on its age."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rows import rollouts_of
from verl_ray.columns.batch import Ragged
from verl_ray.columns.stages import Rollouts
from verl_ray.data.token_versions import OptimizerSteps, versions_of_tokens
from verl_ray.errors import DataError


def rows_of(
    responses: Sequence[int], *spans: Sequence[tuple[int, int]], prompt: int = 2
) -> Rollouts:
    """Rows with prompts of two tokens; spans count from the beginning of the row."""
    rollouts = rollouts_of(responses, prompts=[prompt] * len(responses))
    pairs = [np.reshape(row, (-1, 2)) for row in spans]
    return rollouts.replace(version_spans=Ragged.of_rows(pairs, np.int64))


def versions(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


# ------------------------------------------------------------------------ each token's


def test_a_span_holds_up_to_the_next_one() -> None:
    rows = rows_of([4, 1, 3], [(2, 5), (4, 6)], [(2, 7)], [(2, 3), (3, 4), (4, 9)])
    assert versions_of_tokens(rows).tolist() == [5, 5, 6, 6, 7, 3, 4, 9]


def test_rows_without_tokens_have_no_versions() -> None:
    assert versions_of_tokens(rows_of([0, 0], [], [])).tolist() == []
    rows = rows_of([0, 2, 0, 1, 0], [], [(2, 5)], [], [(2, 4)], [])
    assert versions_of_tokens(rows).tolist() == [5, 5, 4]
    assert versions_of_tokens(rows.select(np.array([], np.int64))).tolist() == []


def test_tokens_outside_the_mask_are_left_out() -> None:
    """A span may go on over tokens that the policy did not choose."""
    rows = rows_of([5], [(2, 5), (5, 6)])
    mask = rows.response_mask.copy()
    mask[[3, 5]] = False
    assert versions_of_tokens(rows.replace(response_mask=mask)).tolist() == [5, 5, 6]


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[(2, 5)], [], [(2, 4)]], "2 of 7 response tokens have no policy version"),
        ([[(2, 5)], [(2, 5)], [(3, 4)]], "1 of 7 response tokens have no"),
        ([[], [], []], "7 of 7 response tokens have no"),
    ],
    ids=["a row without a span", "a span that begins late", "no span"],
)
def test_a_token_without_a_version_gets_none_of_another_row(
    spans: list[list[tuple[int, int]]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        versions_of_tokens(rows_of([2, 2, 3], *spans))


_ROW = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=3)


@given(st.lists(_ROW, min_size=1))
def test_versions_are_those_of_any_spans(drawn: list[list[tuple[int, int]]]) -> None:
    """Each row is given as (tokens, version) one after another."""
    spans = []
    for row in drawn:
        starts = np.cumsum([2] + [count for count, _ in row])
        spans.append([(int(starts[i]), version) for i, (_, version) in enumerate(row)])
    rows = rows_of([sum(count for count, _ in row) for row in drawn], *spans)
    expected = [v for row in drawn for count, v in row for _ in range(count)]
    assert versions_of_tokens(rows).tolist() == expected


# --------------------------------------------------------------------------- both bounds


def published(staleness: int, updates: int, *made: int) -> OptimizerSteps:
    """Counts after version 0, and further versions with so many updates before each."""
    steps = OptimizerSteps(staleness, updates)
    steps.publish(0)
    for version, count in enumerate(made, start=1):
        steps.add(count)
        steps.publish(version)
    return steps


def test_one_update_a_step_counts_versions() -> None:
    ages = published(2, 1, 1, 1, 1).ages(0)
    assert (ages.present, ages.bound, ages.stale_rows) == (3, 2, True)
    assert dict(ages.optimizer_steps) == {1: 2, 2: 1, 3: 0}
    assert ages.count(versions(3, 1, 1, 2, 3, 3)) == {1: 2, 2: 1, 3: 3}
    assert ages.count(versions()) == {}


def test_each_update_of_a_step_makes_tokens_older() -> None:
    """With U = 4 and s = 1, update u sees tokens of at most 4 + u optimizer steps."""
    steps = published(1, 4, 4, 4)
    for update in range(4):
        ages = steps.ages(update)
        assert ages.bound == 4 + update
        assert dict(ages.optimizer_steps) == {1: 4 + update, 2: update}
        assert ages.count(versions(1, 2)) == {1: 1, 2: 1}


def test_updates_that_were_left_out_do_not_count() -> None:
    """A mini-batch without a row to learn from makes no optimizer step."""
    ages = published(2, 4, 4, 1, 0).ages(1)
    assert dict(ages.optimizer_steps) == {1: 2, 2: 1, 3: 1}
    assert ages.bound == 9


@pytest.mark.parametrize("tokens", [(1, 0), (0, 0)], ids=["some", "all"])
def test_more_optimizer_steps_than_a_training_step_makes_are_refused(
    tokens: tuple[int, ...],
) -> None:
    """The version alone would be young enough. The time in the queue counts: tokens of
    one version are as old as those beside younger ones.
    """
    ages = published(1, 2, 3).ages(0)
    with pytest.raises(
        DataError,
        match=r"policy version 0, which is 3 steps old; allowed are the versions 0, 1,"
        r" at most 2 optimizer steps old \(rollout\.staleness, algorithm\.replay_age\)",
    ):
        ages.count(versions(*tokens))


@pytest.mark.parametrize("version", [1, 5])
def test_too_old_and_yet_to_come(version: int) -> None:
    ages = published(2, 1, 1, 1, 1, 1).ages(0)
    assert ages.count(versions(2, 3, 4)) == {2: 1, 3: 1, 4: 1}
    with pytest.raises(
        DataError,
        match=rf"policy version {version}, which is not allowed; allowed are the"
        " versions 2, 3, 4",
    ):
        ages.count(versions(4, version))


def test_a_synchronous_run_learns_from_the_present_version_alone() -> None:
    steps = published(0, 3, 3)
    for update in range(3):
        ages = steps.ages(update)
        assert not ages.stale_rows
        assert ages.count(versions(1, 1)) == {1: 2}
        with pytest.raises(DataError, match="policy version 0, which is not allowed"):
            ages.count(versions(1, 0))


def test_the_counts_go_on_over_a_resume() -> None:
    """A resumed run publishes the version that it goes on from again."""
    steps = published(2, 4, 4, 2)
    resumed = OptimizerSteps(2, 4)
    resumed.load_state(json.loads(json.dumps(steps.state())))
    resumed.publish(2)
    assert resumed.ages(1) == steps.ages(1)
    assert dict(resumed.ages(1).optimizer_steps) == {0: 7, 1: 3, 2: 1}
    for counts in (steps, resumed):
        counts.add(4)
        counts.publish(3)
    assert dict(resumed.ages(0).optimizer_steps) == {1: 6, 2: 4, 3: 0}
    assert resumed.state() == steps.state()


def test_a_smaller_bound_forgets_versions_and_a_larger_one_has_none_yet() -> None:
    state = published(2, 1, 1, 1).state()
    for staleness, known in ((1, [1, 2]), (3, [0, 1, 2])):
        resumed = OptimizerSteps(staleness, 1)
        resumed.load_state(state)
        resumed.publish(2)
        assert sorted(resumed.ages(0).optimizer_steps) == known
