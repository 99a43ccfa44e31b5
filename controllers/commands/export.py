"""The command `export`: a role of a checkpoint as a Hugging Face directory, compared with the model it came from.

Invariant: when it returns, transformers computes with the directory what the training engine computes with the
checkpoint; if it does not, that is an error, and the directory is named as one not to use. Deliberately not here: how
parameters are gathered and written (the engine).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from controllers.system.build import Shape, plan_processes, resolve_on
from controllers.tasks import typed
from controllers.trainers.base import task_of
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.cluster.calls import wait_all
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.session import Session
from verl_ray.cluster.signals import stop_on_signals
from verl_ray.config.renamed import renewed
from verl_ray.config.resolve import shared_anew
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError, ConfigError, Problem
from workers.model_worker import ModelWorker

EXACT = {"float32": 1e-4, "bfloat16": 0.2}
"""How far a log-prob or a score may be from that of transformers in float32, by the type the engine computes in."""


def main(argv: list[str]) -> int:
    """Export and verify; returns 0."""
    given = _parser().parse_args(argv)
    checkpoint = CheckpointStore.open(Path(given.checkpoint).absolute())  # ranks have a current folder of their own
    config = typed(renewed(checkpoint.config))
    role = _role(given.role, config, checkpoint.path)
    target = Path(given.directory)
    if target.exists() and any(target.iterdir()):
        raise ConfigError([Problem("DIR", str(target), "this directory is not empty", "Give one that is, or is new.")])
    with Session.open(given.address) as session, tempfile.TemporaryDirectory() as logs:
        stop_on_signals()  # again: Ray's own handler exits without a message
        shape = Shape.of(session)
        plan = plan_processes(resolve_on(shared_anew(config), shape), shape, task_of(config).workers)
        wanted = plan.roles[role]
        sets = [one for one in plan.sets if one.name == wanted.processes]
        with start_groups(sets, [wanted], stall_s=config.run.stall_s, log_dir=Path(logs)) as groups:
            group = groups[wanted]
            wait_all([group.broadcast(ModelWorker.load, checkpoint.role(role))])
            wait_all([group.broadcast(ModelWorker.export, str(target.absolute()), given.adapter)])
            apart = max(group.broadcast(ModelWorker.distance_from, str(target.absolute())).result())
    limit = EXACT[config.model_roles[role].backend.dtype]
    if not apart <= limit:
        raise CheckpointError(
            f"{target} does not compute what {checkpoint.path} does: they are {apart:.2g} apart on fixed tokens, more "
            f"than {limit:g}. Do not use it"
        )
    print(f"{role} of {checkpoint.path.name}: {target} (within {apart:.1e} of the training engine on fixed tokens)")
    return 0


def _role(asked: str | None, config: Config, checkpoint: Path) -> str:
    saved = [name for name in config.model_roles if (checkpoint / name).is_dir()]
    if asked is None:
        return saved[0]
    if asked not in saved:
        fix = f"The checkpoint holds {', '.join(saved)}."
        raise ConfigError([Problem("--role", asked, "there is no such role in this checkpoint", fix)])
    return asked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-ray export",
        description="Write a role of a checkpoint as a Hugging Face directory (config, tokenizer, safetensors), and "
        "compare what it computes with the training engine. Takes as many ranks as the run had.",
        epilog="example:\n  verl-ray export outputs/first/checkpoints/step_00000200 models/first",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a step_... directory of a run")
    parser.add_argument("directory", metavar="DIR", help="where to write; new or empty")
    parser.add_argument("--role", help="which role (the first that learned: actor, or reward of a reward model)")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the LoRA adapter alone, as peft reads it, and not merged into the model",
    )
    parser.add_argument("--address", metavar="ADDRESS", help="Ray cluster (RAY_ADDRESS, else one of its own)")
    return parser
