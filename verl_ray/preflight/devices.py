"""The devices that the processes of a run take, and those that stay idle.

Invariant: settings for which a machine has no devices are problems; devices with
nothing to do are warnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from verl_ray.config.load import Changes
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config, batch_algebra
from verl_ray.config.vllm_args import VLLM_ARGS_FIXED_ON_A_CPU
from verl_ray.errors import Problem
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.memory_plan import Job
from verl_ray.settings.section import value_of
from verl_ray.shell import for_shell
from verl_ray.suggest import either, nearest_divisors


def ranks_on_devices(job: Job) -> dict[str, int]:
    """Return the number of devices of each role that has processes.

    Colocated roles share their devices, so only the role with most ranks is listed.
    """
    config = job.config
    models = config.active_models(learns=job.learns)
    engines = config.active_engines(learns=job.learns)

    others = {name: role.num_ranks for name, role in models.items()}
    judges: dict[str, int] = {}
    for name, engine in engines.items():
        ranks = judges if name in config.judges else others
        ranks[name] = engine.ranks

    if config.shares_processes:
        largest = max(others, key=lambda name: others[name])
        others = {largest: others[largest]}
    # Judges have devices of their own.
    return others | judges


def as_sum(ranks: Mapping[str, int]) -> str:
    """Return numbers per role as text: actor 2 + rollout 1."""
    return " + ".join(f"{name} {count}" for name, count in ranks.items())


def larger(machine: Machine) -> str:
    """Return what to do about a machine that is too small, after "or"."""
    if machine.is_described:
        return "describe a larger machine"
    return "set ray.address to a cluster"


# ----------------------------------------------------------------------------- problems


def device_problems(job: Job) -> Iterator[Problem]:
    """Yield settings for which the machine has no devices."""
    config = job.config
    machine = job.machine
    if not machine.gpus:
        yield from _cpu_problems(config)
        return

    yield from _shared_gpu_problems(job)
    if machine.nodes > 1:
        yield from _node_problems(job)

    ranks = ranks_on_devices(job)
    needed = sum(ranks.values())
    if needed > machine.total_gpus:
        largest = max(ranks, key=lambda name: ranks[name])
        rule = (
            f"the run needs {needed} GPUs ({as_sum(ranks)}), and {machine.in_words}"
            f" has {machine.total_gpus}"
        )
        fix = (
            f"Lower it by {needed - machine.total_gpus}, choose placement=colocated, or"
            f" {larger(machine)}."
        )
        yield Problem(_ranks_key(largest, config), ranks[largest], rule, fix)


def _ranks_key(role: str, config: Config) -> str:
    """Return the key of the setting that determines a role's number of devices."""
    engine = config.engines.get(role)
    if engine is None:
        return f"{role}.num_ranks"
    return f"{engine.section}.num_replicas"


def _cpu_problems(config: Config) -> Iterator[Problem]:
    """Yield settings that need a GPU."""
    if isinstance(config, RolloutTaskConfig):
        if config.rollout.sync.transport == "cuda_ipc":
            rule = "it joins processes on one GPU, and this machine has none"
            yield Problem("rollout.sync.transport", "cuda_ipc", rule, "Use auto.")

        offload = config.placement.offload
        if offload in ("all", "optimizer"):
            rule = "it frees GPUs, and this machine has none"
            yield Problem("placement.offload", offload, rule, "Use auto.")

    for engine in config.engines.values():
        arguments = engine.config.vllm_args
        for name in sorted(arguments.keys() & VLLM_ARGS_FIXED_ON_A_CPU.keys()):
            key = f"{engine.section}.vllm_args.{name}"
            reason = VLLM_ARGS_FIXED_ON_A_CPU[name]
            rule = f"this argument may not change on a CPU: {reason}"
            yield Problem(key, arguments[name], rule, "Leave it out.")


