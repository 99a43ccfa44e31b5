"""Generation over several replicas: who generates what, and what is pending.

Invariant: every response is generated once and handed on once, with the same tokens
whichever replica generates it. What a lost replica leaves pending goes to the others.
Deliberately not here: whether a replica is lost (`supervisor.py`), and whether it has
the weights (`replicas.py`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controllers.rollouts.supervisor import Replica
from verl_ray.cluster.concurrency_groups import CONCURRENCY_GROUPS, SERVING
from verl_ray.cluster.store import put
from verl_ray.cluster.streams import Stream, next_stream
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Prompts, Rollouts
from verl_ray.errors import RolloutError, WorkerError
from verl_ray.rollout.balancer import Balancer, WorkItem
from workers.rollout import Generation, RolloutWorker

ReplicaIncarnation = tuple[Replica, int]
"""A replica, and the number of times that its process has been started."""

MAX_CALLS = CONCURRENCY_GROUPS[SERVING] // 2
"""Most calls to one replica at the same time.

Further prompts go to it in one call as soon as one of these ends.
"""


@dataclass(frozen=True, eq=False)
class PromptGroup:
    """One prompt of a job, and with it all responses that share this prompt.

    Groups are compared by identity, since two jobs may have the same prompts.
    """

    job: GenerationJob
    ordinal: int


class GenerationJob:
    """Responses to some prompts: the finished ones, and the number of pending ones."""

    def __init__(self, prompts: Prompts, generation: Generation) -> None:
        """Start with all responses pending and no replica at work."""
        group_size = generation.group_size
        ordinals: list[int] = prompts.group_id.tolist()

        self.generation = generation
        self.finished: deque[Sharded[Rollouts]] = deque()
        """Finished responses in the order of their arrival; the owner takes them."""
        self.num_pending = prompts.num_rows * group_size
        """Number of responses that are not finished."""

        # The prompts are stored once, for all replicas that get some of them.
        self._prompts = put(prompts)
        self._row_of_prompt = {ordinal: row for row, ordinal in enumerate(ordinals)}
        self._groups = {ordinal: PromptGroup(self, ordinal) for ordinal in ordinals}

        self._unassigned: dict[int, set[int]] = {}
        """Row ids without a replica, by the ordinal of their group."""
        for ordinal in ordinals:
            first_row = ordinal * group_size
            self._unassigned[ordinal] = set(range(first_row, first_row + group_size))

    @property
    def items(self) -> list[WorkItem[PromptGroup]]:
        """The groups without a replica, as items for the balancer."""
        return self._items(self._unassigned)

    def submit(
        self,
        incarnation: ReplicaIncarnation,
        groups: Sequence[PromptGroup],
    ) -> _ReplicaCall:
        """Request from a replica all responses of these groups that have no replica.

        Raises:
            WorkerError: The replica accepts no calls.
        """
        replica, _ = incarnation

        pending_rows: set[int] = set()
        for group in groups:
            pending_rows |= self._unassigned[group.ordinal]

        prompt_rows = [self._row_of_prompt[group.ordinal] for group in groups]
        stream = replica.open_stream(
            RolloutWorker.generate,
            self._prompts.select(np.array(prompt_rows)),
            self.generation,
            np.array(sorted(pending_rows)),
        )

        # The groups have a replica only now: the call may have been refused.
        for group in groups:
            del self._unassigned[group.ordinal]
        return _ReplicaCall(self, incarnation, stream, pending_rows)

    def take_back(self, rows: Iterable[int]) -> list[WorkItem[PromptGroup]]:
        """Return rows that a lost replica left pending, as items to assign again."""
        group_size = self.generation.group_size

        rows_by_group: dict[int, set[int]] = {}
        for row in rows:
            rows_by_group.setdefault(row // group_size, set()).add(row)

        self._unassigned.update(rows_by_group)
        return self._items(dict(sorted(rows_by_group.items())))

    def _items(self, rows_by_group: dict[int, set[int]]) -> list[WorkItem[PromptGroup]]:
        return [
            WorkItem(self._groups[ordinal], len(rows))
            for ordinal, rows in rows_by_group.items()
        ]


@dataclass(eq=False)
class _ReplicaCall:
    """One call to a replica, and the row ids that it has not delivered yet."""

    job: GenerationJob
    incarnation: ReplicaIncarnation
    stream: Stream[Rollouts]
    pending_rows: set[int]


class GenerationScheduler:
    """Assigns the prompts of all open jobs to replicas, and collects the responses."""

    def __init__(self, in_flight: int) -> None:
        """Start without jobs and without replicas.

        Args:
            in_flight: Responses that a replica generates at the same time.
        """
        self._in_flight = in_flight
        self._balancer = self._new_balancer()
        self._calls: list[_ReplicaCall] = []
        self._reissued = 0

    def _new_balancer(self) -> Balancer[ReplicaIncarnation, PromptGroup]:
        return Balancer((), self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether no response is pending."""
        return not self._calls and not self._balancer.waiting

    def take_reissued_count(self) -> int:
        """Return the number of responses reissued since the last call.

        A response is reissued when the replica that should generate it is lost.
        """
        count = self._reissued
        self._reissued = 0
        return count

    def open(self, job: GenerationJob) -> None:
        """Queue the groups of a job behind those that wait."""
        # Earlier prompts will not come again, so their cached prefixes are of no use.
        if self.is_idle:
            self._balancer.forget_sessions()
        self._balancer.add(job.items)

    def close(self) -> None:
        """Abandon all jobs."""
        for call in self._calls:
            call.stream.abandon()
        self._calls = []
        self._balancer = self._new_balancer()

    def set_replicas(self, incarnations: Sequence[ReplicaIncarnation]) -> None:
        """Use exactly these replicas from now on; they hold the present weights.

        What others left pending is queued again.
        """
        known = self._balancer.replicas
        for incarnation in known:
            if incarnation not in incarnations:
                self._remove(incarnation)
        for incarnation in incarnations:
            if incarnation not in known:
                self._balancer.add_replica(incarnation)

    def references(self) -> list[Any]:
        """Return the object references of the next pieces."""
        return [call.stream.rank_call.payload for call in self._calls]

    def dispatch(self) -> None:
        """Send queued groups to the replicas that have capacity for them.

        Raises:
            WorkerError: A replica accepts no calls. The others have theirs by then.
        """
        call_counts = Counter(call.incarnation for call in self._calls)
        busy = {
            incarnation
            for incarnation, count in call_counts.items()
            if count >= MAX_CALLS
        }

        refusal: WorkerError | None = None
        for incarnation, items in self._balancer.assign(busy).items():
            for job, job_items in _by_job(items).items():
                groups = [item.session for item in job_items]
                try:
                    call = job.submit(incarnation, groups)
                except WorkerError as error:
                    refusal = refusal or error
                    # Others will generate them, before anything else.
                    self._balancer.add(job_items, first=True)
                else:
                    self._calls.append(call)

        if refusal is not None:
            raise refusal

    def take(self, timeout_s: float) -> None:
        """Take the available pieces. Wait for the first one for up to `timeout_s`.

        Raises:
            VerlRayError: A replica failed or makes no progress.
            RolloutError: A replica ended its reply before it was complete.
        """
        # Consumes one piece per round. Ends when no piece is available within the
        # timeout, or when the last call has ended.
        while self._calls:
            streams = [call.stream for call in self._calls]
            ready = next_stream(streams, timeout_s)
            if ready is None:
                return

            call = next(call for call in self._calls if call.stream is ready)
            self._accept(call, ready.take())
            # Only the first piece is waited for.
            timeout_s = 0.0

    def _accept(self, call: _ReplicaCall, piece: Sharded[Rollouts] | None) -> None:
        """Hand a piece to its job; None is the end of the call."""
        if piece is None:
            self._calls.remove(call)
            if call.pending_rows:
                missing = sorted(call.pending_rows)
                raise RolloutError(
                    f"a replica ended its reply without the responses to rows {missing}"
                )
            return

        row_ids = piece.row("row_id").tolist()
        call.pending_rows.difference_update(row_ids)
        call.job.num_pending -= len(piece)
        call.job.finished.append(piece)
        # The replica has capacity for as many further responses.
        self._balancer.finish(call.incarnation, len(piece))

    def _remove(self, incarnation: ReplicaIncarnation) -> None:
        """Stop using a replica; queue what it left pending before anything else."""
        self._balancer.remove_replica(incarnation)
        lost_calls = [call for call in self._calls if call.incarnation == incarnation]
        for call in lost_calls:
            self._calls.remove(call)
            self._reissued += len(call.pending_rows)
            items = call.job.take_back(call.pending_rows)
            self._balancer.add(items, first=True)


def _by_job(
    items: Sequence[WorkItem[PromptGroup]],
) -> dict[GenerationJob, list[WorkItem[PromptGroup]]]:
    by_job: dict[GenerationJob, list[WorkItem[PromptGroup]]] = {}
    for item in items:
        by_job.setdefault(item.session.job, []).append(item)
    return by_job
