"""Scores by a service: items in batches, as JSON over HTTP, with retries, a rate limit and a circuit breaker.

Invariant: `score` answers every item, in order and in bounded time: whatever the service does costs the scores of the
items it was asked about and nothing else. Deliberately not here: a service, what a run does about failed scores, and
limits shared between ranks (each scorer has its own). Not for several callers at once.

A request is POST {"items": [{"prompt", "response", "answer", "data_source", "extra"}, ...]}; the answer to it is
{"scores": [number or null, ...]} with one entry per item, in order, where null leaves an item ungraded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import random
import reprlib
import sys
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from verl_ray.config.reward import HttpReward
from verl_ray.errors import ConfigError, DataError, Problem, RewardError
from verl_ray.profiling.progress import advance
from verl_ray.rewards.health import Health, Score
from verl_ray.rewards.process import ScoreRequest

if TYPE_CHECKING:
    import httpx

_EXPECTED_URL = "Expected http://host:port/path or https://host/path"
_EXPECTED_ANSWER = 'expected {"scores": [number or null, ...]}'
_SHOWN = 200  # characters of what a service said
_MAX_ANSWER_BYTES = 1 << 24  # far above any list of scores; what streams for ever would fill the memory
_LARGEST = 3.4028234663852886e38  # scores travel as float32, in which anything larger is an infinity
_NONFINITE_TEXTS = frozenset({"nan", "inf", "infinity"})  # how JSON writers that are strict spell them
_ANSWERED = frozenset({Health.OK, Health.NONE, Health.NONFINITE})


def url_problem(url: str, key: str) -> Problem | None:
    """What is wrong with the address of a service, as far as can be told without asking it; None when nothing is.
    `key` is the configuration key that the problem will name."""
    if not url.isprintable() or " " in url:
        return Problem(key, url, "has white space or control characters in it", _EXPECTED_URL)
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc:  # the configuration is logged and tracked: no place for secrets, nor is this message
            hidden = url.replace(parts.netloc, "***@" + parts.netloc.rpartition("@")[2], 1)
            return Problem(key, hidden, "holds a user name or password", "Use token_env, beside url")
        if parts.scheme not in ("http", "https"):
            return Problem(key, url, "does not begin with http:// or https://", _EXPECTED_URL)
        if not parts.hostname or parts.port == 0:
            return Problem(key, url, "names no host or no port that can be reached", _EXPECTED_URL)
    except ValueError as error:
        return Problem(key, url, f"is no URL: {error}", _EXPECTED_URL)
    return None


class RemoteScorer:
    """Asks a service for scores. Connections stay open between calls; the environment's proxy variables apply."""

    def __init__(self, config: HttpReward, key: str = "reward") -> None:
        """Nothing is sent yet. `key` is the configuration's section, for errors to name.

        Raises:
            ConfigError: what `url_problem` finds, or a token that is not set or cannot be sent.
        """
        import httpx  # here and below, because it takes 0.1 s that checking a configuration should not pay

        if problem := url_problem(config.url, f"{key}.url"):
            raise ConfigError([problem])
        try:
            url = httpx.URL(config.url)
        except httpx.InvalidURL as error:  # it looks closer at host names
            raise ConfigError([Problem(f"{key}.url", config.url, f"is no URL: {error}", _EXPECTED_URL)]) from None
        self._config = config
        self._client = httpx.AsyncClient(
            headers={"Content-Type": "application/json"} | _authorization(config.token_env, f"{key}.token_env"),
            timeout=None,  # its limits are per read or write; ours are for the whole request
            limits=httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency),
        )
        name = f"{key}.url={url.copy_with(query=None)}"  # the query may hold a secret
        self._circuit = _Circuit(name, config.circuit_failures, config.circuit_reset_s)
        self._next_turn = -math.inf
        self._gate = asyncio.Lock()
        self._random = random.Random()  # not seeded: ranks that failed together should not come back together
        self._runner = asyncio.Runner()  # one event loop for all calls, which the open connections belong to
        self._closed = False

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Grade `requests`; a list of the same length and order. Any exception that interrupts it closes the scorer.

        Raises:
            DataError: an `extra` that JSON cannot hold; nothing was sent.
            RewardError: the scorer is closed.
        """
        if self._closed:
            raise RewardError("the scorer of the service is closed, expected an open one")
        size = self._config.batch_size
        batches = [_Batch.of(requests[start : start + size]) for start in range(0, len(requests), size)]
        try:
            return self._runner.run(self._grade_all(batches))
        except BaseException:  # it leaves requests under way that belong to no call
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def _grade_all(self, batches: list[_Batch]) -> list[Score]:
        """At most `concurrency` lanes take the next batch, wait until it is graded or has failed, and end when there
        is none left."""
        scores: list[list[Score]] = [[] for _ in batches]
        waiting = enumerate(batches)

        async def lane() -> None:
            for index, batch in waiting:
                scores[index] = await self._grade(batch)
                advance(batch.size, "scores")

        await asyncio.gather(*(lane() for _ in range(min(self._config.concurrency, len(batches)))))
        return [score for graded in scores for score in graded]

    async def _grade(self, batch: _Batch) -> list[Score]:
        """The scores of a batch, which has failed for the circuit when not one of its items was answered."""
        era = self._circuit.enter()
        result = self._circuit.refusal() if era is None else await self._ask(batch, era)
        scores = (
            [Score(math.nan, result.health, result.detail)] * batch.size if isinstance(result, _Failure) else result
        )
        if era is not None:
            answered = any(score.health in _ANSWERED for score in scores)
            self._circuit.leave(era, None if answered else scores[0].detail)
        return scores

    async def _ask(self, batch: _Batch, era: int) -> list[Score] | _Failure:
        """Send a batch until it is answered, its deadline passes or its attempts are used up."""
        if not await self._turn(era):
            return self._circuit.refusal()
        deadline = time.monotonic() + self._config.deadline_s  # from here: the first turn is not the service's doing
        attempt = 1
        while True:
            result = await self._post(batch, min(self._config.request_timeout_s, deadline - time.monotonic()))
            if not isinstance(result, _Failure) or not result.passing:
                return result
            failure = dataclasses.replace(
                result, detail=f"{result.detail} (attempt {attempt} of {self._config.max_attempts})"
            )
            backoff_s = self._config.backoff_s * 2 ** (attempt - 1) * self._random.uniform(0.5, 1.5)
            wait_s = max(backoff_s, result.retry_after_s)
            if attempt == self._config.max_attempts or time.monotonic() + wait_s >= deadline:
                return failure
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await asyncio.sleep(wait_s)
                    if not await self._turn(era):
                        return failure
            except TimeoutError:
                return failure
            attempt += 1

    async def _turn(self, era: int) -> bool:
        """Wait until the rate limit lets one more request go; False, at once, when the circuit opens meanwhile.

        Requests leave at even distances: those behind wait for the gate, first come first served, the one inside for
        its time.
        """
        async with self._gate:
            if self._circuit.era == era:
                await asyncio.sleep(max(0.0, self._next_turn - time.monotonic()))
            if self._circuit.era != era:
                return False
            self._next_turn = time.monotonic() + 1 / (self._config.requests_per_s or math.inf)
            return True

    async def _post(self, batch: _Batch, timeout_s: float) -> list[Score] | _Failure:
        """Send one request and read what comes back."""
        import httpx

        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("POST", self._config.url, content=batch.body) as response,
            ):
                body = await _read(response)
        except TimeoutError:
            return _Failure(Health.TIMEOUT, f"no answer within {timeout_s:.3g} s", passing=True)
        except httpx.DecodingError as error:
            return _Failure(Health.UNPARSED, f"the answer cannot be decompressed: {error}"[:_SHOWN])
        except (httpx.HTTPError, OSError) as error:
            detail = f"no answer: {type(error).__name__}: {error}"[:_SHOWN]
            return _Failure(Health.UNAVAILABLE, detail, passing=True)
        if response.is_success:
            return _scores_in(body, batch.size)
        status = response.status_code
        where = f", go to {response.headers['Location']!r:.{_SHOWN}}" if response.has_redirect_location else ""
        return _Failure(
            Health.UNAVAILABLE,
            f"the service answered with status {status}{where}: {_shown(body)}",
            passing=status == 429 or status >= 500,
            retry_after_s=_seconds(response.headers.get("Retry-After", "")),
        )


def _authorization(variable: str | None, key: str) -> dict[str, str]:
    if variable is None:
        return {}
    token = os.environ.get(variable)
    if token is None:
        rule = "there is no such environment variable where the reward role runs"
        raise ConfigError([Problem(key, variable, rule, f"Set it there, or {key}=null to send no token")])
    if not token.isascii() or not token.isprintable() or not token or " " in token:  # the token itself is not shown
        rule = "this environment variable is empty or holds what a header cannot, such as a line break"
        raise ConfigError([Problem(key, variable, rule, "Expected the token and nothing else")])
    return {"Authorization": f"Bearer {token}"}


# ----------------------------------------------------------------------------------------------------- one batch


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Items that travel together."""

    body: bytes
    size: int

    @staticmethod
    def of(requests: Sequence[ScoreRequest]) -> _Batch:
        items = [
            {
                "prompt": request.prompt,
                "response": request.response,
                "answer": request.answer,
                "data_source": request.data_source,
                "extra": request.extra,
            }
            for request in requests
        ]
        try:
            return _Batch(json.dumps({"items": items}).encode("ascii"), len(items))
        except (TypeError, ValueError) as error:
            raise DataError(f"the extra of an item holds what JSON cannot ({error}), expected plain values") from None


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    """Why a whole batch has no scores."""

    health: Health
    detail: str
    passing: bool = False
    """Whether another attempt may help."""
    retry_after_s: float = 0.0
    """How long the service asked to be left alone."""


