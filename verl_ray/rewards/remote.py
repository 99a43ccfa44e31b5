"""Scores by a service: items in batches, as JSON over HTTP, within limits.

Invariant: `score` returns a score for every item, in order and in bounded time:
whatever the service does to a batch costs the scores of its items and no others. Every
entry of a reply is a score or a typed failure, and no reply raises. A service that is
away as a whole costs time and no score (`outage.py`). Each scorer has its own limits,
and is not for several callers at once.

A request is POST {"items": [{"prompt", "response", "answer", "data_source", "extra"},
...]}; the answer is null where the record has none. An item about an episode also has
"episode_score", "episode_end", "episode_messages", "episode_conversations" and
"episode_output". The reply is {"scores": [number or null, ...]} with one entry per
item, in order; null declines to score an item.
"""

from __future__ import annotations

import asyncio
import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import TracebackType

from verl_ray.config.reward import HttpReward
from verl_ray.errors import DataError, GraderOutage, RewardError
from verl_ray.profiling.progress import advance
from verl_ray.rewards.client import (
    RequestFailure,
    ServiceClient,
    ServiceLimits,
    excerpt,
    json_in,
    unparsed,
)
from verl_ray.rewards.health import Score, ScoreHealth, score_of_number
from verl_ray.rewards.request import ScoreRequest
from verl_ray.rewards.signatures import EPISODE_VALUES

_SHOWN = 200  # characters of an entry that an error shows
_EXPECTED_REPLY = 'expected {"scores": [number or null, ...]}'
# Spellings of JSON writers that are strict.
_NONFINITE_TEXTS = frozenset({"nan", "inf", "infinity"})

# Healths of an item that the service has graded, or declined to grade.
_ANSWERED = frozenset({ScoreHealth.OK, ScoreHealth.NONE, ScoreHealth.NONFINITE})


class RemoteScorer:
    """Scores by a service, with its client."""

    needs_groups = False
    """A service gets responses in batches of any prompts."""

    def __init__(self, config: HttpReward, key: str = "reward") -> None:
        """Prepare the connections; nothing is sent yet.

        Args:
            key: The configuration's section, for errors to name.

        Raises:
            ConfigError: `url_problem` finds a problem, or a token is not set or cannot
                be sent.
        """
        self._config = config
        limits = ServiceLimits(
            **{each.name: getattr(config, each.name) for each in fields(ServiceLimits)}
        )
        self._client = ServiceClient(limits, key, RequestBatch.of([]).body)
        # One event loop for all calls, which the open connections belong to.
        self._runner = asyncio.Runner()
        self._closed = False

    @property
    def outage_s(self) -> float:
        """Seconds of all outages of the service that have ended, each counted once."""
        return self._client.outage_s

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score `requests`. Any exception that interrupts this closes the scorer.

        Returns:
            One score per request, in the same order.

        Raises:
            DataError: JSON cannot hold an `extra`; nothing was sent.
            GraderOutage: the service is away for longer than reward.max_outage_s. The
                scorer may be asked again.
            RewardError: the scorer is closed.
        """
        if self._closed:
            raise RewardError(
                "the scorer of the service is closed, expected an open one"
            )

        size = self._config.batch_size
        batches = [
            RequestBatch.of(requests[start : start + size])
            for start in range(0, len(requests), size)
        ]
        try:
            return self._runner.run(self._score_all(batches))
        except GraderOutage:
            raise
        # It may leave requests under way, whose replies no later call must get.
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections. May be called twice."""
        if not self._closed:
            self._closed = True
            self._runner.run(self._client.close())
            self._runner.close()

    def __enter__(self) -> RemoteScorer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    async def _score_all(self, batches: list[RequestBatch]) -> list[Score]:
        """Score all batches, at most `concurrency` of them at the same time."""
        scores: list[list[Score]] = [[] for _ in batches]
        # Shared by all tasks: each batch is taken once.
        queue = enumerate(batches)

        async def score_batches() -> None:
            # Takes the next batch, waits until it is scored or has failed, and ends
            # when no batch is left.
            for index, batch in queue:
                scores[index] = await self._score_batch(batch)
                advance(batch.size, "scores")

        num_tasks = min(self._config.concurrency, len(batches))
        tasks = [asyncio.create_task(score_batches()) for _ in range(num_tasks)]
        try:
            await asyncio.gather(*tasks)
        finally:
            # After an outage the others would go on.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [score for scored in scores for score in scored]

    async def _score_batch(self, batch: RequestBatch) -> list[Score]:
        """Score a batch, which has failed if it alone fails for good."""
        read = partial(scores_in, size=batch.size)
        result = await self._client.ask(batch.body, read, _is_answer)
        if isinstance(result, RequestFailure):
            return [Score(math.nan, result.health, result.detail)] * batch.size
        return result


def _is_answer(scores: Sequence[Score]) -> bool:
    """Return whether the service has graded an item, or declined to grade it."""
    return any(score.health in _ANSWERED for score in scores)


# ----------------------------------------------------------------------------- requests


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Items that travel together."""

    body: bytes
    """The body of the HTTP request."""
    size: int
    """Number of items."""

    @staticmethod
    def of(requests: Sequence[ScoreRequest]) -> RequestBatch:
        """Batch of these requests.

        Raises:
            DataError: JSON cannot hold an `extra`.
        """
        items = [
            {
                "prompt": request.prompt,
                "response": request.response,
                "answer": request.answer,
                "data_source": request.data_source,
                "extra": request.extra,
                **_of_episode(request),
            }
            for request in requests
        ]
        try:
            body = json.dumps({"items": items}).encode("ascii")
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the extra of an item holds what JSON cannot ({error})",
                expected="plain values",
            ) from None
        return RequestBatch(body, len(items))


def _of_episode(request: ScoreRequest) -> dict[str, object]:
    """Return what is sent of an episode besides; nothing where there is none."""
    if request.episode_score is None:
        return {}
    return {name: getattr(request, name) for name in EPISODE_VALUES}


# ------------------------------------------------------------------------------ replies


def scores_in(body: bytes, size: int) -> list[Score] | RequestFailure:
    """Read the scores of `size` items from the body of a successful reply."""
    reply = json_in(body)
    if isinstance(reply, RequestFailure):
        return reply
    entries = reply.get("scores") if isinstance(reply, dict) else None
    if not isinstance(entries, list):
        return unparsed(f"{_EXPECTED_REPLY}, found {excerpt(body)}")
    if len(entries) != size:
        return unparsed(f"{_EXPECTED_REPLY} with {size} entries, found {len(entries)}")
    return [_score_of(entry) for entry in entries]


def _score_of(entry: object) -> Score:
    """Read one entry of `scores`."""
    if entry is None:
        return Score(math.nan, ScoreHealth.NONE, "the service returned null")

    if isinstance(entry, float):
        return score_of_number(entry, "the service returned")

    if isinstance(entry, str):
        unsigned = entry.strip().lstrip("+-").lower()
        if unsigned in _NONFINITE_TEXTS:
            detail = f"the service returned {entry!r}"
            return Score(math.nan, ScoreHealth.NONFINITE, detail)
        text = repr(entry[:_SHOWN])
    else:
        # Bounds depth and length, unlike repr.
        text = reprlib.repr(entry)
    detail = f"the service returned {text}, expected a number or null"
    return Score(math.nan, ScoreHealth.UNPARSED, detail)
