"""The workers of one role: their processes, and typed remote calls of their methods.

Invariant: the name of the call says which ranks run it. `scatter` calls all ranks with
the rows split over the data-parallel ranks, `broadcast` calls all ranks with the same
arguments, and `rank_zero` calls one rank. `route` calls one replica, which is all ranks
of one data-parallel rank, and `stream` every replica that has rows. A group
that failed once refuses further calls until it is restarted.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import numpy as np
import ray

from verl_ray.cluster.calls import Call, Stream, iterate_streams
from verl_ray.cluster.context import (
    PEER_TIMEOUT_FRACTION,
    CallRequest,
    Status,
    Value,
    concurrency_group_of,
)
from verl_ray.cluster.members import Member
from verl_ray.cluster.processes import Processes, Restart
from verl_ray.cluster.rank_calls import RankCall, died, stalled
from verl_ray.cluster.waiting import RAY_CALLS, wait
from verl_ray.columns.batch import Batch, Int64
from verl_ray.columns.packing import Topology, balance, estimated_work
from verl_ray.columns.sharded import Receipt, Sharded, join
from verl_ray.errors import DataError, DeadlineExceeded, WorkerDied, WorkerError

W = TypeVar("W")
B = TypeVar("B", bound=Batch)
R = TypeVar("R", bound=Batch)
T = TypeVar("T")
P = ParamSpec("P")


# ------------------------------------------------------------------ processes of a role


class RoleProcesses:
    """The processes that hold the ranks of one role."""

    def __init__(self, role: str, processes: Processes) -> None:
        self.role = role
        self._processes = processes
        self._failure: WorkerError | None = None
        self._failed_incarnation = 0
        self.has_owner = False
        """Whether somebody looks at the processes while they are idle, and starts them
        again."""

    # ----------------------------------------------------------------------- properties

    @property
    def incarnation(self) -> int:
        """Number of the present incarnation: 1 at first, plus one for each restart."""
        return self._processes.incarnation

    @property
    def stall_s(self) -> float:
        """Seconds for which a process may make no progress while a call is pending."""
        return self._processes.stall_s

    @property
    def log_dir(self) -> str:
        """Directory for the output of the processes, on each node."""
        return self._processes.log_dir

    @property
    def num_ranks(self) -> int:
        """Number of processes of this role."""
        return len(self._processes.ranks)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks, over which `scatter` splits rows."""
        return self.topologies[0].dp_size

    def partition(self, lengths: Int64) -> list[Int64]:
        """Row numbers of each data-parallel rank, in near equal shares of work.

        Args:
            lengths: Lengths of the rows in tokens, int64 [rows]. The workers' model
                determines how much work a row of some length is.
        """
        work = estimated_work(lengths, self.topologies[0].quadratic)
        return balance(work, self.dp_size)

    def members(self) -> list[Member]:
        """Processes of the group, by rank."""
        return [replace(member, role=self.role) for member in self._processes.members]

    @property
    def topologies(self) -> list[Topology]:
        """Topology of each rank."""
        return self._processes.topologies[self.role]

    @property
    def is_first_role(self) -> bool:
        """Whether the group is the first of those that share its processes."""
        return self._processes.roles[0].name == self.role

    @property
    def is_checked_while_idle(self) -> bool:
        """Whether the driver checks the processes also while it waits for others.

        A replica has an owner that does, and so may others. Processes that start, are
        lost or are killed are no longer idle.
        """
        has_owner = self.has_owner or self._processes.spec.replicas
        return not has_owner and self._processes.is_complete

    # ---------------------------------------------------------------- the control group

    def check_heartbeat(
        self, interval_s: float, deadline_s: float, limit: str
    ) -> Status | None:
        """Last status of a group of one process, requested at regular intervals.

        The method returns at once while the process is well.

        Args:
            interval_s: Seconds between two requests.
            deadline_s: Seconds that the process may take to reply.
            limit: Setting and value that define `deadline_s`, for the message.

        Returns:
            The last reply; None before the first.

        Raises:
            WorkerDied: The process has ended.
            DeadlineExceeded: The process has not replied for `deadline_s` seconds.
        """
        (member,) = self.members()
        try:
            if not member.heartbeat.poll(interval_s, deadline_s):
                since = time.monotonic() - member.heartbeat.unanswered_s
                raise stalled(
                    [member], "the control group", limit, since=since, mute=True
                )
        except ray.exceptions.RayError as error:
            raise died(member, "status", error) from error
        return member.heartbeat.status

    # ------------------------------------------------------------ failures and restarts

    def restart(self) -> Restart:
        """Start new processes for this group and every group that shares them.

        Each of these groups gets the next incarnation. The method returns at once; the
        group may be called once the restart is complete.
        """
        return self._processes.restart()

    def kill(self) -> None:
        """Kill the processes at once, also those of a restart that is under way."""
        self._processes.kill()

    def owns(self, error: WorkerError) -> bool:
        """Whether the error is about a process of this group."""
        return error.role == self.role and error.rank in self._processes.ranks

    @property
    def has_failed(self) -> bool:
        """Whether this incarnation refuses calls."""
        failed = self._failure is not None
        return failed and self._failed_incarnation == self.incarnation

    @property
    def shares_processes(self) -> bool:
        """Whether the processes of the group hold other roles, too."""
        return len(self._processes.roles) > 1

    def runs_in(self, sets: Collection[Processes]) -> bool:
        """Whether the processes of the group are one of these sets."""
        return self._processes in sets

    def fail(self, error: WorkerError) -> None:
        """Refuse further calls of this incarnation, with this error as the reason."""
        self._failure = error
        self._failed_incarnation = self.incarnation
        # After any other failure the processes can still close their workers.
        if isinstance(error, WorkerDied | DeadlineExceeded):
            self._processes.broken = True

    def _usable_members(self) -> list[Member]:
        """Processes of the group; raise its first failure again if it has failed."""
        failure = self._failure
        if failure is None or not self.has_failed:
            return self.members()

        message = (
            "the group failed earlier and was not restarted; first failure:"
            f" {failure.message}"
        )
        raise type(failure)(
            message,
            role=failure.role,
            rank=failure.rank,
            node=failure.node,
            detail=failure.detail,
            output=failure.output,
        ) from failure


