"""The histogram of ages, and the metrics of rows and of the queue, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from controllers.watch.token_ages import age_metrics, queue_metrics, version_metrics
from tests.rows import rollouts_of
from verl_ray.columns.sharded import Receipt, Sharded
from verl_ray.columns.stages import Rollouts, Scores
from verl_ray.data.buffer import Experience, RolloutBuffer
from verl_ray.engine.base import LossReport, StepReport
from workers.model_worker import UpdateReport


def report(tokens_of_versions: dict[int, int], oldest: int = 0) -> UpdateReport:
    return UpdateReport(
        LossReport(),
        StepReport(1.0, 0.1),
        tokens_of_versions=tokens_of_versions,
        oldest_optimizer_steps=oldest,
    )


UPDATES = [
    [report({7: 4, 5: 1}, oldest=5), report({6: 2}, oldest=3)],
    [report({7: 1}, oldest=1), report({})],
]
"""Two optimizer steps on two ranks: 5 tokens of version 7, 2 of 6, 1 of 5."""


def test_ages_of_tokens_over_all_updates_and_ranks() -> None:
    metrics = age_metrics(UPDATES, policy_version=7, staleness=3)
    assert metrics == {
        "staleness/share_of_age_0": 5 / 8,
        "staleness/share_of_age_1": 2 / 8,
        "staleness/share_of_age_2": 1 / 8,
        "staleness/share_of_age_3": 0,
        "staleness/age_mean": (2 * 1 + 1 * 2) / 8,
        "staleness/age_max": 2.0,
        "staleness/optimizer_steps_max": 5.0,
    }


def test_nothing_is_told_of_a_synchronous_run_or_without_tokens() -> None:
    assert age_metrics(UPDATES, policy_version=7, staleness=0) == {}
    assert age_metrics([[report({})]], policy_version=7, staleness=1) == {}
    assert age_metrics([], policy_version=7, staleness=1) == {}
    rollouts = stored(rollouts_of([2]))
    assert version_metrics(rollouts, staleness=0) == {}
    assert queue_metrics(RolloutBuffer(1, 0), staleness=0) == {}


def stored(batch: Rollouts | Scores) -> Sharded:
    return Sharded.stored(batch, Receipt.of(batch))


def test_rows_over_which_the_weights_changed() -> None:
    rollouts = rollouts_of([2, 3, 0, 4]).replace(
        oldest_version=np.array([4, 3, -1, 5]), newest_version=np.array([5, 3, -1, 5])
    )
    metrics = version_metrics(stored(rollouts), staleness=1)
    assert metrics == {"staleness/rows_of_several_versions": 1 / 4}


def test_groups_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 15.0, 16.0])
    monkeypatch.setattr("verl_ray.data.buffer.time.monotonic", lambda: next(clock))
    buffer = RolloutBuffer(2, staleness=1)
    buffer.reserve(np.array([0, 1, 2]))
    for groups in ([0, 0, 1], [1, 2, 2]):  # at 10 s and 12 s
        rows = rollouts_of([2] * 3, groups=groups)
        scores = Scores.ok(np.zeros(3, np.float32))
        buffer.put(Experience(stored(rows), {"reward": stored(scores)}))
    buffer.take(np.array([0, 1]), 0, lambda: pytest.fail("all are there"))
    # What is finished later, while the step learns, was not there.
    buffer.reserve(np.array([3]))
    rows = stored(rollouts_of([2] * 2, groups=[3, 3]))
    buffer.put(Experience(rows, {"reward": stored(Scores.ok(np.zeros(2, np.float32)))}))
    assert queue_metrics(buffer, staleness=1) == {
        "staleness/groups_waiting": 1.0,
        "timing_s/queue": (5.0 + 3.0) / 2,
    }
