"""The command `export`: a role of a checkpoint as a Hugging Face directory.

Invariant: when it returns, transformers computes with the directory what the training
engine computes with the checkpoint. If it does not, that is an error, and the message
says not to use the directory.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from controllers.tasks import typed_config
from verl_ray.checkpoint.manifest import Checkpoint, TornCheckpoint
from verl_ray.checkpoint.store import (
    CheckpointStore,
    checkpoint_name,
    is_checkpoint_name,
)
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.config.load import with_auto_again
from verl_ray.config.renamed import migrated
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError, ConfigError, Problem
from verl_ray.hub.models import fetch_models
from verl_ray.paths import path_suggestion, typed_path
from verl_ray.profiling.phases import blocking, phase

if TYPE_CHECKING:
    from verl_ray.cluster.group import WorkerGroup
    from verl_ray.cluster.session import Session
    from workers.model_worker import ModelWorker

LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.2}
"""Largest difference of a log-prob or a score, by the type the engine computes in.

The other side is transformers, which computes in float32.
"""


def main(argv: list[str]) -> int:
    """Export a role, verify the result, and return 0."""
    arguments = _parser().parse_args(argv)

    checkpoint = named_checkpoint(arguments.checkpoint, best=arguments.best)
    config = typed_config(migrated(checkpoint.config))
    role = _role(arguments.role, config, checkpoint.path)
    if arguments.adapter:
        _refuse_missing_adapter(role, config)

    directory = typed_path("DIR", arguments.directory)
    _refuse_full_directory(directory)
    fetch_models(config)

    config, difference = _export(
        config,
        role,
        checkpoint,
        directory,
        address=arguments.address,
        adapter=arguments.adapter,
    )

    # A difference that is not a number is not within the limit either.
    limit = LARGEST_DIFFERENCE[config.model_roles[role].backend.compute_dtype]
    if not difference <= limit:
        raise CheckpointError(
            f"{directory} does not compute what {checkpoint.path} does: they are"
            f" {difference:.2g} apart on fixed tokens, more than {limit:g}. Do not use"
            " it"
        )

    print(
        f"{role} of {checkpoint.path.name}: {directory} (within {difference:.1e} of the"
        " training engine on fixed tokens)"
    )
    return 0


def _export(
    config: Config,
    role: str,
    checkpoint: Checkpoint,
    directory: Path,
    *,
    address: str | None,
    adapter: bool,
) -> tuple[Config, float]:
    """Write the directory and compare it with the training engine.

    Args:
        config: the configuration that the checkpoint holds.
        role: the role to export.
        checkpoint: the checkpoint to export from.
        directory: where to write.
        address: the Ray cluster, or None for the default.
        adapter: whether to write only the LoRA adapter.

    Returns:
        The resolved configuration, and the largest difference on fixed tokens.
    """
    # Ray and torch take seconds to import, which no mistake in the arguments may cost.
    from controllers.system.models import download_models
    from controllers.system.plan import ClusterShape, plan_processes, resolve_on
    from controllers.trainers.base import task_of
    from verl_ray.cluster.launch import start_groups
    from verl_ray.tracking.block import live_block

    with (
        tempfile.TemporaryDirectory() as logs,
        live_block(f"export of {checkpoint.path.name}"),
        _session(address, Path(logs)) as session,
    ):
        # Once more: a handler that Ray has put there exits without a message.
        stop_on_signals()

        # This machine may be of another kind than the one that wrote the checkpoint.
        shape = ClusterShape.of(session)
        config = resolve_on(with_auto_again(config), shape)
        plan = plan_processes(config, shape, task_of(config).workers)
        download_models(config, session)

        # Only the processes of this role are started.
        planned_role = plan.roles[role]
        needed = planned_role.processes
        sets = [processes for processes in plan.sets if processes.name == needed]
        stall_s = config.run.stall_s
        with (
            phase(f"exporting the {role}"),
            start_groups(
                sets, [planned_role], stall_s=stall_s, log_dir=Path(logs)
            ) as groups,
        ):
            source = checkpoint.role(role)
            difference = _converted(
                groups[planned_role], source, str(directory), adapter=adapter
            )
            return config, difference


def _session(address: str | None, logs: Path) -> Session:
    """Open the cluster; it may take a while to start."""
    from verl_ray.cluster.session import Session

    with blocking("starting Ray"):
        return Session.open(address, log_dir=logs)


def _converted(
    group: WorkerGroup[ModelWorker], source: str, directory: str, *, adapter: bool
) -> float:
    """Write a role as a Hugging Face directory; return how far the two are apart."""
    from workers.model_worker import ModelWorker

    with phase("loading the checkpoint"):
        group.broadcast(ModelWorker.load, source).result()
    with phase("writing the model"):
        group.broadcast(ModelWorker.export, directory, adapter).result()
    with phase("comparing it with the training engine"):
        return max(group.broadcast(ModelWorker.distance_from, directory).result())


def _refuse_missing_adapter(role: str, config: Config) -> None:
    """Raise ConfigError if a role has no adapter that could be written alone."""
    if config.model_roles[role].adapter is None:
        rule = f"the {role} was trained without an adapter ({role}.lora.rank = 0)"
        fix = "Leave --adapter out to write the whole model."
        raise ConfigError([Problem("--adapter", role, rule, fix)])


def _refuse_full_directory(directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()):
        rule = "this directory is not empty"
        fix = "Give one that is, or is new."
        raise ConfigError([Problem("DIR", str(directory), rule, fix)])


def _role(requested: str | None, config: Config, checkpoint: Path) -> str:
    """Return the role to export, by default the first one that was saved.

    Raises:
        ConfigError: the checkpoint holds no such role.
    """
    saved = [name for name in config.model_roles if (checkpoint / name).is_dir()]
    if requested is None:
        return saved[0]

    if requested not in saved:
        rule = "there is no such role in this checkpoint"
        fix = f"The checkpoint holds {', '.join(saved)}."
        raise ConfigError([Problem("--role", requested, rule, fix)])
    return requested


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray export",
        description=(
            "Write a role of a checkpoint as a Hugging Face directory (config,"
            " tokenizer, safetensors), and compare what it computes with the training"
            " engine. Takes as many ranks as the run had."
        ),
        epilog=(
            "examples:\n"
            "  verl-ray export outputs/first models/first\n"
            "  verl-ray export outputs/first models/best --best\n"
            "  verl-ray export outputs/first/checkpoints/step_00000200 models/200"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="the folder of a run (its newest checkpoint), or a step_... folder in it",
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="where to write; new or empty",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="of the folder of a run, the checkpoint with the best evaluation",
    )
    parser.add_argument(
        "--role",
        help="which role (the first that learned: actor, or reward of a reward model)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help=(
            "write the LoRA adapter alone, as peft reads it, and not merged into the"
            " model"
        ),
    )
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="Ray cluster (RAY_ADDRESS, else one of its own)",
    )
    return parser


# ---------------------------------------------- the checkpoint that a path stands for

# A path of a checkpoint means this one, and the folder of a run means its newest whole
# checkpoint, or its best. Any other path is answered with what is there.


# Key under which a problem with the path is reported, as the help of commands names it.
_KEY = "CHECKPOINT"


def named_checkpoint(path: str, *, best: bool) -> Checkpoint:
    """Return the checkpoint that a path stands for, with an absolute path.

    Args:
        path: Path of a checkpoint or of the folder of a run, as it was typed.
        best: Whether the best checkpoint of a run is meant, in place of the newest.

    Raises:
        ConfigError: There is no checkpoint, or the path is not of a run and `best`.
        CheckpointError: The checkpoint is not whole.
    """
    folder = typed_path(_KEY, path)
    if not folder.is_dir():
        _refuse_missing(path, folder)

    root = _checkpoints_of(folder)
    if root is not None:
        return _checkpoint_of_run(path, root, best=best)

    if not is_checkpoint_name(folder.name):
        names = sorted(entry.name for entry in folder.iterdir())
        contents = ", ".join(names[:5]) or "nothing"
        rule = f"this folder holds no checkpoint; found {contents}"
        fix = "Give the folder of a run (outputs/NAME), or a step_... folder in it."
        _refuse(path, rule, fix)

    if best:
        rule = (
            "--best chooses between the checkpoints of a run, and this is one of them"
        )
        fix = f"Give the folder of the run ({folder.parent.parent}), or no --best."
        _refuse(path, rule, fix)
    return _whole(folder)


def _checkpoints_of(folder: Path) -> Path | None:
    """Return the folder of all checkpoints of a run; None if this is no such run.

    Args:
        folder: Folder of the run, or that of its checkpoints.
    """
    for root in (folder / "checkpoints", folder):
        if root.is_dir() and any(
            is_checkpoint_name(entry.name) for entry in root.iterdir()
        ):
            return root
    return None


def _checkpoint_of_run(path: str, root: Path, *, best: bool) -> Checkpoint:
    """Return the newest whole checkpoint of a run, or its best one."""
    # The store is only read, so the number of checkpoints to keep does not matter.
    newest = CheckpointStore(root, keep=1).latest()
    for reason in newest.skipped:
        print(f"warning: {reason}", file=sys.stderr, flush=True)
    assert newest.checkpoint is not None, "the folder holds checkpoints"
    if not best:
        return newest.checkpoint

    # Every checkpoint knows the best evaluation up to its step.
    evaluation = newest.checkpoint.state.get("best")
    if evaluation is None:
        rule = f"the run had no evaluation up to {newest.checkpoint.path.name}"
        _refuse(path, rule, "Leave --best out to take the newest checkpoint.")

    step = evaluation["step"]
    measured = f"{evaluation['name']} = {evaluation['value']:.4g}"
    if step == 0:
        config = typed_config(migrated(newest.checkpoint.config))
        model = config.model_roles[config.evaluated_role].model.path
        rule = f"the training did not improve it: {measured} before the first step"
        fix = (
            f"Use the model that the run began with, {model}, or leave --best out"
            " for the newest checkpoint."
        )
        _refuse(path, rule, fix)

    folder = root / checkpoint_name(step)
    if not folder.is_dir():
        rule = f"the best step is {step} ({measured}), and its checkpoint is not here"
        fix = "Leave --best out to take the newest checkpoint."
        _refuse(path, rule, fix)

    print(f"the best step is {step}: {measured}", flush=True)
    return _whole(folder)


def _whole(folder: Path) -> Checkpoint:
    """Open a checkpoint of which every file has the contents that were written."""
    try:
        return CheckpointStore.open(folder)
    except TornCheckpoint as error:
        raise CheckpointError(
            f"{error}. Give another checkpoint, or the folder of the run for the"
            " newest whole one"
        ) from None


def _refuse_missing(path: str, folder: Path) -> NoReturn:
    if folder.exists():
        rule = "this is a file"
        _refuse(path, rule, "Give the folder of a run, or a step_... folder in it.")

    otherwise = "Give the folder of a run (outputs/NAME), or a step_... folder in it."
    _refuse(path, "there is no such folder", path_suggestion(folder, otherwise))


def _refuse(path: str, rule: str, fix: str) -> NoReturn:
    raise ConfigError([Problem(_KEY, path, rule, fix)])
