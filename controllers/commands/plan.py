"""The command `plan`: a configuration for a model and a machine that was described.

Invariant: nothing is started, and neither torch nor ray is imported; of a model its
config.json is enough. Every second that is printed is an estimate, and says so.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from controllers.compose.composition import examine
from controllers.compose.listing import WIDTH, groups
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, Problem
from verl_ray.hub.models import pinned_in_words, pinned_models
from verl_ray.preflight import assumptions
from verl_ray.preflight.facts import facts_here
from verl_ray.preflight.machine import (
    EXAMPLE,
    GIB,
    GPUS,
    OPTION,
    Machine,
    as_described,
    machine_in_words,
    parse_machine,
)
from verl_ray.preflight.memory_plan import USED_SHARE
from verl_ray.preflight.model_directories import model_problems
from verl_ray.preflight.model_files import model_size, remembered_sizes
from verl_ray.preflight.plan_candidates import PLANNED_BACKENDS
from verl_ray.preflight.plan_search import Misfit, Plan, search
from verl_ray.preflight.resolve import resolve
from verl_ray.preflight.step_time import StepTime
from verl_ray.preflight.tables import memory_table, print_tables, role_table
from verl_ray.shell import for_shell, override_of

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
        ConfigError: a model is unavailable, or cannot be planned for.
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


# ------------------------------------------------------------------- tables and lines


_WIDTH = 80

DATA = ("data.train_path=train.jsonl", "data.validation_path=validation.jsonl")
"""Names that stand for the data, which a plan does not read."""

_SLOW_SYNC_SHARE = 0.2
"""Share of a step from which on a slow weight sync is pointed out."""


def time_table(time: StepTime, machine: Machine) -> Table:
    """Return the seconds of each phase, and how long each pool is idle."""
    table = Table(
        title=f"a step takes about {_seconds(time.total_s)} s (estimate)",
        title_justify="left",
    )
    table.add_column("phase", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for phase, seconds in time.seconds.items():
        share = f"{100 * seconds / time.total_s:.0f} %"
        table.add_row(phase, _seconds(seconds), share)

    table.add_section()
    total = machine.total_gpus
    idle = {
        f"trainers idle ({time.trainer_gpus} GPUs)": time.idle_share_of_trainers,
        f"engines idle ({time.engine_gpus} GPUs)": time.idle_share_of_engines,
        f"all GPUs idle ({total} GPUs)": time.idle_share_of(total),
    }
    for name, share_of_step in idle.items():
        table.add_row(name, "", f"{100 * share_of_step:.0f} %")
    return table


def _seconds(seconds: float) -> str:
    """Return seconds with two digits, or whole ones."""
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def origin_lines(plan: Plan, machine: Machine) -> str:
    """Return where the figures come from, and what should be known of the proposal."""
    config = plan.config
    lines = [
        f"compared: {plan.tried} configurations; the fastest that fits is proposed",
        "measured: the memory of processes without their models, on a CPU; nothing of"
        " this plan on a GPU",
        "counted: weights, gradients, optimizer state, KV cache, FLOPs, bytes moved",
        "estimated: activations, buffers and all seconds, from the peaks of data"
        f" sheets with {100 * assumptions.TRAINING_EFFICIENCY:.0f} % of the FLOPs"
        f" (training), {100 * assumptions.DECODE_BANDWIDTH_SHARE:.0f} % of the memory"
        f" bandwidth (decoding) and {100 * assumptions.NETWORK_SHARE:.0f} % of the"
        " links; responses have half of the greatest length in the mean"
        " (docs/planning.md)",
    ]
    unused = machine.total_gpus - plan.time.used_gpus
    if unused:
        lines.append(
            f"unused: {unused} of {machine.total_gpus} GPUs; no configuration that was"
            " compared is clearly faster with more of them"
        )
    if config.actor.backend.packages:
        lines.append(f"needs: the packages of backend={config.actor.backend.kind}")
    publish_share = plan.time.seconds["publish"] / plan.time.total_s
    slow = config.rollout.sync.wire == "host_broadcast"
    if slow and publish_share > _SLOW_SYNC_SHARE:
        lines.append(
            "publish: weights travel over gloo between hosts, which is what"
            " rollout.sync.transport=auto chooses; with placement=separate,"
            " rollout.sync.transport=broadcast uses NCCL, and has not run on a GPU yet"
        )
    return "\n".join(lines)


def misfit_lines(misfit: Misfit) -> str:
    """Return what is short, and which machine would do."""
    shortage = misfit.shortage
    backend = misfit.config.actor.backend
    lines = [
        "nothing fits. Nearest comes"
        f" {backend.description(misfit.config.actor.num_ranks)} with"
        f" placement={misfit.config.placement.kind}, which in the phase"
        f" {shortage.phase} needs {shortage.needed / GIB:.1f} GiB of"
        f" {shortage.place}; a plan may fill {shortage.available / GIB:.1f} GiB"
        f" ({100 * USED_SHARE:.0f} %)",
    ]
    if misfit.larger is not None:
        lines.append(
            f"more memory of the hosts would do: {OPTION} {as_described(misfit.larger)}"
        )

    if misfit.smallest is None:
        lines.append("no listed machine would do")
    else:
        lines.append(
            "the smallest listed machine that would do:"
            f" {OPTION} {as_described(misfit.smallest)}"
        )
    return "\n".join(lines)


def plan_overrides(config: RLConfig, base: RLConfig) -> list[str]:
    """Return the overrides that turn a root config into a proposed configuration.

    Args:
        config: The proposed configuration.
        base: Composed configuration with the same backend.
    """
    backend = config.actor.backend
    overrides = [f"backend={backend.kind}"]
    usual = base.actor.backend.model_dump()
    for name, value in backend.model_dump().items():
        if value != usual[name]:
            overrides.append(f"backend.{name}={json.dumps(value).strip(chr(34))}")

    overrides.append(f"actor.num_ranks={config.actor.num_ranks}")
    if config.has_reference:
        reference = config.reference
        if reference.num_ranks != config.actor.num_ranks:
            overrides.append(f"reference.num_ranks={reference.num_ranks}")
        tokens = reference.backend.micro_batch_tokens_per_rank
        if tokens != backend.micro_batch_tokens_per_rank:
            key = "reference.backend.micro_batch_tokens_per_rank"
            overrides.append(f"{key}={tokens}")

    placement = config.placement
    overrides.append(f"placement={placement.kind}")
    if placement.kind == "colocated":
        overrides.append(f"placement.offload={placement.offload}")

    rollout = config.rollout
    return [
        *overrides,
        f"rollout.num_replicas={rollout.num_replicas}",
        f"rollout.tensor_parallel={rollout.tensor_parallel}",
        f"rollout.dtype={rollout.dtype}",
        f"rollout.kv_cache_gib={rollout.kv_cache_gib}",
    ]


def command_line(root: str, overrides: Sequence[str]) -> str:
    """Return the command that trains with overrides, in lines that can be copied."""
    lines = [f"verl-ray train --config-name {root}"]
    for word in [*overrides, *DATA]:
        text = for_shell([word])
        if len(lines[-1]) + len(text) + 3 > _WIDTH:
            lines.append("   ")
        lines[-1] += f" {text}"
    return "copy, with data of your own:\n  " + " \\\n  ".join(lines)
