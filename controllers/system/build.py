"""From a configuration to wired worker groups: which processes, which roles in them, on which bundles.

Invariant: the plan is a pure function of the configuration and the machine's shape; starting it is one transaction.
Deliberately not here: what the groups are asked to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from controllers.devices.residency import Residency, Sharing
from controllers.publishing.publisher import Publisher
from controllers.rollouts.endpoints import Endpoints
from controllers.rollouts.replicas import Replicas
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.launch import Groups, start_groups
from verl_ray.cluster.placement import ProcessSet, Resources, share_cpus
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import finishing
from verl_ray.config.drawing import DrawingConfig
from verl_ray.config.resolve import resolve
from verl_ray.config.reward import SingleReward
from verl_ray.config.roles import ModelRole
from verl_ray.config.schema import Config
from verl_ray.config.section import resolved
from verl_ray.engine.base import EngineSpec
from verl_ray.preflight.facts import facts_of
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.grader import Grader
from workers.judge import JudgeWorker
from workers.reference import ReferenceWorker
from workers.reward import RewardWorker
from workers.reward_model import RewardModelGrader, RewardModelWorker
from workers.rollout import RolloutSpec, RolloutWorker

SHARED = "shared"  # the bundles that colocated processes sit in

C = TypeVar("C", bound=Config)

Workers = Mapping[str, Callable[..., Any]]
WORKERS: Workers = {
    "actor": ActorWorker, "critic": CriticWorker, "reference": ReferenceWorker, "reward": RewardModelWorker,
}  # fmt: skip
"""The classes of the roles that run a model, by the names that tasks give them."""


@dataclass(frozen=True)
class Shape:
    """What the plan must know of the cluster: the cores and the GPUs of each node that can hold a process."""

    cores: tuple[int, ...]
    gpus_per_node: tuple[int, ...]

    @classmethod
    def of(cls, session: Session) -> Shape:
        # The head of a cluster is often given no CPU, so that nothing runs there.
        nodes = [node.total for node in session.resources() if node.total.get("CPU")]
        cores = tuple(max(1, int(node["CPU"])) for node in nodes)
        return cls(cores, tuple(int(node.get("GPU", 0)) for node in nodes))

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return sum(self.gpus_per_node)

    @property
    def nodes(self) -> list[Resources]:
        """By Ray's names of resources."""
        shapes = zip(self.cores, self.gpus_per_node, strict=True)
        return [{"CPU": float(cores), "GPU": float(gpus)} for cores, gpus in shapes]


def resolve_on(config: C, shape: Shape, *, checkpoint: str | None = None, learns: bool = True) -> C:
    """The configuration with every `auto` replaced by what it stands for on this cluster.

    Args:
        checkpoint: from which the run goes on, if it does.
        learns: False = for one evaluation alone.
    """
    facts = facts_of(config, cores=shape.cores, gpus=shape.gpus_per_node, checkpoint=checkpoint, learns=learns)
    return resolve(config, facts)


@dataclass(frozen=True)
class Plan:
    """Everything `start_groups` needs, and what the user should know about it."""

    sets: tuple[ProcessSet, ...]
    roles: Mapping[str, Role[Any]]
    warnings: tuple[str, ...]
    devices: int


@dataclass(frozen=True)
class System:
    """The running groups of one job. A role that the job does without is None."""

    groups: Groups
    models: Mapping[str, WorkerGroup[Any]]
    """The roles that run a model on a backend, by name, without those that grade."""
    rollout: Replicas | None
    graders: Mapping[str, WorkerGroup[Grader]]
    """The reward role by the keys of its components, and HELD_OUT."""
    has_gpus: bool
    devices: int
    """What throughput is divided by (`count_devices`)."""

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with finishing():
            try:
                if self.rollout is not None:
                    self.rollout.close()
            finally:
                self.groups.close()


def start(config: Config, session: Session, workers: Workers = WORKERS, *, learns: bool = True) -> System:
    """Start every role of the job, or nothing; without learning, only those that answer and grade. `workers`: the class
    of each role that runs a model, by its name."""
    shape = Shape.of(session)
    plan = plan_processes(config, shape, workers, learns=learns)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    groups = start_groups(
        plan.sets,
        list(plan.roles.values()),
        stall_s=config.run.stall_s,
        log_dir=Path(config.run.dir) / "logs",
    )

    graders = {name: groups[plan.roles[name]] for name in config.graders_at_work(learns=learns)}
    named = [name for name in config.model_roles if name in plan.roles and name not in graders]
    models = {name: groups[plan.roles[name]] for name in named}
    rollout = None
    if config.drawing is not None:
        replicas, actor = groups.replicas(plan.roles["rollout"]), models[config.answers]
        try:
            rollout = own_replicas(config.drawing, replicas, actor, list(models.values()), on_gpus=shape.gpus > 0)
        except BaseException:
            groups.close()
            raise
    return System(groups, models, rollout, graders, shape.gpus > 0, plan.devices)


