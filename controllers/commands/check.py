"""The command `check`, and the check that every other command begins with.

Invariant: neither torch nor ray nor vllm is imported, so the result comes in under two
seconds. Deliberately not here: the rules themselves (`verl_ray.config`,
`findings.py`), and the tables (`check_tables.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TextIO

from controllers.commands.check_tables import auto_table, batch_table, role_table
from controllers.compose.composition import examine
from verl_ray.config.resolve import resolutions, resolve
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.findings import Findings, preflight
from verl_ray.preflight.machine import Machine, machine_of
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.memory_table import memory_table, print_tables

GIB = 2**30


def checked_config(
    config_name: str,
    overrides: Sequence[str],
    config_dir: str | None,
    *,
    evaluates: bool = False,
) -> tuple[Config, Findings]:
    """Return the configuration, and the findings of preflight.

    Args:
        config_name: the root config.
        overrides: what the user typed, in Hydra's grammar.
        config_dir: a folder of the user's own, or None.
        evaluates: whether the command is `evaluate`.

    Raises:
        ConfigError: the problems of configuration and machine together.
    """
    composition = examine(config_name, overrides, config_dir, evaluates=evaluates)
    config = composition.config
    problems = list(composition.problems)
    findings = Findings()

    if config is not None:
        # The machine is checked in any case, so that all problems come together.
        findings = preflight(config, machine_of(config), evaluates=evaluates)
        problems = _together(problems, findings.problems)

    if config is None or problems:
        raise ConfigError(problems)
    return config, findings


def _together(
    of_configuration: Sequence[Problem], of_machine: Sequence[Problem]
) -> list[Problem]:
    """Return both lists of problems with one problem per key.

    Where both have the same key and value, preflight's problem stays, since it knows
    the models as well. Where only the key is the same, the value was bad and replaced
    before preflight saw it, so the configuration's problem stays.
    """
    seen_by_preflight = [(problem.key, problem.value) for problem in of_machine]
    problems = [
        problem
        for problem in of_configuration
        if (problem.key, problem.value) not in seen_by_preflight
    ]

    bad_keys = {problem.key for problem in problems}
    problems += [problem for problem in of_machine if problem.key not in bad_keys]
    return problems


def check(config_name: str, overrides: Sequence[str], config_dir: str | None) -> int:
    """Print the sizes of a step, the roles and what they need, and return 0.

    Raises:
        ConfigError: all problems.
    """
    config, findings = checked_config(config_name, overrides, config_dir)
    machine = machine_of(config)
    facts = facts_here(config, machine)
    planned_memory = memory_plan(resolve(config, facts), on_gpus=facts.gpus > 0)

    print_tables(batch_table(config), role_table(config))

    # Another cluster may resolve the settings otherwise than this machine would.
    if machine is not None:
        resolved = resolutions(config, facts)
        if resolved:
            print_tables(auto_table(resolved))

    print_tables(memory_table(planned_memory))
    print(_resources(machine))
    print_warnings(findings.warnings, sys.stdout)
    print(f"{config.run.name} can run; it writes to {config.run.dir}")
    return 0


def _resources(machine: Machine | None) -> str:
    """Return what the machine has, in a line; None stands for another cluster."""
    if machine is None:
        return (
            "resources: read from the cluster when the run starts, and so is what auto"
            " becomes"
        )

    return (
        f"this machine: {machine.cores} cores, {machine.gpus} GPUs,"
        f" {machine.memory_bytes / GIB:.1f} GiB memory,"
        f" {machine.shm_free_bytes / GIB:.1f} GiB free in /dev/shm"
    )


def print_problems(problems: Sequence[Problem], stream: TextIO) -> None:
    """Print a block per problem: key = value, the rule, what would be right."""
    noun = "problem" if len(problems) == 1 else "problems"
    print(f"{len(problems)} {noun} in the configuration:", file=stream)

    for problem in problems:
        print(f"\n  {problem.key} = {_as_typed(problem.value)}", file=stream)
        print(f"    rule: {problem.rule}", file=stream)
        print(f"    fix:  {problem.fix}", file=stream)


def print_warnings(warnings: Sequence[str], stream: TextIO) -> None:
    """Print a line per warning."""
    for warning in warnings:
        print(f"warning: {warning}", file=stream)


def _as_typed(value: object) -> str:
    """Return a value as the user would type it."""
    # An empty text is shown with its quotes.
    if isinstance(value, str) and value:
        return value
    return json.dumps(value, default=str)
