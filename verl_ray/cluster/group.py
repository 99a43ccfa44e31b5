"""Typed calls on the workers of one role.

Invariant: the verb says who is called (`scatter`: all, rows split over row coordinates; `broadcast`: all alike;
`rank_zero`: one; `route`, `stream`: replicas), and rows that come back stand in the order of the rows that went out.
A group that failed once refuses further calls until it is restarted. Deliberately not here: what the methods do, and
processes (`processes.py`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import numpy as np
import ray

from verl_ray.cluster import failures
from verl_ray.cluster.calls import Call, Flight
from verl_ray.cluster.failures import Member
from verl_ray.cluster.lanes import CONTROL, lane_of
from verl_ray.cluster.messages import PATIENCE, Request, Status, Value
from verl_ray.cluster.processes import Processes, Restart
from verl_ray.cluster.streams import Stream, pieces
from verl_ray.cluster.waiting import wait
from verl_ray.data.batch import Batch, Int64
from verl_ray.data.packing import balance, estimated_work
from verl_ray.data.sharded import Receipt, Sharded, join
from verl_ray.errors import DataError, DeadlineExceeded, WorkerDied, WorkerError

W = TypeVar("W")
B = TypeVar("B", bound=Batch)
R = TypeVar("R", bound=Batch)
T = TypeVar("T")
P = ParamSpec("P")


class WorkerGroup(Generic[W]):
    """All ranks of one role."""

    def __init__(self, role: str, processes: Processes) -> None:
        self.role = role
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
    def stall_s(self) -> float:
        """For how many seconds its processes may make no progress while something is asked of them."""
        return self._processes.stall_s

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
    ) -> Call[Sharded[R]]: ...

    @overload
    def scatter(
        self,
        method: Callable[Concatenate[W, B, ...], T],
        rows: Sharded[B],
        *more: object,
        assignment: Sequence[Int64] | None = None,
    ) -> Call[list[T]]: ...

    def scatter(
        self,
        method: Callable[..., Any],
        rows: Sharded[Any],
        *more: object,
        assignment: Sequence[Int64] | None = None,
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
        flights = [
            self._send(member, method, parts[topology.row_index], {})
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
        flights = [self._send(member, method, args, kwargs) for member in self._usable()]
        return Call(self, flights, lambda answers: [_plain(reply) for _, reply in answers])

    def rank_zero(self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs) -> Call[T]:
        """Call the method on rank 0 alone; not for methods in which ranks meet."""
        flight = self._send(self._usable()[0], method, args, kwargs)
        return Call(self, [flight], lambda answers: _plain(answers[0][1]))

    @overload
    def route(
        self,
        method: Callable[Concatenate[W, B, ...], R],
        rows: Sharded[B],
        *more: object,
        replica: int | None = None,
    ) -> Call[Sharded[R]]: ...

    @overload
    def route(
        self,
        method: Callable[Concatenate[W, B, ...], T],
        rows: Sharded[B],
        *more: object,
        replica: int | None = None,
    ) -> Call[T]: ...

    def route(
        self,
        method: Callable[..., Any],
        rows: Sharded[Any],
        *more: object,
        replica: int | None = None,
    ) -> Call[Any]:
        """Call the method with all of `rows` on one replica (row coordinate): the one with the fewest open calls."""
        self._check_beside(rows, more)
        if replica is None:
            replica = min(range(self.row_count), key=self._open_calls)
        flights = [self._send(m, method, (rows, *more), {}) for m in self._replica(replica)]

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
    ) -> Iterator[Sharded[R]]:
        """Call a generator method on all replicas, rows split over them, and yield each batch as soon as it is there.

        The calls are made at once, not at the first `next`. Pieces of different replicas come in any order; replicas
        without rows are not called. A stream may last as long as its replica makes progress. A consumer that stops
        early makes the replicas stop too (their `abort`, if they have one).
        """
        self._check_beside(rows, more)
        chosen = self.deal(rows.lengths) if assignment is None else list(assignment)
        streams = [
            stream
            for replica, index in enumerate(chosen)
            if len(index)
            for stream in self._streams(replica, method, _slice((rows, *more), index))
        ]
        return pieces(streams)

    def open_stream(
        self,
        method: Callable[Concatenate[W, B, ...], Iterator[R]],
        rows: Sharded[B],
        *more: object,
    ) -> Stream[R]:
        """Call a generator method with all of `rows` on a group of one process; its pieces are the caller's to wait
        for, beside those of other groups (see `next_stream`)."""
        self._check_beside(rows, more)
        (stream,) = self._streams(0, method, (rows, *more))
        return stream

    def _streams(self, replica: int, method: Callable[..., Any], args: tuple[object, ...]) -> list[Stream[Any]]:
        streams: list[Stream[Any]] = []
        for member in self._replica(replica):
            request = self._request(method, args, {})
            stream_id = uuid.uuid4().hex
            lane = member.actor.stream.options(num_returns="streaming", concurrency_group=request.lane)
            source = lane.remote(request, stream_id)
            streams.append(Stream(self, Flight(member, method.__name__, source, None, self.stall_s), stream_id))
        return streams

    # ------------------------------------------------------------------------------------------- the control lane

    def status(self) -> list[Status]:
        """What each rank is doing now, also while it is busy."""
        return cast(list[Status], self._control("status"))

    def beat(self, interval_s: float, deadline_s: float, limit: str) -> Status | None:
        """Of a group of one process: ask what it does, every `interval_s` seconds, and what it said last. Returns at
        once while the process is well.

        Raises:
            WorkerDied: the process is gone.
            DeadlineExceeded: it has not answered for `deadline_s` seconds; `limit` names the setting.
        """
        (member,) = self.members()
        try:
            if not member.heartbeat.beat(interval_s, deadline_s):
                since = time.monotonic() - member.heartbeat.unanswered_s
                raise failures.stalled([member], "the control lane", limit, since=since, mute=True)
        except ray.exceptions.RayError as error:
            raise failures.died(member, "status", error) from error
        return member.heartbeat.status

    def stacks(self) -> list[str]:
        """The Python stacks of each rank, also while it is busy or stuck."""
        return cast(list[str], self._control("stacks"))

    def restart(self) -> Restart:
        """New processes for this group, and for every group that shares them: one more incarnation of each. Returns
        at once; the group may be called once the restart is over."""
        return self._processes.restart()

    def kill(self) -> None:
        """End its processes at once, also those of a restart that is under way."""
        self._processes.kill()

    def owns(self, error: WorkerError) -> bool:
        """Whether it is about a process of this group."""
        return error.role == self.role and error.rank in self._processes.ranks

    def fail(self, error: WorkerError) -> None:
        """Refuse further calls of this incarnation, with this error as the reason."""
        self._failure, self._failed_incarnation = error, self.incarnation
        self._processes.broken |= isinstance(error, WorkerDied | DeadlineExceeded)

    # ------------------------------------------------------------------------------------------------- internals

    def _control(self, method: str) -> list[Any]:
        lanes = [getattr(m.actor, method).options(concurrency_group=CONTROL) for m in self._processes.members]
        asked = [lane.remote() for lane in lanes]
        there = wait(asked, len(asked), self.stall_s)
        silent = [member for member, reply in zip(self.members(), asked, strict=True) if reply not in there]
        if silent:
            raise failures.stalled(silent, method, f"run.stall_s = {self.stall_s:g}", mute=True)
        return cast(list[Any], ray.get(asked))

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

    def _request(self, method: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]) -> Request:
        patience_s = PATIENCE * self.stall_s
        return Request(self.role, self.incarnation, method.__name__, args, kwargs, patience_s, lane_of(method))

    def _send(
        self, member: Member, method: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Flight:
        request = self._request(method, args, kwargs)
        lane = member.actor.call.options(num_returns=2, concurrency_group=request.lane)
        payload, reply = lane.remote(request)
        return Flight(member, method.__name__, payload, reply, self.stall_s)

    def _check_beside(self, rows: Sharded[Any], more: Sequence[object]) -> None:
        for other in more:
            if isinstance(other, Sharded) and len(other) != len(rows):
                raise DataError(
                    f"{self.role}: {len(other)} rows of {other.stage.__name__} were given beside {len(rows)} rows of "
                    f"{rows.stage.__name__}; they must stand row by row"
                )


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
