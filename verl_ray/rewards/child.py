"""Program of a scoring process: runs reward functions on items, one after the other.

Invariant: one score per item, in order, sent before the next item begins; whatever a
function raises, returns or prints cannot break the stream. Deliberately not here:
deadlines, which only another process can keep (`pool.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pickle
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import SupportsFloat, cast

from verl_ray.errors import ConfigError
from verl_ray.rewards.functions import RewardFunction, resolve, short_traceback
from verl_ray.rewards.guard import stand_guard
from verl_ray.rewards.health import ScoreHealth
from verl_ray.rewards.wire import (
    BROKEN,
    READY,
    STARTED,
    Item,
    Start,
    frame,
    read_message,
)

# Frames of this file mean nothing to the author of a function.
_OUR_FILES = (__file__,)


def main(descriptor: int) -> None:
    """Serve the pool at the other end of the socket `descriptor` until it hangs up."""
    connection = socket.socket(fileno=descriptor)
    # A program that a function starts must not keep the connection open.
    connection.set_inheritable(False)
    stand_guard(connection)
    # The pool is gone then, and the guard is about to act.
    with contextlib.suppress(ConnectionError):
        _serve(connection)


def _serve(connection: socket.socket) -> None:
    def send(kind: int, value: float = math.nan, text: str = "") -> None:
        connection.sendall(frame(kind, time.monotonic(), value, text))

    stream = connection.makefile("rb")
    first = read_message(stream)
    if first is None:
        return
    start = cast(Start, pickle.loads(first))
    sys.path[:] = start.sys_path

    try:
        functions = {
            source: resolve(spec, key=f"{start.key}.{source}")
            for source, spec in start.functions.items()
        }
    except ConfigError as error:
        problem = dataclasses.asdict(error.problems[0])
        send(BROKEN, text=json.dumps(problem))
        return
    send(READY)

    # Each round waits for one message and scores its items; ends when the pool hangs up
    while True:
        body = read_message(stream)
        if body is None:
            return
        # Before the pickle is read, since reading it counts for the first item.
        send(STARTED)
        items = cast(list[Item], pickle.loads(body))
        _score_all(items, functions, send)


def _score_all(
    items: list[Item],
    functions: Mapping[str, RewardFunction],
    send: Callable[[int, float, str], None],
) -> None:
    for response, answer, prompt, data_source, extra in items:
        function = functions.get(data_source) or functions["default"]
        try:
            result: object = function(
                response, answer, prompt=prompt, data_source=data_source, extra=extra
            )
            value = _number(result)
        # sys.exit() in a function is a failed score, not the end of the process
        except BaseException as error:
            detail = short_traceback(error, _OUR_FILES)
            send(ScoreHealth.EXCEPTION, math.nan, detail)
            continue

        if value is None:
            send(ScoreHealth.NONE, math.nan, "the function returned None")
        elif math.isfinite(value):
            send(ScoreHealth.OK, value, "")
        else:
            detail = f"the function returned {value}"
            send(ScoreHealth.NONFINITE, math.nan, detail)


def _number(result: object) -> float | None:
    """Return the result of a function as a number, or None.

    Raises:
        TypeError: the result is neither.
    """
    if result is None:
        return None
    # A user's function may return anything, such as a number of NumPy.
    if not isinstance(result, SupportsFloat):
        raise TypeError(
            f"the function returned {type(result).__name__} {result!r:.80},"
            " expected float or None"
        )
    return float(result)
