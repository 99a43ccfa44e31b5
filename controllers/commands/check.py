"""What a user sees before a run: every problem, or the batch algebra, the roles and the warnings as tables.

Invariant: neither torch nor ray nor vllm is imported, so the answer comes in under two seconds. Deliberately not
here: the rules themselves (`verl_ray.config`, `findings.py`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.table import Table

from controllers.compose.composition import examine
from verl_ray.config.algebra import batch_algebra
from verl_ray.config.resolve import Resolution, resolutions, resolve
from verl_ray.config.schema import Config
from verl_ray.errors import ConfigError, Problem
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.findings import Findings, preflight
from verl_ray.preflight.machine import Machine, machine_of
from verl_ray.preflight.memory_plan import memory_plan
from verl_ray.preflight.memory_table import memory_table, print_tables


def checked(
    config_name: str, overrides: Sequence[str], config_dir: str | None, *, evaluates: bool = False
) -> tuple[Config, Findings]:
    """The configuration, and what preflight found worth a warning; `evaluates` for the command `evaluate`.

    Raises ConfigError with the problems of configuration and machine together.
    """
    composition = examine(config_name, overrides, config_dir, evaluates=evaluates)
    problems = list(composition.problems)
    refusal = composition.config.why_no_evaluation if evaluates and composition.config is not None else None
    if refusal is not None:
        problems.append(Problem("--config-name", config_name, *refusal))
    findings = Findings()
    if composition.config is not None:
        findings = preflight(composition.config, machine_of(composition.config), evaluates=evaluates)
        problems = _together(problems, findings.problems)
    if composition.config is None or problems:
        raise ConfigError(problems)
    return composition.config, findings


def _together(of_configuration: Sequence[Problem], of_machine: Sequence[Problem]) -> list[Problem]:
    """Both, and once per key: of a bad value that was replaced before the machine was looked at, what the configuration
    says; of the same value what the machine says, who knows the models too."""
    seen = [(problem.key, problem.value) for problem in of_machine]
    kept = [problem for problem in of_configuration if (problem.key, problem.value) not in seen]
    known_bad = {problem.key for problem in kept}
    return kept + [problem for problem in of_machine if problem.key not in known_bad]


def check(config_name: str, overrides: Sequence[str], config_dir: str | None) -> int:
    """Print what the run would be, and return 0; raise ConfigError with all problems otherwise."""
    config, findings = checked(config_name, overrides, config_dir)
    machine = machine_of(config)
    facts = facts_here(config, machine)
    predicted = memory_plan(resolve(config, facts), on_gpus=facts.gpus > 0)
    print_tables(_batch_table(config), _role_table(config))
    if machine is not None and (chosen := resolutions(config, facts)):
        print_tables(_auto_table(chosen))
    print_tables(memory_table(predicted))
    for line in _resources(machine):
        print(line)
    print_warnings(findings.warnings, sys.stdout)
    print(f"{config.run.name} can run; it writes to {config.run.dir}")
    return 0


def print_problems(problems: Sequence[Problem], stream: TextIO) -> None:
    """One block per problem: key = value, the rule, what would be right."""
    print(f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in the configuration:", file=stream)
    for problem in problems:
        print(f"\n  {problem.key} = {_shown(problem.value)}", file=stream)
        print(f"    rule: {problem.rule}", file=stream)
        print(f"    fix:  {problem.fix}", file=stream)


def print_warnings(warnings: Sequence[str], stream: TextIO) -> None:
    """One line per warning."""
    for warning in warnings:
        print(f"warning: {warning}", file=stream)


def _shown(value: object) -> str:
    """A value as the user would type it."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def _batch_table(config: Config) -> Table:
    sizes = batch_algebra(config)
    title = f"one step: {config.step_in_words}, each of up to {sizes.max_row_tokens} tokens"
    table = Table(title=title, title_justify="left")
    headings = ("role", "ranks", "rows per rank", "mini-batch", "per rank", "updates per step", "micro-batch tokens")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "role" else "right", overflow="fold")
    for role in sizes.roles:
        mini = "-" if role.mini_batch_size is None else str(role.mini_batch_size)
        per_rank = "-" if role.mini_batch_size_per_rank is None else str(role.mini_batch_size_per_rank)
        counts = (role.ranks, role.rows_per_rank, mini, per_rank, role.updates_per_step or "-")
        table.add_row(role.role, *map(str, counts), f"<= {role.micro_batch_tokens_per_rank}")
    return table


def _role_table(config: Config) -> Table:
    table = Table(title="roles", title_justify="left")
    for heading in ("role", "backend", "dtype", "ranks", "placement", "model, functions or service"):
        table.add_column(heading, overflow="fold")
    several = len(config.model_roles) + len(config.engines) > 1
    place = "colocated" if several and config.shares_processes else "separate"
    for name, role in config.model_roles.items():
        backend = role.backend
        shown = backend.described(role.num_ranks)
        table.add_row(name, shown, backend.dtype, str(role.num_ranks), place, role.model.path)
    for name, grader in config.graders.items():
        if grader.cpu_ranks is not None:
            table.add_row(name, grader.kind, "-", str(grader.cpu_ranks), "CPU only", grader.asks)
    for name, engine in config.engines.items():
        ranks = f"{engine.config.num_replicas} x {engine.config.tensor_parallel}"
        where = "separate" if name in config.judges else place
        table.add_row(name, "vllm", engine.config.dtype, ranks, where, engine.path)
    return table


def _auto_table(found: Sequence[Resolution]) -> Table:
    table = Table(title="auto: what these settings become here", title_justify="left")
    for heading in ("key", "value", "because"):
        table.add_column(heading, overflow="fold")
    for one in found:
        table.add_row(one.key, json.dumps(one.value).replace('"', ""), one.because)
    return table


def _resources(machine: Machine | None) -> list[str]:
    if machine is None:
        return ["resources: asked of the cluster when the run starts, and so is what auto stands for"]
    return [
        f"this machine: {machine.cores} cores, {machine.gpus} GPUs, {machine.memory_bytes / 2**30:.1f} GiB memory, "
        f"{machine.shm_free_bytes / 2**30:.1f} GiB free in /dev/shm"
    ]
