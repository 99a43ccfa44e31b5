"""Client of a service: requests as JSON over HTTP, repeated within limits.

Invariant: `ask` returns what was read of a reply, or a typed failure, in bounded time,
and no reply raises. A service that is away as a whole costs time and no answer
(`outage.py`). Each client has its own limits, and belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from verl_ray.errors import ConfigError, Problem
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.outage import Availability, Refusal

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

MAX_REPLY_BYTES = 1 << 24
"""Far above any list of scores or text; an endless stream would fill the memory."""

_SHOWN = 200  # characters of a reply that an error shows
_EXPECTED_URL = "Expected http://host:port/path or https://host/path."


@dataclass(frozen=True, kw_only=True)
class ServiceLimits:
    """Address of a service, and the limits of its requests.

    Attributes:
        url: Address of the service, as the configuration has it.
        token_env: Environment variable that holds a bearer token; None sends none.
        concurrency: Connections at the same time.
        requests_per_s: Rate limit; None is none.
        request_timeout_s: Longest time of one request.
        deadline_s: Longest time of a request with all its repetitions.
        max_attempts: Number of these, the first included.
        backoff_s: Wait before the second attempt, which doubles with each.
        max_outage_s: Longest time to ask a service again that is away.
    """

    url: str
    token_env: str | None
    concurrency: int
    requests_per_s: float | None
    request_timeout_s: float
    deadline_s: float
    max_attempts: int
    backoff_s: float
    max_outage_s: float


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Reason why a request has no answer."""

    health: ScoreHealth
    detail: str
    passing: bool = False
    """Whether another attempt may succeed."""
    retry_after_s: float = 0.0
    """Delay that the service requested before the next attempt."""
    sent_at: float = 0.0
    """Time of the last attempt (monotonic clock)."""


Read = Callable[[bytes], T | RequestFailure]
"""Reads the body of a successful reply."""


class ServiceClient:
    """Client of one service.

    Connections stay open between calls. The environment's proxy variables apply.
    """

    def __init__(
        self,
        limits: ServiceLimits,
        key: str,
        probe: bytes,
        address: str | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        """Prepare the connections; nothing is sent yet.

        Args:
            limits: Where the service is, and how long it is asked.
            key: The configuration's section, for errors to name.
            probe: Body of a request that no item can be to blame for.
            address: Where requests are posted to, if not to the url itself.
            max_reply_bytes: Longest body of a reply.

        Raises:
            ConfigError: `url_problem` finds a problem, or a token is not set or cannot
                be sent.
        """
        url = _parse_url(limits.url, f"{key}.url")
        self._limits = limits
        self._address = limits.url if address is None else address
        self._max_reply_bytes = max_reply_bytes
        self._client = _connections(limits, key)
        self._availability = Availability(
            # Without the query, which may hold a secret.
            f"{key}.url={url.copy_with(query=None)}",
            f"{key}.max_outage_s",
            limits.max_outage_s,
            limits.backoff_s,
            self._refusal,
            probe,
        )

        # The rate limit: when the next request may go, and the gate to wait behind.
        self._next_turn = -math.inf
        self._gate = asyncio.Lock()
        # Not seeded: ranks that failed together should not come back together.
        self._random = random.Random()

    @property
    def outage_s(self) -> float:
        """Seconds of all outages of the service that have ended, each counted once."""
        return self._availability.outage_s

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def ask(
        self,
        body: bytes,
        read: Read[T],
        is_answer: Callable[[T], bool] = lambda _: True,
    ) -> T | RequestFailure:
        """Return what is read of the reply to a request, or why it alone has none.

        Each round sends it several times. The loop ends with a reply, or with a second
        round in a row that fails while the service answers others. The second one has a
        single attempt: by then the service is known to answer.

        Args:
            body: The request.
            read: Reads a reply.
            is_answer: Whether what was read says that the service does its work.

        Raises:
            GraderOutage: The service is away for longer than the limit.
        """
        availability = self._availability
        max_attempts = self._limits.max_attempts
        may_cause = False
        while True:
            await availability.wait_for_end()
            num_outages = availability.num_outages
            result = await self._send(body, read, 1 if may_cause else max_attempts)
            if not isinstance(result, RequestFailure):
                break
            if not result.passing:
                return result

            sent_at = result.sent_at
            refusal = Refusal(result.detail, result.retry_after_s)
            has_others = await availability.has_answered_since(
                sent_at, num_outages, refusal
            )
            if has_others and may_cause:
                return result
            may_cause = has_others

        if is_answer(result):
            availability.note_answer(body)
        return result

    async def try_once(self, body: bytes, read: Read[T]) -> T | RequestFailure:
        """Send a request once, and return what is read of the reply."""
        await self._wait_for_turn()
        limits = self._limits
        timeout_s = min(limits.request_timeout_s, limits.deadline_s)
        return await self._post(body, read, timeout_s)

    async def _refusal(self, body: bytes) -> Refusal | None:
        """Send a request once to find out whether the service answers."""
        reply = await self.try_once(body, lambda _: None)
        if isinstance(reply, RequestFailure) and reply.passing:
            return Refusal(reply.detail, reply.retry_after_s)
        return None

    async def _send(
        self, body: bytes, read: Read[T], max_attempts: int
    ) -> T | RequestFailure:
        """Send a request until it has a reply, or may not be sent again.

        Each attempt waits for a turn and a reply. The loop ends with a reply, with a
        failure that is not passing, with the last attempt, or at the deadline.
        """
        await self._wait_for_turn()

        # The deadline begins here: the wait for the first turn is not the service's
        # doing.
        deadline = time.monotonic() + self._limits.deadline_s
        attempt = 1
        while True:
            sent_at = time.monotonic()
            timeout_s = min(self._limits.request_timeout_s, deadline - sent_at)
            result = await self._post(body, read, timeout_s)
            if not isinstance(result, RequestFailure) or not result.passing:
                return result

            detail = f"{result.detail} (attempt {attempt} of {max_attempts})"
            failure = replace(result, detail=detail, sent_at=sent_at)
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
        wait_s: float = self._limits.backoff_s * 2 ** (attempt - 1) * jitter
        return wait_s

    async def _wait_for_turn(self) -> None:
        """Wait until the rate limit lets one more request go.

        Requests leave at even distances. The others wait for the gate, first come first
        served; the one behind it waits for its time.
        """
        async with self._gate:
            await asyncio.sleep(max(0.0, self._next_turn - time.monotonic()))
            # No limit is an infinite rate.
            requests_per_s = self._limits.requests_per_s or math.inf
            self._next_turn = time.monotonic() + 1 / requests_per_s

    async def _post(
        self, body: bytes, read: Read[T], timeout_s: float
    ) -> T | RequestFailure:
        """Send one request and read its reply."""
        import httpx

        url = self._address
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("POST", url, content=body) as response,
            ):
                reply = await _body_of(response, self._max_reply_bytes)
        except TimeoutError:
            detail = f"no reply within {timeout_s:.3g} s"
            return RequestFailure(ScoreHealth.TIMEOUT, detail, passing=True)
        except httpx.DecodingError as error:
            detail = f"the reply cannot be decompressed: {error}"
            return RequestFailure(ScoreHealth.UNPARSED, detail[:_SHOWN])
        except (httpx.HTTPError, OSError) as error:
            detail = f"no reply: {type(error).__name__}: {error}"
            return RequestFailure(
                ScoreHealth.UNAVAILABLE, detail[:_SHOWN], passing=True
            )

        if not response.is_success:
            return _status_failure(response, reply)
        if len(reply) > self._max_reply_bytes:
            detail = f"the reply is longer than {self._max_reply_bytes} bytes"
            return unparsed(f"{detail}: {excerpt(reply)}")
        return read(reply)


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


