"""The plan of a job's processes: which there are, and which roles run in them.

Invariant: the plan is a pure function of the configuration and the shape of the
cluster; nothing is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from controllers.devices import SharingPlan
from controllers.system.device_memory import smallest_gpu_bytes_of
from verl_ray.checkpoint.snapshot_files import available_bytes
from verl_ray.cluster.placement import ProcessSet, Resources, share_cpus
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
from verl_ray.config.reward import JudgeReward, SingleReward
from verl_ray.config.roles import ModelRole, SupervisedRole
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.data.tokenizers import day_of_run, of_run, template_of
from verl_ray.engine.base import EngineSpec
from verl_ray.models.state_kernels import installed_kernels
from verl_ray.preflight.facts import ClusterFacts, facts_of
from verl_ray.preflight.machine import host_memory_bytes
from verl_ray.preflight.model_proof import proof_of
from verl_ray.preflight.resolve import resolve
from verl_ray.settings.section import resolved
from workers.actor import ActorWorker
from workers.critic import CriticWorker
from workers.judge import JudgeWorker
from workers.model_worker import ReferenceWorker
from workers.reward import RewardWorker
from workers.reward_model import RewardModelGrader, RewardModelWorker
from workers.rollout import RolloutSpec, RolloutWorker

ROLLOUT = "rollout"
"""Name of the rollout role and of its process set."""

SHARED = "shared"
"""Name of the bundle group that colocated processes share."""

CPUS_PER_RANK = 1.0
"""Cores that a rank requests before the cores of a node are shared out."""

C = TypeVar("C", bound=Config)

Workers = Mapping[str, Callable[..., Any]]
WORKERS: Workers = {
    "actor": ActorWorker,
    "critic": CriticWorker,
    "reference": ReferenceWorker,
    "reward": RewardModelWorker,
    ROLLOUT: RolloutWorker,
}
"""Classes of the roles that run a model or an engine, by their names."""


@dataclass(frozen=True)
class ClusterShape:
    """The cores and GPUs of each node that can hold a process."""

    cores: tuple[int, ...]
    gpus_per_node: tuple[int, ...]
    gpu_memory_bytes: int | None = None
    """Memory of the smallest GPU, if it is known."""

    @classmethod
    def of(cls, session: Session) -> ClusterShape:
        """Return the shape of the session's cluster."""
        # The head of a cluster often has no CPU, so that nothing runs there.
        nodes = [node.total for node in session.resources() if node.total.get("CPU")]
        cores = tuple(max(1, int(node["CPU"])) for node in nodes)
        gpus = tuple(int(node.get("GPU", 0)) for node in nodes)
        return cls(cores, gpus, smallest_gpu_bytes_of(session))

    @property
    def gpus(self) -> int:
        """Number of GPUs of all nodes."""
        return sum(self.gpus_per_node)

    @property
    def nodes(self) -> list[Resources]:
        """Resources of each node, by Ray's names."""
        shapes = zip(self.cores, self.gpus_per_node, strict=True)
        return [{"CPU": float(cores), "GPU": float(gpus)} for cores, gpus in shapes]


def facts_on(
    config: Config,
    shape: ClusterShape,
    *,
    checkpoint: str | None = None,
    learns: bool = True,
) -> ClusterFacts:
    """Return the facts about a cluster that every `auto` of a job follows from.

    Args:
        config: Configuration of the job.
        shape: Shape of the cluster.
        checkpoint: Path of the checkpoint that the run continues from, if any.
        learns: Whether the job trains. False stands for an evaluation alone.
    """
    return facts_of(
        config,
        cores=shape.cores,
        gpus=shape.gpus_per_node,
        checkpoint=checkpoint,
        learns=learns,
        gpu_memory_bytes=shape.gpu_memory_bytes,
        # The driver's node is taken to be as the others.
        memory_bytes=host_memory_bytes(),
        shm_free_bytes=available_bytes(config.run.dir),
    )


def resolve_on(
    config: C,
    shape: ClusterShape,
    *,
    checkpoint: str | None = None,
    learns: bool = True,
) -> C:
    """Return the configuration with every `auto` replaced by its value on a cluster.

    The arguments are those of `facts_on`.
    """
    facts = facts_on(config, shape, checkpoint=checkpoint, learns=learns)
    return resolve(config, facts)


@dataclass(frozen=True)
class ProcessPlan:
    """The processes and roles of a job, and what the user should know about them."""

    sets: tuple[ProcessSet, ...]
    roles: Mapping[str, Role[Any]]
    warnings: tuple[str, ...]

    devices: int
    """Number of devices that compute with models (`count_devices`)."""


