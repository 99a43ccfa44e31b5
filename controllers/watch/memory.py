"""What memory was used, beside what the plan predicted: the metrics `memory/...` of each step.

Invariant: processes note what they hold while they work, and are asked once per step, by calls that are under way while
others are waited for. Deliberately not here: the prediction (`memory_plan.py`), and how a process is watched
(`verl_ray/profiling/memory.py`).

`memory/<role>/<phase>_gib` is what the process of a rank held at most while that role did its part of a phase, on the
rank that held most: its resident set on a CPU, what torch gave out on its device where there is one. Roles that share a
process are in each other's figures. `memory/<role>/<phase>_predicted_gib` is the plan's figure for the same. Of each
phase it is the last that had ended: of publish the one before the step, whose policy the step samples from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from controllers.watch.measures import Metrics
from verl_ray.cluster.launch import Groups
from verl_ray.config.schema import Config
from verl_ray.preflight.machine import GIB
from verl_ray.preflight.memory_plan import ROLLOUT, MemoryPlan, Phase, memory_plan
from verl_ray.profiling.memory import CallPeaks
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.judge import JudgeWorker
from workers.reward_model import RewardModelGrader, RewardModelWorker
from workers.rollout import RolloutWorker

CALLS: dict[Phase, tuple[Callable[..., object], ...]] = {
    "generate": (RolloutWorker.generate, RewardModelGrader.score, JudgeWorker.score),
    "measure": (
        ActorWorker.compute_log_probs,
        ActorWorker.compute_base_log_probs,
        CriticWorker.compute_values,
        ActorWorker.grade_supervised,
        RewardModelWorker.compute_scores,
    ),
    "learn": (
        ActorWorker.update,
        CriticWorker.update,
        ActorWorker.train_supervised,
        RewardModelWorker.train_preferences,
    ),
    "publish": (
        ActorWorker.send,
        ActorWorker.probe,
        RolloutWorker.receive,
        RolloutWorker.commit,
        RolloutWorker.prove,
    ),
}
"""What a role does in each phase."""

PHASE_OF: dict[str, Phase] = {call.__name__: phase for phase, calls in CALLS.items() for call in calls}

MARGIN = 1.2
"""How far above the prediction a figure may be before a warning says so, and"""

SLACK_BYTES = 256 << 20
"""how far in any case: the libraries of two machines differ by more than small models take."""


class MemoryRecord:
    """Asks the processes of a run, and judges what they say."""

    def __init__(self, config: Config, groups: Groups, *, on_gpus: bool) -> None:
        self._plan = memory_plan(config, on_gpus=on_gpus)
        self._groups = groups
        self._told: Callable[[], list[CallPeaks]] | None = None
        self._last: dict[tuple[str, Phase], int] = {}
        self._warned: set[tuple[str, Phase]] = set()

    def ask(self) -> None:
        """Ask all processes; they answer beside what they do."""
        self._told = self._groups.ask_memory()

    def metrics(self) -> Metrics:
        """What was measured in the last calls that had ended when they were asked, and what was predicted."""
        told, self._told = self._told, None
        self._last |= peaks(self._plan, told() if told else ())
        metrics: Metrics = {}
        for (role, phase), measured in self._last.items():
            predicted = self._plan.predicted(role, phase)
            metrics[f"memory/{role}/{phase}_gib"] = measured / GIB
            metrics[f"memory/{role}/{phase}_predicted_gib"] = predicted / GIB
            if measured > MARGIN * predicted + SLACK_BYTES and (role, phase) not in self._warned:
                self._warned.add((role, phase))
                print(
                    f"warning: a rank of {role} held {measured / GIB:.2f} GiB in the phase {phase}, and "
                    f"{predicted / GIB:.2f} GiB were predicted (memory/{role}/{phase}_gib)",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
        return metrics


def peaks(predicted: MemoryPlan, told: Sequence[CallPeaks]) -> dict[tuple[str, Phase], int]:
    """The most that a rank of each role held in each phase, where its process can tell. A rollout engine does nothing
    while others learn: there it is what it holds as it is asked."""
    found: dict[tuple[str, Phase], int] = {}

    def see(role: str, phase: Phase, nbytes: int) -> None:
        if predicted.is_told(role, phase):
            found[role, phase] = max(nbytes, found.get((role, phase), 0))

    for one in told:
        for (role, method), peak in one.by_call.items():
            if (phase := PHASE_OF.get(method)) is not None:
                see(role, phase, peak)
        if any(role == ROLLOUT for role, _ in one.by_call):
            see(ROLLOUT, "learn", one.now)
    return found
