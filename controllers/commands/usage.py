"""The help texts of `verl-ray`, and the parser of the commands that take overrides.

Invariant: the listed root configs and choices are the files under `configs`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from controllers.commands.generation import add_options
from controllers.compose.listing import WIDTH, formatted_choices, groups, root_configs
from verl_ray.preflight.machine import EXAMPLE, GPUS
from verl_ray.rollout.vllm_core import installed_version
from verl_ray.shell import for_shell

EXIT_CODES = """\
exit codes:
  0    done
  1    the run failed; the message names the cause
  2    the configuration cannot run; the message lists every problem
  130  stopped by Ctrl-C, SIGTERM or SIGHUP; `train` with the same run.dir goes on
       from its newest checkpoint

stopping:
  At the first signal the run prints what happens next. It finishes a step whose
  update has begun and drops any other step. It saves the last finished step (never
  with run.checkpoint_every=0), and its last line is the command that goes on.
  A second signal ends the run at once; the message lists the steps that are lost,
  and ends with that command, too.
"""

OVERRIDES = """\
overrides (Hydra's grammar, no flags):
  key=value                       model.path=/models/qwen3 rollout.group_size=16
  GROUP=CHOICE                    algorithm=grpo placement=separate backend=fsdp;
                                  all choices are below
  backend@critic.backend=engine   the backend of one role;
                                  `backend@reward.backend=fsdp` with reward=model
  backend.dtype=bfloat16          a setting of the backend, for every role
  key=1,2,3                       with --multirun: a run for each combination of values
"""

CHECKPOINTS = "--checkpoints"
"""Option of `evaluate` that names the models to compare."""

OPTIONS = "[--config-name NAME] [--config-dir DIR]"

USAGE = f"""\
usage: verl-ray <command> {OPTIONS} [overrides]
       verl-ray --version

commands:
  train     train a model
  evaluate  measure a model on held-out problems or pairs
  generate  write responses to prompts to a data file
  check     validate a configuration, its data and its rewards; nothing starts
  prove     show whether a model is computed as its family's own code does
  play      play an episode of an environment, or watch a model play it
  export    write a role of a checkpoint as a Hugging Face directory
  ledger    print what happened to each prompt of a run, and check it
  status    print what each process of a run does now, and what it waits for
  watch     show a run that another terminal has started, until it ends
  report    write what runs did to an HTML file, or serve it while they go on
  runs      list the runs in a folder, with their state and result

`verl-ray <command> --help` says more about each.

{EXIT_CODES}"""


@dataclass(frozen=True)
class CommandHelp:
    """The help of a command that takes overrides."""

    about: str
    examples: str


HELP = {
    "train": CommandHelp(
        about=(
            "Train a model. Everything the run writes goes to run.dir"
            " (outputs/<run.name>): config.yaml, metrics.jsonl, rollouts/,"
            " checkpoints/, wandb/, logs/."
        ),
        examples="""\
examples:
  verl-ray train --config-name quickstart
  verl-ray train --config-name grpo model.path=/models/qwen3 \\
      data.train_path=train.jsonl data.validation_path=test.jsonl
  verl-ray train --config-dir outputs/first --config-name config run.total_steps=300

The last one goes on from the newest checkpoint in outputs/first.
""",
    ),
    "evaluate": CommandHelp(
        about=(
            "Measure a model, or with run.resume=PATH a checkpoint, on"
            " data.validation_path: a policy on held-out problems, with the sampling of"
            " the evaluation section; a reward model on held-out pairs; a supervised"
            " model on held-out demonstrations. Metrics, the scores of each problem"
            " and, of a policy, every response are written to run.dir/evaluated. With"
            " --checkpoints several are measured one after another, by the same"
            " processes and seeds, and compared: run.dir/evaluated/comparison has a"
            " table."
        ),
        examples="""\
examples:
  verl-ray evaluate --config-name grpo model.path=/models/qwen3 \\
      data.validation_path=test.jsonl evaluation.num_prompts=200
  verl-ray evaluate --config-name reward_model model.path=outputs/mine/model \\
      data.validation_path=held_out.jsonl
  verl-ray evaluate --config-dir outputs/first --config-name config \\
      --checkpoints base all
""",
    ),
    "generate": CommandHelp(
        about=(
            "Write responses to the prompts of data.train_path to a data file:"
            " rollout.group_size of each (or --n), sampled as a run's rollouts are"
            " (rollout.temperature, rollout.max_response_tokens, run.seed) by the model"
            " of model.path or the checkpoint of run.resume, and scored by the section"
            " reward. Records are read as they are by --config-name sft and grpo, with"
            " --keep pairs by dpo and reward_model. A stopped command goes on where it"
            " was, and evaluation.num_prompts=N takes the first N prompts."
        ),
        examples="""\
examples:
  verl-ray generate --output answers.jsonl --config-name grpo \\
      model.path=/models/qwen3 data.train_path=problems.jsonl
  verl-ray generate --output right.jsonl --keep best --min-score 1 \\
      --config-name grpo model.path=/models/qwen3 data.train_path=problems.jsonl
  verl-ray generate --output pairs.jsonl --keep pairs --config-dir outputs/first \\
      --config-name config run.resume=auto
""",
    ),
    "check": CommandHelp(
        about=(
            "Validate a configuration without starting anything. Reads the data and"
            " tries the reward functions and the environments. Prints all problems at"
            " once, each with its key, value, rule and fix; or the sizes of one step,"
            " the roles, what they need, two prompts and the lengths of all. With"
            " --machine it does so for a machine that one does not sit on: a model's"
            " config.json and tokenizer are enough then, and what only concerns this"
            " machine is left out."
        ),
        examples="""\
examples:
  verl-ray check --config-name quickstart
  verl-ray check --config-name ppo model.path=/models/qwen3 \\
      data.train_path=a.jsonl data.validation_path=null run.evaluate_every=0 \\
      rollout.group_size=3
  verl-ray check --config-name grpo model.path=Qwen/Qwen3-8B --data off \\
      data.train_path=train.jsonl data.validation_path=test.jsonl \\
      --machine nodes=2,gpus=8,gpu=H100-80G,memory=2T
""",
    ),
}
"""The commands that take overrides, with their help."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command that takes overrides."""
    command_help = HELP[command]

    # Several runs would write one file.
    is_swept = command != "generate"
    own = "[--multirun] " if is_swept else ""
    first = "" if is_swept else "--output FILE "
    # Raw text keeps the columns of choices, and an abbreviation would turn a misspelt
    # option into another one.
    parser = argparse.ArgumentParser(
        prog=f"verl-ray {command}",
        usage=f"verl-ray {command} {first}{OPTIONS} {own}[overrides]",
        description=textwrap.fill(command_help.about, WIDTH),
        epilog=f"{_choices()}\n{command_help.examples}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config-name",
        "-cn",
        metavar="NAME",
        help="root config, or the path of a .yaml file",
    )
    parser.add_argument(
        "--config-dir",
        "-cd",
        "--config-path",
        "-cp",
        metavar="DIR",
        help="folder with root configs or groups of your own",
    )
    if command == "check":
        _add_checking(parser)
    if command == "generate":
        add_options(parser)
    if command == "evaluate":
        _add_comparing(parser)
    parser.set_defaults(multirun=False, assumed=())
    if is_swept:
        parser.add_argument(
            "--multirun",
            "-m",
            action="store_true",
            help="one run after another, for each of the values in key=1,2,3; run N"
            " writes to run.dir/N",
        )
    _add_printing(parser, command)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="overrides, as below",
    )
    return parser


