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
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_loop: contextvars.ContextVar[asyncio.AbstractEventLoop] = contextvars.ContextVar(
    "_loop"
)
"""The event loop that waits for the call of this thread."""

_given_up: set[threading.Thread] = set()
"""Threads whose callers have given up, also those that have ended since."""

_late: set[asyncio.Future[Any]] = set()
"""Calls whose callers have given up before they began."""


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
    context.run(_loop.set, loop)
    thread = threading.Thread(target=work, name=place_of(function), daemon=True)
    thread.start()
    try:
        return await outcome
    except asyncio.CancelledError:
        _given_up.add(thread)
        raise


def in_loop(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return what a coroutine function returns, which runs in the event loop meanwhile.

    Raises:
        RuntimeError: This is no thread of `in_thread`.
    """
    try:
        loop = _loop.get()
    except LookupError:
        raise RuntimeError(
            "only a method or a tool without async may wait here, in its own thread;"
            " others await"
        ) from None
    return asyncio.run_coroutine_threadsafe(call(), loop).result()


async def result_of(
    function: Callable[..., Any], /, *arguments: Any, **named: Any
) -> Any:
    """Return what a function of a user returns, in a thread unless it is asynchronous.

    A decorator may hide that it is.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    result = await in_thread(function, *arguments, **named)
    return await result if inspect.isawaitable(result) else result


class OneAtATime:
    """Calls of one object, which never run at the same time.

    A call waits for one whose caller has given up, and is made then in any case: who
    gives up waiting does not take it back.
    """

    def __init__(self) -> None:
        """Begin without a call."""
        self._running = threading.Lock()

    async def result_of(
        self, function: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> Any:
        """Return what a function returns, see `result_of`, once no other call runs."""
        if not inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            def locked(*arguments: Any, **named: Any) -> Any:
                with self._running:
                    return function(*arguments, **named)

            return await result_of(locked, *arguments, **named)

        async def held() -> Any:
            try:
                return await function(*arguments, **named)
            finally:
                self._running.release()

        def late(turn: asyncio.Future[Any]) -> None:
            # The loop itself is over otherwise.
            if not turn.cancelled():
                call = asyncio.ensure_future(held())
                _late.add(call)
                call.add_done_callback(_late.discard)

        if not self._running.acquire(blocking=False):
            turn = asyncio.ensure_future(in_thread(self._running.acquire))
            try:
                await asyncio.shield(turn)
            except asyncio.CancelledError:
                turn.add_done_callback(late)
                raise
        return await held()


def unbound(function: Any) -> Any:
    """Return the function of a `functools.partial`; another one as it is."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def place_of(function: Callable[..., Any]) -> str:
    """Return where a function is defined, for a person."""
    plain = unbound(inspect.unwrap(function))
    # The text of an object would be what its user writes.
    name: str = getattr(plain, "__qualname__", type(plain).__qualname__)
    code = getattr(plain, "__code__", None)
    if code is None:
        return name
    return f"{name} ({code.co_filename}, line {code.co_firstlineno})"
