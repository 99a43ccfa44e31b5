"""How long the driver of `verl-ray bench schedule` takes to react to finished rows.

Invariant: a reaction begins when the replica hands rows on, so it includes the object
store and Ray's messages. All processes are on one machine and share its monotonic
clock. Deliberately not here: what is measured meanwhile (`schedule.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from controllers.bench.schedule_replica import Moment, ReplicaRecord
from verl_ray.data.batch import Int64

LEARNING = "learning"
"""The phase in which the trainer computes."""

Span = tuple[float, float]
"""Begin and end on the monotonic clock, in seconds."""


@dataclass(frozen=True)
class DriverRecord:
    """Times at which the driver did something, on the monotonic clock.

    Attributes:
        passed_on: When each row was passed on to its graders, by row id.
        drawn: When each prompt was drawn, by ordinal.
        waiting: When it waited for the groups of a step.
        publishing: When it published weights.
    """

    passed_on: dict[int, float] = field(default_factory=dict)
    drawn: dict[int, float] = field(default_factory=dict)
    waiting: list[Span] = field(default_factory=list)
    publishing: list[Span] = field(default_factory=list)

    def phase(self, began_s: float, ended_s: float) -> str:
        """Return what the driver did while it reacted.

        A reaction is of "publishing" if it had to wait for a weight sync, else of
        "waiting" if it began while the groups of a step were waited for. Between these
        the trainer computes.
        """
        if any(began_s < end and begin < ended_s for begin, end in self.publishing):
            return "publishing"
        if any(begin <= began_s < end for begin, end in self.waiting):
            return "waiting"
        return LEARNING


@dataclass(frozen=True)
class Reaction:
    """One reaction of the driver to rows that ended.

    Attributes:
        phase: What the driver did meanwhile.
        seconds: How long the driver took.
    """

    phase: str
    seconds: float


def graded(ended: Sequence[Moment], driver: DriverRecord) -> list[Reaction]:
    """Return how long pieces of rows took until they were passed on to graders.

    Pieces that were abandoned at the end are left out.
    """
    reactions = []
    for piece in ended:
        passed_on_s = driver.passed_on.get(int(piece.row_ids[0]))
        if passed_on_s is not None:
            phase = driver.phase(piece.at_s, passed_on_s)
            reactions.append(Reaction(phase, passed_on_s - piece.at_s))
    return reactions


def replaced(
    replica: ReplicaRecord, driver: DriverRecord, concurrency: int, group_size: int
) -> list[Reaction]:
    """Return how long a group that waited took from free capacity to the replica.

    Groups come in the order in which they wait. A group has capacity once enough rows
    have ended that its own would not exceed `concurrency`. Groups that were drawn later
    than that did not wait, and are left out.
    """
    ended_s = [piece.at_s for piece in replica.ended for _ in piece.row_ids]

    reactions = []
    num_begun = 0
    for call in replica.begun:
        for ordinal, size in _groups(call.row_ids, group_size):
            num_begun += size
            num_to_end = num_begun - concurrency
            if num_to_end <= 0:
                continue
            free_s = ended_s[num_to_end - 1]
            if driver.drawn[ordinal] <= free_s:
                phase = driver.phase(free_s, call.at_s)
                reactions.append(Reaction(phase, call.at_s - free_s))
    return reactions


def _groups(row_ids: Int64, group_size: int) -> list[tuple[int, int]]:
    """Return the ordinal and the number of rows of each group, in their order."""
    ordinals, sizes = np.unique(row_ids // group_size, return_counts=True)
    return list(zip(ordinals.tolist(), sizes.tolist(), strict=True))


def percentiles(reactions: Sequence[Reaction]) -> dict[str, dict[str, float]]:
    """Return count, median, 99th percentile and maximum in ms, by the driver's phase.

    "all" stands for all phases; a phase without reactions is left out.
    """
    by_phase: dict[str, list[float]] = {}
    for reaction in reactions:
        for phase in (reaction.phase, "all"):
            by_phase.setdefault(phase, []).append(1000 * reaction.seconds)

    return {
        phase: {
            "count": len(values),
            "p50_ms": round(float(np.percentile(values, 50)), 2),
            "p99_ms": round(float(np.percentile(values, 99)), 2),
            "max_ms": round(max(values), 2),
        }
        for phase, values in by_phase.items()
    }