def _add_comparing(parser: argparse.ArgumentParser) -> None:
    """Add the option that only `evaluate` has."""
    parser.add_argument(
        CHECKPOINTS,
        nargs="+",
        default=[],
        metavar="PATH",
        help="measure and compare these: paths of checkpoints, or of runs, which"
        " stand for their newest one; base = the model of model.path; all = every"
        " checkpoint in run.dir. Overrides may follow",
    )


def _add_checking(parser: argparse.ArgumentParser) -> None:
    """Add the options that only `check` has."""
    parser.add_argument(
        "--data",
        choices=("on", "off"),
        default="on",
        help="off leaves the data files and the reward functions out",
    )
    parser.add_argument(
        "--rates",
        metavar="SECONDS",
        help="say how long trainers and rollout engines are idle, from the seconds of"
        " a step, such as generate=30,train=25, or from a run's folder",
    )
    parser.add_argument(
        "--machine",
        metavar="PARTS",
        help="check for another machine than this one, such as"
        f" {EXAMPLE}; cores, memory and shm (/dev/shm) are of a node;"
        f" GPUs: {', '.join(GPUS)}",
    )


def _add_printing(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options that print the configuration and start nothing."""
    names = ["--cfg", "-c"]
    parser.add_argument(
        *names,
        choices=["job"],
        help="print the configuration as YAML, and start nothing",
    )
    if command == "check":
        parser.add_argument(
            "--print",
            dest="cfg",
            action="store_const",
            const="job",
            help="the same",
        )
    parser.add_argument(
        "--resolve",
        action="store_true",
        help="print values in place of references such as ${model.path}",
    )


def versions() -> str:
    """Return the versions of this program and of what it stands on, a line each."""
    lines = []

    for name in ("verl_ray", "torch", "ray"):
        # Nothing is imported, which would take seconds.
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")

    vllm = installed_version()
    lines.append(f"vllm {vllm}" if vllm is not None else "vllm is not installed")
    return "\n".join(lines)


def _choices() -> str:
    """Return what a configuration is composed of, as text.

    The parts are root configs, overrides, and the choices of every group.
    """
    roots = formatted_choices(root_configs(), "  ")
    parts = [f"root configs (--config-name):\n{roots}\n", OVERRIDES]

    for group, choices in groups().items():
        parts.append(f"choices of {group}:\n{formatted_choices(choices, '  ')}\n")

    return "\n".join(parts)


# ------------------------------------------------------------ a command of earlier days

_OPTIONS_OF_PLAN = {
    "--backend": "backend",
    "--prompts": "data.prompts_per_step",
    "--group-size": "rollout.group_size",
    "--prompt-tokens": "data.max_prompt_tokens",
    "--max-tokens": "rollout.max_response_tokens",
}
"""Options of `verl-ray plan`, and the settings that they were."""


def instead_of_plan(arguments: Sequence[str]) -> str:
    """Return the answer to `verl-ray plan`, with the command that takes its place.

    Args:
        arguments: What was typed behind the command.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("model", nargs="?", default="MODEL")
    parser.add_argument("--machine", default=EXAMPLE)
    parser.add_argument("--algorithm", default="grpo")
    for option, key in _OPTIONS_OF_PLAN.items():
        parser.add_argument(option, dest=key)
    typed, _ = parser.parse_known_args(arguments)

    # PPO is a root config of its own.
    root = "ppo" if typed.algorithm == "ppo" else "grpo"
    words = ["verl-ray", "check", "--config-name", root, "--machine", typed.machine]
    words += ["--data", "off", f"model.path={typed.model}", *_NO_DATA]
    if typed.algorithm != root:
        words.append(f"algorithm={typed.algorithm}")
    for key in _OPTIONS_OF_PLAN.values():
        if getattr(typed, key) is not None:
            words.append(f"{key}={getattr(typed, key)}")

    return (
        "verl-ray: there is no command plan any more: none of the seconds by which it"
        " chose was ever measured on a GPU. This says what each auto becomes there, and"
        " the cheapest change where something does not fit; backend, placement and"
        f" ranks are yours to choose:\n  {for_shell(words)}"
    )


_NO_DATA = ("data.train_path=train.jsonl", "data.validation_path=test.jsonl")
"""Names that stand for the data, which are not read."""
