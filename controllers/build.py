"""From a configuration to wired worker groups: which processes, which roles in them, on which bundles.

Invariant: the plan is a pure function of the configuration and the machine's shape; starting it is one transaction.
Deliberately not here: what the groups are asked to do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import Groups, start_groups
from verl_ray.cluster.placement import ProcessSet, share_cpus
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
from verl_ray.config.schema import Config, ModelRole, RLConfig, SupervisedRole, TrainedRole
from verl_ray.engine.base import EngineSpec
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.reference import ReferenceWorker
from workers.reward import RewardWorker
from workers.rollout import RolloutSpec, RolloutWorker

ROLES = ("actor", "critic", "reference", "reward", "rollout")
SHARED = "shared"  # the bundles that colocated processes sit in


@dataclass(frozen=True)
class Shape:
    """What the plan must know of the cluster: the cores of each node, and all GPUs."""

    cores: tuple[int, ...]
    gpus: int

    @classmethod
    def of(cls, session: Session) -> Shape:
        nodes = [node.total for node in session.resources()]
        cores = tuple(max(1, int(node.get("CPU", 0))) for node in nodes)
        return cls(cores, int(sum(node.get("GPU", 0) for node in nodes)))


@dataclass(frozen=True)
class Plan:
    """Everything `start_groups` needs, and what the user should know about it."""

    sets: tuple[ProcessSet, ...]
    roles: Mapping[str, Role[Any]]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class System:
    """The running groups of one job. A role that the algorithm does without is None."""

    groups: Groups
    actor: WorkerGroup[ActorWorker]
    critic: WorkerGroup[CriticWorker] | None
    reference: WorkerGroup[ReferenceWorker] | None
    reward: WorkerGroup[RewardWorker] | None
    rollout: WorkerGroup[RolloutWorker] | None
    has_gpus: bool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.groups.close()


def start(config: Config, session: Session, *, learns: bool = True) -> System:
    """Start every role of the job, or nothing; without learning, only those that answer and grade."""
    shape = Shape.of(session)
    plan = plan_processes(config, shape, learns=learns)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    groups = start_groups(
        plan.sets,
        list(plan.roles.values()),
        start_deadline_s=config.run.start_deadline_s,
        call_deadline_s=config.run.call_deadline_s,
        log_dir=Path(config.run.dir) / "logs",
    )

    def group(name: str) -> Any:
        return groups[plan.roles[name]] if name in plan.roles else None

    actor, critic, reference, reward, rollout = map(group, ROLES)
    return System(groups, actor, critic, reference, reward, rollout, shape.gpus > 0)


def plan_processes(config: Config, shape: Shape, *, learns: bool = True) -> Plan:
    """Process sets and roles of a job.

    Colocated, the model roles of one backend share a process per rank; different backends never share one. The
    rollout engine has processes of its own, in the same bundles. Grading needs no device, and has its own bundles.
    """
    gpu = 1 if shape.gpus else 0
    colocated = not isinstance(config, RLConfig) or config.placement.kind == "colocated"
    models = {name: role for name, role in config.model_roles.items() if learns or name == "actor"}
    home: dict[str, str] = {
        name: f"{role.backend.kind} trainer" if colocated else name for name, role in models.items()
    }
    counts = {home[name]: role.num_ranks for name, role in models.items()}
    if isinstance(config, RLConfig):
        counts |= {"rollout": config.rollout.num_replicas, "reward": config.reward.num_ranks}
    threads = threads_per_rank(config, counts, shape)

    def one(name: str, gpus: int, process_group: bool, bundles: str) -> ProcessSet:
        return ProcessSet(name, counts[name], 1.0, gpus, bundles, threads.get(name, 1), process_group)

    sets = [one(name, gpu, True, SHARED if colocated else name) for name in dict.fromkeys(home.values())]
    roles: dict[str, Role[Any]] = {
        name: Role(name, home[name], FACTORIES[name], (engine_spec(name, role, config),))
        for name, role in models.items()
    }
    if isinstance(config, RLConfig):
        sets.append(one("rollout", gpu * config.rollout.tensor_parallel, False, SHARED if colocated else "rollout"))
        roles["rollout"] = Role("rollout", "rollout", RolloutWorker, (rollout_spec(config),))
        sets.append(one("reward", 0, False, "reward"))
        roles["reward"] = Role(
            "reward", "reward", GRADERS[config.reward.kind], (config.reward, config.actor.model.path)
        )
    shared, warning = share_cpus(sets, shape.cores)
    return Plan(tuple(shared), roles, () if warning is None or gpu else (warning,))


GRADERS = {"function": RewardWorker}  # reward.kind -> the worker with the `score` verb
FACTORIES = {"actor": ActorWorker, "critic": CriticWorker, "reference": ReferenceWorker}


def threads_per_rank(config: Config, counts: Mapping[str, int], shape: Shape) -> dict[str, int]:
    """CPU threads of each process of a set.

    Trainers and rollout engines take turns, so each may use all cores of its node; processes of one set, and sets of
    trainers, work at the same time and divide them.
    """
    if config.run.threads_per_rank != "auto":
        return dict.fromkeys(counts, config.run.threads_per_rank)
    trainers = sum(count for name, count in counts.items() if name not in ("rollout", "reward"))
    working = {name: counts[name] if name in ("rollout", "reward") else trainers for name in counts}
    if isinstance(config, RLConfig):
        working["rollout"] *= config.rollout.tensor_parallel  # each rank of an engine has as many threads
    return {name: max(1, min(shape.cores) // count) if name != "reward" else 1 for name, count in working.items()}


def engine_spec(name: str, role: ModelRole, config: Config) -> EngineSpec:
    learning = role if isinstance(role, SupervisedRole) else None
    return EngineSpec(
        role=name,
        model_path=role.model.path,
        head="value" if name == "critic" else "policy",
        backend=role.backend,
        optimizer=learning.optimizer if learning else None,
        schedule_steps=learning_steps(name, config) * updates_per_step(learning, config) if learning else 0,
        seed=config.run.seed,
    )


def learning_steps(name: str, config: Config) -> int:
    """Training steps in which a role learns."""
    if isinstance(config, RLConfig) and name == "actor":
        return config.run.total_steps - config.algorithm.critic_warmup_steps
    return config.run.total_steps


def updates_per_step(role: SupervisedRole, config: Config) -> int:
    """Optimizer steps of one training step."""
    if not isinstance(config, RLConfig) or not isinstance(role, TrainedRole):
        return 1
    rows = config.data.prompts_per_step * config.rollout.group_size
    return role.epochs * -(-rows // (role.mini_batch_size or rows))


def rollout_spec(config: RLConfig) -> RolloutSpec:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    return RolloutSpec(config.actor.model.path, config.rollout, longest, config.run.seed)
