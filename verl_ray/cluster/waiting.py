"""Calls into Ray that the driver waits for, and rows into and out of its object store.

A process of Ray that is stopped or hangs makes Ray's compiled calls wait for ever, deaf
to signals. So another thread makes the call, and the caller waits for that thread.

Invariant: while this process has a session, a call returns or raises. It raises within
half a second of a signal or of the loss of the cluster, and else at the session's
limit. Ray would wait for a minute, or for ever, and then end this process without a
word. Without a session, as in a worker, the calls are made at once: the raylet or the
guard ends such a process. Only the release of resources (`RayCalls.attempt`,
`wait_while_closing`) continues after a signal. A wait that is long also says what the
run is doing (`verl_ray/profiling/phases.py`). `read` returns a read-only view of the
stored bytes wherever the rows are neighbours.

Not made here: requests without data, which Ray only queues (`Heartbeat`), and
`ray.init` of an own cluster, whose processes end together with the thread that started
them.
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
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import ray

from verl_ray.cluster.signals import heed_signals
from verl_ray.columns.batch import Batch
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.errors import ClusterError, ClusterLost
from verl_ray.profiling.phases import PHASES
from verl_ray.profiling.progress import advance

T = TypeVar("T")
P = ParamSpec("P")

TICK_S = 0.5
"""Longest time in seconds between two looks at signals."""


class ClusterLoss:
    """The loss of the cluster that this process is connected to."""

    def __init__(self) -> None:
        self._reason: str | None = None

    @property
    def has_happened(self) -> bool:
        """Whether the cluster is lost."""
        return self._reason is not None

    def note(self, reason: str) -> None:
        """Note why the cluster is lost; any thread may call this.

        Args:
            reason: A process of Ray, and what has become of it.
        """
        self._reason = self._reason or reason

    def forget(self) -> None:
        """Forget the loss: this process is connected to no cluster any more."""
        self._reason = None

    def raise_if_lost(self) -> None:
        """Raise ClusterLost if the cluster is lost."""
        if self._reason is not None:
            raise ClusterLost(
                f"Ray's process {self._reason}, and the cluster is lost with it. What"
                " Ray said is in its folder of logs"
            )


CLUSTER_LOSS = ClusterLoss()


# -------------------------------------------------------------------------------- calls


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
        # `_ask_owners`.
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
            while not call.has_finished_within(TICK_S):
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


# -------------------------------------------------------------------------------- waits


class Background(Protocol):
    """Work of the driver that continues while the driver waits for something else.

    Both methods return at once.
    """

    def references(self) -> Sequence[Any]:
        """References that the work waits for; it can be advanced once one is ready."""

    def advance(self) -> None:
        """Receive what is ready, and begin what comes next."""


def wait(references: Sequence[Any], count: int, timeout_s: float) -> list[Any]:
    """Wait until `count` of the references are ready, at most `timeout_s` seconds.

    Args:
        references: References without duplicates.
        count: Number of references to wait for.
        timeout_s: Limit in seconds.

    Returns:
        The references that are ready: at least `count`, or fewer at the limit.

    Raises:
        Interrupted: The run was stopped by a signal.
        ClusterError: The cluster is lost, or Ray hangs.
    """
    deadline = time.monotonic() + timeout_s

    # Waits for the references in slices of at most half a second, and heeds signals
    # after each. Ends when enough references are ready, or after the last slice.
    while True:
        remaining_s = deadline - time.monotonic()
        slice_s = min(max(remaining_s, 0.0), TICK_S)
        ready: list[Any]
        ready, _ = RAY_CALLS.make(
            ray.wait, list(references), num_returns=count, timeout=slice_s
        )
        heed_signals()
        CLUSTER_LOSS.raise_if_lost()
        PHASES.tick()
        if len(ready) >= count or remaining_s <= TICK_S:
            return ready


def wait_while_closing(references: Sequence[Any], timeout_s: float) -> None:
    """Wait until all references are ready, at most `timeout_s` seconds.

    A signal does not end the wait, since closing continues after one. Neither does a
    lost cluster.
    """
    count = len(references)
    RAY_CALLS.attempt(
        2 * timeout_s, ray.wait, list(references), num_returns=count, timeout=timeout_s
    )


# --------------------------------------------------------------------- the object store

B = TypeVar("B", bound=Batch)


def put(batch: B) -> Sharded[B]:
    """Store a batch on this node and return the reference to all of its rows.

    Raises:
        ClusterError: The cluster is lost, or Ray hangs.
    """
    reference = RAY_CALLS.make(ray.put, batch)
    return Sharded.stored(reference, Receipt.of(batch))


def read(rows: Sharded[B], stall_s: float) -> B:
    """Batch with the rows themselves.

    Args:
        rows: References to the rows.
        stall_s: Limit in seconds without the arrival of another stored object.

    Raises:
        ClusterError: No stored object arrived for `stall_s` seconds, or one is lost.
    """
    stage = rows.stage.__name__

    def fetch(parts: Sequence[Any]) -> Sequence[B]:
        # Several parts may lie in one object, and `wait` takes no duplicates.
        objects = list(dict.fromkeys(parts))
        try:
            _wait_for_arrival(objects, stall_s, f"{len(rows)} rows of {stage}")
            return cast(list[B], _get(parts, stall_s))
        except ray.exceptions.ObjectLostError as error:
            raise ClusterError(
                f"rows of {stage} are lost with the process that held them: {error}"
            ) from None

    return rows.read(fetch)


def _wait_for_arrival(
    references: Sequence[Any], stall_s: float, description: str
) -> None:
    """Wait until all stored objects are on this node; each arrival is progress."""
    num_arrived = 0
    last_arrival = time.monotonic()
    waited_before_asking_s = TICK_S

    # Waits for the next arrival in slices of at most half a second. Ends when all
    # objects have arrived, or when none has for `stall_s` seconds.
    while True:
        ready = wait(references, len(references), min(stall_s, TICK_S))
        if len(ready) > num_arrived:
            advance(len(ready) - num_arrived, "stored objects")
            num_arrived = len(ready)
            last_arrival = time.monotonic()

        if num_arrived == len(references):
            return
        if time.monotonic() - last_arrival > stall_s:
            raise ClusterError(
                f"{description} lie in {len(references)} stored objects, of which"
                f" {num_arrived} have arrived and none in the last {stall_s:g} s"
                " (run.stall_s)"
            )

        # Rarely, since an owner replies only once the object exists.
        if time.monotonic() - last_arrival > waited_before_asking_s:
            RAY_CALLS.make(_ask_owners, references)
            waited_before_asking_s *= 2


def _get(references: Sequence[Any], stall_s: float) -> list[Any]:
    """Return stored objects that have arrived on this node."""
    began_s = time.monotonic()

    # One round is enough, unless Ray has forgotten an object.
    while True:
        try:
            objects: list[Any] = RAY_CALLS.make(
                ray.get, list(references), timeout=TICK_S
            )
            return objects
        except ray.exceptions.GetTimeoutError:
            heed_signals()
            if time.monotonic() - began_s > stall_s:
                raise ClusterError(
                    "stored objects have arrived on this node, but cannot be read:"
                    f" Ray has waited for them for {stall_s:g} s (run.stall_s)"
                ) from None
            RAY_CALLS.make(_ask_owners, references)


def _ask_owners(references: Sequence[Any]) -> None:
    """Let Ray ask the owners of stored objects again where these are.

    When a thread drops the last reference of a process to an object, Ray forgets where
    the object is. If another thread received a reference in that moment, what Ray
    learned for it is forgotten, too, and `ray.get` waits for ever.
    """
    worker = ray._private.worker.global_worker.core_worker
    for reference in references:
        _, owner, status = worker.serialize_object_ref(reference)
        worker.deserialize_and_register_object_ref(
            reference.binary(), ray.ObjectRef.nil(), owner, status
        )
