"""The running system of a job: its worker groups, started, connected, and restarted.

Invariant: all processes of a plan start, or none of them stays. After a restart of lost
processes, beside those that are well, every process is as after the start of a run,
apart from the state of models that survived: no replica generates, receives weights or
is paused, engines that share devices with trainers are asleep, and all training state
is on its devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controllers.devices import DeviceSharing, SharingPlan
from controllers.publishing.publisher import Publisher
from controllers.rollouts.endpoints import Endpoints
from controllers.rollouts.replicas import Replicas
from controllers.rollouts.supervisor import Replica
from controllers.system.models import download_models
from controllers.system.plan import (
    ROLLOUT,
    WORKERS,
    ClusterShape,
    ProcessPlan,
    Workers,
    plan_processes,
)
from verl_ray.cluster.calls import wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import Groups, start_groups
from verl_ray.cluster.restarts import InPlaceRestarts, MayRestart, never
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import finishing
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.errors import VerlRayError, worker_error_of
from verl_ray.profiling.phases import phase
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.model_worker import ModelWorker, ReferenceWorker
from workers.reward import Grader
from workers.rollout import RolloutWorker


@dataclass
class System:
    """The running groups of one job. A role that the job does without is None."""

    groups: Groups

    models: Mapping[str, WorkerGroup[Any]]
    """Roles that run a model on a training backend, by name, without the graders."""

    rollout: Replicas | None
    """The replicas; others after a restart of lost processes."""

    graders: Mapping[str, WorkerGroup[Grader]]
    """Groups of the reward role by the keys of its components and HELD_OUT_GRADER."""

    has_gpus: bool

    devices: int
    """Number of devices that throughput is divided by (`count_devices`)."""

    restarts: InPlaceRestarts = field(default_factory=InPlaceRestarts)
    """Lost groups without state, which start again in place."""

    learns: bool = True
    """Whether the job trains; False stands for an evaluation alone."""

    @property
    def actor(self) -> WorkerGroup[ActorWorker]:
        return self.models["actor"]

    @property
    def critic(self) -> WorkerGroup[CriticWorker] | None:
        return self.models.get("critic")

    @property
    def reference(self) -> WorkerGroup[ReferenceWorker] | None:
        return self.models.get("reference")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        # A signal must not leave processes behind.
        with finishing():
            try:
                self.restarts.close()
                if self.rollout is not None:
                    self.rollout.close()
            finally:
                self.groups.close()


def start(
    config: Config,
    session: Session,
    workers: Workers = WORKERS,
    *,
    learns: bool = True,
    may_restart: MayRestart = never,
) -> System:
    """Start every role of the job, or none.

    Args:
        config: Resolved configuration of the job.
        session: Cluster to run on.
        workers: Class of each role that runs a model, by the role's name.
        learns: Whether the job trains. False starts only the roles that an evaluation
            needs: those that respond and those that grade.
        may_restart: Decides whether a lost group without state starts again in place.
    """
    shape = ClusterShape.of(session)
    plan = plan_processes(config, shape, workers, learns=learns)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)

    download_models(config, session)
    with phase(f"loading {_in_words(plan.roles)}"):
        groups = start_groups(
            plan.sets,
            list(plan.roles.values()),
            stall_s=config.run.stall_s,
            log_dir=Path(config.run.dir) / "logs",
        )

    graders, models = _graders_and_models(config, plan, groups, learns=learns)
    has_gpus = shape.gpus > 0
    rollout = None
    if isinstance(config, RolloutTaskConfig):
        replicas = groups.replicas(plan.roles[ROLLOUT])
        actor = models[config.evaluated_role]
        try:
            rollout = build_replicas(
                config,
                replicas,
                actor,
                list(models.values()),
                on_gpus=has_gpus,
            )
        except BaseException:
            # No system is returned that could close them.
            groups.close()
            raise

    restarts = InPlaceRestarts(may_restart)
    restarts.own([*graders.values(), *models_without_state(config, models, has_gpus)])
    return System(
        groups, models, rollout, graders, has_gpus, plan.devices, restarts, learns
    )


def models_without_state(
    config: Config, models: Mapping[str, WorkerGroup[Any]], has_gpus: bool
) -> list[WorkerGroup[Any]]:
    """Return the models that need only their folder, and may start at any time.

    The reference is such a model, but for one on the devices of engines: it would start
    beside an engine that is awake, or while its state has to be on the host.
    """
    if not isinstance(config, RolloutTaskConfig) or "reference" not in models:
        return []
    if SharingPlan.of(config, on_gpus=has_gpus).shares_devices:
        return []
    return [models["reference"]]


def _graders_and_models(
    config: Config, plan: ProcessPlan, groups: Groups, *, learns: bool
) -> tuple[dict[str, WorkerGroup[Grader]], dict[str, WorkerGroup[Any]]]:
    """Return the groups that grade, and those that run a model and do not, by name."""
    graders: dict[str, WorkerGroup[Grader]] = {}
    for name in config.active_graders(learns=learns):
        graders[name] = groups[plan.roles[name]]

    # A grader may run a model, and is then no model role of the system.
    models: dict[str, WorkerGroup[Any]] = {}
    for name in config.model_roles:
        if name in plan.roles and name not in graders:
            models[name] = groups[plan.roles[name]]
    return graders, models


def _in_words(roles: Iterable[str]) -> str:
    """Return the names of roles for a person."""
    return ", ".join(
        "the rollout engine" if role == ROLLOUT else f"the {role}" for role in roles
    )


def build_replicas(
    config: RolloutTaskConfig,
    replicas: Sequence[WorkerGroup[RolloutWorker]],
    actor: WorkerGroup[ActorWorker],
    models: Sequence[WorkerGroup[Any]],
    *,
    on_gpus: bool,
) -> Replicas:
    """Return the owner of these replicas, connected to the actor.

    Args:
        config: Configuration of a task with rollouts.
        replicas: Running groups, one per replica.
        actor: Group whose weights the replicas receive.
        models: Groups that offload for rollouts where they share devices with the
            replicas, the actor included.
        on_gpus: Whether the cluster has GPUs.
    """
    sharing_plan = SharingPlan.of(config, on_gpus=on_gpus)
    device_sharing = DeviceSharing(sharing_plan, actor, models)
    publisher = Publisher(actor, config, device_sharing, has_gpus=on_gpus)

    # Without endpoints, replicas serve only this run.
    endpoints = None
    if config.rollout.endpoint.enabled:
        endpoints = Endpoints(config)

    return Replicas(replicas, publisher, device_sharing, config, endpoints)


# ------------------------------------------------------------------------------ restart


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
    again = [system.models[name] for name in also]
    # Replicas may wait for weights from one of these, and are calmed next.
    for processes in system.groups.lost(again):
        processes.kill()

    offloads = False
    if isinstance(config, RolloutTaskConfig):
        plan = SharingPlan.of(config, on_gpus=system.has_gpus)
        offloads = plan.trainers_offload != "nothing"
        _calm_replicas(system, plan)

    lost = system.groups.lost(again)
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
