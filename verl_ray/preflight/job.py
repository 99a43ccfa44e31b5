"""A run, or a single evaluation, on the machine that must hold it.

Invariant: its memory is planned once. Deliberately not here: whether the machine is
large enough (`resources.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from verl_ray.config.schema import Config
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.memory_plan import MemoryPlan, memory_plan


@dataclass(frozen=True)
class Job:
    """A configuration on a machine."""

    config: Config
    """Configuration of the run, resolved for this machine."""
    machine: Machine
    learns: bool = True
    """False stands for an evaluation alone, which starts fewer processes."""

    @cached_property
    def memory(self) -> MemoryPlan:
        """The memory plan."""
        on_gpus = self.machine.gpus > 0
        return memory_plan(self.config, on_gpus=on_gpus, learns=self.learns)