def plan_processes(
    config: Config,
    shape: ClusterShape,
    workers: Workers = WORKERS,
    *,
    learns: bool = True,
) -> ProcessPlan:
    """Return the process sets and roles of a job.

    With placement=colocated, the model roles of one backend share a process per rank;
    different backends never share one. The rollout engine has its own processes in the
    same bundles. Functions, services and judges have bundles of their own; functions
    and services need no device.

    Args:
        config: Resolved configuration of the job.
        shape: Shape of the cluster.
        workers: Class of each role that runs a model, by the role's name.
        learns: Whether the job trains. False stands for an evaluation alone.
    """
    graders = config.active_graders(learns=learns)
    models = config.active_models(learns=learns)
    # These graders run no model on a training backend.
    own_graders = {
        name: grader for name, grader in graders.items() if name not in models
    }
    homes = _trainer_sets_of(config, models)

    gpu = 1 if shape.gpus else 0
    trainers = [*_trainer_sets(config, models, homes, gpu)]
    engines = [*_rollout_sets(config, gpu)]
    sets = [
        *trainers,
        *_holders(trainers, engines),
        *engines,
        *_grader_sets(config, own_graders, gpu),
    ]

    specs = {
        name: engine_spec(name, role, config, learns=learns)
        for name, role in models.items()
    }
    roles = _roles(config, specs, graders, homes, workers)

    shared, warning = share_cpus(sets, shape.nodes)
    warnings: tuple[str, ...] = ()
    # A shortage of cores slows only models that compute on them.
    if warning is not None and not gpu:
        warnings = (warning,)

    computing = [
        process_set
        for process_set in sets
        if not _needs_no_device(process_set.name, own_graders)
    ]
    return ProcessPlan(tuple(shared), roles, warnings, count_devices(computing))


def _roles(
    config: Config,
    specs: Mapping[str, EngineSpec],
    graders: Mapping[str, SingleReward],
    homes: Mapping[str, str],
    workers: Workers,
) -> dict[str, Role[Any]]:
    """Return the roles of a job by name, each with its class and arguments."""
    roles: dict[str, Role[Any]] = {}
    for name, spec in specs.items():
        # A model that grades is a component of the reward role, see below.
        if name not in graders:
            roles[name] = Role(name, homes[name], workers[name], (spec,))

    if not isinstance(config, RolloutTaskConfig):
        return roles

    roles[ROLLOUT] = Role(ROLLOUT, ROLLOUT, workers[ROLLOUT], (rollout_spec(config),))
    for name, grader in graders.items():
        # Only a grader with a model shares the processes of trainers.
        home = homes.get(name, name)
        roles[name] = grader_role(name, grader, home, config)
    return roles


def _needs_no_device(name: str, own_graders: Mapping[str, SingleReward]) -> bool:
    """Return whether this process set holds functions or services that score."""
    return name in own_graders and own_graders[name].cpu_ranks is not None


def _trainer_sets_of(config: Config, models: Mapping[str, ModelRole]) -> dict[str, str]:
    """Return the name of the process set of each role that runs a model."""
    if not config.shares_processes:
        return {name: name for name in models}
    return {name: f"{role.backend.kind} trainer" for name, role in models.items()}


def _bundle_group(config: Config, process_set: str) -> str:
    """Return the bundle group of a set of trainers or of the rollout engine."""
    return SHARED if config.shares_processes else process_set


def _trainer_sets(
    config: Config,
    models: Mapping[str, ModelRole],
    homes: Mapping[str, str],
    gpu: int,
) -> Iterator[ProcessSet]:
    """Yield the process sets of the roles that run a model on a training backend."""
    # Roles that share a process set have equally many ranks.
    num_ranks = {homes[name]: role.num_ranks for name, role in models.items()}

    for home, ranks in num_ranks.items():
        yield ProcessSet(
            home,
            num_ranks=ranks,
            cpus_per_rank=CPUS_PER_RANK,
            gpus_per_rank=gpu,
            bundle_group=_bundle_group(config, home),
            threads_per_rank=config.run.threads["trainers"],
            process_group=True,
        )


def _rollout_sets(config: Config, gpu: int) -> Iterator[ProcessSet]:
    """Yield the process set of the rollout engine, if the job has one."""
    if not isinstance(config, RolloutTaskConfig):
        return

    sharing = SharingPlan.of(config, on_gpus=bool(gpu))
    width = config.rollout.ranks_per_replica
    spans = width if sharing.shares_devices else 1
    yield ProcessSet(
        ROLLOUT,
        num_ranks=resolved(config.rollout.num_replicas),
        cpus_per_rank=CPUS_PER_RANK,
        gpus_per_rank=gpu * width,
        bundle_group=_bundle_group(config, ROLLOUT),
        threads_per_rank=config.run.threads["engines"],
        process_group=False,
        replicas=True,
        built_first=sharing.engines_start_first,
        spans=spans,
    )


def _holders(
    trainers: Sequence[ProcessSet], engines: Sequence[ProcessSet]
) -> Iterator[ProcessSet]:
    """Yield processes that hold GPUs for engines which span more than trainers have.

    An evaluation starts fewer trainers than a run, and the same engines.
    """
    for engine in engines:
        most = max(trainer.num_ranks for trainer in trainers)
        if engine.spans > 1 and engine.num_bundles > most:
            yield ProcessSet(
                "holder of GPUs",
                num_ranks=engine.num_bundles,
                cpus_per_rank=CPUS_PER_RANK,
                gpus_per_rank=1,
                bundle_group=engine.bundle_group,
                threads_per_rank=1,
                process_group=False,
            )


