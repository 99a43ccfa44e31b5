"""Synchronous code of users, in threads beside the event loop of the episodes.

Each call has a thread of its own, so that no episode waits for others. An environment
has one call at a time: the open episodes of a process bound its threads.

A thread cannot be stopped. One whose caller has given up hangs, and ends with the
process, which does not wait for it. Whoever owns the process looks at how many hang,
and replaces it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_given_up: set[threading.Thread] = set()
"""Threads whose callers have given up, also those that have ended since."""


def hanging_calls() -> list[str]:
    """Return the functions in which threads hang, each as often as it does."""
    for thread in list(_given_up):
        if not thread.is_alive():
            _given_up.discard(thread)
    return [thread.name for thread in _given_up]


async def in_thread(
    function: Callable[..., Any], /, *arguments: Any, **named: Any
) -> Any:
    """Return what a function returns, which runs in a thread of its own meanwhile."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[object] = loop.create_future()

    def settle(result: object, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def work() -> None:
        result: object = None
        failure: BaseException | None = None
        try:
            result = context.run(function, *arguments, **named)
        # A future has no way to hold it.
        except StopIteration as error:
            failure = RuntimeError(f"the call raised {error!r}")
        except BaseException as error:
            failure = error
        # The loop may be over.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    context = contextvars.copy_context()
    thread = threading.Thread(target=work, name=place_of(function), daemon=True)
    thread.start()
    try:
        return await outcome
    except asyncio.CancelledError:
        _given_up.add(thread)
        raise


def place_of(function: Callable[..., Any]) -> str:
    """Return where a function is defined, for a person."""
    plain = inspect.unwrap(function)
    name = getattr(plain, "__qualname__", repr(plain))
    code = getattr(plain, "__code__", None)
    if code is None:
        return name
    return f"{name} ({code.co_filename}, line {code.co_firstlineno})"
