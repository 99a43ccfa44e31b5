"""Messages between a scorer and a service: batches out, scores or a failure in.

Invariant: every entry of a reply is a score or a typed failure, and no reply of a
service raises. Deliberately not here: when a batch is sent (`remote.py`).

A request is POST {"items": [{"prompt", "response", "answer", "data_source", "extra"},
...]}; the answer is null where the record has none. Its reply is {"scores": [number or
null, ...]} with one entry per item, in order; null declines to score an item.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from verl_ray.errors import DataError
from verl_ray.rewards.health import Score, ScoreHealth
from verl_ray.rewards.request import ScoreRequest

if TYPE_CHECKING:
    import httpx

SHOWN = 200
"""Characters of a reply that an error shows."""

_EXPECTED_REPLY = 'expected {"scores": [number or null, ...]}'
# Far above any list of scores; an endless stream would fill the memory.
_MAX_REPLY_BYTES = 1 << 24
# Scores travel as float32, in which anything larger is an infinity.
_LARGEST = 3.4028234663852886e38
# Spellings of JSON writers that are strict.
_NONFINITE_TEXTS = frozenset({"nan", "inf", "infinity"})


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
        target = f", go to {response.headers['Location']!r:.{SHOWN}}"
    return BatchFailure(
        ScoreHealth.UNAVAILABLE,
        f"the service answered with status {status}{target}: {excerpt(body)}",
        passing=status == 429 or status >= 500,
        retry_after_s=_seconds(response.headers.get("Retry-After", "")),
    )


def excerpt(body: bytes) -> str:
    """The beginning of a body, as text for an error."""
    text = repr(body[:SHOWN].decode(errors="replace"))
    return text + " ..." if len(body) > SHOWN else text


def _unparsed(detail: str) -> BatchFailure:
    return BatchFailure(ScoreHealth.UNPARSED, detail)


def _score_of(entry: object) -> Score:
    """Read one entry of `scores`."""
    if entry is None:
        return Score(math.nan, ScoreHealth.NONE, "the service returned null")

    if isinstance(entry, float):
        if abs(entry) <= _LARGEST:
            return Score(entry, ScoreHealth.OK)
        return Score(math.nan, ScoreHealth.NONFINITE, f"the service returned {entry}")

    if isinstance(entry, str):
        unsigned = entry.strip().lstrip("+-").lower()
        if unsigned in _NONFINITE_TEXTS:
            detail = f"the service returned {entry!r}"
            return Score(math.nan, ScoreHealth.NONFINITE, detail)
        text = repr(entry[:SHOWN])
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
