"""The memory that processes report, as metrics next to the prediction."""

from __future__ import annotations

import pytest

from controllers.watch.memory import PHASE_OF, MemoryRecord, peaks
from scripts.configuration import compose
from tests.preflight.configs import planned, settled
from verl_ray.cluster.launch import Groups
from verl_ray.preflight.machine import GIB
from verl_ray.profiling.memory import CallPeaks

REPORTS = [
    CallPeaks(
        3 * GIB,
        {
            ("actor", "update"): 5 * GIB,
            ("actor", "place"): 9 * GIB,
            ("critic", "compute_values"): GIB,
        },
    ),
    CallPeaks(3 * GIB, {("actor", "update"): 4 * GIB, ("reward", "score"): 9 * GIB}),
    CallPeaks(
        2 * GIB,
        {
            ("rollout", "generate"): 7 * GIB,
            ("rollout", "commit"): GIB,
            ("rollout", "receive"): 6 * GIB,
        },
    ),
]


class ReportedGroups(Groups):
    """Groups whose processes have sent these reports already."""

    def __init__(self, *reports: list[CallPeaks]) -> None:
        self._reports = iter(reports)

    def request_memory(self):  # type: ignore[no-untyped-def]
        return lambda: next(self._reports)


def test_each_phase_has_the_most_of_any_rank_and_call() -> None:
    found = peaks(planned(compose("quickstart"), on_gpus=False), REPORTS)
    assert {key: size // GIB for key, size in found.items()} == {
        ("actor", "learn"): 5, ("critic", "measure"): 1, ("rollout", "generate"): 7, ("rollout", "publish"): 6,
        ("rollout", "learn"): 2,
    }  # fmt: skip


def test_names_of_calls_belong_to_one_phase() -> None:
    assert (
        PHASE_OF["update"] == "learn"
        and PHASE_OF["score"] == "generate"
        and PHASE_OF["receive"] == "publish"
    )


def test_what_is_far_above_the_prediction_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = MemoryRecord(
        settled(compose("quickstart")),
        ReportedGroups(REPORTS, [], REPORTS),
        on_gpus=False,
    )
    assert record.metrics() == {}  # nothing was requested
    record.request_peaks()
    first = record.metrics()
    assert (
        first["memory/actor/learn_gib"] == 5
        and 0.4 < first["memory/actor/learn_predicted_gib"] < 1
    )
    told = capsys.readouterr().err
    assert "a rank of actor held 5.00 GiB in the phase learn, and 0.8" in told
    assert (
        told.count("warning") == 4 and "critic" not in told
    )  # 1 GiB of 0.81 is within the margin
    for _ in range(2):
        record.request_peaks()
        assert record.metrics() == first  # what no call has changed stays
    assert capsys.readouterr().err == ""
