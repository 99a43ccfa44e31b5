"""The command that continues a stopped run, as its user would type it.

Invariant: the command works in the folder where the run was started.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from controllers.run.next_command import in_shell, program_words
from verl_ray.config.schema import Config
from verl_ray.paths import SCRIPT

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
