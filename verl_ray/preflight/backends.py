"""Requirements of a run's backends: their packages, and models that they can compute.

Invariant: every refusal concerns a run that would fail after its processes have
started, or would compute something else. No package of a backend is imported.

Deliberately not here: requirements that do not depend on a model
(`verl_ray/config/roles.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.backends.base import ModelFacts
from verl_ray.config.schema import Config
from verl_ray.engine.packages import INSTALL, missing_packages
from verl_ray.errors import Problem
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.model_files import settings_of, shapes_of


def backend_problems(config: Config, machine: Machine | None) -> Iterator[Problem]:
    """Yield missing packages, and models that their backend cannot compute.

    Args:
        config: Configuration of the run.
        machine: Machine that must have the packages, which are checked on this one
            alone. None stands for another cluster.
    """
    # The packages of other machines cannot be seen from here.
    if machine is not None and not machine.is_described:
        yield from _package_problems(config)

    for name, role in config.model_roles.items():
        path = role.model.folder
        model = ModelFacts(
            path=path,
            settings=settings_of(path, config),
            tensors=shapes_of(path, config),
            has_value_head=config.head_of(name) == "value",
        )
        yield from role.backend.model_problems(name, role.num_ranks, model)


def _package_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each backend whose packages are missing.

    A backend that several roles use is reported once, for the first of them.
    """
    reported: set[str] = set()
    for name, role in config.model_roles.items():
        backend = role.backend
        missing = missing_packages(backend.packages)
        if not missing or backend.kind in reported:
            continue

        reported.add(backend.kind)
        rule = f"this backend needs {' and '.join(missing)}, not installed here"
        fix = f"Install it: {INSTALL}"
        yield Problem(f"{name}.backend", backend.kind, rule, fix)
