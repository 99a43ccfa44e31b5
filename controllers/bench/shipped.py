"""The shipped settings, as benchmarks measure them.

Invariant: a benchmark that starts no cluster measures the same settings on every
machine, whatever `auto` becomes there. Deliberately not here: benchmarks of runs, which
resolve as a run does.
"""

from __future__ import annotations

from typing import TypeVar

from verl_ray.config.schema import Config
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.resolve import resolve

C = TypeVar("C", bound=Config)


def as_on_a_cpu(config: C) -> C:
    """Return the configuration with the values that `auto` has on a CPU."""
    return resolve(config, facts_here(config, None))
