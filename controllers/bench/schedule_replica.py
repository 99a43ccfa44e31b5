"""The replica of `verl-ray bench schedule`: forced lengths, and when its rows end.

Invariant: the length of a response depends on its row id alone, so that all schedules
generate the same responses. Deliberately not here: what the driver does with them
(`schedule_trainer.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from verl_ray.cluster.context import WorkerContext, concurrent, steering
from verl_ray.data.batch import Int64
from verl_ray.data.stages import Prompts, Rollouts
from verl_ray.rollout.requests import Sampling
from verl_ray.rollout.seeds import row_seeds
from workers.rollout import Generation, RolloutSpec, RolloutWorker

LEAST_OF_TAIL = 8
"""The scale of the heavy-tailed lengths, which is the least of them."""

_SEEDS = 2.0**63


@dataclass(frozen=True)
class Lengths:
    """The lengths of the responses.

    Attributes:
        kind: equal: all of them have `most` tokens. tail: half of them have less than
            twice `LEAST_OF_TAIL`, a quarter less than four times, and so on up to
            `most`: a Pareto distribution of index 1, cut off there.
        most: The greatest length.
    """

    kind: Literal["equal", "tail"]
    most: int

    def of(self, row_id: int) -> int:
        """Return the length of the response of this row."""
        if self.kind == "equal":
            return self.most
        seed = row_seeds(0, "length", np.array([row_id]))[0]
        uniform = (float(seed) + 1) / _SEEDS
        return min(self.most, math.floor(LEAST_OF_TAIL / uniform))


@dataclass(frozen=True)
class ForcedGeneration(Generation):
    """Generation of responses whose lengths are forced."""

    lengths: Lengths

    def sampling_of(self, row_id: int) -> Sampling:
        """Return the sampling of a row, which stops at its length and at no token."""
        return replace(
            self.sampling, max_tokens=self.lengths.of(row_id), stop_token_ids=()
        )


@dataclass(frozen=True)
class Moment:
    """When some rows began or ended in the replica.

    Attributes:
        at_s: The time on the monotonic clock, which is the machine's.
        row_ids: The rows, int64 [rows].
    """

    at_s: float
    row_ids: Int64


@dataclass(frozen=True)
class ReplicaRecord:
    """Calls that a replica got and rows that it handed on, since it was last asked."""

    begun: list[Moment]
    ended: list[Moment]


class RecordingWorker(RolloutWorker):
    """A replica that remembers when rows came, and when it handed them on."""

    def __init__(self, context: WorkerContext, spec: RolloutSpec) -> None:
        super().__init__(context, spec)
        self._record = ReplicaRecord([], [])

    @concurrent
    def generate(
        self,
        prompts: Prompts,
        generation: Generation,
        requested_rows: Int64 | None = None,
    ) -> Iterator[Rollouts]:
        """Yield responses as a replica does, and remember when."""
        assert requested_rows is not None
        record = self._record
        record.begun.append(Moment(time.monotonic(), requested_rows))
        for rollouts in super().generate(prompts, generation, requested_rows):
            record.ended.append(Moment(time.monotonic(), rollouts.row_id))
            yield rollouts

    @steering
    def take_record(self) -> ReplicaRecord:
        """Return what was remembered since the last call."""
        record = self._record
        self._record = ReplicaRecord([], [])
        return record
