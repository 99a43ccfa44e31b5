"""Scores that k of the n responses to a prompt reach: best@k, pass@k and maj@k.

All are expectations over the subsets of k different responses, which makes them
unbiased estimates of what k fresh responses would reach.

Invariant: pure functions of scores and answers; neither the order of the prompts nor
what other prompts have changes a value.
"""

from __future__ import annotations

import functools
import itertools
import math
from math import nan

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Answers = npt.NDArray[np.int32]

NO_ANSWER = -1
"""Number of a response that has no answer."""

MOST_SUBSETS = 2_000
"""Subsets that maj@k is computed from; where there are more, they are drawn."""

_VOTES_AT_ONCE = 2_000_000
"""Votes, each for an answer to a prompt in a subset, that are in memory at once."""


def sample_sizes(group_size: int) -> list[int]:
    """Return 1, 2, 4, 8 and so on up to the size of a group, and that size."""
    sizes = {2**power for power in range(group_size.bit_length())} | {group_size}
    return sorted(size for size in sizes if 0 < size <= group_size)


def best_of(scores: Float64s, k: int) -> Float64s:
    """Return the expected best score of k responses to each prompt, [prompts].

    It is exact: sum over i of x_(i) * C(i - 1, k - 1) / C(n, k), with x ascending. A
    prompt with fewer than k scores has NaN.

    Args:
        scores: Scores of the responses, [prompts, responses]; NaN for none.
        k: Number of responses, at least 1.
    """
    # Ascending, with what is left out (NaN) at the end.
    ascending = np.sort(scores, axis=1)
    counts = (~np.isnan(scores)).sum(axis=1)

    best = np.full(len(scores), nan)
    for count in np.unique(counts[counts >= k]).tolist():
        has_count = counts == count
        best[has_count] = ascending[has_count, :count] @ _weights_of_best(count, k)
    return best


def pass_at(scores: Float64s, k: int) -> Float64s:
    """Return the probability that any of k responses to each prompt is right.

    It is 1 - C(n - c, k) / C(n, k) with c right ones among n (arXiv:2107.03374, eq. 1),
    computed as the product 1 - (1 - k/(n - c + 1)) ... (1 - k/n) of its section 2.1. A
    prompt with fewer than k scores has NaN.

    Args:
        scores: 1 for a right response, 0 for a wrong one, and NaN for none, [prompts,
            responses].
        k: Number of responses, at least 1.
    """
    counts = (~np.isnan(scores)).sum(axis=1)
    wrong = (scores == 0).sum(axis=1)
    # The factor of place i, which counts from 1, belongs to it if n - c < i <= n.
    places = np.arange(1, scores.shape[1] + 1)
    counted = (places > wrong[:, None]) & (places <= counts[:, None])
    # With fewer than k wrong ones, any k responses include a right one.
    factors = np.where(counted, np.maximum(1 - k / places, 0), 1)
    return np.where(counts >= k, 1 - factors.prod(axis=1), nan)


def majority_of(
    scores: Float64s, answers: Answers, k: int, *, seed: int = 0
) -> Float64s:
    """Return the expected score of the majority's answer of k responses, [prompts].

    The answer with the most votes wins (arXiv:2203.11171). Ties go to each of its
    answers equally often. The score of an answer is the mean over the prompt's
    responses that have it. A response without an answer does not vote; where none of k
    votes, any of them is taken. A response without a score is no member of the group,
    and a prompt with fewer than k others has NaN.

    It is exact where there are at most `MOST_SUBSETS` subsets, as for up to 13
    responses, or k = 2 of up to 63. Otherwise it is the mean over that many random
    ones, whose standard error is below 0.012 per prompt for scores of 0 and 1.

    Args:
        scores: Scores of the responses, [prompts, responses]; NaN for none.
        answers: Number of each response's answer, int32 [prompts, responses]; equal
            for equal answers to the same prompt, and `NO_ANSWER` for none.
        k: Number of responses, at least 1.
        seed: Seed of the random subsets, which are the same for all prompts.
    """
    majority = np.full(len(scores), nan)
    has_score = ~np.isnan(scores)
    counts = has_score.sum(axis=1)
    # What has a score comes first, in the order of the responses.
    order = np.argsort(~has_score, axis=1, kind="stable")
    scores = np.take_along_axis(scores, order, axis=1)
    answers = np.take_along_axis(answers, order, axis=1)

    for count in np.unique(counts[counts >= k]).tolist():
        rows = np.flatnonzero(counts == count)
        members = _subsets(count, k, seed)
        majority[rows] = _majorities(
            scores[rows, :count], answers[rows, :count], members
        )
    return majority


