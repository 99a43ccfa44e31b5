"""The commands to try after a run, or to continue it, as its user would type them.

Invariant: a command works in the folder where the run was started, and depends only on
what is on disk, so a finished run shows the same ones again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ray.checkpoint.manifest import Checkpoint
from verl_ray.checkpoint.store import CheckpointStore, checkpoint_name
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError
from verl_ray.paths import SCRIPT, in_ray_package, program, shown_path
from verl_ray.report.tracker import PAGE
from verl_ray.shell import for_shell
from verl_ray.tracking.jsonl import METRICS

PROGRAM = "verl-ray"

MODEL = "model"
"""Folder of the model that some tasks write at the end, in run.dir."""

EXPORTED = "exported"
"""Folder in run.dir that the command proposes for an export."""


def next_in_words(config: Config) -> str:
    """Return what to try after a finished run, and how.

    Args:
        config: the configuration of the run.
    """
    lines = []
    best = _best_evaluation(_newest_checkpoint(config))
    if best is not None and best["step"] == 0:
        report = Path(config.run.dir) / PAGE
        record = report if report.is_file() else report.with_name(METRICS)
        lines.append(
            f"next: the training did not improve the model. {best['name']} was best"
            f" before the first step, with {best['value']:.4g};"
            f" {shown_path(record)} shows what happened then"
        )

    commands = next_commands(config)
    if not commands:
        lines.append(_without_commands(config))
    for purpose, command in commands.items():
        lines.append(f"next, to {purpose}:\n{command}")
    return "\n".join(lines)


def _without_commands(config: Config) -> str:
    """Return what is left of a finished run that no command can go on with."""
    for name in (EXPORTED, MODEL):
        folder = Path(config.run.dir) / name
        if folder.is_dir():
            return f"next: the model is in {shown_path(folder)}"

    newest = _newest_checkpoint(config)
    if newest is not None:
        return f"next: the last checkpoint is {shown_path(newest.path)}"
    return "next: nothing was saved (run.save_at_end=false), so nothing is left"


def next_commands(config: Config) -> dict[str, str]:
    """Return what to try after a finished run, as purpose -> command.

    It is about the best checkpoint, where that is on disk, and else about the newest. A
    model that was best before the training is not worth an export.

    Args:
        config: the configuration of the run.
    """
    run_dir = Path(config.run.dir)
    newest = _newest_checkpoint(config)
    best = _best_evaluation(newest)
    checkpoint = _best_checkpoint(newest, best)
    commands = {}

    # Supervised runs and reward models have written the model of the last step already.
    has_model = (run_dir / MODEL).is_dir()
    is_written = has_model and checkpoint == newest
    has_improved = best is None or best["step"] > 0
    exported = run_dir / EXPORTED
    is_exportable = has_improved and not is_written and not exported.exists()
    if checkpoint is not None and is_exportable:
        which = "model"
        if checkpoint != newest:
            which = f"model of the best step ({checkpoint.step})"
        commands[f"write the {which} as a Hugging Face directory"] = shell_command(
            "export", shown_path(checkpoint.path), shown_path(exported)
        )

    can_be_evaluated = checkpoint is not None or has_model
    if can_be_evaluated and config.data.validation_sets:
        words: list[str | tuple[str, object]] = [
            "evaluate",
            "--config-dir",
            shown_path(run_dir),
            "--config-name",
            "config",
        ]
        # What the run itself began from stands in its config.yaml.
        if checkpoint is not None:
            words.append(("run.resume", shown_path(checkpoint.path)))
        else:
            model = shown_path(run_dir / MODEL)
            role = config.evaluated_role
            words += [
                "run.resume=auto",
                ("model.path", model),
                (f"{role}.model.path", model),
            ]
        # Only a policy generates responses.
        what = "the score of every row"
        if isinstance(config, RolloutTaskConfig):
            what = "every response"
        commands[f"measure it again, with {what} on disk"] = shell_command(*words)
    return commands


def shell_command(*arguments: str | tuple[str, object]) -> str:
    """Return a command of this program, quoted for a shell."""
    return in_shell([*program_words(), *arguments], Path.cwd())


def in_shell(words: Sequence[str | tuple[str, object]], current_folder: Path) -> str:
    """Return words quoted for a shell.

    Args:
        words: the words of the command. A pair is the key and the value of an override.
        current_folder: the current folder. In a Ray job it is a copy of the one that
            was submitted.
    """
    job: list[str] = []
    if in_ray_package(current_folder):
        job = ["ray", "job", "submit", "--working-dir", ".", "--"]
    return for_shell([*job, *words])


def program_words() -> list[str]:
    """Return the words by which the user can call this program."""
    # The script does not put the program on the user's PATH.
    if os.environ.get(SCRIPT):
        return [program(PROGRAM)]

    started = Path(sys.argv[0])
    if started.parts[-2:] == ("controllers", "__main__.py"):
        return [sys.orig_argv[0], "-m", "controllers"]
    # A file or a notebook of the user's has called the functions of `verl_ray`.
    if started.name != PROGRAM:
        return [program(PROGRAM)]

    on_path = shutil.which(PROGRAM)
    if on_path is not None and Path(on_path).resolve() == started.resolve():
        return [PROGRAM]
    return [sys.argv[0]]


def _newest_checkpoint(config: Config) -> Checkpoint | None:
    """Return the newest checkpoint in run.dir, or None."""
    run = config.run
    store = CheckpointStore(Path(run.dir) / "checkpoints", run.keep_checkpoints)
    with contextlib.suppress(CheckpointError):
        return store.latest(verify=False).checkpoint
    return None


def _best_evaluation(newest: Checkpoint | None) -> Mapping[str, Any] | None:
    """Return the best evaluation of a run, which its newest checkpoint knows."""
    # Earlier versions did not save it.
    return None if newest is None else newest.state.get("best")


def _best_checkpoint(
    newest: Checkpoint | None, best: Mapping[str, Any] | None
) -> Checkpoint | None:
    """Return the checkpoint of the best evaluation, or the newest where it is gone."""
    if newest is None or best is None or best["step"] in (0, newest.step):
        return newest

    folder = newest.path.with_name(checkpoint_name(best["step"]))
    with contextlib.suppress(CheckpointError):
        return CheckpointStore.open(folder, verify=False)
    return newest


# ---------------------------------------------------- the continuation of a stopped run

SCRIPT_ARGUMENTS = ("train", "--config-name", "quickstart")
"""The arguments that such a script stands for, so that messages can leave them out."""


def resume_hint(config: Config | None, arguments: Sequence[str]) -> str:
    """Return the command that continues a run, with a heading.

    Where nothing is saved yet, the command starts the run again.

    Args:
        config: the configuration; None if the run stopped before it was known.
        arguments: the arguments of `verl-ray`.
    """
    resume = "auto"
    has_checkpoints = False
    if config is not None:
        resume = config.run.resume
        has_checkpoints = _has_checkpoints(config)

    command = command_to_resume(
        typed_words(arguments),
        resume,
        has_checkpoints=has_checkpoints,
        current_folder=Path.cwd(),
    )

    continues = has_checkpoints or resume not in ("auto", "none")
    heading = "To go on" if continues else "To begin again"
    return f"{heading}:\n{command}"


def failure_hint(config: Config, arguments: Sequence[str]) -> str:
    """Return the command that continues a failed run, with a heading.

    Without a checkpoint the command starts the run again.

    Args:
        config: the configuration.
        arguments: the arguments of `verl-ray`.
    """
    has_checkpoints = _has_checkpoints(config)
    command = command_to_resume(
        typed_words(arguments),
        config.run.resume,
        has_checkpoints=has_checkpoints,
        current_folder=Path.cwd(),
    )

    way_on = "To begin again"
    if has_checkpoints:
        way_on = "To go on from the newest checkpoint"
    return f"{way_on}, once the cause is mended:\n{command}"


def _has_checkpoints(config: Config) -> bool:
    return any((Path(config.run.dir) / "checkpoints").glob("step_*"))


def typed_command(arguments: Sequence[str]) -> str:
    """Return the command line as the user typed it, quoted for a shell.

    Args:
        arguments: the arguments of `verl-ray`.
    """
    return in_shell(typed_words(arguments), Path.cwd())


def typed_words(arguments: Sequence[str]) -> list[str]:
    """Return the words of the command line, as the user typed them."""
    # The user typed the script's name in place of its first arguments.
    script = os.environ.get(SCRIPT)
    if script:
        return [script, *arguments[len(SCRIPT_ARGUMENTS) :]]
    return [*program_words(), *arguments]


def command_to_resume(
    typed: Sequence[str],
    resume: str,
    *,
    has_checkpoints: bool,
    current_folder: Path,
) -> str:
    """Return the command that continues a run, quoted for a shell.

    Args:
        typed: the words of the command line that started the run.
        resume: the value of run.resume.
        has_checkpoints: whether run.dir has any.
        current_folder: the current folder. In a Ray job it is a copy of the one that
            was submitted.
    """
    words = list(typed)

    # A run that was to begin anew, or from another run's checkpoint, has begun by now.
    has_begun = resume == "none" or (resume != "auto" and has_checkpoints)
    if has_begun:
        words = [word for word in words if not _sets_resume(word)]
        words.append("run.resume=auto")

    return in_shell(words, current_folder)


def _sets_resume(word: str) -> bool:
    # Hydra also takes a key that is marked as an addition.
    return word.lstrip("+").startswith("run.resume=")
