"""The search for the fastest configuration that fits a described machine.

Invariant: the result is the fastest of all candidates by the time model, up to the
advantage that megatron-core must have; no candidate is passed over that could be
faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from verl_ray.config.rollout_task import Offloaded
from verl_ray.config.schema import rule_violations
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, Problem
from verl_ray.preflight.assumptions import Links
from verl_ray.preflight.device_defaults import fastest
from verl_ray.preflight.footprints import BFLOAT16
from verl_ray.preflight.machine import (
    GIB,
    GPUS,
    Machine,
    parse_machine,
    with_host_memory,
)
from verl_ray.preflight.memory_plan import USED_SHARE, MemoryPlan, memory_plan
from verl_ray.preflight.model_directories import engine_problems
from verl_ray.preflight.model_files import model_size, remembered_sizes
from verl_ray.preflight.plan_candidates import (
    OFFLOADS,
    Demand,
    Space,
    at_best,
    candidates,
    demands_of,
    fitted,
    offloaded,
    with_least_cache,
)
from verl_ray.preflight.resources import resource_problems
from verl_ray.preflight.step_time import StepTime, step_time

_SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8), (16, 8), (32, 8))
"""Nodes, and GPUs of each, of the machines that a message may name."""


MEGATRON_ADVANTAGE = 1.05
"""Times that a step must be faster with megatron-core to be proposed.

A time model does not tell a few percent apart, and the other backends need no packages.
"""


HOST_ADVANTAGE = 1.05
"""Times that a step must be faster with parameters that stay on the host.