def own_replicas(
    config: DrawingConfig,
    replicas: Sequence[WorkerGroup[RolloutWorker]],
    actor: WorkerGroup[ActorWorker],
    models: Sequence[WorkerGroup[Any]],
    *,
    on_gpus: bool,
) -> Replicas:
    """The owner of these replicas, who get the actor's weights. `models`: the groups, the actor included, that make
    room for rollouts where they share devices with them."""
    residency = Residency(Sharing.of(config, on_gpus=on_gpus), actor, models)
    publisher = Publisher(actor, config, residency, has_gpus=on_gpus)
    endpoints = Endpoints(config) if config.rollout.endpoint.enabled else None
    return Replicas(replicas, publisher, residency, config.rollout, endpoints)


def plan_processes(config: Config, shape: Shape, workers: Workers = WORKERS, *, learns: bool = True) -> Plan:
    """Process sets and roles of a job, whose configuration is resolved.

    Colocated, the model roles of one backend share a process per rank; different backends never share one. The
    rollout engine has processes of its own, in the same bundles. Functions, services and judges have bundles of their
    own; the former need no device.
    """
    gpu = 1 if shape.gpus else 0
    shares = config.shares_processes
    graders = config.graders_at_work(learns=learns)
    models = {
        name: role for name, role in config.model_roles.items() if learns or name == config.answers or name in graders
    }
    texts = {name: grader for name, grader in graders.items() if name not in models}
    home = {name: f"{role.backend.kind} trainer" if shares else name for name, role in models.items()}
    counts = {home[name]: role.num_ranks for name, role in models.items()}
    if config.drawing is not None:
        counts["rollout"] = config.drawing.rollout.num_replicas
    counts |= {name: one.processes for name, one in texts.items()}

    def one(name: str, gpus: int, process_group: bool, bundles: str, *, replicas: bool = False) -> ProcessSet:
        is_engine = name == "rollout" or name in config.judges
        threads = config.run.threads["engines" if is_engine else "graders" if name in texts else "trainers"]
        return ProcessSet(name, counts[name], 1.0, gpus, bundles, threads, process_group, replicas)

    sets = [one(name, gpu, True, SHARED if shares else name) for name in dict.fromkeys(home.values())]
    roles: dict[str, Role[Any]] = {
        name: Role(name, home[name], workers[name], (engine_spec(name, role, config),))
        for name, role in models.items()
        if name not in graders
    }
    if (drawing := config.drawing) is not None:
        devices = gpu * drawing.rollout.tensor_parallel
        engines = one("rollout", devices, False, SHARED if shares else "rollout", replicas=True)
        sets.append(replace(engines, built_first=Sharing.of(drawing, on_gpus=bool(gpu)).engines_start_first))
        roles["rollout"] = Role("rollout", "rollout", RolloutWorker, (rollout_spec(drawing),))
        for name, grader in graders.items():
            roles[name] = grader_role(name, grader, home.get(name, name), drawing)
    sets += [one(name, gpu * grader.parallel_devices, False, name) for name, grader in texts.items()]

    shared, warning = share_cpus(sets, shape.nodes)
    computing = [held for held in sets if held.name not in texts or texts[held.name].cpu_ranks is None]
    return Plan(tuple(shared), roles, () if warning is None or gpu else (warning,), count_devices(computing))


def grader_role(name: str, grader: SingleReward, home: str, config: DrawingConfig) -> Role[Any]:
    """One component of the reward role, in the processes `home`."""
    policy = config.actor.model.path
    if (model := config.model_roles.get(name)) is not None:
        spec = engine_spec(name, model, config)
        return Role(name, home, RewardModelGrader, (spec, policy, resolved(config.data.apply_chat_template)))
    if grader.served is not None:
        return Role(name, home, JudgeWorker, (grader, policy, config.run.seed))
    return Role(name, home, RewardWorker, (grader, policy))


def count_devices(sets: Sequence[ProcessSet]) -> int:
    """How many devices processes that hold models compute on: their GPUs, where those that share one count it once.
    Without GPUs a rank stands for a device, and ranks that would share one GPU count once, too."""
    devices: dict[str, int] = {}
    for one in sets:
        held = one.num_ranks * max(one.gpus_per_rank, 1)
        devices[one.bundle_group] = max(devices.get(one.bundle_group, 0), held)
    return sum(devices.values())


def engine_spec(name: str, role: ModelRole, config: Config) -> EngineSpec:
    learning = role.learning
    return EngineSpec(
        role=name,
        model_path=role.model.path,
        head=config.head_of(name),
        backend=role.backend,
        optimizer=learning.optimizer if learning else None,
        new_head=learning is not None,
        lora=role.adapter,
        expert_balance=learning.expert_balance if learning else None,
        schedule_steps=config.learning_steps(name) * role.updates_per_step(config.rows_per_step),
        seed=config.run.seed,
    )


def rollout_spec(config: DrawingConfig) -> RolloutSpec:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    lora = config.actor.lora if config.sends_adapter_alone else None
    return RolloutSpec(
        config.actor.model.path, config.rollout, longest, config.run.seed, config.run.name, lora, config.rollout.frees
    )
