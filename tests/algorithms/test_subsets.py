"""best@k, pass@k and maj@k, by hand and by counting."""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import pytest

from verl_ray.algorithms import subsets
from verl_ray.algorithms.subsets import (
    NO_ANSWER,
    best_of,
    majority_of,
    pass_at,
    sample_sizes,
)

NAN = math.nan

RIGHT = np.array([[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]], float)
"""Four problems, of whose responses c = 0, 1, 2 and 4 are right."""


def majority(values: list[float], votes: str, k: int) -> float:
    """The majority of one problem's responses; a dot stands for no answer."""
    numbers = [NO_ANSWER if vote == "." else ord(vote) for vote in votes]
    answers = np.array([numbers], np.int32)
    return float(majority_of(np.array([values], float), answers, k)[0])


def test_sizes_are_powers_of_two_and_the_group() -> None:
    assert sample_sizes(1) == [1]
    assert sample_sizes(6) == [1, 2, 4, 6]
    assert sample_sizes(8) == [1, 2, 4, 8]


def test_pass_at_k_by_hand() -> None:
    """1 - C(4 - c, k) / C(4, k)."""
    assert pass_at(RIGHT, 1) == pytest.approx([0, 1 / 4, 1 / 2, 1])
    assert pass_at(RIGHT, 2) == pytest.approx([0, 1 / 2, 1 - 1 / 6, 1])
    assert pass_at(RIGHT, 4) == pytest.approx([0, 1, 1, 1])


def test_pass_at_k_is_the_best_of_accuracies() -> None:
    random = np.random.default_rng(0)
    right = (random.random((50, 32)) < random.random((50, 1))).astype(float)
    right[random.random(right.shape) < 0.1] = NAN
    for k in (1, 2, 7, 16, 32):
        np.testing.assert_allclose(pass_at(right, k), best_of(right, k), atol=1e-12)
    # C(2000, 1000) is far beyond float64.
    many = np.zeros((1, 2000))
    many[0, :1000] = 1
    assert pass_at(many, 1)[0] == pytest.approx(0.5)
    assert pass_at(many, 1000)[0] == 1


def test_the_best_of_any_scores_is_the_mean_over_all_choices() -> None:
    values = np.random.default_rng(0).normal(size=(3, 6))
    for k in (1, 2, 4, 6):
        expected = [
            np.mean([max(chosen) for chosen in itertools.combinations(row, k)])
            for row in values
        ]
        assert best_of(values, k) == pytest.approx(expected)


def test_a_response_without_a_score_is_not_chosen() -> None:
    values = np.array([[NAN, 1, NAN, 3], [2, NAN, NAN, NAN]])
    # The second problem has no two scores, and neither has four.
    assert best_of(values, 2) == pytest.approx([3, NAN], nan_ok=True)
    assert np.isnan(best_of(values, 4)).all()
    answers = np.array([[0, 1, 0, 1], [0, 1, 1, 1]], np.int32)
    assert majority_of(values, answers, 2) == pytest.approx([2, NAN], nan_ok=True)


def test_the_majority_by_hand() -> None:
    # a wins of all four; of two, a pair of a's among six pairs wins alone, b and c do
    # half or not at all: (1 + 4 * 1/2 + 0) / 6.
    assert majority([1, 1, 0, 0], "aabc", 4) == 1
    assert majority([1, 1, 0, 0], "aabc", 2) == pytest.approx(3 / 6)
    assert majority([1, 1, 0, 0], "aabc", 1) == 1 / 2
    # A tie of two answers, and a wrong majority.
    assert majority([1, 1, 0, 0], "aabb", 4) == 1 / 2
    assert majority([1, 0, 0, 0], "abbb", 4) == 0
    # The same answer may have other scores: its own is their mean.
    assert majority([1, 0.5, 0], "aab", 3) == 0.75


def test_a_response_without_an_answer_does_not_vote() -> None:
    assert majority([1, 0, 0, 0], "a...", 4) == 1
    # Of the six pairs three have the answer.
    assert majority([1, 0, 0, 0], "a...", 2) == 1 / 2
    # Where nobody votes, any response is taken.
    assert majority([0.25, 0.75], "..", 2) == 1 / 2


def test_the_majority_of_many_responses_is_estimated() -> None:
    """8 of 16 right ones with one answer, and 8 wrong ones with two others."""
    values = [1.0] * 8 + [0.0] * 8
    votes = "a" * 8 + "bbbbcccc"
    k = 8
    expected = []
    for chosen in itertools.combinations(range(16), k):
        counts = dict.fromkeys("abc", 0)
        for place in chosen:
            counts[votes[place]] += 1
        winners = [vote for vote in "abc" if counts[vote] == max(counts.values())]
        expected.append(("a" in winners) / len(winners))
    estimate = majority(values, votes, k)
    # Five standard errors.
    error = np.std(expected) / math.sqrt(2000)
    assert abs(estimate - np.mean(expected)) < 5 * error < 0.06
    assert estimate == majority(values, votes, k)


def shares(votes: list[int]) -> dict[int, float]:
    """How much of a subset each answer wins, by counting."""
    counts = {vote: votes.count(vote) for vote in votes if vote != NO_ANSWER}
    most = max(counts.values(), default=0)
    winners = [vote for vote in counts if counts[vote] == most] or [NO_ANSWER]
    return dict.fromkeys(winners, 1 / len(winners))


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_the_majorities_of_many_prompts_are_counted_together(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(k)
    answers = random.integers(NO_ANSWER, random.integers(1, 7, (40, 1)), (40, 6))
    answers = answers.astype(np.int32)
    values = random.random((40, 6))
    values[random.random(values.shape) < 0.1] = NAN

    expected = []
    for row, votes in zip(values, answers, strict=True):
        members = np.flatnonzero(~np.isnan(row))
        score = {vote: np.nanmean(row[votes == vote]) for vote in set(votes[members])}
        wins = [
            sum(score[vote] * share for vote, share in shares(chosen).items())
            for chosen in map(list, itertools.combinations(votes[members].tolist(), k))
        ]
        expected.append(np.mean(wins) if wins else NAN)

    found = majority_of(values, answers, k)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # However many fit into the memory at once.
    monkeypatch.setattr(subsets, "_VOTES_AT_ONCE", 50)
    np.testing.assert_allclose(majority_of(values, answers, k), found, rtol=1e-6)


def test_the_number_of_calls_does_not_grow_with_the_prompts() -> None:
    right = (np.arange(8) < np.arange(400)[:, None] % 8).astype(float)
    answers = right.astype(np.int32)
    majority_of(right[:1], answers[:1], 4)

    def calls(prompts: int) -> int:
        events: list[str] = []
        sys.setprofile(lambda frame, event, argument: events.append(event))
        majority_of(right[:prompts], answers[:prompts], 4)
        sys.setprofile(None)
        return events.count("call")

    assert calls(400) == calls(40) > 0
