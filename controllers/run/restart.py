"""A run that goes on after processes of it are lost.

Invariant: what follows is what follows from a resume: lost processes are new, the
trainer is new, and its state is that of a snapshot or checkpoint, or of the
beginning where there is none. So the steps that are made again have the same bits.
"""

from __future__ import annotations

from typing import Any

from controllers.run.faults import Cure, FaultPolicy
from controllers.run.recovery import Recovery
from controllers.supervisor import reports
from controllers.system.build import System, restart_lost
from controllers.trainers.base import Task, Trainable
from verl_ray.config.schema import Config


class RunRestart:
    """Restores one run after failures of its processes."""

    def __init__(
        self,
        config: Config,
        task: Task[Any, Any],
        data: Any,
        system: System,
        recovery: Recovery,
        policy: FaultPolicy,
    ) -> None:
        """Take what a trainer is made of.

        Args:
            config: Resolved configuration of the run.
            task: Its task.
            data: What the task has read.
            system: The processes.
            recovery: The checkpoints.
            policy: Decides about failures, as the system asks it about its graders and
                reference.
        """
        self._config = config
        self._task = task
        self._data = data
        self._system = system
        self._recovery = recovery
        self._policy = policy

    def note_finished(self, step: int) -> None:
        """Note that a step is finished, for the first time or again."""
        self._policy.note_finished(step)
        reports().finished(step)

    def may_cure(self, failure: BaseException, step: int) -> bool:
        """Return whether this driver goes on after a failure in this step; say so."""
        cure = self._policy.cure_of(failure, step)
        if cure is Cure.START_AGAIN:
            reports().retry(str(failure).partition("\n")[0])
        return cure is Cure.GO_BACK

    def restart(self, trainer: Trainable) -> Trainable:
        """Start lost processes again; return a new trainer without any state."""
        restart_lost(self._config, self._system)
        restarted = self._task.make_trainer(self._data, self._system)
        if not self._recovery.finds_state(restarted):
            # Those that learned have to forget it.
            restart_lost(self._config, self._system, list(trainer.groups))
            restarted = self._task.make_trainer(self._data, self._system)
        return restarted