def _shared_gpu_problems(job: Job) -> Iterator[Problem]:
    """Yield rollout engines of several ranks whose GPUs are not those of trainers."""
    config = job.config
    if not isinstance(config, RolloutTaskConfig) or not config.shares_processes:
        return
    width = config.rollout.ranks_per_replica
    # An evaluation starts processes for the GPUs of trainers that it does without.
    if width == 1 or not job.learns:
        return

    key = "rollout.tensor_parallel"
    if config.rollout.pipeline_parallel > 1:
        key = "rollout.pipeline_parallel"
    where = "with placement=colocated an engine runs on the GPUs of trainer ranks"
    most = max(role.num_ranks for role in config.model_roles.values())
    value = value_of(config, key)
    if most % width:
        rule = f"{where}, and its {width} ranks do not divide {most}"
        divisors = either(nearest_divisors(most, width))
        fix = f"The nearest that do are {divisors} in all; or use placement=separate."
        yield Problem(key, value, rule, fix)
        return

    replicas = config.engines["rollout"].replicas
    if replicas > most // width:
        rule = f"{where}: {most} have those of {most // width} engines of {width}"
        fix = f"Use at most {most // width}, or auto."
        yield Problem("rollout.num_replicas", replicas, rule, fix)

    gpus = job.machine.gpus
    if job.machine.nodes > 1 and most > gpus and gpus % width:
        rule = (
            "with placement=colocated trainer ranks fill nodes, and the ranks of an"
            f" engine share a node, which has {gpus} GPUs"
        )
        divisors = either(nearest_divisors(gpus, width))
        yield Problem(key, value, rule, f"The nearest that divide them are {divisors}.")


