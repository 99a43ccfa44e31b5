"""Memory that processes used, next to the prediction of the plan, and machine use.

These are the metrics `memory/...` of each step, and those of `machine_use.py`.

Invariant: processes measure their memory while they work. They are asked for it once
per step, by calls that run while the driver waits for others.

`memory/<role>/<phase>_gib` is the peak memory of the process of a rank while that role
did its part of a phase, on the rank with the highest peak. On a CPU it is the resident
set, on a device what torch allocated there. Roles that share a process are included in
each other's figures. `memory/<role>/<phase>_predicted_gib` is the plan's figure for the
same. The figures of a phase are those of the last time that it ended: for publish, this
is the one before the step, whose policy the step samples from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from controllers.watch.machine_use import use_metrics
from controllers.watch.measures import Metrics
from verl_ray.cluster.launch import Groups
from verl_ray.config.schema import Config
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import MemoryPlan, memory_plan
from verl_ray.preflight.role_memory import ROLLOUT, Phase
from verl_ray.profiling.machine_use import MachineUse, UseMeter
from verl_ray.profiling.memory import CallPeaks
from verl_ray.report.findings import is_beyond_plan
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.judge import JudgeWorker
from workers.model_worker import ModelWorker
from workers.reward_model import RewardModelGrader, RewardModelWorker
from workers.rollout import RolloutWorker

CALLS: dict[Phase, tuple[Callable[..., object], ...]] = {
    "generate": (RolloutWorker.generate, RewardModelGrader.score, JudgeWorker.score),
    "measure": (
        ActorWorker.compute_log_probs,
        ModelWorker.compute_reference_log_probs,
        CriticWorker.compute_values,
        ModelWorker.evaluate_teacher_forced,
        RewardModelWorker.compute_scores,
    ),
    "learn": (
        ActorWorker.update,
        CriticWorker.update,
        ModelWorker.learn,
    ),
    "publish": (
        ActorWorker.send,
        ActorWorker.probe,
        RolloutWorker.receive,
        RolloutWorker.commit,
        RolloutWorker.verify,
    ),
}
"""Methods by which roles do their part of each phase."""

PHASE_OF: dict[str, Phase] = {
    call.__name__: phase for phase, calls in CALLS.items() for call in calls
}


class MemoryRecord:
    """Collects the peak memory of a run's processes and compares it with the plan."""

    def __init__(self, config: Config, groups: Groups, *, on_gpus: bool) -> None:
        self._plan = memory_plan(config, on_gpus=on_gpus)
        self._groups = groups
        self._collect: Callable[[], list[tuple[CallPeaks, MachineUse]]] | None = None
        self._driver = UseMeter("driver", counts_children=False)
        self._measured: dict[tuple[str, Phase], int] = {}
        self._warned: set[tuple[str, Phase]] = set()

    def request_peaks(self) -> None:
        """Request the peaks of all processes, which reply while they work."""
        self._collect = self._groups.request_usage()

    def metrics(self) -> Metrics:
        """Return the memory of each role and phase, its prediction, and machine use.

        Memory is measured in the calls that had ended when the peaks were requested.
        """
        # A request is collected once; without a new one the last figures stay.
        collect, self._collect = self._collect, None
        metrics: Metrics = {}
        if collect is not None:
            reports = collect()
            self._measured |= peaks(self._plan, [report for report, _ in reports])
            metrics |= use_metrics([self._driver.take(), *(use for _, use in reports)])

        for (role, phase), measured in self._measured.items():
            predicted = self._plan.predicted(role, phase)
            metrics[f"memory/{role}/{phase}_gib"] = measured / GIB
            metrics[f"memory/{role}/{phase}_predicted_gib"] = predicted / GIB

            if is_beyond_plan(measured / GIB, predicted / GIB):
                self._warn_once(role, phase, measured, predicted)
        return metrics

    def _warn_once(
        self, role: str, phase: Phase, measured: int, predicted: int
    ) -> None:
        """Warn about memory beyond the prediction, once per role and phase."""
        if (role, phase) in self._warned:
            return

        self._warned.add((role, phase))
        print(
            f"warning: a rank of {role} held {measured / GIB:.2f} GiB in the phase"
            f" {phase}, and {predicted / GIB:.2f} GiB were predicted"
            f" (memory/{role}/{phase}_gib)",
            file=sys.stderr,
            flush=True,
        )


def peaks(
    plan: MemoryPlan, reports: Sequence[CallPeaks]
) -> dict[tuple[str, Phase], int]:
    """Return the peak memory of a rank of each role in each phase, in bytes.

    Phases are left out in which the role's process cannot measure its memory.

    Args:
        plan: Memory plan of the run.
        reports: Report of each process.
    """
    highest: dict[tuple[str, Phase], int] = {}

    def add(role: str, phase: Phase, nbytes: int) -> None:
        if plan.is_measured(role, phase):
            highest[role, phase] = max(nbytes, highest.get((role, phase), 0))

    for report in reports:
        for (role, method), peak in report.by_call.items():
            phase = PHASE_OF.get(method)
            if phase is not None:
                add(role, phase, peak)

        # A rollout engine does nothing while others learn, so its memory in this phase
        # is what it holds now.
        if any(role == ROLLOUT for role, _ in report.by_call):
            add(ROLLOUT, "learn", report.current_bytes)

    return highest
