"""Shared GPUs: which state of trainers and rollout engines is on the devices now.

Invariant: every shared model is in the same phase. The phase changes by `switch_to`
alone, which returns once all state is in its place. What is freed, and by whom, follows
from the configuration before anything starts (`SharingPlan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.rollout_task import Offloaded, RolloutTaskConfig
from verl_ray.rollout.engine_state import EngineMemoryPart
from verl_ray.settings.section import resolved
from workers.actor import ActorWorker
from workers.model_worker import ModelWorker

DevicePhase = Literal["training", "publishing", "rollouts"]
"""The training state that is on shared GPUs.

- training: all of it.
- publishing: of the state that placement.offload moves, only the actor's weights, which
  are sent from there.
- rollouts: nothing of the state that placement.offload moves.
"""


@dataclass(frozen=True)
class SharingPlan:
    """Memory that trainers and rollout engines free for each other."""

    shares_devices: bool
    """Whether trainers and engines are on the same GPUs."""
    engines_free: EngineMemoryPart | None
    """What engines free while the trainers work."""
    trainers_offload: Literal["nothing", "optimizer", "all"]
    """What trainers move to the host while rollouts are generated."""

    @classmethod
    def of(cls, config: RolloutTaskConfig, *, on_gpus: bool) -> Self:
        """Return the plan that follows from the configuration.

        Args:
            on_gpus: Whether the run has GPUs. Without them nothing is moved, and
                engines sleep only if the configuration says so.
        """
        shares_devices = on_gpus and config.placement.kind == "colocated"
        offload: Offloaded = resolved(config.placement.offload)

        # Trainers with GPUs of their own keep everything there.
        trainers_offload: Literal["nothing", "optimizer", "all"] = "nothing"
        if shares_devices and offload != "none":
            trainers_offload = offload

        return cls(
            shares_devices=shares_devices,
            engines_free=config.rollout.freed_by_sleep,
            trainers_offload=trainers_offload,
        )

    @property
    def engines_start_first(self) -> bool:
        """Whether engines are built before trainers.

        An engine is awake when it starts. Awake it does not fit next to the trainers
        for which it frees memory later.
        """
        return self.engines_free is not None


class DeviceSharing:
    """The devices of one run, and the phase that they are in."""

    def __init__(
        self,
        plan: SharingPlan,
        actor: WorkerGroup[ActorWorker],
        models: Sequence[WorkerGroup[Any]],
    ) -> None:
        """Start in the phase "training".

        Args:
            models: Groups whose state is offloaded for rollouts where devices are
                shared, the actor included.
        """
        self.plan = plan
        self._actor = actor
        self._offloaded: tuple[WorkerGroup[Any], ...] = ()
        if plan.trainers_offload != "nothing":
            self._offloaded = tuple(models)
        self._phase: DevicePhase = "training"

    @property
    def phase(self) -> DevicePhase:
        """The present phase."""
        return self._phase

    @property
    def offloads_actor(self) -> bool:
        """Whether the actor's weights are on the host while rollouts are generated."""
        return bool(self._offloaded) and self.plan.trainers_offload == "all"

    @property
    def moves_nothing(self) -> bool:
        """Whether trainers and engines keep all of their memory in every phase."""
        return not self._offloaded and self.plan.engines_free is None

    @property
    def engine_fits(self) -> bool:
        """Whether there is memory for an engine that starts now, awake at first."""
        return not self._offloaded or self._phase == "rollouts"

    def switch_to(self, phase: DevicePhase) -> None:
        """Move the state of all models that share devices; return when it is there."""
        moves: list[Call[list[None]]] = []

        for group in self._offloaded:
            # The optimizer state is only needed for updates.
            optimizer = "host"
            if phase == "training":
                optimizer = "device"

            # The actor's weights are sent from the device.
            sends_weights = phase == "publishing" and group is self._actor

            weights = "device"
            if (
                self.plan.trainers_offload == "all"
                and optimizer == "host"
                and not sends_weights
            ):
                weights = "host"
            moves.append(group.broadcast(ModelWorker.place, weights, optimizer))

        # All groups move at the same time. The phase changes only if all succeed.
        wait_all(moves)
        self._phase = phase
