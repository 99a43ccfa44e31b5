"""Calls of users' code with a deadline, and the clock by which it passes.

Invariant: whatever a call does, whoever waits for it goes on: with what it returned,
with an `Exception`, or once it is late.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_LOOK_S = 0.1
"""How often a wait looks whether its clock goes on."""


class Clock:
    """The time of episodes, which stands still while the engine is paused.

    So no episode runs out of time because of a pause, which may take as long as a
    training step.
    """

    def __init__(self) -> None:
        """Begin to go."""
        self._stopped_at_s: float | None = None
        self._lost_s = 0.0

    def now(self) -> float:
        """Return the time in seconds, from an arbitrary beginning."""
        if self._stopped_at_s is not None:
            return self._stopped_at_s
        return asyncio.get_running_loop().time() - self._lost_s

    def stop(self) -> None:
        """Stand still. If it does already, this has no effect."""
        self._stopped_at_s = self.now()

    def go(self) -> None:
        """Go on. If it does already, this has no effect."""
        if self._stopped_at_s is not None:
            loop_s = asyncio.get_running_loop().time()
            self._lost_s = loop_s - self._stopped_at_s
            self._stopped_at_s = None

    async def wait(self, task: asyncio.Future[T], until_s: float) -> bool:
        """Wait until a task is done, or it is so late; return whether it is done."""
        # The first round lets a task begin that has no time at all.
        while True:
            timeout_s: float | None = None
            if not math.isinf(until_s):
                timeout_s = max(0.0, until_s - self.now())
                if self._stopped_at_s is not None:
                    timeout_s = max(timeout_s, _LOOK_S)
            await asyncio.wait({task}, timeout=timeout_s)
            if task.done() or self.now() >= until_s:
                return task.done()


class Late(Exception):
    """A call did not return in time."""


async def bounded(
    call: Callable[[], Awaitable[T]], clock: Clock, until_s: float, grace_s: float
) -> T:
    """Return what a call returns.

    It runs in a task of its own. One that does not end when it is cancelled is left to
    itself, so that it cannot keep its episode.

    Args:
        grace_s: Seconds that a cancelled call may take.

    Raises:
        Late: It has not returned until `until_s`.
        RuntimeError: It raised what is no `Exception`, or cancelled itself.
        Exception: Whatever it raises.
    """
    task = asyncio.ensure_future(_contained(call))
    try:
        is_done = await clock.wait(task, until_s)
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.CancelledError):
            await _stop(task, grace_s)
        raise
    if not is_done:
        await _stop(task, grace_s)
        raise Late
    if task.cancelled():
        raise RuntimeError("the call cancelled itself")
    return task.result()


async def _contained(call: Callable[[], Awaitable[T]]) -> T:
    try:
        return await call()
    except (Exception, asyncio.CancelledError):
        raise
    # The panic of an extension module, say. In a task some would end the event loop.
    except BaseException as error:
        raise as_exception(error) from error


def as_exception(error: BaseException) -> RuntimeError:
    """Return an `Exception` that says what was raised that is none, and where."""
    failure = RuntimeError(f"it raised {error!r}, which is no Exception")
    return failure.with_traceback(error.__traceback__)


async def _stop(task: asyncio.Future[T], grace_s: float) -> None:
    """Cancel a task, and wait for it a while."""
    task.cancel()
    # Nobody else looks at its exception.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    await asyncio.wait({task}, timeout=grace_s)
