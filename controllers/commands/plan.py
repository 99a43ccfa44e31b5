"""The command `plan`: a configuration for a model and a machine that was described.

Invariant: nothing is started, and neither torch nor ray is imported; of a model its
config.json is enough. Every second that is printed is an estimate, and says so.
Deliberately not here: the search (`verl_ray/planning`), and its time model
(`verl_ray/preflight/time_model`).
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Mapping

from controllers.commands.check_tables import role_table
from controllers.commands.plan_tables import (
    DATA,
    command_line,
    misfit_lines,
    origin_lines,
    plan_overrides,
    time_table,
)
from controllers.compose.composition import examine
from controllers.compose.listing import WIDTH, groups
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, Problem
from verl_ray.hub.models import pinned_in_words, pinned_models
from verl_ray.planning.candidates import PLANNED_BACKENDS
from verl_ray.planning.search import Misfit, search
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.machine import (
    EXAMPLE,
    GPUS,
    OPTION,
    Machine,
    machine_in_words,
    parse_machine,
)
from verl_ray.preflight.model_directories import model_problems
from verl_ray.preflight.model_sizes import model_size, remembered_sizes
from verl_ray.preflight.resolve import resolve
from verl_ray.preflight.tables import memory_table, print_tables
from verl_ray.shell import override_of

_SETTINGS = {
    "prompts": "data.prompts_per_step",
    "group_size": "rollout.group_size",
    "prompt_tokens": "data.max_prompt_tokens",
    "max_tokens": "rollout.max_response_tokens",
}
"""Options with a number, and the keys that they set."""

_NOTHING_FITS = 2


def main(argv: list[str]) -> int:
    """Print a plan and return 0; return 2 if nothing fits the machine.

    Raises:
        ConfigError: the model or the machine cannot be planned for.
    """
    arguments = _parser().parse_args(argv)
    machine = _machine(arguments.machine)
    root = "ppo" if arguments.algorithm == "ppo" else "grpo"
    model = override_of("model.path", arguments.model)
    typed = [model, *_typed_settings(arguments)]
    if arguments.algorithm not in ("ppo", "grpo"):
        typed.append(f"algorithm={arguments.algorithm}")

    kinds = arguments.backend or PLANNED_BACKENDS
    bases = {kind: _base(root, [*typed, f"backend={kind}"]) for kind in kinds}
    # A large model's sizes take a while to add up.
    with remembered_sizes():
        bases = _checked(bases, machine)

    print(machine_in_words(machine))
    outcome = search(bases, machine)
    if isinstance(outcome, Misfit):
        print(misfit_lines(outcome))
        return _NOTHING_FITS

    config = outcome.config
    print_tables(role_table(config))
    print_tables(memory_table(outcome.memory, nodes=machine.nodes))
    print_tables(time_table(outcome.time, machine))
    print(origin_lines(outcome, machine))
    base = bases[config.actor.backend.kind]
    print(command_line(root, [*typed, *plan_overrides(config, base)]))
    return 0


def _typed_settings(arguments: argparse.Namespace) -> list[str]:
    """Return an override for each option with a number."""
    values = {key: getattr(arguments, name) for name, key in _SETTINGS.items()}
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def _machine(text: str) -> Machine:
    """Return the described machine, which must have GPUs."""
    machine = parse_machine(text)
    if machine.gpu is None:
        rule = "a plan is for GPUs, and this machine has none"
        raise ConfigError([Problem(OPTION, text, rule, f"Write {OPTION} {EXAMPLE}.")])
    return machine


def _base(root: str, overrides: list[str]) -> RLConfig:
    """Return the configuration that candidates of a backend begin with."""
    composition = examine(root, [*overrides, *DATA])
    problems = _not_chosen(composition.problems)
    if composition.config is None or problems:
        raise ConfigError(problems)
    assert isinstance(composition.config, RLConfig), "both roots have this task"
    return composition.config


def _not_chosen(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems of settings that the plan does not choose."""
    chosen = ("micro_batch_tokens_per_rank", "kv_cache_gib")
    return [problem for problem in problems if not problem.key.endswith(chosen)]


def _checked(bases: Mapping[str, RLConfig], machine: Machine) -> dict[str, RLConfig]:
    """Return the configurations with their models at hand.

    Raises:
        ConfigError: a model cannot be had, or cannot be planned for.
    """
    checked = {}
    problems: list[Problem] = []
    for kind, base in bases.items():
        pinned, unavailable = pinned_models(base, {}, needs_weights=False)
        checked[kind] = pinned
        resolved = resolve(pinned, facts_here(pinned, machine))
        problems = _not_chosen([*unavailable, *model_problems(resolved, machine)])
        if problems:
            raise ConfigError(problems)

    any_base: Config = next(iter(checked.values()))
    for line in pinned_in_words(any_base):
        print(line, flush=True)
    for name, role in any_base.model_roles.items():
        if model_size(name, role, any_base).shape is None:
            rule = "the layers of this model are not alike, so FLOPs are not counted"
            fix = "Take a model whose layers are alike; `check --machine` takes both."
            problems.append(Problem(f"{name}.model.path", role.model.path, rule, fix))
    if problems:
        raise ConfigError(problems)
    return checked


def _parser() -> argparse.ArgumentParser:
    about = (
        "Propose the fastest configuration, by a model of memory and time, with which"
        " a machine trains a model. Its time model is an estimate: no part of it was"
        " measured on a GPU. docs/planning.md says what it counts."
    )
    parser = argparse.ArgumentParser(
        prog="verl-ray plan",
        description=textwrap.fill(about, WIDTH),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"""\
example:
  verl-ray plan Qwen/Qwen3-8B --machine {EXAMPLE} \\
      --max-tokens 8192 --prompts 128 --group-size 16

exit codes:
  0  a plan
  2  nothing fits, or the model or the machine cannot be planned for
""",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="directory with a config.json, or the id of a model on the hub",
    )
    parser.add_argument(
        OPTION,
        metavar="PARTS",
        required=True,
        help=f"such as {EXAMPLE}; memory is of a node, link is per GPU; GPUs:"
        f" {', '.join(GPUS)}",
    )
    parser.add_argument(
        "--algorithm", choices=list(groups()["algorithm"]), default="grpo"
    )
    parser.add_argument(
        "--backend",
        action="append",
        choices=PLANNED_BACKENDS,
        help="propose this backend only; may be repeated",
    )
    for name, key in _SETTINGS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=positive_number, metavar="N", help=f"sets {key}"
        )
    return parser


def positive_number(text: str) -> int:
    """Return a whole number above 0."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