async def _read(response: httpx.Response) -> bytes:
    """The body, or the first part of one that is too long."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _MAX_ANSWER_BYTES:
            break
    return bytes(body)


def _scores_in(body: bytes, size: int) -> list[Score] | _Failure:
    if len(body) > _MAX_ANSWER_BYTES:
        return _Failure(Health.UNPARSED, f"the answer is longer than {_MAX_ANSWER_BYTES} bytes: {_shown(body)}")
    try:
        answer: Any = json.loads(body, parse_int=float)  # float: no limit on digits, and no int that is none
    except (ValueError, RecursionError) as error:
        return _Failure(Health.UNPARSED, f"the answer is not JSON ({error}): {_shown(body)}")
    entries = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        return _Failure(Health.UNPARSED, f"{_EXPECTED_ANSWER}, found {_shown(body)}")
    if len(entries) != size:
        return _Failure(Health.UNPARSED, f"{_EXPECTED_ANSWER} with {size} entries, found {len(entries)}")
    return [_score_of(entry) for entry in entries]


def _score_of(entry: object) -> Score:
    if entry is None:
        return Score(math.nan, Health.NONE, "the service returned null")
    if isinstance(entry, float):
        if abs(entry) <= _LARGEST:
            return Score(entry, Health.OK)
        return Score(math.nan, Health.NONFINITE, f"the service returned {entry}")
    if isinstance(entry, str) and entry.strip().lstrip("+-").lower() in _NONFINITE_TEXTS:
        return Score(math.nan, Health.NONFINITE, f"the service returned {entry!r}")
    found = repr(entry[:_SHOWN]) if isinstance(entry, str) else reprlib.repr(entry)  # which bounds depth and length
    return Score(math.nan, Health.UNPARSED, f"the service returned {found}, expected a number or null")


def _shown(body: bytes) -> str:
    return repr(body[:_SHOWN].decode(errors="replace")) + (" ..." if len(body) > _SHOWN else "")


def _seconds(retry_after: str) -> float:
    """A Retry-After header, seconds or a date, in seconds from now; 0 when it is neither."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        return parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (TypeError, ValueError, OverflowError):
        return 0.0