# -------------------------------------------------------------------------- typed calls


class WorkerGroup(RoleProcesses, Generic[W]):
    """All ranks of one role, with typed calls on their workers."""

    def __init__(self, role: str, processes: Processes) -> None:
        super().__init__(role, processes)
        # Calls of `route` by replica that may still be open.
        self._routed: dict[int, list[Call[Any]]] = {}

    # ---------------------------------------------------------------------------- verbs

    @overload
    def scatter(  # type: ignore[overload-overlap]  # a batch is the narrower case of any value
        self,
        method: Callable[Concatenate[W, B, ...], R],
        rows: Sharded[B],
        *more_args: object,
        assignment: Sequence[Int64] | None = None,
    ) -> Call[Sharded[R]]: ...

    @overload
    def scatter(
        self,
        method: Callable[Concatenate[W, B, ...], T],
        rows: Sharded[B],
        *more_args: object,
        assignment: Sequence[Int64] | None = None,
    ) -> Call[list[T]]: ...

    def scatter(
        self,
        method: Callable[..., Any],
        rows: Sharded[Any],
        *more_args: object,
        assignment: Sequence[Int64] | None = None,
    ) -> Call[Any]:
        """Call `method(worker, rows, *more_args)` on all ranks with `rows` split.

        Rows of one data-parallel rank keep their order. A rank may get no rows.

        Args:
            method: Method of the worker class.
            rows: Rows to split over the data-parallel ranks.
            more_args: Further arguments. A `Sharded` must match `rows` row by row and
                is split in the same way. Other values go to every rank unchanged.
            assignment: Row numbers of each data-parallel rank; None for `partition`.

        Returns:
            A call with rows in the order of `rows` if the method returns a batch,
            else with a list of one value per data-parallel rank.

        Raises:
            DataError: Numbers of rows do not match, or the assignment does not hold
                each row once.
        """
        check_aligned(self.role, rows, more_args)
        parts = self._assigned(rows, assignment)
        check_assignment(self.role, parts, len(rows), self.dp_size)

        args_by_dp_rank = [select_rows((rows, *more_args), part) for part in parts]
        topologies = self.topologies
        rank_calls = []
        for member, topology in zip(self._usable_members(), topologies, strict=True):
            # Peers with the same data-parallel rank compute the same rows.
            args = args_by_dp_rank[topology.dp_rank]
            rank_calls.append(self._send(member, method, args, {}))

        def assemble(replies: list[RankReply]) -> Any:
            return join_results(replies, topologies, parts)

        return Call(self, rank_calls, assemble)

    def broadcast(
        self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Call[list[T]]:
        """Call the method on all ranks with the same arguments, none of them `Sharded`.

        Returns:
            A call with the values of all ranks, by rank.
        """
        members = self._usable_members()
        rank_calls = [self._send(member, method, args, kwargs) for member in members]

        def assemble(replies: list[RankReply]) -> list[T]:
            return [plain_value(reply) for _, reply in replies]

        return Call(self, rank_calls, assemble)

    def rank_zero(
        self, method: Callable[Concatenate[W, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> Call[T]:
        """Call the method on rank 0 alone; not for methods with collectives."""
        first_member = self._usable_members()[0]
        rank_call = self._send(first_member, method, args, kwargs)

        def assemble(replies: list[RankReply]) -> T:
            _, reply = replies[0]
            return cast(T, plain_value(reply))

        return Call(self, [rank_call], assemble)

    @overload
    def route(
        self,
        method: Callable[Concatenate[W, B, ...], R],
        rows: Sharded[B],
        *more_args: object,
        replica: int | None = None,
    ) -> Call[Sharded[R]]: ...

    @overload
    def route(
        self,
        method: Callable[Concatenate[W, B, ...], T],
        rows: Sharded[B],
        *more_args: object,
        replica: int | None = None,
    ) -> Call[T]: ...

    def route(
        self,
        method: Callable[..., Any],
        rows: Sharded[Any],
        *more_args: object,
        replica: int | None = None,
    ) -> Call[Any]:
        """Call the method with all of `rows` on one replica (data-parallel rank).

        Args:
            method: Method of the worker class.
            rows: Rows of the call.
            more_args: Further arguments; a `Sharded` must match `rows` row by row.
            replica: Number of the replica; None for the one with the fewest open
                calls of `route`.
        """
        check_aligned(self.role, rows, more_args)
        if replica is None:
            replica = self._least_loaded_replica()

        # All ranks of a replica run the call, and one of them returns the result.
        args = (rows, *more_args)
        members = self._members_of_replica(replica)
        rank_calls = [self._send(member, method, args, {}) for member in members]

        call: Call[Any] = Call(self, rank_calls, result_of_replica)
        if self.dp_size > 1:
            self._routed.setdefault(replica, []).append(call)
        return call

    def stream(
        self,
        method: Callable[Concatenate[W, B, ...], Iterator[R]],
        rows: Sharded[B],
        *more_args: object,
        assignment: Sequence[Int64] | None = None,
    ) -> Iterator[Sharded[R]]:
        """Call a generator method on all replicas with `rows` split over them.

        The calls are made at once, not at the first `next`. Replicas without rows are
        not called. The iterator yields each batch as soon as it arrives; batches of
        different replicas come in any order. A stream has no time limit while its
        process makes progress. If the consumer stops early, the workers' generators
        are stopped as well (`Stream.abandon`).

        Raises:
            DataError: Numbers of rows do not match, or the assignment does not hold
                each row once.
        """
        check_aligned(self.role, rows, more_args)
        parts = self._assigned(rows, assignment)
        check_assignment(self.role, parts, len(rows), self.dp_size)

        # `iterate_streams` is a generator, so calls made there would wait for the first
        # `next`.
        streams: list[Stream[Any]] = []
        for replica, part in enumerate(parts):
            if len(part):
                args = select_rows((rows, *more_args), part)
                streams += self._open_streams(replica, method, args)
        return iterate_streams(streams)

    def open_stream(
        self,
        method: Callable[Concatenate[W, B, ...], Iterator[R]],
        rows: Sharded[B],
        *more_args: object,
    ) -> Stream[R]:
        """Call a generator method with all of `rows` on a group of one process.

        The caller waits for its batches itself, together with the streams of other
        groups (see `ready_streams`).
        """
        check_aligned(self.role, rows, more_args)
        (stream,) = self._open_streams(0, method, (rows, *more_args))
        return stream

    # ----------------------------------------------------------------- sending requests

    def _assigned(
        self, rows: Sharded[Any], assignment: Sequence[Int64] | None
    ) -> list[Int64]:
        if assignment is None:
            return self.partition(rows.lengths)
        return list(assignment)

    def _members_of_replica(self, replica: int) -> list[Member]:
        members = zip(self._usable_members(), self.topologies, strict=True)
        return [member for member, topology in members if topology.dp_rank == replica]

    def _least_loaded_replica(self) -> int:
        """Return the replica with the fewest open calls of `route`."""
        routed = [call for calls in self._routed.values() for call in calls]
        references = [reference for call in routed for reference in call.references()]
        # One look at all calls: a look at each would take as long, and many are open.
        replied: set[Any] = set()
        if references:
            replied = set(wait(references, len(references), 0.0))

        # Complete calls are forgotten here, so that their results can be freed.
        for replica, calls in self._routed.items():
            self._routed[replica] = [
                call for call in calls if not replied.issuperset(call.references())
            ]
        return min(
            range(self.dp_size), key=lambda replica: len(self._routed.get(replica, ()))
        )

    def _request(
        self,
        method: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> CallRequest:
        return CallRequest(
            role=self.role,
            incarnation=self.incarnation,
            method=method.__name__,
            args=args,
            kwargs=kwargs,
            patience_s=PEER_TIMEOUT_FRACTION * self.stall_s,
            concurrency_group=concurrency_group_of(method),
        )

    def _send(
        self,
        member: Member,
        method: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> RankCall:
        request = self._request(method, args, kwargs)
        # There are two results: the driver fetches only the small reply, and the
        # payload (a batch) stays in the object store.
        actor_method = member.actor.call.options(
            num_returns=2, concurrency_group=request.concurrency_group
        )
        payload, reply = RAY_CALLS.make(actor_method.remote, request)
        return RankCall(member, request.method, payload, reply, self.stall_s)

    def _open_streams(
        self, replica: int, method: Callable[..., Any], args: tuple[object, ...]
    ) -> list[Stream[Any]]:
        """Call a generator method on every rank of one replica."""
        streams: list[Stream[Any]] = []
        for member in self._members_of_replica(replica):
            request = self._request(method, args, {})
            stream_id = uuid.uuid4().hex
            actor_method = member.actor.stream.options(
                num_returns="streaming", concurrency_group=request.concurrency_group
            )
            source = RAY_CALLS.make(actor_method.remote, request, stream_id)
            rank_call = RankCall(member, request.method, source, None, self.stall_s)
            streams.append(Stream(self, rank_call, stream_id))
        return streams


# ------------------------------------------------------------------ arguments with rows

# Rows as arguments and results of calls: split over ranks, and joined again.
#
# Invariant: results that come back stand in the order of the rows that went out.

RankReply = tuple[Any, Any]
"""Reference to the batch that one rank stored, and the reply of that rank."""


def check_aligned(role: str, rows: Sharded[Any], others: Sequence[object]) -> None:
    """Raise DataError if a `Sharded` in `others` has another number of rows."""
    for other in others:
        if isinstance(other, Sharded) and len(other) != len(rows):
            raise DataError(
                f"{role}: one argument holds {len(rows)} rows of"
                f" {rows.stage.__name__} and another {len(other)} rows of"
                f" {other.stage.__name__}; all must hold the same number of rows"
            )


def check_assignment(
    role: str, assignment: Sequence[Int64], num_rows: int, dp_size: int
) -> None:
    """Raise DataError unless `assignment` gives each row to one of `dp_size` ranks."""
    num_assigned = sum(map(len, assignment))
    if len(assignment) != dp_size or num_assigned != num_rows:
        raise DataError(
            f"{role}: the assignment holds {num_assigned} rows for"
            f" {len(assignment)} data-parallel ranks, expected {num_rows} rows for"
            f" {dp_size}"
        )

    # A row that is assigned twice, or that does not exist, takes the place of another.
    left_out = np.setdiff1d(np.arange(num_rows), np.concatenate(assignment))
    if len(left_out):
        raise DataError(
            f"{role}: the assignment must hold each of {num_rows} rows once, but it"
            f" lacks {len(left_out)} of them, the first is row {left_out[0]}"
        )


def select_rows(args: tuple[object, ...], indices: Int64) -> tuple[object, ...]:
    """Arguments with every `Sharded` reduced to `indices`, and the others unchanged."""
    return tuple(_select(argument, indices) for argument in args)


def _select(argument: object, indices: Int64) -> object:
    if not isinstance(argument, Sharded):
        return argument

    # A selection of all rows would only copy the index.
    is_whole = len(indices) == len(argument) and _is_identity(indices)
    if is_whole:
        return argument
    return argument.select(indices)


def join_results(
    replies: Sequence[RankReply],
    topologies: Sequence[Topology],
    assignment: Sequence[Int64],
) -> Any:
    """Result of a call whose rows were assigned to data-parallel ranks.

    Args:
        replies: One reply per rank.
        topologies: One topology per rank.
        assignment: Row numbers of each data-parallel rank.

    Returns:
        A `Sharded` in the order of the rows that went out if the method returns
        batches, else a list with one value per data-parallel rank.
    """
    ordered = _in_order_of_dp_rank(replies, topologies)
    _, first_reply = ordered[0]
    if not isinstance(first_reply, Receipt):
        return [reply.value for _, reply in ordered]

    order = np.empty(0, np.int64)
    if assignment:
        order = np.concatenate(assignment)

    parts = [Sharded.stored(payload, reply) for payload, reply in ordered]
    if len(parts) == 1 and _is_identity(order):
        return parts[0]
    return join(parts, order)


def result_of_replica(replies: Sequence[RankReply]) -> Any:
    """Result of the rank that replies for its replica: a `Sharded` or a value."""
    payload, reply = next(pair for pair in replies if pair[1] is not None)
    if isinstance(reply, Receipt):
        return Sharded.stored(payload, reply)
    return reply.value


def plain_value(reply: Any) -> Any:
    """Value of a reply that holds no batch.

    Raises:
        DataError: The reply holds a batch, whose rows would have no order.
    """
    if isinstance(reply, Value):
        return reply.value
    raise DataError(
        f"a method that returns {reply.stage.__name__} must be called by scatter or"
        " route"
    )


def _in_order_of_dp_rank(
    replies: Sequence[RankReply], topologies: Sequence[Topology]
) -> list[RankReply]:
    """Replies of the ranks that return results, by data-parallel rank."""
    by_dp_rank: dict[int, RankReply] = {}
    for reply, topology in zip(replies, topologies, strict=True):
        if topology.returns_results:
            by_dp_rank[topology.dp_rank] = reply
    return [by_dp_rank[dp_rank] for dp_rank in sorted(by_dp_rank)]


def _is_identity(order: Int64) -> bool:
    return bool(np.array_equal(order, np.arange(len(order))))
