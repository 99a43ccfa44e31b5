"""The command line: `verl-ray <command> [options] [overrides]`.

Invariant: a mistake of the user ends in a message and an exit code, never in a
traceback, and no command imports what it does not need.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import yaml

from controllers.commands.check import (
    check,
    checked_config,
    print_warnings,
)
from controllers.commands.check_data import print_readings
from controllers.commands.check_pools import parse_rates
from controllers.commands.generation import (
    RequestedResponses,
    assumed_overrides,
    in_words_of_generate,
)
from controllers.commands.multirun import multirun
from controllers.commands.usage import (
    CHECKPOINTS,
    HELP,
    USAGE,
    instead_of_plan,
    parser_of,
    versions,
)
from controllers.compose.composition import examine
from controllers.compose.listing import named_root
from controllers.compose.trees import MISSING, key_exists, value_at
from controllers.run.finished import finished_step, show_finished
from controllers.run.next_command import failure_hint, resume_hint, typed_command
from controllers.supervisor import reports
from verl_ray.cluster.signals import (
    heed_signals,
    outlast_full_disks,
    pointing,
    stop_on_signals,
    stoppable,
)
from verl_ray.config.advice import advice_on
from verl_ray.config.load import to_tree, value_keys
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.errors import ConfigError, Interrupted, Problem, VerlRayError
from verl_ray.paths import refuse_foreign_packages
from verl_ray.preflight.machine import parse_machine
from verl_ray.suggest import closest, did_you_mean, is_misspelt

_COMMANDS_WITH_FLAGS = (
    *("export", "ledger", "play", "prove", "report", "runs", "status", "watch"),
)
"""Commands that read flags of their own, each the `main` of its module."""

MEASURING = ("evaluate", "generate")
"""Commands that start the processes of a single evaluation."""


class TakesConfig(Protocol):
    """The implementation of a command that takes a checked configuration."""

    def __call__(self, config: Config, **settings: Any) -> int: ...


class TakesArguments(Protocol):
    """The implementation of a command that reads flags of its own."""

    def __call__(self, argv: list[str]) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return exit_code_of(functools.partial(_run, arguments))


def exit_code_of(work: Callable[[], int]) -> int:
    """Do the work of a program, and return its exit code.

    A failure, a signal or a closed output ends it with a message and a code of its own.
    """
    outlast_full_disks()

    try:
        # Other projects may have packages of the same common names.
        refuse_foreign_packages()
        return work()
    except BrokenPipeError:
        # Whoever reads the output, such as `head`, has seen enough. Python flushes
        # stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Interrupted as stop:
        # The terminal may be gone already.
        with contextlib.suppress(OSError):
            print(stop, file=sys.stderr)
        return stop.exit_code
    except VerlRayError as error:
        print(error.report(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return Interrupted.exit_code


def _run(arguments: list[str]) -> int:
    """Run the command that the first argument names."""
    command = arguments[0] if arguments else "--help"
    rest = arguments[1:]

    if command in ("-h", "--help"):
        print(USAGE)
        return 0

    if command in ("-V", "--version"):
        print(versions())
        return 0

    if command in _COMMANDS_WITH_FLAGS:
        return run_with_flags(f"controllers.commands.{command}", rest)

    if command == "bench":
        program = shlex.join(["python", "-m", "scripts.bench", *rest])
        print(
            "verl-ray bench: the benchmarks are not in the package. Type in a checkout:"
            f" {program}",
            file=sys.stderr,
        )
        return 2

    if command == "plan":
        print(instead_of_plan(rest), file=sys.stderr)
        return 2

    if command not in HELP:
        hint = did_you_mean(command, [*HELP, *_COMMANDS_WITH_FLAGS], "command")
        print(f"verl-ray: no command {command!r}. {hint}", file=sys.stderr)
        return 2

    return _run_typed(command, arguments)


def _run_typed(command: str, arguments: Sequence[str]) -> int:
    """Run a command that takes overrides.

    Args:
        command: the command.
        arguments: all arguments of `verl-ray`, the command first.
    """
    options = _parsed(command, arguments[1:])
    if command == "generate":
        return _generated(arguments, options)
    settings = _compared(options) if command == "evaluate" else {}
    return _composed_and_run(command, arguments, options, settings)


def _generated(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Run `generate`, which is an evaluation on the training data."""
    requested = RequestedResponses.from_options(options)
    options.assumed = assumed_overrides(options.overrides, requested)
    try:
        settings = {"requested": requested}
        return _composed_and_run("generate", arguments, options, settings)
    except ConfigError as error:
        raise in_words_of_generate(error) from error
    except Interrupted as stop:
        more = "The same command goes on with the pieces that are missing"
        raise Interrupted(f"{stop}. {more}") from stop


