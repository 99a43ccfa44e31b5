"""Generation over several replicas: who generates what, and what is pending.

Invariant: every response is generated once and handed on once, with the same tokens
whichever replica generates it. What a lost replica leaves pending goes to the others; a
prompt that ends them, too, is tried apart from other rows, and given up. Whether a
replica is lost is known to `supervisor.py`; whether it has the weights, to
`replicas.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controllers.rollouts.supervisor import Replica
from verl_ray.cluster.calls import Stream, ready_streams
from verl_ray.cluster.context import CONCURRENCY_GROUPS, SERVING
from verl_ray.cluster.waiting import put
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Prompts, Rollouts
from verl_ray.errors import RolloutError, WorkerError
from verl_ray.processes.isolation import Isolation
from verl_ray.rollout.balancer import Balancer, WorkItem
from workers.generation import Generation
from workers.rollout import (
    RolloutWorker,
)

ReplicaIncarnation = tuple[Replica, int]
"""A replica, and the number of times that its process has been started."""


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
        self.given_up: deque[int] = deque()
        """Ordinals of groups that no further response comes of; the owner takes them
        and forgets the responses that there are."""

        # The prompts are stored once, for all replicas that get some of them.
        self._prompts = put(prompts)
        self._row_of_prompt = {ordinal: row for row, ordinal in enumerate(ordinals)}
        self._groups = {ordinal: PromptGroup(self, ordinal) for ordinal in ordinals}

        self._unassigned: dict[int, set[int]] = {}
        """Responses without a replica, by the ordinal of their group: the ids of their
        trajectories."""
        for ordinal in ordinals:
            first_row = ordinal * group_size
            self._unassigned[ordinal] = set(range(first_row, first_row + group_size))

    @property
    def groups(self) -> Iterable[PromptGroup]:
        """The groups of all prompts."""
        return self._groups.values()

    @property
    def items(self) -> list[WorkItem[PromptGroup]]:
        """The groups without a replica, as items for the balancer."""
        return self._items(self._unassigned)

    def groups_of(self, rows: Iterable[int]) -> list[PromptGroup]:
        """Return the groups of some rows."""
        ordinals = {row // self.generation.group_size for row in rows}
        return [self._groups[ordinal] for ordinal in sorted(ordinals)]

    def item_of(self, group: PromptGroup) -> WorkItem[PromptGroup]:
        """Return a group that has no replica as an item for the balancer."""
        return WorkItem(group, len(self._unassigned[group.ordinal]))

    def give_up(self, group: PromptGroup) -> None:
        """Generate no response of a group, which has no replica, any more."""
        self.num_pending -= len(self._unassigned.pop(group.ordinal))
        self.given_up.append(group.ordinal)

    def prompt(self, ordinal: int) -> Sharded[Prompts]:
        """Return the prompt of a group."""
        return self._prompts.select([self._row_of_prompt[ordinal]])

    def submit(
        self,
        incarnation: ReplicaIncarnation,
        groups: Sequence[PromptGroup],
    ) -> ReplicaCall:
        """Request from a replica all responses of these groups that have no replica.

        Raises:
            WorkerError: The replica accepts no calls.
        """
        replica, _ = incarnation

        pending_responses: set[int] = set()
        for group in groups:
            pending_responses |= self._unassigned[group.ordinal]

        prompt_rows = [self._row_of_prompt[group.ordinal] for group in groups]
        stream = replica.open_stream(
            RolloutWorker.generate,
            self._prompts.select(np.array(prompt_rows)),
            self.generation,
            np.array(sorted(pending_responses)),
        )

        # The groups have a replica only now: the call may have been refused.
        for group in groups:
            del self._unassigned[group.ordinal]
        return ReplicaCall(self, incarnation, stream, pending_responses)

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
class ReplicaCall:
    """One call to a replica, and the responses that it has not delivered yet."""

    job: GenerationJob
    incarnation: ReplicaIncarnation
    stream: Stream[Rollouts]
    pending_responses: set[int]

    def open_groups(self) -> list[PromptGroup]:
        """Return the groups that rows are pending of."""
        return self.job.groups_of(self.pending_responses)


_PARTS = 4
"""Parts that the prompts of a second lost replica are divided into. A loss often has
other causes, so few parts keep the others waiting for a short time."""

MAX_CALLS = CONCURRENCY_GROUPS[SERVING] - 8
"""Most calls to one replica at the same time; the other threads are for `respond`.

