"""Admission of prompts: which of them may be drawn now, the oldest first.

The ordinal of a prompt is its running number in the run. Batch n, counted from 0, holds
the ordinals [n * B, (n + 1) * B), where B is data.prompts_per_step, and training step
n + 1 learns from it.

Invariant: at most rollout.staleness + 1 batches beyond the last trained one are drawn.
A row of batch n is therefore never older than that of version n - rollout.staleness,
and no group is dropped for its age, which would starve prompts that take long. What the
state of a run holds is the place of the oldest batch that is not trained, so that a
resumed run draws the same prompts again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Int8, Prompts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.cursor import CursorState, drawn_rows
from verl_ray.data.prompts import PromptSource
from verl_ray.rewards.shaping import ResponseScores

if TYPE_CHECKING:
    # It imports Ray, and `check` does without.
    from controllers.watch.measures import Metrics


@dataclass(frozen=True)
class _Batch:
    """A batch that was drawn and is not trained yet."""

    ordinals: Int64
    place: CursorState
    """Where the source stood before the batch was drawn."""


class Admission:
    """The batches of prompts that are drawn and not trained yet."""

    def __init__(self, prompts: PromptSource, config: RLConfig) -> None:
        """Begin without batches, at the place of the source."""
        self._prompts = prompts
        self._curriculum = prompts.curriculum
        self._size = config.data.prompts_per_step
        self._staleness = config.rollout.staleness
        self._total_steps = config.run.steps

        self._trained = 0
        """Number of trained batches."""
        self._open: deque[_Batch] = deque()
        """Batches that were drawn and are not trained, the oldest first."""

    @property
    def num_trained(self) -> int:
        """Number of trained batches, which is the version of the policy."""
        return self._trained

    @property
    def undecided(self) -> Int64:
        """Drawn ordinals that no batch holds for certain: none, int64 [0]."""
        return np.empty(0, np.int64)

    @property
    def is_full(self) -> bool:
        """Whether it is known which groups the next batch holds."""
        return True

    @property
    def oldest(self) -> Int64:
        """Ordinals of the batch that is trained next, int64 [prompts]."""
        return self._open[0].ordinals

    def batches_of(self, ordinals: Int64) -> Int64:
        """Return the batch that holds each group, int64 [groups]."""
        first = drawn_rows(self.state())
        batches: Int64 = self._trained + (ordinals - first) // self._size
        return batches

    def draw(self) -> Iterator[tuple[int, Prompts]]:
        """Yield each batch that may be drawn now, with the step that learns from it."""
        # Each round draws one batch. It ends when no further one may be drawn.
        while self._may_draw:
            if self._curriculum is not None:
                self._curriculum.begin_batch(self._trained + len(self._open))
            place = self._prompts.state()
            prompts = self._prompts.next_batch(self._size)
            self._open.append(_Batch(prompts.group_id, place))
            yield self._trained + len(self._open), prompts

    @property
    def _may_draw(self) -> bool:
        num_drawn = self._trained + len(self._open)
        is_within_bound = len(self._open) <= self._staleness
        return is_within_bound and num_drawn < self._total_steps

    def decide(self, group_id: Int64, scores: ResponseScores, finish: Int8) -> Int64:
        """Return which whole groups are rejected: none, int64 [0]."""
        return np.empty(0, np.int64)

    def note_trained(self) -> Metrics:
        """Note that the oldest batch is trained; return what there is to say of it."""
        self._open.popleft()
        self._trained += 1
        return {}

    def state(self) -> CursorState:
        """Return the place of the oldest batch that is not trained."""
        return self._open[0].place if self._open else self._prompts.state()

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: the data are not those that the state was taken with.
            CheckpointError: the state contradicts itself.
        """
        self._prompts.load_state(state)
        self._open.clear()

    def begin(self, trained: int) -> None:
        """Begin behind this number of trained batches, where the source stands."""
        self._trained = trained
