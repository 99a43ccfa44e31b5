"""A shaping of rewards, as a user would write it."""

from __future__ import annotations

import numpy as np


def shorter(score, group, valid, *, length, brevity, overlong_share=0.5):  # type: ignore[no-untyped-def]
    """Take off the length in hundreds of tokens."""
    assert overlong_share == 0.5
    return score - brevity * length / 100


def everything(
    score, group, valid, *, trajectory, length, truncated, parts, max_tokens
):  # type: ignore[no-untyped-def]
    """Halve what was cut, and add the second grader again."""
    assert len(set(trajectory)) == len(score)
    assert not np.isnan(score).any()
    (_, _), (weight, style) = parts
    share = np.where(truncated, length / max_tokens / 2, 1)
    return score * share + weight * style


def nowhere_else(score, group, valid):  # type: ignore[no-untyped-def]
    """Add 1, and return no number where there is no score."""
    return np.where(valid, score + 1, [0, 0, np.nan, np.inf])


def short(score, group, valid):  # type: ignore[no-untyped-def]
    return score[1:]


def infinite(score, group, valid):  # type: ignore[no-untyped-def]
    return score / 0.0


def broken(score, group, valid):  # type: ignore[no-untyped-def]
    return score.no_such_thing


def typo(score, group, valid, *, lenght):  # type: ignore[no-untyped-def]
    return score