Further prompts go to it in one call as soon as one of these ends.
"""


class GenerationScheduler:
    """Assigns the prompts of all open jobs to replicas, and collects the responses."""

    def __init__(self, in_flight: int) -> None:
        """Start without jobs and without replicas.

        Args:
            in_flight: Responses that a replica generates at the same time.
        """
        self._in_flight = in_flight
        self._balancer = self._new_balancer()
        self._calls: list[ReplicaCall] = []
        self._reissued = 0
        self._isolation = self._new_isolation()
        self._fatal: set[tuple[str, int]] = set()
        """Purpose and ordinal of each prompt that was given up."""
        self._num_given_up = 0

    def _new_isolation(self) -> Isolation[ReplicaIncarnation, PromptGroup]:
        # So a lost node, which leaves many prompts open, holds nobody up.
        return Isolation(_PARTS, free_losses=1)

    def _new_balancer(self) -> Balancer[ReplicaIncarnation, PromptGroup]:
        return Balancer((), self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether no response is pending."""
        return not (self._calls or self._balancer.waiting or self._isolation.is_waiting)

    def runs_retried_prompts(self, replica: Replica) -> bool:
        """Return whether a replica has open rows that were open at another's loss."""
        calls = [call for call in self._calls if call.incarnation[0] is replica]
        groups = (group for call in calls for group in call.open_groups())
        return any(map(self._isolation.causes, groups))

    def take_given_up_count(self) -> int:
        """Return the number of prompts given up since the last call."""
        count = self._num_given_up
        self._num_given_up = 0
        return count

    def busy(self, purpose: str | None = None) -> set[ReplicaIncarnation]:
        """Return the replicas that have open rows, of this purpose or of any."""
        return {
            call.incarnation
            for call in self._calls
            if call.pending_responses and purpose in (None, call.job.generation.purpose)
        }

    def pending(self, incarnation: ReplicaIncarnation) -> int:
        """Return the number of responses that a replica has been asked for."""
        return self._balancer.load(incarnation)

    def set_limit(self, incarnation: ReplicaIncarnation, limit: int) -> None:
        """Let a replica generate this many responses at a time from now on."""
        self._balancer.set_limit(incarnation, limit)

    def take_reissued_count(self) -> int:
        """Return the number of responses reissued since the last call.

        A response is reissued when the replica that should generate it is lost.
        """
        count = self._reissued
        self._reissued = 0
        return count

    def open(
        self, prompts: Prompts, generation: Generation, *, first: bool = False
    ) -> GenerationJob:
        """Begin to generate responses to these prompts; `Replicas.advance` continues.

        Args:
            prompts: The prompts.
            generation: What is generated for each of them.
            first: Whether they come before all prompts that wait for a replica.
        """
        job = GenerationJob(prompts, generation)
        # Earlier prompts will not come again, so their cached prefixes are of no use.
        if self.is_idle:
            self._balancer.forget_sessions()
        # Held-out problems come again, and need not end further replicas.
        for group in job.groups:
            if (job.generation.purpose, group.ordinal) in self._fatal:
                job.give_up(group)
        self._balancer.add(job.items, first=first)
        return job

    def close(self) -> None:
        """Abandon all jobs."""
        for call in self._calls:
            call.stream.abandon()
        self._calls = []
        self._balancer = self._new_balancer()
        self._isolation = self._new_isolation()

    def set_replicas(
        self,
        incarnations: Sequence[ReplicaIncarnation],
        running: Sequence[ReplicaIncarnation],
    ) -> None:
        """Use exactly these replicas from now on; they hold the present weights.

        What others left pending is queued again.

        Args:
            incarnations: The replicas to use.
            running: All that run. What others left pending may have ended them.
        """
        known = self._balancer.replicas
        removed = [replica for replica in known if replica not in incarnations]
        items: list[WorkItem[PromptGroup]] = []
        for replica in removed:
            items += self._remove(replica, is_lost=replica not in running)
        self._balancer.add(items, first=True)
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
            if self._waits_for_more_capacity(incarnation, count)
        }

        refusal: WorkerError | None = None
        refused: list[WorkItem[PromptGroup]] = []
        apart = self._begin_part(busy)
        assigned = apart | self._balancer.assign(busy)
        for incarnation, items in assigned.items():
            for job, job_items in _by_job(items).items():
                groups = [item.session for item in job_items]
                try:
                    call = job.submit(incarnation, groups)
                except WorkerError as error:
                    refusal = refusal or error
                    if incarnation in self._isolation.processes:
                        self._isolation.put_back(incarnation, groups)
                    else:
                        refused += job_items
                else:
                    self._calls.append(call)

        if refusal is not None:
            # Others will generate them, before anything else.
            self._balancer.add(refused, first=True)
            raise refusal

    def _begin_part(
        self, busy: set[ReplicaIncarnation]
    ) -> dict[ReplicaIncarnation, list[WorkItem[PromptGroup]]]:
        """Return the items that go on apart from others, by replica, if any can begin.

        Args:
            busy: Replicas that get no other items. The one with such items is added, or
                the one that is emptied for them.
        """
        items: list[WorkItem[PromptGroup]] = []
        replica = next(iter(self._isolation.processes), None)
        is_waiting = self._isolation.is_waiting
        if replica is None and is_waiting and self._balancer.replicas:
            replica = min(self._balancer.replicas, key=self._balancer.load)
            has_calls = any(call.incarnation == replica for call in self._calls)
            if not has_calls:
                groups = self._isolation.begin(replica)
                items = [group.job.item_of(group) for group in groups]
                self._balancer.place(replica, items)

        if replica is not None:
            busy.add(replica)
        return {replica: items} if replica is not None and items else {}

    def _waits_for_more_capacity(
        self, incarnation: ReplicaIncarnation, num_calls: int
    ) -> bool:
        """Return whether a replica with so many open calls gets no further one yet.

        A call lasts as long as its slowest response. The more of them are open, the
        more responses the next one must bring, or calls with a single slow response
        each would be all that the replica may have.
        """
        if num_calls >= MAX_CALLS:
            return True
        capacity = self._balancer.capacity(incarnation)
        total = capacity + self._balancer.load(incarnation)
        return capacity < total * num_calls // (2 * MAX_CALLS)

    def note_resumed(self) -> None:
        """Note that the replicas, which were paused, go on."""
        for call in self._calls:
            call.stream.note_resumed()

    def take(self, timeout_s: float, *, paused: bool) -> None:
        """Take the available pieces. Wait for the first one for up to `timeout_s`.

        Args:
            timeout_s: Limit in seconds.
            paused: Whether the replicas were told to make no progress.

        Raises:
            VerlRayError: A replica failed or makes no progress.
            RolloutError: A replica ended its reply before it was complete.
        """
        # Consumes a piece of each stream that has one per round. Ends when no piece is
        # available within the timeout, or when the last call has ended.
        while self._calls:
            calls = {call.stream: call for call in self._calls}
            ready = ready_streams(list(calls), timeout_s, paused=paused)
            if not ready:
                return

            for stream in ready:
                self._accept(calls[stream], stream.take())
            # Only the first piece is waited for.
            timeout_s = 0.0

    def _accept(self, call: ReplicaCall, piece: Sharded[Rollouts] | None) -> None:
        """Hand a piece to its job; None is the end of the call."""
        if piece is None:
            self._calls.remove(call)
            if call.pending_responses:
                missing = sorted(call.pending_responses)
                raise RolloutError(
                    f"a replica ended its reply without the responses {missing}"
                )
            others = (other.incarnation for other in self._calls)
            if call.incarnation not in others:
                self._isolation.finish(call.incarnation)
            return

        # A trajectory comes as a whole, whatever number of rows it has.
        responses = np.unique(piece.row("trajectory_id"))
        call.pending_responses.difference_update(responses.tolist())
        call.job.num_pending -= len(responses)
        call.job.finished.append(piece)
        if not call.job.num_pending:
            self._balancer.forget(call.job.groups)
            self._isolation.forget(call.job.groups)
        # The replica has capacity for as many further responses.
        self._balancer.finish(call.incarnation, len(responses))

    def _remove(
        self, replica: ReplicaIncarnation, *, is_lost: bool
    ) -> list[WorkItem[PromptGroup]]:
        """Stop using a replica; return what it left pending and others may take.

        What goes on apart from others is not part of it.
        """
        self._balancer.remove_replica(replica)
        items: list[WorkItem[PromptGroup]] = []
        # In the order of the calls: the oldest groups come first again.
        for call in [call for call in self._calls if call.incarnation == replica]:
            self._calls.remove(call)
            self._reissued += len(call.pending_responses)
            items += call.job.take_back(call.pending_responses)
        groups = [item.session for item in items]

        if is_lost:
            loss = self._isolation.note_loss(replica, groups)
            culprit = loss.culprit
            if culprit is not None:
                self._isolation.forget([culprit])
                culprit.job.give_up(culprit)
                self._fatal.add((culprit.job.generation.purpose, culprit.ordinal))
                self._num_given_up += 1
            return [item for item in items if item.session in set(loss.free)]
        if replica in self._isolation.processes:
            self._isolation.put_back(replica, groups)
            self._isolation.finish(replica)
            return []
        return items


def _by_job(
    items: Sequence[WorkItem[PromptGroup]],
) -> dict[GenerationJob, list[WorkItem[PromptGroup]]]:
    by_job: dict[GenerationJob, list[WorkItem[PromptGroup]]] = {}
    for item in items:
        by_job.setdefault(item.session.job, []).append(item)
    return by_job
