"""Scores of as much as a time allows, by functions in processes that can be killed."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from verl_ray.config.reward import SingleReward
from verl_ray.rewards.health import Score
from verl_ray.rewards.pool import ScoringPool
from verl_ray.rewards.request import ScoreRequest

T = TypeVar("T")

PROCESSES = 4
"""Items that are scored at the same time."""

_START_S = 60.0
"""Longest time in which the files of reward functions may be imported."""


def score_in_time(
    functions: Mapping[str, str],
    grader: SingleReward,
    key: str,
    items: deque[T],
    requests_for: Callable[[T], Sequence[ScoreRequest]],
    *,
    processes: int,
    at_once: int,
    longest_s: float,
) -> Generator[tuple[T, list[Score]], None, None]:
    """Score items until there are none or the time is over; the first ones in any case.

    Args:
        functions: Data source -> spec.
        grader: The grader by these functions, which has their deadline.
        key: The configuration's section of the functions.
        items: What is scored; those that time was left for are taken out.
        requests_for: Returns the requests about an item.
        processes: Number of processes that score.
        at_once: Items that are scored between two looks at the clock.
        longest_s: Seconds after which no further items are taken.

    Yields:
        An item, and the scores of its requests.

    Raises:
        ConfigError: A function cannot be imported or called.
    """
    assert grader.time_limit_s is not None, "functions have a deadline"
    end_s = time.monotonic() + longest_s
    with ScoringPool(
        functions,
        processes,
        grader.time_limit_s,
        key=key,
        start_deadline_s=_START_S,
        warns_of_deaths=False,
    ) as pool:
        # Each round takes some items, also where the start has taken all of the time.
        while items:
            taken = [items.popleft() for _ in range(min(at_once, len(items)))]
            requests = [requests_for(item) for item in taken]
            scores = iter(pool.score([each for some in requests for each in some]))
            for item, some in zip(taken, requests, strict=True):
                yield item, list(itertools.islice(scores, len(some)))
            if time.monotonic() >= end_s:
                return
