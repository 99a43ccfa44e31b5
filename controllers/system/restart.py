"""The restart of lost processes of a running system, beside those that are well.

Invariant: afterwards every process is as after the start of a run, apart from the state
of models that survived: no replica generates, receives weights or is paused, engines
that share devices with trainers are asleep, and all training state is on its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from controllers.devices import SharingPlan
from controllers.rollouts.supervisor import Replica
from controllers.system.build import System, build_replicas
from controllers.system.plan import ROLLOUT
from verl_ray.cluster.calls import wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.errors import VerlRayError, worker_error_of
from workers.model_worker import ModelWorker
from workers.rollout import RolloutWorker


def restart_lost(config: Config, system: System, also: Collection[str] = ()) -> None:
    """Start lost processes again, and put the others into the state of a start.

    Args:
        config: Resolved configuration of the job.
        system: The system, which has another `rollout` afterwards.
        also: Model roles whose processes start again although they are well.

    Raises:
        VerlRayError: A process failed as it started. No lost process runs then.
    """
    # Those that are starting again are killed, and start with the other lost ones.
    system.restarts.close()
    offloads = False
    if isinstance(config, RolloutTaskConfig):
        plan = SharingPlan.of(config, on_gpus=system.has_gpus)
        offloads = plan.trainers_offload != "nothing"
        _calm_replicas(system, plan)

    lost = system.groups.lost([system.models[name] for name in also])
    survivors = [group for group in system.models.values() if not group.runs_in(lost)]
    # An engine is awake when it starts, and takes the memory of the trainers.
    if offloads:
        _place(survivors, "host")
    system.groups.restart(lost)
    if offloads:
        _place(survivors, "device")

    if isinstance(config, RolloutTaskConfig):
        _connect_replicas(config, system)


def _calm_replicas(system: System, plan: SharingPlan) -> None:
    """Let replicas forget their work, and sleep where they share devices."""
    assert system.rollout is not None, "a task with rollouts has replicas"
    replicas: Sequence[Replica] = [
        replica for replica in system.rollout.available if not replica.has_failed
    ]
    # So are replicas that are starting again.
    system.rollout.close()
    system.rollout.abandon_sync()

    replicas = _call_each(replicas, RolloutWorker.pause, "abort")
    replicas = _call_each(replicas, RolloutWorker.abort_update)
    replicas = _call_each(replicas, RolloutWorker.resume)
    if plan.engines_free is not None:
        _call_each(replicas, RolloutWorker.sleep, plan.engines_free)


def _call_each(
    replicas: Sequence[Replica], method: Callable[..., object], *args: object
) -> list[Replica]:
    """Call a method of each replica. Return those that survive it; kill the others."""
    survivors = []
    calls = {replica: replica.broadcast(method, *args) for replica in replicas}
    for replica, call in calls.items():
        try:
            call.result()
            survivors.append(replica)
        except VerlRayError as error:
            # A stop of the run is no failure of the replica.
            if worker_error_of(error) is None:
                raise
            replica.kill()
    return survivors


def _place(groups: Sequence[WorkerGroup[Any]], where: str) -> None:
    """Move all state of these models to "device" or "host"."""
    wait_all([group.broadcast(ModelWorker.place, where, where) for group in groups])


def _connect_replicas(config: RolloutTaskConfig, system: System) -> None:
    """Give the system new replicas, which have no weights yet."""
    system.rollout = build_replicas(
        config,
        system.groups.named(ROLLOUT),
        system.models[config.evaluated_role],
        list(system.models.values()),
        on_gpus=system.has_gpus,
    )
