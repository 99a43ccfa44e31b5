"""Program of a scoring process: runs reward functions on units, one after the other.

Invariant: one score per item, in order, and those of a unit are sent before the next
unit begins; whatever a function raises, returns or prints cannot break the stream. A
coroutine that misses its deadline is cancelled, and costs its own score alone.
The deadlines of functions that block are kept by the pool, which only another process
can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import pickle
import socket
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from verl_ray.processes.frames import frame, frames_of, started
from verl_ray.rewards.arguments import GroupLog, group_values, response_values
from verl_ray.rewards.built_in import PRED, answer_in
from verl_ray.rewards.health import Score, ScoreHealth, score_of
from verl_ray.rewards.request import (
    Needs,
    RequestRow,
    ScoreRequest,
    UnitKind,
    scores_fields,
)
from verl_ray.rewards.signatures import MissingValue, Style
from verl_ray.rewards.specs import LoadedFunction, load
from verl_ray.user_files import short_traceback

# Frames of these files mean nothing to the author of a function.
_OUR_FILES = (str(Path(__file__).parent), asyncio.__path__[0])

_Functions = Mapping[str, LoadedFunction]


def main(connection: socket.socket) -> None:
    """Serve the pool at the other end of a connection until it hangs up."""
    # The pool is gone then, and the guard is about to act.
    with contextlib.suppress(ConnectionError):
        _serve(connection)


def _serve(connection: socket.socket) -> None:
    def send(kind: str, **fields: object) -> None:
        connection.sendall(frame(kind, {"time_s": time.monotonic(), **fields}))

    def import_all(fields: dict[str, Any]) -> tuple[_Functions, dict[str, Any]]:
        loaded = _load_all(fields["functions"], fields["key"])
        needs = {source: _needs_of(function) for source, function in loaded.items()}
        return loaded, {"time_s": time.monotonic(), "needs": needs}

    messages = frames_of(connection)
    start = next(messages, None)
    if start is None:
        return
    functions, answer = started(start, import_all)
    connection.sendall(answer)
    if functions is None:
        return

    # Each round waits for one message and scores its units; ends when the pool hangs up
    scorer = _Scorer(start.fields["deadline_s"])
    for message in messages:
        # Before the pickle is read, since reading it counts for the first unit.
        send("started")
        for rows in cast(list[list[RequestRow]], pickle.loads(message.data)):
            unit = [ScoreRequest(*row) for row in rows]
            source = unit[0].data_source
            loaded = functions.get(source) or functions["default"]
            send("scored", scores=scores_fields(scorer.score(loaded, unit)))


def _load_all(specs: Mapping[str, str], key: str) -> _Functions:
    """Return the function of each data source; each spec is loaded once."""
    loaded: dict[str, LoadedFunction] = {}
    for source, spec in specs.items():
        if spec not in loaded:
            loaded[spec] = load(spec, key=f"{key}.{source}")
    return {source: loaded[spec] for source, spec in specs.items()}


def _needs_of(loaded: LoadedFunction) -> Needs:
    signature = loaded.signature
    is_batched = signature.style is Style.TRL
    unit: UnitKind = "concurrent" if signature.is_async else "single"
    return Needs(
        unit="group" if is_batched else unit,
        tokens=is_batched and signature.names("completion_ids"),
        conversation=is_batched,
        episode_conversations=is_batched
        or signature.names("episode_messages", "episode_conversations"),
        episode_output=signature.names("episode_output"),
    )


class _Scorer:
    """The calls of functions, and the event loop of those that are awaited."""

    def __init__(self, deadline_s: float) -> None:
        """Take the longest time of one response."""
        self._deadline_s = deadline_s
        # One loop for all calls: a function may hold connections that belong to it.
        self._runner = asyncio.Runner()

    def score(
        self, loaded: LoadedFunction, requests: Sequence[ScoreRequest]
    ) -> list[Score]:
        """Return the scores of a unit."""
        if loaded.signature.style is Style.TRL:
            return self._score_group(loaded, requests)
        if loaded.signature.is_async:
            return self._runner.run(self._gather(loaded, requests))
        return [self._score_response(loaded, request) for request in requests]

    def _score_response(self, loaded: LoadedFunction, request: ScoreRequest) -> Score:
        try:
            place, named = loaded.signature.bind(response_values(request))
            result = loaded.function(*place, **named)
            # Some decorators hide that a function is a coroutine function.
            if not isinstance(result, float) and inspect.isawaitable(result):
                result = self._runner.run(_awaited(result))
            return score_of(result, _answer(loaded, request))
        # sys.exit() in a function is a failed score, not the end of the process
        except BaseException as error:
            return _failure(error)

    async def _gather(
        self, loaded: LoadedFunction, requests: Sequence[ScoreRequest]
    ) -> list[Score]:
        """Await the scores of all requests side by side."""
        coroutines = [self._score_async(loaded, request) for request in requests]
        return list(await asyncio.gather(*coroutines))

    async def _score_async(
        self, loaded: LoadedFunction, request: ScoreRequest
    ) -> Score:
        limit = asyncio.timeout(self._deadline_s)
        try:
            place, named = loaded.signature.bind(response_values(request))
            async with limit:
                result = await cast(Awaitable[object], loaded.function(*place, **named))
            return score_of(result)
        # SystemExit would end the event loop with all other responses.
        except BaseException as error:
            if limit.expired():
                detail = f"no score within {self._deadline_s:g} s; it was cancelled"
                return Score(math.nan, ScoreHealth.TIMEOUT, detail)
            return _failure(error)

    def _score_group(
        self, loaded: LoadedFunction, requests: Sequence[ScoreRequest]
    ) -> list[Score]:
        log = GroupLog(len(requests))
        try:
            place, named = loaded.signature.bind(group_values(requests, log))
            result = loaded.function(*place, **named)
            if inspect.isawaitable(result):
                result = self._runner.run(_awaited(result))
            results = _results_of(result, len(requests))
        except BaseException as error:
            return [_failure(error)] * len(requests)
        return [
            _read(result, notes)
            for result, notes in zip(results, log.entries, strict=True)
        ]


def _read(result: object, notes: Mapping[str, object]) -> Score:
    """Return a result of a batched function as a score; a bad one costs no other."""
    try:
        return score_of(result, notes)
    except BaseException as error:
        return _failure(error)


def _answer(loaded: LoadedFunction, request: ScoreRequest) -> dict[str, object]:
    """Return the answer that a built-in function reads, as an entry, where wanted."""
    if not request.is_held_out:
        return {}
    answer = answer_in(loaded.function, request.response, request.data_source)
    return {PRED: answer}


async def _awaited(result: Awaitable[object]) -> object:
    return await result


def _results_of(result: object, size: int) -> Sequence[object]:
    """Return the results of a batched function, one per response.

    Raises:
        TypeError: It returned no list.
        ValueError: It returned too many or too few.
    """
    # Arrays and tensors are lists for this purpose.
    to_list = getattr(result, "tolist", None)
    if to_list is not None:
        result = to_list()
    if not isinstance(result, list | tuple):
        raise TypeError(
            f"the function returned {type(result).__name__} {result!r:.80}, expected a"
            f" list of {size} scores, one per completion"
        )
    if len(result) != size:
        raise ValueError(
            f"the function returned {len(result)} scores for {size} completions;"
            " expected one each"
        )
    return result


def _failure(error: BaseException) -> Score:
    """Return the failed score of a function that raised."""
    detail = short_traceback(error, _OUR_FILES)
    if isinstance(error, MissingValue):
        detail = str(error)
    return Score(math.nan, ScoreHealth.EXCEPTION, detail)