An optimizer on the host depends on its cores, which the time model does not count.
"""


@dataclass(frozen=True)
class Plan:
    """A proposed configuration.

    Attributes:
        config: The configuration, without any `auto`.
        time: Estimated time of its steps.
        memory: Predicted memory of its processes.
        tried: Number of configurations that were compared.
    """

    config: RLConfig
    time: StepTime
    memory: MemoryPlan
    tried: int


@dataclass(frozen=True)
class Misfit:
    """The outcome of a search in which nothing fits.

    Attributes:
        config: The candidate that is short of least: of hosts alone, if there is one.
        shortage: What it lacks.
        larger: The same machine with as much memory of its hosts as is needed; None if
            its GPUs are too small.
        smallest: The smallest listed machine that would do; None if none does.
    """

    config: RLConfig
    shortage: Demand
    larger: Machine | None
    smallest: Machine | None


def search(bases: Mapping[str, RLConfig], machine: Machine) -> Plan | Misfit:
    """Return the fastest configuration that fits a machine.

    A candidate's time with the largest cache that it can use, and nothing offloaded, is
    a lower bound. In the order of their bounds, candidates are fitted and timed, until
    no bound is lower than the best time.

    Args:
        bases: Composed configuration by the backend of all of its roles.
        machine: Described machine with GPUs.

    Raises:
        ConfigError: Something else than memory prevents every candidate that fits.
    """
    with remembered_sizes():
        space = Space.of(bases, machine)
        refusals: list[Problem] = []
        tried = 0
        # The most frugal candidates come second, since they are among the slowest.
        for frugal in (False, True):
            options = list(candidates(space, frugal=frugal))
            tried += len(options)
            best = _fastest(options, space, refusals)
            if best is not None:
                memory = memory_plan(best, on_gpus=True)
                return Plan(best, step_time(best, space.links), memory, tried)

        if refusals:
            raise ConfigError(refusals)
        return _misfit(bases, machine)


def _fastest(
    options: Sequence[RLConfig], space: Space, refusals: list[Problem]
) -> RLConfig | None:
    """Return the fastest candidate that fits; None if none does.

    Args:
        options: Candidates.
        space: The machine, and where candidates begin.
        refusals: Where problems are added that a candidate has which fits.
    """

    def is_allowed(config: RLConfig) -> bool:
        problems = _problems(config, space.machine)
        if not refusals:
            refusals.extend(problems)
        return not problems

    return fastest(
        options,
        least_s=lambda option: _score(at_best(offloaded(option, "none")), space.links),
        fitted=lambda option: _fitting(option, space.machine),
        seconds=lambda config: _score(config, space.links),
        is_allowed=is_allowed,
    )


def _score(config: RLConfig, links: Links) -> float:
    """Return the seconds of a step by which candidates are compared."""
    seconds = step_time(config, links).total_s
    backend = config.actor.backend
    if backend.packages:
        seconds *= MEGATRON_ADVANTAGE
    if backend.stays_on_host:
        seconds *= HOST_ADVANTAGE
    return seconds


def _problems(config: RLConfig, machine: Machine) -> list[Problem]:
    """Return the problems for which a check would refuse a configuration."""
    problems = [*rule_violations(config), *resource_problems(config, machine)]
    for engine in config.engines.values():
        problems += engine_problems(engine, machine)
    return problems


def _fitting(candidate: RLConfig, machine: Machine) -> Iterator[RLConfig]:
    """Yield the ways to offload with which a candidate fits, with their caches."""
    for offload in _offloads(candidate):
        config = fitted(offloaded(candidate, offload), machine)
        if isinstance(config, RLConfig):
            yield config


def _offloads(candidate: RLConfig) -> Sequence[Offloaded]:
    """Return the ways to offload that a candidate has, the fastest first."""
    return OFFLOADS if candidate.shares_processes else OFFLOADS[:1]


# ---------------------------------------------------------------------- if nothing fits


def _misfit(bases: Mapping[str, RLConfig], machine: Machine) -> Misfit:
    """Return what is short, and the smallest listed machine that would do."""
    demands = [
        (*demands_of(memory_plan(config, on_gpus=True), machine), config)
        for config in most_frugal(bases, machine)
    ]
    if not demands:
        kinds = ", ".join(bases)
        rule = "it cannot compute this model, or cannot share it out over these GPUs"
        raise ConfigError([Problem("--backend", kinds, rule, "Choose fsdp.")])

    # Memory of a host is added more easily than GPUs.
    larger = with_enough_memory(bases, machine)
    fit_gpus = [
        (of_host, config) for of_gpu, of_host, config in demands if of_gpu.factor <= 1
    ]
    if fit_gpus:
        shortage, config = min(fit_gpus, key=lambda entry: entry[0].needed)
    else:
        shortage, _, config = min(demands, key=lambda entry: entry[0].needed)
    return Misfit(config, shortage, larger, smallest_machine(bases, machine))


def smallest_machine(bases: Mapping[str, RLConfig], machine: Machine) -> Machine | None:
    """Return the machine with least memory of its GPUs that some candidate fits.

    Its hosts have the memory that is assumed of a machine, or as much as is needed. Its
    links are those of the described machine.

    Args:
        bases: Composed configuration by the backend of all of its roles.
        machine: Described machine with GPUs.
    """
    options = [(nodes, gpus, gpu) for nodes, gpus in _SHAPES for gpu in GPUS.values()]
    options.sort(key=lambda option: option[0] * option[1] * option[2].memory_bytes)
    for nodes, gpus, gpu in options:
        listed = parse_machine(f"nodes={nodes},gpus={gpus},gpu={gpu.name}")
        linked = replace(listed, link_bytes_per_s=machine.link_bytes_per_s)
        enough = with_enough_memory(bases, linked)
        if enough is not None:
            return enough
    return None


def with_enough_memory(
    bases: Mapping[str, RLConfig], machine: Machine
) -> Machine | None:
    """Return a machine with as much memory of its hosts as some candidate needs.

    It is the machine itself where it has enough. None if its GPUs are too small, or if
    something else than memory prevents every candidate.

    Args:
        bases: Composed configuration by the backend of all of its roles.
        machine: Described machine with GPUs.
    """
    if _is_too_small(next(iter(bases.values())), machine):
        return None
    fit_gpus: list[tuple[int, RLConfig]] = []
    for config in most_frugal(bases, machine):
        of_gpu, of_host = demands_of(memory_plan(config, on_gpus=True), machine)
        if of_gpu.factor <= 1:
            fit_gpus.append((of_host.needed, config))

    for needed, config in sorted(fit_gpus, key=lambda entry: entry[0]):
        gib = math.ceil(needed / USED_SHARE / GIB)
        larger = with_host_memory(machine, max(machine.memory_bytes, gib * GIB))
        if not _problems(config, larger):
            return larger
    return None


def _is_too_small(base: RLConfig, machine: Machine) -> bool:
    """Return whether GPUs of a machine hold no candidate, whatever its settings are.

    An engine is on one node, with weights in bfloat16.
    """
    assert machine.gpu is not None, "a machine with GPUs was described"
    gpus_bytes = machine.gpus * machine.gpu.memory_bytes
    return BFLOAT16 * model_size("actor", base.actor, base).parameters > gpus_bytes


def most_frugal(bases: Mapping[str, RLConfig], machine: Machine) -> Iterator[RLConfig]:
    """Yield the candidates that need least memory, with caches for a single row."""
    for option in candidates(Space.of(bases, machine), frugal=True):
        for offload in _offloads(option):
            yield with_least_cache(offloaded(option, offload))
