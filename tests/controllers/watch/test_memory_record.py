"""The memory that processes report, as metrics next to the prediction."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from controllers.watch.machine_use import use_metrics
from controllers.watch.memory import PHASE_OF, MemoryRecord, peaks
from scripts.configuration import compose
from tests.preflight.configs import planned, settled
from verl_ray.cluster.launch import Groups
from verl_ray.preflight.machine import GIB
from verl_ray.profiling.machine_use import MachineUse, UseMeter
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


USE = MachineUse("trainer", "host", 1.5, 50.0, 8.0)


class ReportedGroups(Groups):
    """Groups whose processes have sent these reports already."""

    def __init__(self, *reports: list[CallPeaks]) -> None:
        self._reports = iter(reports)

    def request_usage(self):  # type: ignore[no-untyped-def]
        return lambda: [(peaks, USE) for peaks in next(self._reports)]


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
        again = record.metrics()
        # What no call has changed stays.
        assert {name: again[name] for name in first if name.startswith("memory")} == {
            name: value for name, value in first.items() if name.startswith("memory")
        }
    assert capsys.readouterr().err == ""
    assert first["perf/trainer/cpu_cores"] == 3 * 1.5


def test_use_is_that_of_process_sets_and_of_nodes() -> None:
    one = MachineUse("rollout", "a", 2.0, 40.0, 8.0, gpu_percent=90.0)
    metrics = use_metrics(
        [
            one,
            replace(one, gpu_percent=60.0, node_cpu_percent=42.0),
            replace(one, processes="trainer", node="b", node_cpu_percent=5.0),
            replace(one, processes="driver", node_used_gib=9.0, gpu_percent=None),
        ]
    )
    own = {name: value for name, value in metrics.items() if "cpu_memory" not in name}
    assert own == pytest.approx(
        {
            "perf/rollout/cpu_cores": 4.0,
            "perf/rollout/gpu_percent": 75.0,
            "perf/trainer/cpu_cores": 2.0,
            "perf/trainer/gpu_percent": 90.0,
            "perf/driver/cpu_cores": 2.0,
            "perf/node_0/cpu_percent": 122 / 3,
            "perf/node_0/memory_used_gb": 9.0,
            "perf/node_1/cpu_percent": 5.0,
            "perf/node_1/memory_used_gb": 8.0,
            "perf/cpu_percent": (122 / 3 + 5) / 2,
        }
    )


def test_a_process_that_computes_uses_a_core() -> None:
    meter = UseMeter("driver")
    begun_s, cpu_s = time.monotonic(), time.process_time()
    while time.process_time() - cpu_s < 0.2:
        pass
    use = meter.take()
    # A busy machine gives it less than a core.
    assert use.cpu_cores >= 0.15 / (time.monotonic() - begun_s)
    assert use.cpu_cores < 64 and use.node_used_gib > 0 and use.gpu_percent is None


@pytest.mark.processes
def test_the_time_of_children_that_end_counts_once() -> None:
    program = (
        "import time\nwhile time.process_time() < 0.5: pass\nprint('.', flush=True)"
    )
    command = [sys.executable, "-c", f"{program}\ninput()"]
    meter = UseMeter("reward")
    begun_s = time.monotonic()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == ".\n"
        first_s = meter.take().cpu_cores * (time.monotonic() - begun_s)
        begun_s, cpu_s = time.monotonic(), time.process_time()
        child.communicate("\n")
    while time.process_time() - cpu_s < 0.2:
        pass
    second_s = meter.take().cpu_cores * (time.monotonic() - begun_s)
    assert first_s >= 0.45 and 0.15 <= second_s < 0.45

    # One that no reading has seen.
    begun_s = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=pipe)
    assert meter.take().cpu_cores * (time.monotonic() - begun_s) >= 0.45
