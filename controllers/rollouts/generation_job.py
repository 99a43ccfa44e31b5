"""Responses to some prompts that are generated together, and the calls that do it.

Invariant: a response is pending, with a replica or without one, or it is handed on
once. Deliberately not here: which replica gets which prompts (`generation.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from controllers.rollouts.supervisor import Replica
from verl_ray.cluster.calls import Stream
from verl_ray.cluster.store import put
from verl_ray.data.sharded import Sharded
from verl_ray.data.stages import Prompts, Rollouts
from verl_ray.rollout.balancer import WorkItem
from workers.rollout import Generation, RolloutWorker

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
        """Row ids without a replica, by the ordinal of their group."""
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
        return ReplicaCall(self, incarnation, stream, pending_rows)

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
    """One call to a replica, and the row ids that it has not delivered yet."""

    job: GenerationJob
    incarnation: ReplicaIncarnation
    stream: Stream[Rollouts]
    pending_rows: set[int]

    def open_groups(self) -> list[PromptGroup]:
        """Return the groups that rows are pending of."""
        return self.job.groups_of(self.pending_rows)
