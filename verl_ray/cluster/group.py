"""Typed calls on the workers of one role.

Invariant: the verb says who is called (`scatter`: all, rows split over row coordinates; `broadcast`: all alike;
`rank_zero`: one; `route`, `stream`: replicas), and rows that come back stand in the order of the rows that went out.
A group that failed once refuses further calls until it is restarted. Deliberately not here: what the methods do, and
processes (`processes.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import numpy as np
import ray

from verl_ray.cluster.calls import Call, Deadline, Flight, late, receive
from verl_ray.cluster.failures import Member
from verl_ray.cluster.host import CONTROL, Request, Status, Value, lane_of
from verl_ray.cluster.processes import Processes
from verl_ray.data.batch import Batch, Int64
from verl_ray.data.packing import balance, estimated_work
from verl_ray.data.sharded import Receipt, Sharded, join
from verl_ray.errors import DataError, DeadlineExceeded, WorkerDied, WorkerError

W = TypeVar("W")
B = TypeVar("B", bound=Batch)
R = TypeVar("R", bound=Batch)
T = TypeVar("T")
P = ParamSpec("P")

CALL_KEY = "run.call_deadline_s"


class WorkerGroup(Generic[W]):
    """All ranks of one role. `deadline_s` bounds every call that does not name its own."""

    def __init__(self, role: str, processes: Processes, deadline_s: float) -> None:
        self.role = role
        self.deadline_s = deadline_s
        self._processes = processes
        self._failure: WorkerError | None = None
        self._failed_incarnation = 0
        self._routed: dict[int, list[Call[Any]]] = {}

    # --------------------------------------------------------------------------------------------------- facts

    @property
    def incarnation(self) -> int:
        """1 at first, one more after each restart."""
        return self._processes.incarnation

    @property
    def num_ranks(self) -> int:
        """Processes of this role."""
        return len(self._processes.ranks)

    @property
    def row_count(self) -> int:
        """Row coordinates: into how many parts `scatter` splits rows."""
        return self._processes.topologies[self.role][0].row_count

    def deal(self, lengths: Int64) -> list[Int64]:
        """Row numbers of each row coordinate, for rows of these lengths, int64 [rows]: near equal shares of the work
        that the workers' model has with them."""
        quadratic = self._processes.topologies[self.role][0].quadratic
        return balance(estimated_work(lengths, quadratic), self.row_count)

    def members(self) -> list[Member]:
        """The processes, by rank."""
        return [replace(member, role=self.role) for member in self._processes.members]

    # --------------------------------------------------------------------------------------------------- verbs

    @overload
    def scatter(  # type: ignore[overload-overlap]  # a batch is the narrower case of any value
        self,
        method: Callable[Concatenate[W, B, ...], R],
        rows: Sharded[B],
        *more: object,
        assignment: Sequence[Int64] | None = None,
        deadline_s: float | None = None,
    ) -> Call[Sharded[R]]: ...

    @overload
    def scatter(
        self,
        method: Callable[Concatenate[W, B, ...], T],
        rows: Sharded[B],
        *more: object,
        assignment: Sequence[Int64] | None = None,
        deadline_s: float | None = None,
    ) -> Call[list[T]]: ...

    def scatter(
        self,
        method: Callable[..., Any],
        rows: Sharded[Any],
        *more: object,
        assignment: Sequence[Int64] | None = None,
        deadline_s: float | None = None,
    ) -> Call[Any]:
        """Call `method(worker, rows, *more)` on all ranks, rows split over the row coordinates (see `deal`).

        Each coordinate's rows keep their order; it may get none. Every further `Sharded` in `more` is taken to stand
        row by row beside `rows` and is split alike; anything else goes to every rank as it is. `assignment` names the
        rows of each coordinate instead. Returns rows in the order of `rows` where the method returns a batch, else
        one value per row coordinate, in order. Raises DataError when row counts do not match.
        """
        self._check_beside(rows, more)
        chosen = self.deal(rows.lengths) if assignment is None else list(assignment)
        if len(chosen) != self.row_count or sum(map(len, chosen)) != len(rows):
            raise DataError(
                f"{self.role}: an assignment of {sum(map(len, chosen))} rows to {len(chosen)} coordinates was given "
                f"for {len(rows)} rows and {self.row_count} coordinates"
            )
        parts = [_slice((rows, *more), index) for index in chosen]
        topologies = self._processes.topologies[self.role]
        deadline = self._deadline(deadline_s)
        flights = [
            self._send(member, method, parts[topology.row_index], {}, deadline)
            for member, topology in zip(self._usable(), topologies, strict=True)
        ]
        order = np.concatenate(chosen) if chosen else np.empty(0, np.int64)

        def assemble(answers: list[tuple[Any, Any]]) -> Any:
            ordered = _by_coordinate(answers, [(t.row_index, t.answers) for t in topologies])
            if isinstance(ordered[0][1], Receipt):
                pieces = [Sharded.stored(payload, reply) for payload, reply in ordered]
                return pieces[0] if len(pieces) == 1 and _is_identity(order) else join(pieces, order)
            return [reply.value for _, reply in ordered]

        return Call(self, flights, assemble)

    def broadcast(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> Call[list[T]]:
        """Call the method with the same arguments, no rows, on all ranks. Returns the value of each rank."""
        deadline = self._deadline(None)
        flights = [self._send(member, method, args, kwargs, deadline) for member in self._usable()]
        return Call(self, flights, lambda answers: [_plain(reply) for _, reply in answers])

    def rank_zero(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Call the method on rank 0 alone; not for methods in which ranks meet."""
        flight = self._send(self._usable()[0], method, args, kwargs, self._deadline(None))
        return Call(self, [flight], lambda answers: _plain(answers[0][1]))

    @overload
    def route(
        self,
        method: Callable[Concatenate[W, B, ...], R],
        rows: Sharded[B],
        *more: object,
        replica: int | None = None,
        deadline_s: float | None = None,
    ) -> Call[Sharded[R]]: ...

    @overload
    def route(
        self,
        method: Callable[Concatenate[W, B, ...], T],
        rows: Sharded[B],
        *more: object,
        replica: int | None = None,
        deadline_s: float | None = None,
    ) -> Call[T]: ...

    def route(
        self,
        method: Callable[..., Any],
        rows: Sharded[Any],
        *more: object,
        replica: int | None = None,
        deadline_s: float | None = None,
    ) -> Call[Any]:
        """Call the method with all of `rows` on one replica (row coordinate): the one with the fewest open calls."""
        self._check_beside(rows, more)
        if replica is None:
            replica = min(range(self.row_count), key=self._open_calls)
        deadline = self._deadline(deadline_s)
        flights = [self._send(m, method, (rows, *more), {}, deadline) for m in self._replica(replica)]

        def assemble(answers: list[tuple[Any, Any]]) -> Any:
            payload, reply = next((payload, reply) for payload, reply in answers if reply is not None)
            return Sharded.stored(payload, reply) if isinstance(reply, Receipt) else reply.value

        call: Call[Any] = Call(self, flights, assemble)
        self._routed.setdefault(replica, []).append(call)
        return call

    def stream(
        self,
        method: Callable[Concatenate[W, B, ...], Iterator[R]],
        rows: Sharded[B],
        *more: object,
        assignment: Sequence[Int64] | None = None,
        deadline_s: float | None = None,
    ) -> Iterator[Sharded[R]]:
        """Call a generator method on all replicas, rows split over them, and yield each batch as soon as it is there.

        The calls are made at once, not at the first `next`. Pieces of different replicas come in any order; replicas
        without rows are not called. The deadline covers the whole stream. A consumer that stops early makes the
        replicas stop too (their `abort`, if they have one).
        """
        self._check_beside(rows, more)
        chosen = self.deal(rows.lengths) if assignment is None else list(assignment)
        deadline = self._deadline(deadline_s)
        streams = [
            stream
            for replica, index in enumerate(chosen)
            if len(index)
            for stream in self._streams(replica, method, _slice((rows, *more), index), deadline)
        ]
        return _pieces(streams)

    def open_stream(
        self,
        method: Callable[Concatenate[W, B, ...], Iterator[R]],
        rows: Sharded[B],
        *more: object,
        deadline_s: float | None = None,
    ) -> Stream[R]:
        """Call a generator method with all of `rows` on a group of one process; its pieces are the caller's to wait
        for, beside those of other groups (see `next_stream`)."""
        self._check_beside(rows, more)
        (stream,) = self._streams(0, method, (rows, *more), self._deadline(deadline_s))
        return stream

    def _streams(
        self, replica: int, method: Callable[..., Any], args: tuple[object, ...], deadline: Deadline
    ) -> list[Stream[Any]]:
        streams: list[Stream[Any]] = []
        for member in self._replica(replica):
            request = self._request(method, args, {}, deadline)
            stream_id = uuid.uuid4().hex
            lane = member.actor.stream.options(num_returns="streaming", concurrency_group=request.lane)
            source = lane.remote(request, stream_id)
            streams.append(Stream(self, Flight(member, method.__name__, source, None, deadline), stream_id))
        return streams

    # ------------------------------------------------------------------------------------------- the control lane

    def status(self) -> list[Status]:
        """What each rank is doing now, also while it is busy."""
        return cast(list[Status], self._control("status"))

    def answers(self, timeout_s: float) -> bool:
        """Whether the control lane of each rank answers in time."""
        asked = [m.actor.status.options(concurrency_group=CONTROL).remote() for m in self._processes.members]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
        try:
            return len(ray.get(ready)) == len(asked)
        except ray.exceptions.RayError:
            return False

    def stacks(self) -> list[str]:
        """The Python stacks of each rank, also while it is busy or stuck."""
        return cast(list[str], self._control("stacks"))

    def abort(self) -> None:
        """Tell every worker to give up what it is doing: its own `abort`, if it has one."""
        self._control("abort", self.role)

    def restart(self, deadline_s: float) -> None:
        """New processes for this group, and for every group that shares them: one more incarnation of each."""
        self._processes.restart(deadline_s)

    def owns(self, error: WorkerError) -> bool:
        """Whether it is about a process of this group."""
        return error.role == self.role and error.rank in self._processes.ranks

    def fail(self, error: WorkerError) -> None:
        """Refuse further calls of this incarnation, with this error as the reason."""
        self._failure, self._failed_incarnation = error, self.incarnation
        self._processes.broken |= isinstance(error, WorkerDied | DeadlineExceeded)

    # ------------------------------------------------------------------------------------------------- internals

    def _control(self, method: str, *args: object) -> list[Any]:
        lanes = [getattr(m.actor, method).options(concurrency_group=CONTROL) for m in self._processes.members]
        return cast(list[Any], ray.get([lane.remote(*args) for lane in lanes], timeout=self.deadline_s))

    def _usable(self) -> list[Member]:
        if self._failure is not None and self._failed_incarnation == self.incarnation:
            first = self._failure
            what = f"the group failed earlier and was not restarted; first failure: {first.what}"
            raise type(first)(
                what, role=first.role, rank=first.rank, node=first.node, detail=first.detail, output=first.output
            ) from first
        return self.members()

    def _replica(self, replica: int) -> list[Member]:
        topologies = self._processes.topologies[self.role]
        return [m for m, t in zip(self._usable(), topologies, strict=True) if t.row_index == replica]

    def _open_calls(self, replica: int) -> int:
        calls = [call for call in self._routed.get(replica, []) if not call.replied()]
        self._routed[replica] = calls
        return len(calls)

    def _deadline(self, deadline_s: float | None) -> Deadline:
        return Deadline.of(self.deadline_s if deadline_s is None else deadline_s, CALL_KEY)

    def _request(
        self, method: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object], deadline: Deadline
    ) -> Request:
        return Request(self.role, self.incarnation, method.__name__, args, kwargs, deadline.allowed_s, lane_of(method))

    def _send(
        self,
        member: Member,
        method: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        deadline: Deadline,
    ) -> Flight:
        request = self._request(method, args, kwargs, deadline)
        lane = member.actor.call.options(num_returns=2, concurrency_group=request.lane)
        payload, reply = lane.remote(request)
        return Flight(member, method.__name__, payload, reply, deadline)

    def _check_beside(self, rows: Sharded[Any], more: Sequence[object]) -> None:
        for other in more:
            if isinstance(other, Sharded) and len(other) != len(rows):
                raise DataError(
                    f"{self.role}: {len(other)} rows of {other.stage.__name__} were given beside {len(rows)} rows of "
                    f"{rows.stage.__name__}; they must stand row by row"
                )


class Stream(Generic[R]):
    """The pieces of one process's generator method. Nothing is lost by not waiting for it: pieces are kept."""

    def __init__(self, group: WorkerGroup[Any], flight: Flight, stream_id: str) -> None:
        self.group = group
        self.flight = flight
        self._stream_id = stream_id

    def take(self) -> Sharded[R] | None:
        """The next piece, which should be there already (`next_stream`); None at the end.

        Raises WorkerError and its kin, after which the group refuses further calls.
        """
        source = self.flight.payload
        try:
            try:
                payload = next(source)
            except StopIteration:
                return None
            _wait([self])
            try:
                reply = receive(replace(self.flight, reply=next(source)))
            except StopIteration:  # the process ended between the two; the reason lies in the first
                reply = receive(replace(self.flight, reply=payload))
            if isinstance(reply, WorkerError):
                raise reply
        except WorkerError as error:
            self.group.fail(error)
            raise
        return Sharded.stored(payload, reply)

    def end(self) -> None:
        """Nobody listens any more: the worker's `abort`, if it has one, and no further piece."""
        lane = self.flight.member.actor.end_stream.options(concurrency_group=CONTROL)
        lane.remote(self.group.role, self._stream_id)


def next_stream(streams: Sequence[Stream[R]], timeout_s: float) -> Stream[R] | None:
    """The first of these that has a piece, an end or a failure to take; None when none has for `timeout_s` seconds.

    Raises DeadlineExceeded when one of them is past its deadline.
    """
    return _wait(streams, timeout_s)


def _wait(streams: Sequence[Stream[R]], timeout_s: float | None = None) -> Stream[R] | None:
    left = min(stream.flight.deadline.left_s for stream in streams)
    by_source = {stream.flight.payload: stream for stream in streams}
    allowed = left if timeout_s is None else min(left, timeout_s)
    ready, _ = ray.wait(list(by_source), num_returns=1, timeout=allowed)
    if ready:
        return by_source[ready[0]]
    if allowed < left:
        return None
    error = late([stream.flight for stream in streams])
    for stream in streams:
        if stream.group.owns(error):
            stream.group.fail(error)
    raise error


def _pieces(streams: Sequence[Stream[R]]) -> Iterator[Sharded[R]]:
    # Consumes every stream to its end; waits for the next piece of any; unblocked by a piece, an end, a failure or
    # the deadline; stops when all streams have ended or one has failed.
    running = list(streams)
    try:
        while running:
            stream = _wait(running)
            assert stream is not None  # without a timeout it waits for the deadline
            piece = stream.take()
            if piece is None:
                running.remove(stream)
            else:
                yield piece
    finally:
        for stream in running:
            stream.end()


def _slice(args: tuple[object, ...], index: Int64) -> tuple[object, ...]:
    def taken(argument: object) -> object:
        if not isinstance(argument, Sharded):
            return argument
        whole = len(index) == len(argument) and _is_identity(index)
        return argument if whole else argument.select(index)

    return tuple(taken(argument) for argument in args)


def _is_identity(order: Int64) -> bool:
    return bool(np.array_equal(order, np.arange(len(order))))


def _by_coordinate(answers: Sequence[tuple[Any, Any]], told: Sequence[tuple[int, bool]]) -> list[tuple[Any, Any]]:
    chosen = [(index, answer) for answer, (index, answers_) in zip(answers, told, strict=True) if answers_]
    return [answer for _, answer in sorted(chosen, key=lambda pair: pair[0])]


def _plain(reply: Any) -> Any:
    if isinstance(reply, Value):
        return reply.value
    raise DataError(f"a method that returns {reply.stage.__name__} must be called by scatter or route")
