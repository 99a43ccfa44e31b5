"""Typed remote calls of the workers of one role.

Invariant: the name of the call says which ranks run it. `scatter` calls all ranks with
the rows split over the data-parallel ranks, `broadcast` calls all ranks with the same
arguments, and `rank_zero` calls one rank. `route` calls one replica, which is all ranks
of one data-parallel rank, and `stream` every replica that has rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from verl_ray.cluster.calls import Call, Stream, iterate_streams
from verl_ray.cluster.context import (
    PEER_TIMEOUT_FRACTION,
    CallRequest,
    concurrency_group_of,
)
from verl_ray.cluster.members import Member
from verl_ray.cluster.processes import Processes
from verl_ray.cluster.rank_calls import RankCall
from verl_ray.cluster.role_processes import RoleProcesses
from verl_ray.cluster.row_arguments import (
    RankReply,
    check_aligned,
    check_assignment,
    join_results,
    plain_value,
    result_of_replica,
    select_rows,
)
from verl_ray.cluster.waiting import RAY_CALLS, wait
from verl_ray.columns.batch import Batch, Int64
from verl_ray.columns.sharded import Sharded

W = TypeVar("W")
B = TypeVar("B", bound=Batch)
R = TypeVar("R", bound=Batch)
T = TypeVar("T")
P = ParamSpec("P")


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