def _node_problems(job: Job) -> Iterator[Problem]:
    """Yield engines that do not fit the nodes, since their ranks share one."""
    machine = job.machine
    for engine in job.config.active_engines(learns=job.learns).values():
        width = engine.config.ranks_per_replica
        replicas = engine.replicas
        most = machine.nodes * (machine.gpus // width)
        rule = f"the ranks of an engine share a node, which has {machine.gpus} GPUs"

        if width > machine.gpus:
            key = f"{engine.section}.tensor_parallel"
            stages = engine.config.pipeline_parallel
            rule += f", and this one needs {width}"
            fix = f"Use at most {max(1, machine.gpus // stages)}."
            yield Problem(key, engine.config.tensor_parallel, rule, fix)
        # Engines that need more GPUs than there are at all are reported elsewhere.
        elif most < replicas and engine.ranks <= machine.total_gpus:
            key = f"{engine.section}.num_replicas"
            rule += f": {machine.nodes} nodes hold {most} engines of {width} ranks"
            yield Problem(key, replicas, rule, f"Use at most {most}.")


# ------------------------------------------------------------------------- idle devices


def ranks_without_rows(config: Config) -> Iterator[str]:
    """Yield a warning for each role whose mini-batches are too small for its ranks."""
    for role in batch_algebra(config).roles:
        rows = role.mini_batch_size
        if rows is None or rows >= role.dp_size:
            continue

        # Ranks that share rows are idle together.
        ranks_per_share = role.ranks // role.dp_size
        idle = (role.dp_size - rows) * ranks_per_share
        yield (
            f"{role.role}.num_ranks={role.ranks} share mini-batches of {rows} rows:"
            f" {idle} ranks have nothing to do in each update"
        )


def idle_gpus(job: Job) -> Iterator[str]:
    """Yield warnings about GPUs that have nothing to do, always or in some phase."""
    yield from _unused_gpus(job)
    yield from _half_used_gpus(job.config)
    yield from _engines_without_rows(job.config)


def _unused_gpus(job: Job) -> Iterator[str]:
    """Yield a warning if no process of the run uses some of the GPUs."""
    config = job.config
    machine = job.machine
    ranks = ranks_on_devices(job)
    used = sum(ranks.values())
    idle = machine.total_gpus - used
    if idle <= 0:
        return
    use = "use them with"
    changes = ranks_on_idle_gpus(job, [config.evaluated_role])
    if isinstance(config, RolloutTaskConfig) and not config.shares_processes:
        # More engines need nothing of the trainers, but a row each.
        replicas = config.engines["rollout"].replicas
        rows = config.most_open_rows - replicas
        more = min(idle // config.rollout.ranks_per_replica, rows)
        if more > 0:
            changes = {"rollout.num_replicas": replicas + more}
        elif rows <= 0:
            use = "each row has an engine already; if that is faster, use them with"

    fix = f"no role takes more ranks with its backend and {config.examples_key}"
    if changes:
        fix = f"{use} {for_shell(changes.items())}"
    yield (
        f"{machine.in_words} has {machine.total_gpus} GPUs, and the run uses {used}"
        f" ({as_sum(ranks)}): {idle} are idle; {fix}"
    )


def _engines_without_rows(config: Config) -> Iterator[str]:
    """Yield a warning if there are more rollout engines than rows to generate."""
    if not isinstance(config, RolloutTaskConfig):
        return
    replicas = config.engines["rollout"].replicas
    rows = config.most_open_rows
    if replicas > rows:
        yield (
            f"rollout.num_replicas={replicas} share at most {rows} rows at a time"
            f" ({config.step_in_words}): {replicas - rows} engines have nothing to do"
        )


def _half_used_gpus(config: Config) -> Iterator[str]:
    """Yield a warning if shared GPUs are without a trainer, or without an engine."""
    if not isinstance(config, RolloutTaskConfig) or not config.shares_processes:
        return

    most = max(role.num_ranks for role in config.model_roles.values())
    engines = config.engines["rollout"].ranks
    if engines < most:
        yield (
            f"{most - engines} of {most} GPUs have no rollout engine, and are idle"
            " while rollouts are generated; use rollout.num_replicas=auto"
        )
    elif most < engines:
        yield (
            f"{engines - most} of {engines} GPUs have an engine alone, and are idle"
            f" while models learn; raise actor.num_ranks to {engines}"
        )


def ranks_on_idle_gpus(job: Job, names: Sequence[str]) -> Changes:
    """Return the numbers of ranks with which roles use GPUs that are idle, by key.

    Roles that share devices grow together. A role does not grow where its backend or
    its rows allow no larger number.

    Args:
        job: The run, on a machine with GPUs.
        names: Roles that run a model on a training backend, to share out the GPUs.
    """
    config = job.config
    ranks = ranks_on_devices(job)
    total = job.machine.total_gpus
    idle = total - sum(ranks.values())
    changes: dict[str, object] = {}
    if not config.shares_processes:
        for name in names:
            most = config.model_roles[name].num_ranks + idle // len(names)
            changes |= _with_most_ranks(config, [name], most)
        return changes

    # Roles on one backend have equal numbers of ranks.
    by_backend: dict[str, list[str]] = {}
    for name, role in config.model_roles.items():
        by_backend.setdefault(role.backend.kind, []).append(name)
    judge_ranks = sum(ranks.get(name, 0) for name in config.judges)
    for together in by_backend.values():
        changes |= _with_most_ranks(config, together, total - judge_ranks)
    return changes


def _with_most_ranks(config: Config, names: Sequence[str], most: int) -> Changes:
    """Return the largest number of ranks that all of these roles take, by key."""
    current = config.model_roles[names[0]].num_ranks
    for ranks in range(most, current, -1):
        if all(_takes(config, name, ranks) for name in names):
            return {f"{name}.num_ranks": ranks for name in names}
    return {}


def _takes(config: Config, name: str, ranks: int) -> bool:
    """Return whether a role's backend can have these ranks, each with rows."""
    role = config.model_roles[name]
    rows = config.rows_per_step
    if ranks // role.peers > (role.rows_per_update(rows) or rows):
        return False
    if (
        isinstance(config, RolloutTaskConfig)
        and config.shares_processes
        and ranks % config.rollout.ranks_per_replica
    ):
        return False
    return not any(role.backend.rank_problems(name, ranks))
