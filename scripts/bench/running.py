"""The parts of a run that a suite measures: its cluster, its actor and its replicas.

Invariant: they are those of `train`, started in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from controllers.rollouts.replicas import Replicas
from controllers.system.build import build_replicas
from controllers.system.plan import ROLLOUT, ClusterShape, plan_processes, resolve_on
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.config.tasks.rl import RLConfig
from workers.actor import ActorWorker
from workers.rollout import RolloutWorker


def log_dir(config: RLConfig) -> Path:
    """Return where the processes of a run write what they say."""
    return Path(config.run.dir) / "logs"


@contextlib.contextmanager
def cluster(config: RLConfig) -> Iterator[tuple[Session, ClusterShape]]:
    """Open the cluster of a run, and close it at the end."""
    with Session.open(config.ray.address, log_dir=log_dir(config)) as session:
        stop_on_signals()  # again: Ray's own handler exits without a message
        yield session, ClusterShape.of(session)


@dataclass(frozen=True)
class ActorAndReplicas:
    """The actor and the replicas of a run, without its other roles.

    Attributes:
        config: The resolved configuration.
        on_gpus: Whether the cluster has GPUs.
        actor: The group that trains.
        members: The groups of the replicas.
        replicas: Their owner, connected to the actor.
        threads_per_engine: Threads of each rollout engine.
    """

    config: RLConfig
    on_gpus: bool
    actor: WorkerGroup[ActorWorker]
    members: tuple[WorkerGroup[Any], ...]
    replicas: Replicas
    threads_per_engine: int


@contextlib.contextmanager
def actor_and_replicas(
    config: RLConfig,
    shape: ClusterShape,
    worker: Callable[..., RolloutWorker] = RolloutWorker,
) -> Iterator[ActorAndReplicas]:
    """Start the actor and the replicas of a run, and end them afterwards.

    Args:
        config: The configuration, in which values may be `auto`.
        shape: The cluster.
        worker: The class of the replicas.
    """
    config = resolve_on(config, shape)
    plan = plan_processes(config, shape)
    actor_role = plan.roles["actor"]
    rollout_role = replace(plan.roles[ROLLOUT], factory=worker)
    roles = [actor_role, rollout_role]
    set_names = {role.processes for role in roles}
    sets = {process_set.name: process_set for process_set in plan.sets}

    groups = start_groups(
        [process_set for name, process_set in sets.items() if name in set_names],
        roles,
        stall_s=config.run.stall_s,
        log_dir=log_dir(config),
    )
    with groups:
        actor = groups[actor_role]
        members = tuple(groups.replicas(rollout_role))
        on_gpus = shape.gpus > 0
        replicas = build_replicas(config, members, actor, [actor], on_gpus=on_gpus)
        threads = sets[rollout_role.processes].threads_per_rank
        yield ActorAndReplicas(config, on_gpus, actor, members, replicas, threads)