# --------------------------------------------------------------------------------------------- the circuit breaker


class _Circuit:
    """Whether batches may go. Closed at first; opens when too many fail in a row; then one at a time decides.

    Opening begins a new era. What comes of a batch of an earlier one says nothing any more.
    """

    def __init__(self, name: str, failures: int, reset_s: float) -> None:
        self.era = 0
        self._name = name
        self._limit = failures
        self._reset_s = reset_s
        self._failed = 0  # in a row
        self._last = ""  # why the last of them failed
        self._trial_at: float | None = None  # None: closed; inf: the trial is under way

    def enter(self) -> int | None:
        """The era in which one more batch may go, None when it may not; every batch that enters must leave."""
        if self._trial_at is not None:
            if time.monotonic() < self._trial_at:
                return None
            self._trial_at = math.inf
        return self.era

    def leave(self, era: int, failure: str | None) -> None:
        """A batch that entered in `era` was answered, or failed with `failure`."""
        if era != self.era:
            return
        if failure is None:
            self._failed = 0
            if self._trial_at is not None:
                self._trial_at = None
                print(f"warning: {self._name}: answers again, the circuit is closed", file=sys.stderr, flush=True)
            return
        self._failed += 1
        self._last = failure
        if self._failed >= self._limit:
            if self._trial_at is None:
                print(
                    f"warning: {self._name}: the circuit is open, {self._failed} batches failed in a row, the last "
                    f"with: {failure}. Every score fails at once; one batch may try every {self._reset_s:g} s",
                    file=sys.stderr,
                    flush=True,
                )
            self._trial_at = time.monotonic() + self._reset_s
            self.era += 1

    def refusal(self) -> _Failure:
        """What becomes of a batch that may not go."""
        detail = f"not sent: the circuit is open after {self._failed} failed batches in a row, the last: {self._last}"
        return _Failure(Health.UNAVAILABLE, detail)
