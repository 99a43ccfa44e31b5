"""The search for the fastest configuration that fits a described machine.

Invariant: the result is the fastest of all candidates by the time model, up to the
advantage that megatron-core must have; no candidate is passed over that could be
faster. Deliberately not here: which candidates there are
(`candidates.py`), and where they fit (`fit.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from verl_ray.config.rules import rule_violations
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, Problem
from verl_ray.planning.candidates import OFFLOADS, Space, candidates, offloaded
from verl_ray.planning.fit import Shortage, fitted, largest_cache_gib, with_cache
from verl_ray.planning.step_time import StepTime, step_time
from verl_ray.preflight.engine_models import engine_problems
from verl_ray.preflight.gpus import GPUS, Gpu
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.memory_plan import MemoryPlan, memory_plan
from verl_ray.preflight.model_sizes import remembered_sizes
from verl_ray.preflight.resources import resource_problems

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
        config: The candidate that is short of least.
        shortage: What it lacks.
        smallest: The smallest listed machine that would do, as nodes, GPUs per node and
            their kind; None if none does.
    """

    config: RLConfig
    shortage: Shortage
    smallest: tuple[int, int, Gpu] | None


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
            best = _fastest(options, machine, refusals)
            if best is not None:
                memory = memory_plan(best, on_gpus=True)
                return Plan(best, step_time(best, machine), memory, tried)

        if refusals:
            raise ConfigError(refusals)
        return _misfit(bases, machine)


def _fastest(
    options: Sequence[RLConfig], machine: Machine, refusals: list[Problem]
) -> RLConfig | None:
    """Return the fastest candidate that fits; None if none does.

    Args:
        options: Candidates.
        machine: Described machine with GPUs.
        refusals: Where problems are added that a candidate has which fits.
    """
    bounds: list[tuple[float, int, RLConfig]] = []
    for config in options:
        at_best = with_cache(offloaded(config, "none"), largest_cache_gib(config))
        bounds.append((_score(at_best, machine), len(bounds), config))
    bounds.sort(key=lambda entry: entry[:2])

    best: RLConfig | None = None
    best_s = float("inf")
    for bound, _, candidate in bounds:
        if bound >= best_s:
            break
        for config in _fitting(candidate, machine):
            seconds = _score(config, machine)
            if seconds >= best_s:
                continue
            problems = _problems(config, machine)
            if not problems:
                best, best_s = config, seconds
            elif not refusals:
                refusals += problems
    return best


def _score(config: RLConfig, machine: Machine) -> float:
    """Return the seconds of a step by which candidates are compared."""
    seconds = step_time(config, machine).total_s
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
    for offload in OFFLOADS if candidate.shares_processes else OFFLOADS[:1]:
        config = fitted(offloaded(candidate, offload), machine)
        if isinstance(config, RLConfig):
            yield config


# ---------------------------------------------------------------------- if nothing fits


def _misfit(bases: Mapping[str, RLConfig], machine: Machine) -> Misfit:
    """Return what is short, and the smallest listed machine that would do."""
    shortages: list[tuple[float, int, RLConfig, Shortage]] = []
    for config in candidates(Space.of(bases, machine), frugal=True):
        shortage = fitted(_smallest(config), machine)
        if isinstance(shortage, Shortage):
            shortages.append((shortage.factor, len(shortages), config, shortage))
    if not shortages:
        kinds = ", ".join(bases)
        rule = "it cannot compute this model, or cannot share it out over these GPUs"
        raise ConfigError([Problem("--backend", kinds, rule, "Choose fsdp.")])
    _, _, config, shortage = min(shortages)
    return Misfit(config, shortage, smallest_machine(bases, machine))


def smallest_machine(
    bases: Mapping[str, RLConfig], machine: Machine
) -> tuple[int, int, Gpu] | None:
    """Return the machine with least memory of its GPUs that some candidate fits.

    Its nodes have the memory per GPU of the described machine.

    Args:
        bases: Composed configuration by the backend of all of its roles.
        machine: Described machine with GPUs.
    """
    options = [(nodes, gpus, gpu) for nodes, gpus in _SHAPES for gpu in GPUS.values()]
    options.sort(key=lambda option: option[0] * option[1] * option[2].memory_bytes)
    for nodes, gpus, gpu in options:
        larger = replace(
            machine,
            nodes=nodes,
            gpus=gpus,
            gpu=gpu,
            gpu_memory_bytes=gpu.memory_bytes,
            memory_bytes=machine.memory_bytes * gpus // machine.gpus,
        )
        if _fits(bases, larger):
            return nodes, gpus, gpu
    return None


def _fits(bases: Mapping[str, RLConfig], machine: Machine) -> bool:
    """Return whether a candidate fits a machine."""
    return any(
        isinstance(fitted(_smallest(config), machine), RLConfig)
        for config in candidates(Space.of(bases, machine), frugal=True)
    )


def _smallest(config: RLConfig) -> RLConfig:
    """Return a candidate with all of its state offloaded where GPUs are shared."""
    return offloaded(config, "all" if config.shares_processes else "none")
