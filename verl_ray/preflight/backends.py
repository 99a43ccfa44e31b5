"""Whether the backends of a run are installed, and can compute its models.

Invariant: what is refused here would fail after the processes have started, or compute something else; no package of a
backend is imported. Deliberately not here: what no model changes (`verl_ray/config/rules/backends.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.backends.base import ModelFacts
from verl_ray.config.schema import Config
from verl_ray.engine.packages import INSTALL, missing_packages
from verl_ray.errors import Problem
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.model_directories import settings_of, shapes_of


def backend_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Packages that `machine` lacks, unless it is None; and models and backends that do not go together."""
    if machine is not None:
        yield from _package_problems(config)
    for name, role in config.model_roles.items():
        path = role.model.path
        model = ModelFacts(path, settings_of(path, config), shapes_of(path, config), config.head_of(name) == "value")
        yield from role.backend.model_problems(name, role.num_ranks, model)


def _package_problems(config: Config) -> Iterator[Problem]:
    """One per backend, however many roles use it."""
    first: dict[str, str] = {}
    for name, role in config.model_roles.items():
        backend = role.backend
        missing = missing_packages(backend.packages)
        if missing and first.setdefault(backend.kind, name) == name:
            rule = f"this backend needs {' and '.join(missing)}, not installed here"
            yield Problem(f"{name}.backend", backend.kind, rule, f"Install it: {INSTALL}")
