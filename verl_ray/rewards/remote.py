"""Scores by a service: items in batches, as JSON over HTTP, within limits.

Invariant: `score` returns a score for every item, in order and in bounded time:
whatever the service does to a batch costs the scores of its items and no others. Every
entry of a reply is a score or a typed failure, and no reply raises. A service that is
away as a whole costs time and no score (`outage.py`). Each scorer has its own limits,
and is not for several callers at once.

A request is POST {"items": [{"prompt", "response", "answer", "data_source", "extra"},
...]}; the answer is null where the record has none. An item about an episode also has
"episode_score", "episode_end" and "episode_messages". The reply is {"scores": [number
or null, ...]} with one entry per item, in order; null declines to score an item.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import random
import reprlib
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from verl_ray.config.reward import HttpReward
from verl_ray.errors import (
    ConfigError,
    DataError,
    GraderOutage,
    Problem,
    RewardError,
)
from verl_ray.profiling.progress import advance
from verl_ray.rewards.health import Score, ScoreHealth, score_of_number
from verl_ray.rewards.outage import Availability, Refusal
from verl_ray.rewards.request import ScoreRequest
from verl_ray.rewards.signatures import OF_EPISODES

if TYPE_CHECKING:
    import httpx

_SHOWN = 200  # characters of a reply that an error shows
_EXPECTED_REPLY = 'expected {"scores": [number or null, ...]}'
# Far above any list of scores; an endless stream would fill the memory.
_MAX_REPLY_BYTES = 1 << 24
# Spellings of JSON writers that are strict.
_NONFINITE_TEXTS = frozenset({"nan", "inf", "infinity"})

_EXPECTED_URL = "Expected http://host:port/path or https://host/path."

# Healths of an item that the service has graded, or declined to grade.
_ANSWERED = frozenset({ScoreHealth.OK, ScoreHealth.NONE, ScoreHealth.NONFINITE})


def url_problem(url: str, key: str) -> Problem | None:
    """Return what is wrong with the address of a service, without connecting to it.

    Args:
        key: The configuration key that the problem will name.
    """
    if not url.isprintable() or " " in url:
        rule = "has white space or control characters in it"
        return Problem(key, url, rule, _EXPECTED_URL)

    try:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            # The configuration is logged and tracked. Neither it nor this message is a
            # place for secrets.
            host = parts.netloc.rpartition("@")[2]
            hidden = url.replace(parts.netloc, "***@" + host, 1)
            rule = "holds a user name or password"
            return Problem(key, hidden, rule, "Use token_env, next to url")
        if parts.scheme not in ("http", "https"):
            rule = "does not begin with http:// or https://"
            return Problem(key, url, rule, _EXPECTED_URL)
        if not parts.hostname or parts.port == 0:
            rule = "names no host or no port that can be reached"
            return Problem(key, url, rule, _EXPECTED_URL)
    # Raised by urlsplit, and by reading the port.
    except ValueError as error:
        return Problem(key, url, f"is no URL: {error}", _EXPECTED_URL)
    return None


class RemoteScorer:
    """Client of a service that scores.

    Connections stay open between calls. The environment's proxy variables apply.
    """

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
        url = _parse_url(config.url, f"{key}.url")
        self._config = config
        self._client = _client(config, key)
        self._availability = Availability(
            # Without the query, which may hold a secret.
            f"{key}.url={url.copy_with(query=None)}",
            f"{key}.max_outage_s",
            config.max_outage_s,
            config.backoff_s,
            self._ask,
            RequestBatch.of([]).body,
        )

        # The rate limit: when the next request may go, and the gate to wait behind.
        self._next_turn = -math.inf
        self._gate = asyncio.Lock()
        # Not seeded: ranks that failed together should not come back together.
        self._random = random.Random()
        # One event loop for all calls, which the open connections belong to.
        self._runner = asyncio.Runner()
        self._closed = False

    @property
    def outage_s(self) -> float:
        """Seconds of all outages of the service that have ended, each counted once."""
        return self._availability.outage_s

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
            self._runner.run(self._client.aclose())
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
        """Score a batch, which has failed if it alone fails for good.

        Each round sends it several times. The loop ends with a reply, or with a second
        round in a row that fails while the service answers others. The second one has a
        single attempt: by then the service is known to answer.
        """
        availability = self._availability
        max_attempts = self._config.max_attempts
        is_suspect = False
        while True:
            await availability.wait_for_end()
            num_outages = availability.num_outages
            result = await self._send(batch, 1 if is_suspect else max_attempts)
            if not isinstance(result, BatchFailure):
                break
            if not result.passing:
                return _failed_scores(batch, result)

            sent_at = result.sent_at
            refusal = Refusal(result.detail, result.retry_after_s)
            has_others = await availability.has_answered_since(
                sent_at, num_outages, refusal
            )
            if has_others and is_suspect:
                return _failed_scores(batch, result)
            is_suspect = has_others

        if any(score.health in _ANSWERED for score in result):
            availability.note_answer(batch.body)
        return result

    async def _ask(self, body: bytes) -> Refusal | None:
        """Send a request once to find out whether the service answers."""
        await self._wait_for_turn()
        timeout_s = min(self._config.request_timeout_s, self._config.deadline_s)
        reply = await self._post(body, 0, timeout_s)
        if isinstance(reply, BatchFailure) and reply.passing:
            return Refusal(reply.detail, reply.retry_after_s)
        return None

    async def _send(
        self, batch: RequestBatch, max_attempts: int
    ) -> list[Score] | BatchFailure:
        """Send a batch until it has a reply, or may not be sent again.

        Each attempt waits for a turn and a reply. The loop ends with a reply, with a
        failure that is not passing, with the last attempt, or at the deadline.
        """
        await self._wait_for_turn()

        # The deadline begins here: the wait for the first turn is not the service's
        # doing.
        deadline = time.monotonic() + self._config.deadline_s
        attempt = 1
        while True:
            sent_at = time.monotonic()
            timeout_s = min(self._config.request_timeout_s, deadline - sent_at)
            result = await self._post(batch.body, batch.size, timeout_s)
            if not isinstance(result, BatchFailure) or not result.passing:
                return result

            detail = f"{result.detail} (attempt {attempt} of {max_attempts})"
            failure = dataclasses.replace(result, detail=detail, sent_at=sent_at)
            wait_s = max(self._backoff_s(attempt), result.retry_after_s)
            if attempt == max_attempts or time.monotonic() + wait_s >= deadline:
                return failure
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await asyncio.sleep(wait_s)
                    await self._wait_for_turn()
            except TimeoutError:
                return failure
            attempt += 1

    def _backoff_s(self, attempt: int) -> float:
        """Seconds to wait before the next attempt: doubled each time, with a jitter."""
        jitter = self._random.uniform(0.5, 1.5)
        wait_s: float = self._config.backoff_s * 2 ** (attempt - 1) * jitter
        return wait_s

    async def _wait_for_turn(self) -> None:
        """Wait until the rate limit lets one more request go.

        Requests leave at even distances. The others wait for the gate, first come first
        served; the one behind it waits for its time.
        """
        async with self._gate:
            await asyncio.sleep(max(0.0, self._next_turn - time.monotonic()))
            # No limit is an infinite rate.
            requests_per_s = self._config.requests_per_s or math.inf
            self._next_turn = time.monotonic() + 1 / requests_per_s

    async def _post(
        self, body: bytes, size: int, timeout_s: float
    ) -> list[Score] | BatchFailure:
        """Send one request about `size` items and read its reply."""
        import httpx

        url = self._config.url
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("POST", url, content=body) as response,
            ):
                reply = await read_body(response)
        except TimeoutError:
            detail = f"no reply within {timeout_s:.3g} s"
            return BatchFailure(ScoreHealth.TIMEOUT, detail, passing=True)
        except httpx.DecodingError as error:
            detail = f"the reply cannot be decompressed: {error}"
            return BatchFailure(ScoreHealth.UNPARSED, detail[:_SHOWN])
        except (httpx.HTTPError, OSError) as error:
            detail = f"no reply: {type(error).__name__}: {error}"
            return BatchFailure(ScoreHealth.UNAVAILABLE, detail[:_SHOWN], passing=True)

        if response.is_success:
            return scores_in(reply, size)
        return status_failure(response, reply)


def _failed_scores(batch: RequestBatch, failure: BatchFailure) -> list[Score]:
    """Scores of a batch that has failed as a whole."""
    return [Score(math.nan, failure.health, failure.detail)] * batch.size


# ------------------------------------------------------------------------ configuration


def _parse_url(text: str, key: str) -> httpx.URL:
    # Imported here and below, because it takes 0.1 s that checking a configuration
    # should not pay.
    import httpx

    problem = url_problem(text, key)
    if problem is not None:
        raise ConfigError([problem])
    try:
        return httpx.URL(text)
    # It is stricter about host names than `url_problem`.
    except httpx.InvalidURL as error:
        problem = Problem(key, text, f"is no URL: {error}", _EXPECTED_URL)
        raise ConfigError([problem]) from None


def _client(config: HttpReward, key: str) -> httpx.AsyncClient:
    import httpx

    headers = {"Content-Type": "application/json"}
    headers |= _authorization(config.token_env, f"{key}.token_env")
    return httpx.AsyncClient(
        headers=headers,
        # The client's limits are per read or write; `_post` limits the whole request.
        timeout=None,
        limits=httpx.Limits(
            max_connections=config.concurrency,
            max_keepalive_connections=config.concurrency,
        ),
    )


def _authorization(variable: str | None, key: str) -> dict[str, str]:
    """Headers that authorize the requests, with the token in an environment variable.

    Raises:
        ConfigError: the variable is not set, or no header can hold its value.
    """
    if variable is None:
        return {}

    token = os.environ.get(variable)
    if token is None:
        rule = "there is no such environment variable where the reward role runs"
        fix = f"Set it there, or {key}=null to send no token"
        raise ConfigError([Problem(key, variable, rule, fix)])

    is_printable = token.isascii() and token.isprintable() and " " not in token
    if not token or not is_printable:
        # The token itself is not shown.
        rule = (
            "this environment variable is empty or holds what a header cannot, such as"
            " a line break"
        )
        fix = "Expected the token and nothing else"
        raise ConfigError([Problem(key, variable, rule, fix)])
    return {"Authorization": f"Bearer {token}"}


# ----------------------------------------------------------------------------- requests


@dataclasses.dataclass(frozen=True, slots=True)
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
    return {name: getattr(request, name) for name in OF_EPISODES}


# ------------------------------------------------------------------------------ replies


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFailure:
    """Reason why a whole batch has no scores."""

    health: ScoreHealth
    detail: str
    passing: bool = False
    """Whether another attempt may succeed."""
    retry_after_s: float = 0.0
    """Delay that the service requested before the next attempt."""
    sent_at: float = 0.0
    """Time of the last attempt (monotonic clock)."""


async def read_body(response: httpx.Response) -> bytes:
    """Read the body; of one that is too long, the first part."""
    body = bytearray()
    # Consumes the stream until it ends or exceeds the limit; the caller has a deadline.
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _MAX_REPLY_BYTES:
            break
    return bytes(body)


def scores_in(body: bytes, size: int) -> list[Score] | BatchFailure:
    """Read the scores of `size` items from the body of a successful reply."""
    if len(body) > _MAX_REPLY_BYTES:
        return _unparsed(
            f"the reply is longer than {_MAX_REPLY_BYTES} bytes: {excerpt(body)}"
        )
    try:
        # Integers are read as floats, which have no limit on digits.
        reply: Any = json.loads(body, parse_int=float)
    except (ValueError, RecursionError) as error:
        return _unparsed(f"the reply is not JSON ({error}): {excerpt(body)}")

    entries = reply.get("scores") if isinstance(reply, dict) else None
    if not isinstance(entries, list):
        return _unparsed(f"{_EXPECTED_REPLY}, found {excerpt(body)}")
    if len(entries) != size:
        return _unparsed(f"{_EXPECTED_REPLY} with {size} entries, found {len(entries)}")
    return [_score_of(entry) for entry in entries]


def status_failure(response: httpx.Response, body: bytes) -> BatchFailure:
    """Failure for a reply with any status but success."""
    status = response.status_code
    target = ""
    if response.has_redirect_location:
        # Redirects are not followed; the error names where this one leads.
        target = f", go to {response.headers['Location']!r:.{_SHOWN}}"
    return BatchFailure(
        ScoreHealth.UNAVAILABLE,
        f"the service answered with status {status}{target}: {excerpt(body)}",
        passing=status == 429 or status >= 500,
        retry_after_s=_seconds(response.headers.get("Retry-After", "")),
    )


def excerpt(body: bytes) -> str:
    """The beginning of a body, as text for an error."""
    text = repr(body[:_SHOWN].decode(errors="replace"))
    return text + " ..." if len(body) > _SHOWN else text


def _unparsed(detail: str) -> BatchFailure:
    return BatchFailure(ScoreHealth.UNPARSED, detail)


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


def _seconds(retry_after: str) -> float:
    """Return a Retry-After header, seconds or a date, in seconds from now.

    It is 0 where the header is neither.
    """
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return 0.0
