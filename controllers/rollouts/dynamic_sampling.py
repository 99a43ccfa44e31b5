"""Groups that teach nothing are drawn again until a batch is full.

With a group baseline, a group whose responses all have the same score, but for
rounding, has no advantage. DAPO (arXiv:2503.14476, section 3.2) leaves such groups
out and draws others, so that every batch has as many groups that count.

The batches are those of the accepted groups, in the order of their ordinals: batch n
holds the accepted ones from number n * B on, where B is data.prompts_per_step.

Invariant: which groups a batch holds depends on no order of completion. A batch is
full once B groups are accepted and every earlier ordinal is decided. At most
(staleness + 1) * B groups are open, accepted or undecided, so a batch is learned from
at most rollout.staleness versions after its groups were drawn, and a synchronous run
draws exactly the groups that are missing.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ray.algorithms.advantages import ADVANTAGES
from verl_ray.algorithms.groups import has_spread
from verl_ray.columns.batch import Int64
from verl_ray.columns.stages import Bool, Int8, Prompts
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.cursor import CursorState
from verl_ray.data.prompts import PromptSource
from verl_ray.errors import CheckpointError, DataError
from verl_ray.learning.credit import says_something
from verl_ray.rewards.shaping import ResponseScores

if TYPE_CHECKING:
    # It imports Ray, and `check` does without.
    from controllers.watch.measures import Metrics
from controllers.rollouts.admission import Admission

Settled = Callable[[Int64], Bool]
"""Tells of ordinals whether they were trained or rejected, as the ledger does."""


def with_spread(
    config: RLConfig, group_id: Int64, scores: ResponseScores, finish: Int8
) -> Bool:
    """Return whether the estimator of a run sees a spread in each row's group.

    A response that is no member of its group, such as one that was cut with
    algorithm.truncated=drop, makes no spread.

    Args:
        group_id: int64 [rows].
        scores: Weighed scores of the rows.
        finish: Numbers of `Finish`, int8 [rows].
    """
    is_member = scores.ok & says_something(config.algorithm, finish)
    # Groups whose sums of rewards agree may differ in what is added, and vice versa.
    estimator = ADVANTAGES[config.algorithm.advantage]
    parts = estimator.compared(scores.summands)
    return has_spread(scores.score, group_id, is_member, parts=parts)


def require_dynamic_sampling(config: RLConfig, ledger: Mapping[str, Any]) -> None:
    """Refuse to continue without it where prompts were rejected ahead of others.

    Args:
        config: Configuration of the run.
        ledger: The ledger's state in the checkpoint.

    Raises:
        CheckpointError: There are such prompts, and the run would draw them again.
    """
    if ledger["holes"] and config.algorithm.dynamic_sampling is None:
        raise CheckpointError(
            "prompts of the checkpoint were rejected ahead of others, which only a run"
            " with algorithm.dynamic_sampling passes by: keep it, for example"
            " algorithm.dynamic_sampling=10"
        )


class DynamicAdmission(Admission):
    """The groups that are drawn and not trained yet, accepted or undecided."""

    def __init__(
        self, prompts: PromptSource, config: RLConfig, is_settled: Settled
    ) -> None:
        """Begin without groups, at the place of the source."""
        super().__init__(prompts, config)
        most_draws = config.algorithm.dynamic_sampling
        assert most_draws is not None
        self._most_draws = most_draws * self._size
        self._is_settled = is_settled
        self._config = config

        self._places: dict[int, CursorState] = {}
        """Where the source stood before each open ordinal, ascending."""
        self._accepted: list[int] = []
        """Accepted ordinals that are not trained, ascending."""
        self._num_accepted = 0
        """Number of groups that were accepted since a batch was trained."""
        self._rejected: list[float] = []
        """Mean score of each that was rejected since; NaN without a score."""

    @property
    def undecided(self) -> Int64:
        """Ordinals that are neither accepted nor rejected, ascending, int64."""
        accepted = set(self._accepted)
        undecided = [ordinal for ordinal in self._places if ordinal not in accepted]
        return np.array(undecided, np.int64)

    @property
    def is_full(self) -> bool:
        """Whether it is known which groups the next batch holds."""
        if len(self._accepted) < self._size:
            return False
        undecided = self.undecided
        return not len(undecided) or undecided[0] > self._accepted[self._size - 1]

    @property
    def oldest(self) -> Int64:
        """Ordinals of the batch that is trained next, int64 [prompts]."""
        assert self.is_full, "the batch is not full yet"
        return np.array(self._accepted[: self._size], np.int64)

    def batches_of(self, ordinals: Int64) -> Int64:
        """Return the last batch that may hold each open group, from its place on."""
        first = next(iter(self._places), self._prompts.drawn)
        between = np.arange(first, int(ordinals.max(initial=first)) + 1)
        num_open = np.cumsum(~self._is_settled(between))
        earlier = num_open[np.maximum(ordinals - first, 0)] - 1
        batches: Int64 = self._trained + np.maximum(earlier, 0) // self._size
        return batches

    def draw(self) -> Iterator[tuple[int, Prompts]]:
        """Yield the prompts that may be drawn now, with the step that may learn.

        Raises:
            DataError: More were drawn for a batch than algorithm.dynamic_sampling
                allows.
        """
        num_batches = min(self._staleness + 1, self._total_steps - self._trained)
        missing = num_batches * self._size - len(self._places)
        if missing <= 0:
            return
        needed = len(self._rejected) + num_batches * self._size
        if needed > num_batches * self._most_draws and not self.is_full:
            raise self._error()

        # Each round draws what is missing of one batch.
        while missing:
            step = self._trained + 1 + len(self._places) // self._size
            count = min(missing, self._size - len(self._places) % self._size)
            missing -= count
            yield step, Prompts.concat([self._draw_one() for _ in range(count)])

    def _draw_one(self) -> Prompts:
        """Draw the next prompt that is not settled."""
        if self._curriculum is not None:
            # No batch beyond the next one is drawn with a curriculum.
            self._curriculum.begin_batch(self._trained)
        self._pass_settled()
        place = self._prompts.state()
        prompt = self._prompts.next_batch(1)
        self._places[int(prompt.group_id[0])] = place
        return prompt

    def _pass_settled(self) -> None:
        """Pass by the next ordinals that were rejected before a restart."""
        while self._is_settled(np.array([self._prompts.drawn]))[0]:
            self._prompts.next_batch(1)

    def decide(self, group_id: Int64, scores: ResponseScores, finish: Int8) -> Int64:
        """Accept or reject whole groups; return the rejected ones, int64 [groups].

        Args:
            group_id: The ordinal of each response, int64 [rows].
            scores: Their scores.
            finish: Why each of them ended, numbers of `Finish`, int8 [rows].
        """
        accepts = with_spread(self._config, group_id, scores, finish)
        for ordinal in np.unique(group_id[accepts]).tolist():
            insort(self._accepted, ordinal)
            self._num_accepted += 1
        rejected = np.unique(group_id[~accepts])
        for ordinal in rejected.tolist():
            del self._places[ordinal]
            group_scores = scores.score[(group_id == ordinal) & scores.ok]
            mean = float(group_scores.mean()) if len(group_scores) else math.nan
            self._rejected.append(mean)
        return rejected

    def note_trained(self) -> Metrics:
        """Note that the batch is trained; return what was decided since the last."""
        metrics = {"dynamic_sampling/rejected": float(len(self._rejected))}
        if self._num_accepted or self._rejected:
            metrics["dynamic_sampling/accepted_share"] = self._accepted_share
        if not math.isnan(self._rejected_mean):
            metrics["dynamic_sampling/rejected_score_mean"] = self._rejected_mean

        for ordinal in self._accepted[: self._size]:
            del self._places[ordinal]
        del self._accepted[: self._size]
        self._num_accepted = 0
        self._rejected.clear()
        self._trained += 1
        # The place is behind what is settled, as that of the ledger.
        if not self._places:
            self._pass_settled()
        return metrics

    @property
    def _accepted_share(self) -> float:
        """The share of accepted groups among those that were decided."""
        return self._num_accepted / (self._num_accepted + len(self._rejected))

    @property
    def _rejected_mean(self) -> float:
        """The mean score of the rejected groups; NaN if none has one."""
        means = [mean for mean in self._rejected if not math.isnan(mean)]
        return sum(means) / len(means) if means else math.nan

    def _error(self) -> DataError:
        return DataError(
            f"algorithm.dynamic_sampling: {len(self._rejected)} groups have no two"
            f" different scores ({self._rejected_mean:g} in the mean), and"
            f" {self._num_accepted} were accepted, {self._accepted_share:.1%}, since a"
            f" batch of {self._size} was last full",
            fix="Choose problems that are neither too hard nor too easy for this"
            " policy, raise rollout.group_size or algorithm.dynamic_sampling, or"
            " set it to null",
        )

    def state(self) -> CursorState:
        """Return the place of the oldest ordinal that is open."""
        for place in self._places.values():
            return place
        return self._prompts.state()

    def load_state(self, state: Mapping[str, int | str]) -> None:
        """Continue where `state` was taken.

        Raises:
            DataError: the data are not those that the state was taken with.
            CheckpointError: the state contradicts itself.
        """
        super().load_state(state)
        self._places.clear()
        self._accepted.clear()