def _composed_and_run(
    command: str,
    arguments: Sequence[str],
    options: argparse.Namespace,
    settings: Mapping[str, Any],
) -> int:
    """Run a command with the configuration that its options name.

    Args:
        command: the command.
        arguments: all arguments of `verl-ray`, the command first.
        settings: what the command takes beside the configuration.
    """
    # Printing and checking start nothing, so they may show the quickstart.
    root = options.config_name
    if root is None and command != "check" and options.cfg is None:
        raise ConfigError([_unnamed_root(command)])
    name, folder = named_root(root or "quickstart", options.config_dir)
    if options.cfg is not None:
        return print_configuration(
            name, folder, options, evaluates=command in MEASURING
        )

    # Only `check` can leave the data out, and ask about another machine.
    reads_data = getattr(options, "data", "on") == "on"
    machine = getattr(options, "machine", None)
    described = parse_machine(machine) if machine else None
    if options.multirun:
        return multirun(
            command,
            arguments,
            config_name=name,
            overrides=options.overrides,
            config_dir=folder,
            reads_data=reads_data,
            described=described,
        )

    if command == "check":
        return check(
            name,
            options.overrides,
            folder,
            reads_data=reads_data,
            described=described,
            rates=None if options.rates is None else parse_rates(options.rates),
        )

    return _run_with_config(
        command,
        arguments,
        config_name=name,
        overrides=options.overrides,
        config_dir=folder,
        assumed=options.assumed,
        settings=settings,
    )