def _majorities(values: Float64s, answers: Answers, members: Float32s) -> Float64s:
    """Return the mean over subsets of the score of the majority's answer, [prompts].

    Args:
        values: Score of each response, [prompts, responses].
        answers: Number of each response's answer, [prompts, responses].
        members: 1 for each member of a subset, else 0, [responses, subsets].
    """
    numbers = _renumbered(answers)
    num_answers = numbers.max(axis=1) + 1

    # Prompts of about as many answers are counted together, to waste little space.
    order = np.argsort(-num_answers, kind="stable")
    majorities = np.empty(len(values))
    start = 0
    while start < len(order):
        most_answers = int(num_answers[order[start]])
        at_once = max(1, _VOTES_AT_ONCE // (most_answers * members.shape[1]))
        rows = order[start : start + at_once]
        start += at_once

        has_answer = numbers[rows] == np.arange(most_answers)[:, None, None]
        responses = has_answer.sum(axis=2)
        totals = (has_answer * values[rows]).sum(axis=2)
        scores = totals / np.maximum(responses, 1)
        is_none = (has_answer & (answers[rows] == NO_ANSWER)).any(axis=2)
        majorities[rows] = (_wins(has_answer, is_none, members) * scores).sum(axis=0)
    return majorities


def _wins(
    has_answer: npt.NDArray[np.bool_],
    is_none: npt.NDArray[np.bool_],
    members: Float32s,
) -> Float64s:
    """Return how often each answer has the most votes, [answers, prompts].

    A tie counts for each of its answers by its share.

    Args:
        has_answer: Whether a response has an answer, [answers, prompts, responses].
        is_none: Whether an answer stands for none, [answers, prompts].
        members: As for `_majorities`.
    """
    # All together, those without an answer have less than one vote.
    votes_of = np.where(is_none, 0.5 / len(members), 1).astype(np.float32)
    voters = has_answer * votes_of[:, :, None]
    # One product of two matrices is several times as fast as one for each answer.
    votes = voters.reshape(-1, len(members)) @ members
    votes = votes.reshape(*is_none.shape, -1)
    wins = (votes == votes.max(axis=0)).astype(np.float32)
    wins /= wins.sum(axis=0)
    shares: Float64s = wins.mean(axis=2, dtype=np.float64)
    return shares


def _renumbered(answers: Answers) -> Answers:
    """Return the same answers, numbered from 0 for each prompt without gaps."""
    order = np.argsort(answers, axis=1, kind="stable")
    ascending = np.take_along_axis(answers, order, axis=1)
    is_next = np.diff(ascending, axis=1, prepend=ascending[:, :1]) != 0
    numbers = np.empty_like(answers)
    np.put_along_axis(numbers, order, is_next.cumsum(axis=1, dtype=np.int32), axis=1)
    return numbers


@functools.cache
def _subsets(count: int, k: int, seed: int) -> Float32s:
    """Return subsets of k of some responses, all or `MOST_SUBSETS` random ones.

    Returns:
        1 for each member of a subset, else 0, float32 [count, subsets].
    """
    if math.comb(count, k) <= MOST_SUBSETS:
        chosen = np.array(list(itertools.combinations(range(count), k)))
    else:
        random = np.random.default_rng([seed, count, k])
        order = random.random((MOST_SUBSETS, count)).argsort(axis=1)
        chosen = order[:, :k]
    members = np.zeros((len(chosen), count), np.float32)
    np.put_along_axis(members, chosen, 1, axis=1)
    return np.ascontiguousarray(members.T)


@functools.cache
def _weights_of_best(count: int, k: int) -> Float64s:
    """Return how often each of some ascending scores is the best of k, [count]."""
    ways = math.comb(count, k)
    return np.array(
        [math.comb(place, k - 1) / ways for place in range(count)], dtype=np.float64
    )