def _grader_sets(
    config: Config, graders: Mapping[str, SingleReward], gpu: int
) -> Iterator[ProcessSet]:
    """Yield the process sets of graders that run no model on a training backend."""
    for name, grader in graders.items():
        # A judge is a vLLM engine, whatever it is used for.
        threads = config.run.threads["graders"]
        if name in config.judges:
            threads = config.run.threads["engines"]

        yield ProcessSet(
            name,
            num_ranks=grader.num_processes,
            cpus_per_rank=CPUS_PER_RANK,
            gpus_per_rank=gpu * grader.devices_per_process,
            bundle_group=name,
            threads_per_rank=threads,
            process_group=False,
        )


def count_devices(sets: Sequence[ProcessSet]) -> int:
    """Return the number of devices that processes with models compute on.

    Processes that share a GPU count it once. Without GPUs, a rank stands for a device,
    and ranks that would share a GPU count once, too.
    """
    devices: dict[str, int] = {}
    for process_set in sets:
        group = process_set.bundle_group
        in_set = process_set.num_ranks * max(process_set.gpus_per_rank, 1)
        # Processes in one bundle group share devices, rank by rank.
        devices[group] = max(devices.get(group, 0), in_set)
    return sum(devices.values())


# ----------------------------------------------------------------- arguments of workers


def grader_role(
    name: str, grader: SingleReward, home: str, config: RolloutTaskConfig
) -> Role[Any]:
    """Return one component of the reward role, in the process set `home`."""
    policy = config.actor.model.folder
    day = day_of_run(config.data)

    model = config.model_roles.get(name)
    if model is not None:
        spec = engine_spec(name, model, config)
        has_template = resolved(config.data.apply_chat_template)
        text_arguments = (
            has_template,
            config.data.special_tokens,
            template_of(config.data),
        )
        arguments = (spec, policy, *text_arguments, day)
        return Role(name, home, RewardModelGrader, arguments)

    if isinstance(grader, JudgeReward):
        trusts_code = config.trusts_code(grader.model.folder)
        for_judge = (grader, policy, config.run.seed, day, trusts_code)
        return Role(name, home, JudgeWorker, for_judge)
    return Role(name, home, RewardWorker, (grader, policy))


def engine_spec(
    name: str, role: ModelRole, config: Config, *, learns: bool = True
) -> EngineSpec:
    """Return what the engine of a model role is built from.

    Args:
        name: Name of the role.
        role: Settings of the role.
        config: Resolved configuration of the job.
        learns: Whether the job trains. False leaves the optimizer out.
    """
    optimizer = None
    expert_balance = None
    expert_bias_update = 0.0
    average_decay = None
    if isinstance(role, SupervisedRole) and learns:
        optimizer = role.optimizer
        expert_balance = role.expert_balance
        expert_bias_update = role.expert_bias_update
        average_decay = config.average_decay(name)

    # The learning rate follows optimizer steps, of which a training step has several.
    pace = config.run.paces.get(name)
    updates_per_step = role.updates_per_step(config.rows_per_step)
    if pace is not None:
        updates_per_step = pace.began_with
    schedule_steps = config.learning_steps(name) * updates_per_step

    trusts_code = config.trusts_code(role.model.folder)
    proof = proof_of(role.model.folder, trusts_code=trusts_code)
    packs_rows = proof.packs_rows_in(role.backend.dtype)
    return EngineSpec(
        role=name,
        model_path=role.model.folder,
        head=config.head_of(name),
        backend=role.backend,
        optimizer=optimizer,
        new_head=isinstance(role, SupervisedRole),
        lora=role.adapter,
        packs_rows=packs_rows,
        kernels=installed_kernels() if packs_rows and proof.has_states else (),
        trusts_code=trusts_code,
        expert_balance=expert_balance,
        expert_bias_update=expert_bias_update,
        average_decay=average_decay,
        replays_routing=config.replays_routing(name),
        schedule_steps=schedule_steps,
        pace=pace,
        seed=config.run.seed,
        # The other models keep what they came with.
        chat_template=template_of(config.data)
        if name == config.evaluated_role
        else None,
    )


def rollout_spec(config: RolloutTaskConfig) -> RolloutSpec:
    """Return what a rollout engine is built from."""
    longest_row = config.data.max_prompt_tokens + config.rollout.max_response_tokens

    # Replicas receive the model once, and then the adapter alone.
    lora = config.actor.lora if config.sends_adapter_alone else None

    return RolloutSpec(
        config.actor.model.folder,
        config.rollout,
        longest_row,
        config.run.seed,
        config.run.name,
        lora,
        config.rollout.freed_by_sleep,
        of_run(config.data),
        template_of(config.data),
        config.episodes,
        template_day=resolved(config.data.template_day),
        special_tokens=config.data.special_tokens,
        trusts_code=config.trusts_code(config.actor.model.folder),
    )
