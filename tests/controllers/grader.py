"""Reward functions of a user's own, named as path:function by the tests."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any


def ones(response: str, answer: str, /, **more: Any) -> float:
    """The fraction of characters that are 1 or 2: untrained models differ in it, and
    can learn it within steps.
    """
    return sum(character in "12" for character in response) / 8


def sometimes(response: str, answer: str, /, **more: Any) -> float:
    """Breaks on about one response in ten, whatever the policy has learned by then."""
    if zlib.crc32(f"{answer} {response}".encode()) % 10 == 0:
        raise ValueError(f"cannot grade {response!r}")
    return ones(response, answer)


def slow(response: str, answer: str, /, **more: Any) -> float:
    """Takes up to 60 ms for a response, some much longer than others."""
    time.sleep(0.02 * (zlib.crc32(response.encode()) % 4))
    return ones(response, answer)


def broken(response: str, answer: str, /, **more: Any) -> float:
    raise ValueError(f"nothing can be graded, least of all {answer!r}")


def ranked(
    completions: list[str],
    level: list[int],
    trainer_state: Any,
    log_metric: Callable[[str, float], None],
    **columns: Any,
) -> list[float]:
    """The rank of each response in its group, by its text; a batched function."""
    log_metric("step", trainer_state.global_step)
    log_metric("size", len(completions) + level[0])
    ranks = sorted(range(len(completions)), key=lambda row: (completions[row], row))
    return [float(ranks.index(row)) for row in range(len(completions))]
