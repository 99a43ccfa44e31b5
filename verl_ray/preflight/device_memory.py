"""Memory that a run needs of a GPU, and the change with which it would fit.

Invariant: only a lower bound is refused. An estimate above the GPU is a warning.
Deliberately not here: the other resources of a machine (`resources.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.config.schema import Config
from verl_ray.errors import Problem
from verl_ray.preflight.device_defaults import with_changes
from verl_ray.preflight.machine import GIB, Machine
from verl_ray.preflight.memory_plan import MemoryPlan, memory_plan
from verl_ray.preflight.role_memory import Phase
from verl_ray.preflight.savings import cheapest_change, in_words, single_rows

SURE_SHARE = 0.5
"""Share of estimated activations that is needed in any case; see `docs/memory.md`."""


def device_memory_problems(
    plan: MemoryPlan, config: Config, machine: Machine
) -> Iterator[Problem]:
    """Yield a problem if the smallest GPU is too small."""
    available = machine.gpu_memory_bytes
    if available is None:
        return

    phase, needed = plan.fullest(on_device=True, certain=True)
    if needed <= available:
        phase, needed = _least_of_a_row(config)
    if needed <= available:
        return

    rule = (
        "weights, optimizer, caches and one row of the greatest length take at least"
        f" {needed / GIB:.1f} GiB of a GPU ({phase})"
    )
    size = f"These have {available / GIB:.1f} GiB"
    fix = f"{size}: {_how_it_fits(config, available)}."
    yield Problem("model.path", config.model.path, rule, fix)


def _least_of_a_row(config: Config) -> tuple[Phase, int]:
    """Return the phase that takes most of a GPU for one row, and a lower bound of it.

    A row cannot be cut, so micro-batches of one longest row need least.
    """
    plan = memory_plan(with_changes(config, single_rows(config)), on_gpus=True)
    bounds: dict[Phase, int] = {}
    for phase in plan.phases:
        of_devices = dict(plan.bytes_by_device(phase, certain=True))
        activations: dict[str, int] = {}
        for name, phases in plan.by_role.items():
            device = plan.device_of(name)
            of_role = phases[phase].of("activations")
            # Roles that share a device compute in turn.
            activations[device] = max(activations.get(device, 0), of_role)
        for device, size in activations.items():
            of_devices[device] += int(SURE_SHARE * size)
        bounds[phase] = max(of_devices.values())

    phase = max(bounds, key=lambda phase: bounds[phase])
    return phase, bounds[phase]


def device_memory_warnings(config: Config, machine: Machine) -> Iterator[str]:
    """Yield a warning if the smallest GPU is too small as far as can be estimated."""
    available = machine.gpu_memory_bytes
    if available is None:
        return

    plan = memory_plan(config, on_gpus=True)
    phase, needed = plan.fullest(on_device=True)
    _, certain = plan.fullest(on_device=True, certain=True)
    if certain <= available < needed:
        yield (
            f"a GPU has {available / GIB:.1f} GiB, and {phase} is estimated to need"
            f" {needed / GIB:.1f}: {_how_it_fits(config, available)}"
        )


def _how_it_fits(config: Config, available_bytes: int) -> str:
    """Return the cheapest change with which the run would fit, in words."""
    changes = cheapest_change(config, available_bytes)
    if changes is None:
        return (
            "no setting changes that; share the model out over more ranks"
            " (backend=fsdp, num_ranks), or take a smaller one"
        )
    return f"the cheapest change that would fit is {in_words(changes)}"