def _parsed(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options and the overrides behind a command.

    Raises:
        ConfigError: The command has no such option.
    """
    # Options may stand between overrides.
    parser = parser_of(command)
    options, others = parser.parse_known_intermixed_args(arguments)
    if others or (options.resolve and options.cfg is None):
        known = [name for action in parser._actions for name in action.option_strings]
        raise ConfigError(unknown_options(command, others, known))
    return options


def _compared(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `evaluate` compares; overrides behind the option become overrides.

    Raises:
        ConfigError: The option names nothing, or several runs would each compare.
    """
    words = options.checkpoints
    is_override = [
        "=" in word.split("/")[0] and not Path(word).exists() for word in words
    ]
    pairs = list(zip(words, is_override, strict=True))
    options.overrides += [word for word, is_one in pairs if is_one]
    checkpoints = [word for word, is_one in pairs if not is_one]
    if words and not checkpoints:
        rule = "names no checkpoint: the words behind it are overrides"
        fix = "Write paths of checkpoints, base or all."
        raise ConfigError([Problem(CHECKPOINTS, " ".join(words), rule, fix)])
    if checkpoints and options.multirun:
        rule = "compares models in one run, and --multirun starts several"
        fix = "Leave out one of them."
        raise ConfigError([Problem(CHECKPOINTS, " ".join(checkpoints), rule, fix)])
    return {"checkpoints": checkpoints}


def _unnamed_root(command: str) -> Problem:
    """Return the problem of a command line that does not say what to run."""
    rule = f"it is not given, and verl-ray {command} would start processes"
    fix = (
        "Write --config-name quickstart, or another root config; a run goes on with"
        " --config-dir outputs/NAME --config-name config."
    )
    return Problem("--config-name", None, rule, fix)


def run_with_flags(module: str, arguments: list[str]) -> int:
    """Run a command that reads flags of its own, and return its exit code.

    Args:
        module: Name of the module whose `main` it is.
        arguments: What was typed behind the command.
    """
    stop_on_signals()
    run = importlib.import_module(module).main
    _collect_garbage_again()
    return stoppable(functools.partial(cast(TakesArguments, run), arguments))


def _run_with_config(
    command: str,
    arguments: Sequence[str],
    *,
    config_name: str,
    overrides: Sequence[str],
    config_dir: str | None,
    assumed: Sequence[str],
    settings: Mapping[str, Any],
) -> int:
    """Check the configuration, then run a command that takes it.

    Args:
        command: the command, which is also the name of its module and function.
        arguments: all arguments of `verl-ray`, for messages and the record of a run.
        config_name: the root config.
        overrides: what the user typed, in Hydra's grammar.
        config_dir: a folder of the user's own, or None.
        assumed: overrides of the command itself.
        settings: what the command takes beside the configuration.
    """
    stop_on_signals()
    config = None

    try:
        config = _checked(command, config_name, overrides, config_dir, assumed)

        if command == "train":
            step = finished_step(config)
            if step is not None:
                show_finished(config, step)
                return 0

        work = functools.partial(_implementation(command), config, **settings)
        _collect_garbage_again()
        if command != "train":
            return stoppable(work)
        work = functools.partial(work, command=typed_command(arguments))
        # A second signal ends the process before it comes to the hint below.
        with pointing(functools.partial(resume_hint, config, arguments)):
            return stoppable(work)
    except Interrupted as stop:
        # Only training can be continued.
        if command != "train":
            raise
        # The terminal may be gone already, and so may the current folder.
        with contextlib.suppress(OSError):
            hint = resume_hint(config, arguments)
            print(f"{stop}. {hint}", file=sys.stderr, flush=True)
        return stop.exit_code
    except Exception as error:
        if command == "train" and reports().restarts:
            # It imports Ray.
            importlib.import_module("controllers.run.next_driver").report_refusal(error)
        # A mistake in the configuration has its fix in its message.
        is_mistake = isinstance(error, ConfigError)
        if command == "train" and config is not None and not is_mistake:
            with contextlib.suppress(OSError):
                error.add_note(failure_hint(config, arguments))
        raise


def _checked(
    command: str,
    config_name: str,
    overrides: Sequence[str],
    config_dir: str | None,
    assumed: Sequence[str],
) -> Config:
    """Return the configuration of a command, and print the warnings about it."""
    work = functools.partial(
        checked_config,
        config_name,
        overrides,
        config_dir,
        evaluates=command in MEASURING,
        assumed=assumed,
        trains=command == "train",
    )
    checked = stoppable(work)
    # A library that reads the data may have swallowed a signal.
    heed_signals()
    print_readings(checked.results.data.files, sys.stderr)
    print_warnings(checked.warnings, sys.stderr)
    return checked.config


def _collect_garbage_again() -> None:
    """Switch Python's garbage collector on, for what is made from now on.

    The program switches it off before it imports this module. A process that calls
    `main` by itself keeps its collector as it is.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _implementation(command: str) -> TakesConfig:
    """Import a command that takes a configuration, which imports torch and ray."""
    module = importlib.import_module(f"controllers.commands.{command}")
    return cast(TakesConfig, getattr(module, command))


# ---------------------------------------------------------------------- check --print

# What is printed can be written to a file and named by --config-name; nothing else goes
# to stdout, and nothing is started.


def print_configuration(
    config_name: str,
    config_dir: str | None,
    options: argparse.Namespace,
    *,
    evaluates: bool,
) -> int:
    """Print a configuration as YAML and return 0.

    With `--resolve` references such as `${model.path}` are followed. Otherwise they
    stand as they are written, and so does a value that must be given yet.

    Args:
        config_name: the root config.
        config_dir: a folder of the user's own, or None.
        options: the options and overrides of the command.
        evaluates: whether the command starts the processes of an evaluation.

    Raises:
        ConfigError: the problems of the configuration alone, not of the machine.
    """
    composition = examine(
        config_name,
        options.overrides,
        config_dir,
        evaluates=evaluates,
        assumed=options.assumed,
    )
    tree = composition.tree
    problems = composition.problems

    if not options.resolve:
        problems = [problem for problem in problems if not _is_missing(problem, tree)]
    elif composition.config is not None:
        tree = to_tree(composition.config)

    if problems:
        raise ConfigError(problems)
    yaml.safe_dump(tree, sys.stdout, sort_keys=False, allow_unicode=True)
    return 0


def _is_missing(problem: Problem, tree: dict[str, object]) -> bool:
    """Return whether a problem is that a value must be given yet."""
    return key_exists(tree, problem.key) and value_at(tree, problem.key) == MISSING


# ---------------------------------------------------------- options that do not exist

# Hydra's and other systems' options are among them; each is answered with what to type.


_HYDRA_OPTIONS = {
    "--info": (
        "Type `verl-ray check` for what a run would do, `verl-ray check --print` for"
        " its configuration, `verl-ray train --help` for all groups and their choices."
    ),
    "--package": "Type `verl-ray check --print`, which prints every section.",
    "--run": "Leave it out: `verl-ray train` is one run.",
    "--hydra-help": "Type `verl-ray train --help`.",
    "--shell-completion": "Leave it out; a misspelt key is answered with near ones.",
    "--experimental-rerun": (
        "Type `verl-ray train --config-name outputs/NAME/config.yaml run.dir=FOLDER`."
    ),
    "-i": "Type `verl-ray check`, or `verl-ray check --print`.",
    "-p": "Type `verl-ray check --print`, which prints every section.",
    "-r": "Leave it out: `verl-ray train` is one run.",
}
"""Option of Hydra -> what to type instead."""


def unknown_options(
    command: str, arguments: Sequence[str], options: Sequence[str]
) -> list[Problem]:
    """Return a problem for each option that a command does not have.

    Args:
        command: the command.
        arguments: what was typed and is no option of the command.
        options: the options of the command.
    """
    known = value_keys(RLConfig)
    problems = []

    for text in arguments:
        option, _, value = text.partition("=")
        if not option.startswith("-"):
            # The value of the option before it.
            continue

        rule = f"verl-ray {command} has no such option"
        fix = _HYDRA_OPTIONS.get(option) or _advice(option, value, options, known)
        problems.append(Problem(option, value or None, rule, fix))

    if not problems:
        rule = "it says how a configuration is printed, and none is"
        problems.append(Problem("--resolve", None, rule, "Add --cfg job."))
    return problems


def _advice(
    option: str, value: str, options: Sequence[str], known: Sequence[str]
) -> str:
    """Return what to type in place of an option that Hydra does not have either."""
    if is_misspelt(option, options):
        return f"Did you mean {closest(option, options, 1)[0]}?"
    if option.startswith("--config"):
        return f"Did you mean --config-name {value or 'FILE.yaml'}?"

    key = option.lstrip("-")
    if key in known:
        return f"Write {key}={value or '...'}: a setting has no dashes."
    return f"{advice_on(option, known)} A setting has no dashes: key=value."
