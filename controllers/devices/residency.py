"""Who holds the devices now: the state of trainers and the engines of rollouts, which take turns on shared GPUs.

Invariant: there is one answer for all of them, the arrangement; it changes by `arrange` alone, which returns when
everything is in its place. What is freed, and by whom, follows from the configuration before anything starts
(`Sharing`). Deliberately not here: how a model moves (`verl_ray/engine/offload.py`) or an engine sleeps
(`verl_ray/rollout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.drawing import DrawingConfig, Offloaded
from verl_ray.config.section import resolved
from verl_ray.rollout.base import Part
from workers.actor import ActorWorker
from workers.model_worker import ModelWorker

Arrangement = Literal["training", "publishing", "rollouts"]
"""Which of the training state is on shared GPUs: all of it; of what placement.offload moves, only the actor's weights,
which are sent from there; or nothing of that."""


@dataclass(frozen=True)
class Sharing:
    """What trainers and rollout engines free for each other."""

    devices: bool
    """Whether they are on the same GPUs."""
    sleeps: Part | None
    """What engines free while the trainers work."""
    offloads: Literal["nothing", "optimizer", "all"]
    """What trainers free while rollouts are drawn."""

    @classmethod
    def of(cls, config: DrawingConfig, *, on_gpus: bool) -> Self:
        """`on_gpus`: whether the run has any; without them nothing is moved, and engines sleep only if told to."""
        devices = on_gpus and config.placement.kind == "colocated"
        offload: Offloaded = resolved(config.placement.offload)
        return cls(devices, config.rollout.frees, offload if devices and offload != "none" else "nothing")

    @property
    def engines_start_first(self) -> bool:
        """An engine is awake as it starts, and awake it does not fit beside the trainers that it makes room for."""
        return self.sleeps is not None


class Residency:
    """The devices of one run."""

    def __init__(self, sharing: Sharing, actor: WorkerGroup[ActorWorker], models: Sequence[WorkerGroup[Any]]) -> None:
        """`models`: the groups whose state makes room for rollouts where devices are shared, the actor included."""
        self.sharing = sharing
        self._actor = actor
        self._offloaded = tuple(models) if sharing.offloads != "nothing" else ()
        self._arrangement: Arrangement = "training"

    @property
    def arrangement(self) -> Arrangement:
        """As it is now."""
        return self._arrangement

    @property
    def actor_leaves(self) -> bool:
        """Whether the actor's weights are on the host while rollouts are drawn."""
        return bool(self._offloaded) and self.sharing.offloads == "all"

    @property
    def has_room(self) -> bool:
        """Whether an engine that starts now, and is awake at first, finds memory."""
        return not self._offloaded or self._arrangement == "rollouts"

    def arrange(self, wanted: Arrangement) -> None:
        """Move the state of all models that share devices; returns when it is there."""
        moves: list[Call[list[None]]] = []
        for group in self._offloaded:
            optimizer = "device" if wanted == "training" else "host"
            sends = wanted == "publishing" and group is self._actor
            leaves = self.sharing.offloads == "all" and optimizer == "host" and not sends
            moves.append(group.broadcast(ModelWorker.place, "host" if leaves else "device", optimizer))
        wait_all(moves)
        self._arrangement = wanted
