"""The command line: `verl-ray <command> [--config-name NAME] [--config-dir DIR] [overrides]`.

Invariant: a mistake of the user ends in a message and an exit code, never in a traceback, and no command imports what
it does not need. Deliberately not here: what the commands do.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

from controllers.commands.check import check, checked, print_problems, print_warnings
from controllers.compose.composition import compose
from controllers.compose.listing import groups, listed, root_configs
from verl_ray.cluster.signals import heed_signals, stop_on_signals, was_disturbed
from verl_ray.config.schema import Config
from verl_ray.config.suggest import did_you_mean
from verl_ray.errors import ConfigError, Interrupted, VerlRayError
from verl_ray.paths import in_ray_package, refuse_foreign_packages

__all__ = ["compose", "main"]

EXIT_CODES = """\
exit codes:
  0    done
  1    the run failed; the message names the cause
  2    the configuration cannot run; the message lists every problem
  130  stopped by Ctrl-C, SIGTERM or SIGHUP; `train` with the same run.dir goes on from its newest checkpoint

stopping:
  The first signal is answered with what happens next. A step whose update has begun is finished, any other is given
  up; the last finished step is saved (never with run.checkpoint_every=0), and the last line is the command that goes
  on. A second signal ends the run at once and says which steps are lost.
"""

SCRIPT = "VERL_RAY_SCRIPT"
SCRIPT_MEANS = ("train", "--config-name", "quickstart")
"""A script that stands for these arguments names itself in this variable, so that messages name what was typed."""

OVERRIDES = """\
overrides (Hydra's grammar, no flags):
  key=value                       model.path=/models/qwen3 rollout.group_size=16
  GROUP=CHOICE                    algorithm=grpo placement=separate backend=fsdp; all choices are below
  backend@critic.backend=engine   the backend of one role; `backend@reward.backend=fsdp` with reward=model
  backend.dtype=bfloat16          a setting of the backend, for every role
"""

USAGE = f"""\
usage: verl-ray <command> [--config-name NAME] [--config-dir DIR] [overrides]

commands:
  train     train a model
  evaluate  measure a model on held-out problems or pairs
  check     validate a configuration in a second, without starting anything
  export    write a role of a checkpoint as a Hugging Face directory
  bench     measure speed

`verl-ray <command> --help` says more about each.

{EXIT_CODES}"""

ABOUT = {
    "train": (
        "Train a model. Everything the run writes goes to run.dir (outputs/<run.name>): config.yaml, metrics.jsonl, "
        "samples/, checkpoints/, wandb/, logs/.",
        """\
examples:
  verl-ray train
  verl-ray train --config-name grpo model.path=/models/qwen3 data.train_path=train.jsonl \\
      data.validation_path=test.jsonl
  verl-ray train run.dir=outputs/first run.total_steps=300     goes on from the newest checkpoint there
""",
    ),
    "evaluate": (
        "Measure a model, or with run.resume=PATH a checkpoint, on data.validation_path: a policy on held-out "
        "problems, with the sampling of the evaluation section; a reward model on held-out pairs.",
        """\
examples:
  verl-ray evaluate --config-name grpo model.path=/models/qwen3 data.train_path=train.jsonl \\
      data.validation_path=test.jsonl evaluation.num_prompts=200
  verl-ray evaluate --config-name reward_model model.path=outputs/mine/model data.train_path=pairs.jsonl \\
      data.validation_path=held_out.jsonl
""",
    ),
    "check": (
        "Validate a configuration without starting anything: all problems at once, each with its key, value, rule and "
        "fix; or the sizes of one step, the roles and what they need.",
        """\
examples:
  verl-ray check
  verl-ray check --config-name ppo model.path=/models/qwen3 data.train_path=a.jsonl run.evaluate_every=0 \\
      data.validation_path=null rollout.group_size=3
""",
    ),
}


class TakesConfig(Protocol):
    """A command's implementation."""

    def __call__(self, config: Config) -> int: ...


class TakesArguments(Protocol):
    """Commands that read flags of their own."""

    def __call__(self, argv: list[str]) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        refuse_foreign_packages()
        return _run(arguments)
    except ConfigError as error:
        print_problems(error.problems, sys.stderr)
        _print_origin(error)
        return error.exit_code
    except Interrupted as stop:
        with contextlib.suppress(OSError):  # nobody may read it any more
            print(stop, file=sys.stderr)
        return stop.exit_code
    except VerlRayError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        _print_origin(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return Interrupted.exit_code


def _print_origin(error: VerlRayError) -> None:
    """What was added to it on its way here, and which process has raised it, if it was another one."""
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)
    if (origin := error.origin) is not None:
        print(f"raised by {origin.role} rank {origin.rank} on {origin.node}; {origin.detail}", file=sys.stderr)


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command == "bench":
        return _bench(arguments[1:])
    if command == "export":
        return _export(arguments[1:])
    if command not in ABOUT:
        hint = did_you_mean(command, [*ABOUT, "bench", "export"], "command")
        print(f"verl-ray: no command {command!r}. {hint}", file=sys.stderr)
        return 2
    given = _parser(command).parse_intermixed_args(arguments[1:])
    if command == "check":
        return check(given.config_name, given.overrides, given.config_dir)
    stop_on_signals()
    config = None
    try:
        config, findings = checked(
            given.config_name, given.overrides, given.config_dir, evaluates=command == "evaluate"
        )
        print_warnings(findings.warnings, sys.stderr)
        module = importlib.import_module(f"controllers.commands.{command}")
        implementation = cast(TakesConfig, getattr(module, command))
        return _stoppable(functools.partial(implementation, config))
    except Interrupted as stop:
        if command == "train":
            with contextlib.suppress(OSError):
                print(f"{stop}. {_what_now(config, arguments)}", file=sys.stderr, flush=True)
            return stop.exit_code
        raise


def _what_now(config: Config | None, arguments: Sequence[str]) -> str:
    """The command that resumes this run, as its user gave it; or starts it again, where nothing is saved yet."""
    if script := os.environ.get(SCRIPT):
        typed = [script, *arguments[len(SCRIPT_MEANS) :]]
    elif Path(sys.argv[0]).name == "verl-ray":
        typed = ["verl-ray", *arguments]
    else:
        typed = [sys.orig_argv[0], "-m", "controllers", *arguments]
    resume = "auto" if config is None else config.run.resume
    has_checkpoints = config is not None and any((Path(config.run.dir) / "checkpoints").glob("step_*"))
    command = command_to_resume(typed, resume, has_checkpoints=has_checkpoints, here=Path.cwd())
    goes_on = has_checkpoints or resume not in ("auto", "none")
    return f"{'To go on' if goes_on else 'To begin again'}:\n{command}"


def command_to_resume(typed: Sequence[str], resume: str, *, has_checkpoints: bool, here: Path) -> str:
    """What goes on with a run that the command line `typed` started, as a shell reads it.

    Args:
        resume: the value of run.resume. A run that was told to begin anew, or from elsewhere, has begun by now.
        has_checkpoints: whether there are some in run.dir.
        here: the current folder, which in a Ray job is a copy of the one that was submitted.
    """
    words = list(typed)
    if resume == "none" or (resume != "auto" and has_checkpoints):
        words = [word for word in words if not word.lstrip("+").startswith("run.resume=")] + ["run.resume=auto"]
    if in_ray_package(here):
        words = ["ray", "job", "submit", "--working-dir", ".", "--", *words]
    return shlex.join(words)


def _bench(arguments: list[str]) -> int:
    stop_on_signals()
    implementation = cast(TakesArguments, importlib.import_module("controllers.bench").main)
    return _stoppable(lambda: implementation(arguments))


def _export(arguments: list[str]) -> int:
    stop_on_signals()
    implementation = cast(TakesArguments, importlib.import_module("controllers.commands.export").main)
    return _stoppable(lambda: implementation(arguments))


def _stoppable(work: Callable[[], int]) -> int:
    """Another shape of a stop: whatever fails after a signal raised an exception in the middle of something, since
    Ray's compiled calls swallow it, or turn it into others."""
    try:
        return work()
    except Exception:
        if was_disturbed():
            heed_signals()
        raise


def _configuration() -> str:
    """What a configuration is made of: root configs, overrides, and the choices of every group."""
    parts = [f"root configs (--config-name):\n{listed(root_configs(), '  ')}\n", OVERRIDES]
    parts += [f"choices of {group}:\n{listed(choices, '  ')}\n" for group, choices in groups().items()]
    return "\n".join(parts)


def _parser(command: str) -> argparse.ArgumentParser:
    about, examples = ABOUT[command]
    parser = argparse.ArgumentParser(
        prog=f"verl-ray {command}",
        usage=f"verl-ray {command} [--config-name NAME] [--config-dir DIR] [overrides]",
        description=textwrap.fill(about, 100),
        epilog=f"{_configuration()}\n{examples}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config-name", default="quickstart", metavar="NAME", help="root config (quickstart)")
    parser.add_argument("--config-dir", metavar="DIR", help="folder with root configs or groups of your own")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as below")
    return parser
