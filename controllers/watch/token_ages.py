"""How far behind the learning policy tokens were sampled.

Invariant: the shares of all ages add up to 1, over the response tokens of a step. In
a synchronous run every token is of age 0, and there are no such metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from controllers.watch.measures import Metrics
from verl_ray.columns.sharded import Sharded
from verl_ray.columns.stages import Rollouts
from verl_ray.data.buffer import RolloutBuffer
from workers.model_worker import UpdateReport


def age_metrics(
    updates: Sequence[Sequence[UpdateReport]], policy_version: int, staleness: int
) -> Metrics:
    """Return the histogram of ages in policy versions, by token, and its moments.

    Args:
        updates: Reports of the actor, [steps][ranks].
        policy_version: Version that the trainer held before it learned.
        staleness: The largest age; with 0 there are no metrics.
    """
    if not staleness:
        return {}

    tokens = Counter[int]()
    oldest_optimizer_steps = 0
    for ranks in updates:
        for report in ranks:
            oldest_optimizer_steps = max(
                oldest_optimizer_steps, report.oldest_optimizer_steps
            )
            for version, count in report.tokens_of_versions.items():
                tokens[policy_version - version] += count
    total = tokens.total()
    if not total:
        return {}

    shares = {age: tokens[age] / total for age in range(staleness + 1)}
    metrics = {f"staleness/share_of_age_{age}": share for age, share in shares.items()}
    return metrics | {
        "staleness/age_mean": sum(age * share for age, share in shares.items()),
        "staleness/age_max": float(max(tokens)),
        "staleness/optimizer_steps_max": float(oldest_optimizer_steps),
    }


def version_metrics(rollouts: Sharded[Rollouts], staleness: int) -> Metrics:
    """Return the share of rows that were sampled from several versions."""
    if not staleness:
        return {}
    changes = rollouts.row("oldest_version") != rollouts.row("newest_version")
    return {"staleness/rows_of_several_versions": float(changes.mean())}


def queue_metrics(buffer: RolloutBuffer, staleness: int) -> Metrics:
    """Return how many groups waited as others were taken, and how long those did."""
    if not staleness:
        return {}
    return {
        "staleness/groups_waiting": float(buffer.num_waiting),
        "timing_s/queue": buffer.take_queue_s(),
    }
