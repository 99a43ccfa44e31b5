"""A run whose settings were changed so that it fits: what it then needs, and breaks.

Invariant: an attempt is the configuration as its user gave it, with other values of
some settings, so every `auto` follows them. Deliberately not here: which changes are
tried (`savings.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from verl_ray.config.load import Changes, with_changes
from verl_ray.config.schema import Config, rule_violations
from verl_ray.preflight.backends import backend_problems
from verl_ray.preflight.devices import device_problems
from verl_ray.preflight.engine_models import engine_problems
from verl_ray.preflight.facts import ClusterFacts, facts_here
from verl_ray.preflight.job import Job
from verl_ray.preflight.machine import GIB, Machine
from verl_ray.preflight.memory_plan import MemoryPlan, memory_plan
from verl_ray.preflight.remaining_memory import cache_bounds_gib
from verl_ray.preflight.resolve import resolve
from verl_ray.preflight.resolved_record import with_auto_again

Place = Literal["device", "host"]
"""A GPU, or the host of a node."""


@dataclass(frozen=True)
class Attempt:
    """A run on a machine with GPUs, some of whose settings were changed."""

    typed: Config
    """Configuration that may hold `auto`."""
    machine: Machine
    facts: ClusterFacts
    changes_auto: bool
    """Whether a setting that is `auto` may be changed."""
    overridden: frozenset[str] = frozenset()
    """Keys that were changed."""

    @staticmethod
    def of(job: Job, *, changes_auto: bool) -> Attempt:
        """Return the run without any change."""
        typed = with_auto_again(job.config)
        facts = facts_here(typed, job.machine, learns=job.learns)
        return Attempt(typed, job.machine, facts, changes_auto)

    def changed(self, changes: Changes) -> Attempt:
        """Return the run with other values of some settings."""
        typed = with_changes(self.typed, changes)
        return replace(self, typed=typed, overridden=frozenset(changes))

    @property
    def settings(self) -> Config:
        """The settings to change. One that may not be changed is `auto`."""
        return self.config if self.changes_auto else self.typed

    @cached_property
    def config(self) -> Config:
        """The configuration with every `auto` replaced by its value.

        Where nothing fits a GPU, it is what needs least of one, which is found sooner.
        """
        least = self._frugal()
        plan = memory_plan(least, on_gpus=True, learns=self.facts.learns)
        if plan.fullest(on_device=True)[1] > self.available["device"]:
            return least
        return resolve(self.typed, self.facts)

    def _frugal(self) -> Config:
        """Return the configuration in which every `auto` needs least of a GPU."""
        facts = replace(self.facts, gpu_memory_bytes=None)
        config = resolve(self.typed, facts)
        least: dict[str, object] = {}
        for name, engine in self.typed.engines.items():
            if engine.config.kv_cache_gib == "auto":
                own = config.engines[name]
                key = f"{engine.section}.kv_cache_gib"
                least[key], _ = cache_bounds_gib(own, config, learns=facts.learns)
        return with_changes(config, least)

    @cached_property
    def job(self) -> Job:
        """The run with every `auto` replaced by its value."""
        return Job(self.config, self.machine, self.facts.learns)

    @property
    def models(self) -> list[str]:
        """Roles that run a model on a training backend."""
        return list(self.config.active_models(learns=self.facts.learns))

    @property
    def engines(self) -> list[str]:
        """Roles that vLLM serves."""
        return list(self.config.active_engines(learns=self.facts.learns))

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan."""
        return self.job.memory

    @cached_property
    def needed(self) -> Mapping[Place, int]:
        """Bytes of the fullest GPU and of the fullest host."""
        _, of_device = self.memory.fullest(on_device=True)
        gpus = self.machine.gpus
        of_host = [self.memory.node_bytes(each, gpus) for each in self.memory.phases]
        return {"device": of_device, "host": max(of_host)}

    @property
    def available(self) -> Mapping[Place, float]:
        """Bytes of a GPU, without limit if it is not known, and of a host."""
        of_device = self.machine.gpu_memory_bytes or math.inf
        return {"device": of_device, "host": self.machine.memory_bytes}

    @property
    def short(self) -> list[Place]:
        """Places that are too small."""
        return [
            place for place in self.needed if self.needed[place] > self.available[place]
        ]

    def is_possible_after(self, before: Attempt) -> bool:
        """Return whether the changes break no rule, and need no more that is short."""
        if self._keys_of_problems - before._keys_of_problems:
            return False
        return all(self.needed[place] <= before.needed[place] for place in self.short)

    @cached_property
    def _keys_of_problems(self) -> set[str]:
        """Keys of the settings that break a rule."""
        problems = rule_violations(self.typed, self.overridden)
        problems += backend_problems(self.config, None)
        problems += device_problems(self.job)
        for engine in self.config.engines.values():
            problems += engine_problems(engine, self.machine)
        return {problem.key for problem in problems}

    def is_short(self, role: str) -> bool:
        """Return whether the GPUs of a role are too small in some phase."""
        plan = self.memory
        device = plan.device_of(role)
        sizes = [plan.bytes_by_device(phase)[device] for phase in plan.phases]
        return max(sizes) > self.available["device"]

    def excess_gib(self, engine: str, share: float = 1.0) -> float:
        """Return what an engine's GPUs lack while it has a cache, in GiB.

        Args:
            engine: Name of the engine.
            share: Share of a GPU that may be filled.
        """
        plan = self.memory
        device = plan.device_of(engine)
        needed = max(
            plan.bytes_by_device(phase)[device]
            for phase in plan.phases
            if plan.by_role[engine][phase].of("cache")
        )
        return (needed - share * self.available["device"]) / GIB