def _connections(limits: ServiceLimits, key: str) -> httpx.AsyncClient:
    import httpx

    headers = {"Content-Type": "application/json"}
    headers |= _authorization(limits.token_env, f"{key}.token_env")
    return httpx.AsyncClient(
        headers=headers,
        # The client's limits are per read or write; `_post` limits the whole request.
        timeout=None,
        limits=httpx.Limits(
            max_connections=limits.concurrency,
            max_keepalive_connections=limits.concurrency,
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
        rule = "there is no such environment variable where the service is asked from"
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


# ------------------------------------------------------------------------------ replies


async def _body_of(response: httpx.Response, limit: int) -> bytes:
    """Read the body; of one that is too long, the first part."""
    body = bytearray()
    # Consumes the stream until it ends or exceeds the limit; the caller has a deadline.
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > limit:
            break
    return bytes(body)


def _status_failure(response: httpx.Response, body: bytes) -> RequestFailure:
    """Failure for a reply with any status but success."""
    status = response.status_code
    target = ""
    if response.has_redirect_location:
        # Redirects are not followed; the error names where this one leads.
        target = f", go to {response.headers['Location']!r:.{_SHOWN}}"
    return RequestFailure(
        ScoreHealth.UNAVAILABLE,
        f"the service answered with status {status}{target}: {excerpt(body)}",
        passing=status == 429 or status >= 500,
        retry_after_s=_seconds(response.headers.get("Retry-After", "")),
    )


def excerpt(body: bytes) -> str:
    """The beginning of a body, as text for an error."""
    text = repr(body[:_SHOWN].decode(errors="replace"))
    return text + " ..." if len(body) > _SHOWN else text


def json_in(body: bytes) -> Any | RequestFailure:
    """Return what a reply says in JSON, or the failure to read it."""
    try:
        # Integers are read as floats, which have no limit on digits.
        return json.loads(body, parse_int=float)
    except (ValueError, RecursionError) as error:
        return unparsed(f"the reply is not JSON ({error}): {excerpt(body)}")


def unparsed(detail: str) -> RequestFailure:
    """Return the failure of a reply that says something else than was asked for."""
    return RequestFailure(ScoreHealth.UNPARSED, detail)


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
