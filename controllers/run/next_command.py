"""The commands to try after a run, as its user would type them.

Invariant: a command works in the folder where the run was started, and depends only on
what is on disk, so a finished run shows the same ones again. Deliberately not here: the
command that continues a stopped run (`controllers/commands/resume_hint.py`).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError
from verl_ray.paths import in_ray_package

SCRIPT = "VERL_RAY_SCRIPT"
"""Environment variable in which a script that stands for a command names itself."""

PROGRAM = "verl-ray"

MODEL = "model"
"""Folder of the model that some tasks write at the end, in run.dir."""

EXPORTED = "exported"
"""Folder in run.dir that the command proposes for an export."""


def next_commands(config: Config) -> dict[str, str]:
    """Return what to try after a finished run, as purpose -> command.

    Args:
        config: the configuration of the run.
    """
    run_dir = Path(config.run.dir)
    checkpoint = _newest_checkpoint(config)
    commands = {}

    # Supervised runs and reward models have written their model already.
    has_model = (run_dir / MODEL).is_dir()
    exported = run_dir / EXPORTED
    if checkpoint is not None and not has_model and not exported.exists():
        commands["write the model as a Hugging Face directory"] = shell_command(
            "export", _shown(checkpoint), _shown(exported)
        )

    can_be_evaluated = checkpoint is not None or has_model
    if can_be_evaluated and config.data.validation_path is not None:
        words = ["evaluate", "--config-dir", _shown(run_dir), "--config-name", "config"]
        # What the run itself began from stands in its config.yaml.
        if checkpoint is not None:
            words.append(f"run.resume={_shown(checkpoint)}")
        else:
            model = _shown(run_dir / MODEL)
            role = config.evaluated_role
            words += [
                "run.resume=auto",
                f"model.path={model}",
                f"{role}.model.path={model}",
            ]
        commands["measure it again, with every response on disk"] = shell_command(
            *words
        )
    return commands


def print_next(commands: Mapping[str, str]) -> None:
    """Print what to try after a finished run, given as purpose -> command."""
    if not commands:
        print("next: nothing was saved (run.checkpoint_every=0), so nothing is left")
    for purpose, command in commands.items():
        print(f"next, to {purpose}:\n{command}")


def shell_command(*arguments: str) -> str:
    """Return a command of this program, quoted for a shell."""
    return in_shell([*program_words(), *arguments], Path.cwd())


def in_shell(words: Sequence[str], current_folder: Path) -> str:
    """Return words quoted for a shell.

    Args:
        words: the words of the command.
        current_folder: the current folder. In a Ray job it is a copy of the one that
            was submitted.
    """
    job: list[str] = []
    if in_ray_package(current_folder):
        job = ["ray", "job", "submit", "--working-dir", ".", "--"]
    return shlex.join([*job, *words])


def program_words() -> list[str]:
    """Return the words by which the user can call this program."""
    # The script does not put the program on the user's PATH.
    if os.environ.get(SCRIPT):
        return [_shown(Path(sys.executable).with_name(PROGRAM))]

    if Path(sys.argv[0]).name != PROGRAM:
        return [sys.orig_argv[0], "-m", "controllers"]

    on_path = shutil.which(PROGRAM)
    if on_path is not None and Path(on_path).resolve() == Path(sys.argv[0]).resolve():
        return [PROGRAM]
    return [sys.argv[0]]


def _shown(path: Path) -> str:
    """Return a path as it is shortest where the user is."""
    here = Path.cwd()
    # The script has left the folder of its user, which is known only if it was called
    # by the path that it has from here. A job's folder is a copy.
    script = os.environ.get(SCRIPT)
    has_moved = script is not None and Path(script) != Path("scripts/quickstart")
    if has_moved or in_ray_package(here) or not path.is_relative_to(here):
        return str(path)
    return str(path.relative_to(here))


def _newest_checkpoint(config: Config) -> Path | None:
    """Return the newest checkpoint in run.dir, or None."""
    run = config.run
    store = CheckpointStore(Path(run.dir) / "checkpoints", run.keep_checkpoints)
    with contextlib.suppress(CheckpointError):
        newest = store.latest(verify=False).checkpoint
        if newest is not None:
            return newest.path
    return None
