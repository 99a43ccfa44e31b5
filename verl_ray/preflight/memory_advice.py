"""One advice for GPUs and hosts that are too small.

Invariant: what certainly does not fit is a problem, what is estimated not to fit is a
warning, and the advice stands with the first of the problems, or else of the warnings.
Deliberately not here: what is too small (`device_memory.py`, `host_memory.py`), and the
changes that are tried (`savings.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import Problem
from verl_ray.preflight.described_machine import OPTION, as_described
from verl_ray.preflight.device_memory import device_shortage, fullest_roles, largest
from verl_ray.preflight.devices import ranks_on_idle_gpus
from verl_ray.preflight.host_memory import host_shortage
from verl_ray.preflight.job import Job
from verl_ray.preflight.role_memory import ROLLOUT
from verl_ray.preflight.savings import as_overrides, cheapest_change
from verl_ray.preflight.shortage import Shortage
from verl_ray.shell import for_shell


def memory_problems(job: Job) -> Iterator[Problem]:
    """Yield a problem for a GPU, and for a host, that is certainly too small."""
    shortages = list(_shortages(job))
    for shortage in shortages:
        if shortage.is_certain:
            yield shortage.problem(_advice(shortage, shortages, job))


def memory_warnings(job: Job) -> Iterator[str]:
    """Yield a warning for a GPU, and for a host, that is too small by estimate."""
    shortages = list(_shortages(job))
    for shortage in shortages:
        if not shortage.is_certain:
            yield shortage.warning(_advice(shortage, shortages, job))


def _shortages(job: Job) -> Iterator[Shortage]:
    """Yield what is too small, a GPU first."""
    for shortage in (device_shortage(job), host_shortage(job)):
        if shortage is not None:
            yield shortage


def _advice(shortage: Shortage, shortages: list[Shortage], job: Job) -> str:
    """Return what to do about something that is too small."""
    if shortage.own_advice is not None:
        return shortage.own_advice
    advised = [each for each in shortages if each.own_advice is None]
    # Sorting keeps the order of those that are equally certain.
    first = min(advised, key=lambda each: not each.is_certain)
    if shortage is first:
        return how_it_fits(job)
    return f"the same is needed here as for {first.place}"


def how_it_fits(job: Job) -> str:
    """Return the cheapest change with which a run fits GPUs and hosts, in words."""
    sharing = _sharing(job)
    changes = cheapest_change(job)
    if changes is not None:
        cheapest = f"the cheapest change that would fit is {as_overrides(changes)}"
        return f"{sharing}; without that, {cheapest}" if sharing else cheapest

    ways = [way for way in (sharing, _separate_engines(job), _plan(job)) if way]
    ways.append("or take a smaller model or a larger machine")
    return f"no setting that was tried is enough: {'; '.join(ways)}"


def _sharing(job: Job) -> str:
    """Return how to share out models of which each GPU has a copy; empty if none can.

    A backend is chosen as a whole, so nothing is predicted of another one.
    """
    phase, needed = job.memory.fullest(on_device=True)
    if needed <= (job.machine.gpu_memory_bytes or needed):
        return ""
    roles = fullest_roles(job.memory, phase)
    models = job.config.model_roles
    copied = [
        name
        for name in models
        if name in roles and models[name].backend.kind == "engine"
    ]
    more = ranks_on_idle_gpus(job, copied) if copied else {}
    if not more and all(models[name].num_ranks == 1 for name in copied):
        return ""
    overrides = f"backend=fsdp {as_overrides(more)}".strip()
    return f"{overrides} shares out models of which each GPU has a copy now"


def _separate_engines(job: Job) -> str:
    """Return how to share out an engine's model that is too large for a shared GPU."""
    available = job.machine.gpu_memory_bytes
    if available is None or not job.config.shares_processes:
        return ""
    for phase in job.memory.phases:
        if job.memory.device_bytes(phase) > available:
            name, part, _ = largest(job.memory, phase)
            if (name, part) == (ROLLOUT, "weights"):
                return (
                    "placement=separate with a larger rollout.tensor_parallel shares"
                    " the engine's model out"
                )
    return ""


def _plan(job: Job) -> str:
    """Return the command that searches all placements; empty if it knows no such run.

    The lengths and the algorithm are those of the run.
    """
    config = job.config
    if not isinstance(config, RLConfig) or not job.learns:
        return ""
    machine = as_described(job.machine) if job.machine.is_described else "..."
    options = {
        OPTION: machine,
        "--algorithm": config.algorithm.name,
        "--prompts": config.data.prompts_per_step,
        "--group-size": config.rollout.group_size,
        "--prompt-tokens": config.data.max_prompt_tokens,
        "--max-tokens": config.rollout.max_response_tokens,
    }
    words = ["verl-ray", "plan", config.model.path]
    for option, value in options.items():
        words += [option, str(value)]
    return f"`{for_shell(words)}` searches all placements"
