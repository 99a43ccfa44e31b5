"""Calls into Ray that the driver waits for: each of them ends within a limit.

A process of Ray that is stopped or hangs makes Ray's compiled calls wait for ever, deaf
to signals. So another thread makes the call, and the caller waits for that thread.

Invariant: while this process has a session, a call returns or raises. It raises within
half a second of a signal or of the loss of the cluster, and else at the session's
limit. Without a session, as in a worker, the calls are made at once: the raylet or the
guard ends such a process. Deliberately not here: requests without data, which Ray only
queues (`Heartbeat`), and `ray.init` of an own cluster, whose processes end together
with the thread that started them.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, cast

from verl_ray.cluster.cluster_loss import CLUSTER_LOSS, ClusterLoss
from verl_ray.cluster.signals import heed_signals
from verl_ray.errors import ClusterError
from verl_ray.profiling.phases import PHASES

T = TypeVar("T")
P = ParamSpec("P")

LOOK_S = 0.5
"""Longest time in seconds between two looks at signals."""


class _Call(Generic[T]):
    """A call that another thread makes."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._result: T | None = None
        self._error: BaseException | None = None
        self._has_finished = False
        # An Event costs several times as much.
        self._unfinished = threading.Lock()
        self._unfinished.acquire()

    def make(self) -> None:
        """Make the call, and keep what follows from it."""
        assert self._function is not None, "a call is made once"
        try:
            self._result = self._function()
        # The caller gets every exception, as if it had made the call itself.
        except BaseException as error:
            self._error = error
        # References to objects are dropped by the caller, not by this thread: see
        # `_ask_owners` (`store.py`).
        self._function = None

    def finish(self) -> None:
        """Let the caller go on."""
        self._has_finished = True
        self._unfinished.release()

    def has_finished_within(self, seconds: float) -> bool:
        """Wait for the end of the call, in one thread; return whether it came."""
        return self._has_finished or self._unfinished.acquire(timeout=seconds)

    def outcome(self) -> T:
        """Return the result of a call that has finished, or raise its exception."""
        result, error = self._result, self._error
        self._result = self._error = None
        if error is None:
            return cast(T, result)
        try:
            raise error
        finally:
            # An exception in a variable of its own frames would live, with all that
            # these hold, until the garbage collector finds it.
            del error


class _Caller:
    """A thread that makes one call at a time, and ends with the session."""

    def __init__(self, calls: RayCalls) -> None:
        self._owner = calls
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._make_all, name="Ray", daemon=True)
        thread.start()

    def begin(self, call: _Call[Any] | None) -> None:
        """Make this call; None ends the thread."""
        self._calls.put(call)

    def _make_all(self) -> None:
        # Consumes calls, and waits for the next. Ends at None, or without a session.
        while (call := self._calls.get()) is not None:
            call.make()
            is_kept = self._owner.is_open
            if is_kept:
                # The next call may come as soon as this one is finished.
                self._owner.idle.append(self)
            call.finish()
            del call
            if not is_kept:
                return


class RayCalls:
    """The calls into Ray of a process, and the limit of its session."""

    def __init__(self, loss: ClusterLoss) -> None:
        self.loss = loss
        """Whether the cluster is lost."""
        self.is_open = False
        """Whether there is a session."""
        self._limit_s = math.inf
        self.idle: list[_Caller] = []
        """Threads without a call."""
        self._unfinished: list[_Call[Any]] = []
        """Calls that nobody waits for any more."""

    def open(self, limit_s: float) -> None:
        """Make calls within this limit from now on, in seconds."""
        self.is_open = True
        self._limit_s = limit_s

    def close(self, within_s: float) -> bool:
        """Make calls at once from now on.

        Args:
            within_s: Seconds to wait for calls that were given up.

        Returns:
            Whether no call is left. If Ray's raylet ends during one, Ray ends this
            process.
        """
        self.is_open = False
        self._limit_s = math.inf
        deadline = time.monotonic() + within_s
        unfinished = [
            call
            for call in self._unfinished
            if not call.has_finished_within(max(0.0, deadline - time.monotonic()))
        ]
        self._unfinished = unfinished
        while self.idle:
            self.idle.pop().begin(None)
        return not unfinished

    @property
    def hangs(self) -> bool:
        """Whether a call that was given up has not returned yet."""
        return any(not call.has_finished_within(0.0) for call in self._unfinished)

    def make(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of Ray, and return its result.

        Raises:
            ClusterError: The cluster is lost, or the call lasts longer than the limit.
            Interrupted: The run was stopped by a signal while the call lasted.
        """
        if not self.is_open:
            return function(*args, **kwargs)

        # Ray ends this process where a call needs a raylet that has ended.
        self.loss.raise_if_lost()
        call = self._begin(lambda: function(*args, **kwargs))
        began_s = time.monotonic()
        try:
            # Ends with the call, at a signal, at a loss, or at the limit.
            while not call.has_finished_within(LOOK_S):
                heed_signals()
                self.loss.raise_if_lost()
                PHASES.tick()
                if time.monotonic() - began_s > self._limit_s:
                    name = getattr(function, "__qualname__", repr(function))
                    raise ClusterError(
                        f"Ray has not returned from {name} for {self._limit_s:g} s"
                        " (run.stall_s): one of its own processes hangs, or cannot be"
                        " reached"
                    )
        except BaseException:
            self._unfinished.append(call)
            raise
        return call.outcome()

    def attempt(
        self,
        limit_s: float,
        function: Callable[P, object],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> bool:
        """Call a function of Ray for a release, which no signal and no loss ends.

        Args:
            limit_s: Limit in seconds, also without a session.
            function: The function. Whatever it raises is dropped.
            args: Its arguments.
            kwargs: Its arguments by name.

        Returns:
            Whether it has returned or raised.
        """
        call = self._begin(lambda: function(*args, **kwargs))
        has_finished = call.has_finished_within(limit_s)
        if not has_finished:
            self._unfinished.append(call)
        return has_finished

    def _begin(self, function: Callable[[], T]) -> _Call[T]:
        call = _Call(function)
        # Several threads may make calls, and one of them takes the last idle caller.
        try:
            caller = self.idle.pop()
        except IndexError:
            caller = _Caller(self)
        caller.begin(call)
        return call


RAY_CALLS = RayCalls(CLUSTER_LOSS)


@atexit.register
def _leave_calls_behind() -> None:
    """End this process with its exit code of a failure if one of its calls hangs.

    Python's own end would crash, since the call still uses what it takes apart.
    """
    if RAY_CALLS.hangs:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
