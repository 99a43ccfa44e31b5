"""The scoring process: runs reward functions on the items it is sent, one after the other.

Invariant: one answer per item, in order, sent before the next item is touched; nothing that a function raises,
returns or prints can break the stream. Deliberately not here: deadlines, which only another process can keep.
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
from verl_ray.rewards.health import Health
from verl_ray.rewards.wire import BROKEN, READY, STARTED, Item, Start, frame, read_message

_OUR_FILES = (__file__,)


def main(descriptor: int) -> None:
    """Serve the pool at the other end of the socket `descriptor` until it hangs up."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # the programs that a function starts have no business here
    stand_guard(connection)
    with contextlib.suppress(ConnectionError):  # the pool is gone, and the guard about to act
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
        functions = {source: resolve(spec, key=f"{start.key}.{source}") for source, spec in start.functions.items()}
    except ConfigError as error:
        send(BROKEN, text=json.dumps(dataclasses.asdict(error.problems[0])))
        return
    send(READY)
    while (body := read_message(stream)) is not None:
        send(STARTED)
        _grade_all(cast(list[Item], pickle.loads(body)), functions, send)


def _grade_all(
    items: list[Item], functions: Mapping[str, RewardFunction], send: Callable[[int, float, str], None]
) -> None:
    for response, answer, prompt, data_source, extra in items:
        function = functions.get(data_source) or functions["default"]
        try:
            result: object = function(response, answer, prompt=prompt, data_source=data_source, extra=extra)
            if result is None:
                send(Health.NONE, math.nan, "the function returned None")
                continue
            if not isinstance(result, SupportsFloat):
                raise TypeError(f"the function returned {type(result).__name__} {result!r:.80}, expected float or None")
            value = float(result)
        except BaseException as error:  # sys.exit() in a function is a failed score, not the end of the process
            send(Health.EXCEPTION, math.nan, short_traceback(error, _OUR_FILES))
            continue
        if math.isfinite(value):
            send(Health.OK, value, "")
        else:
            send(Health.NONFINITE, math.nan, f"the function returned {value}")
