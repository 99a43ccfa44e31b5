"""The facts that every `auto` follows from: of a cluster, of the models' files and of the run's folder.

Invariant: no framework is imported, and no tensor is read. Deliberately not here: what follows from them
(`verl_ray/config/resolve.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.resolve import Facts
from verl_ray.config.schema import Config
from verl_ray.errors import CheckpointError
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.memory_plan import sent_bytes
from verl_ray.preflight.model_directories import made_model


def facts_of(
    config: Config, *, cores: Sequence[int], gpus: Sequence[int], checkpoint: str | None, learns: bool = True
) -> Facts:
    """Of a run on a cluster.

    Args:
        cores: of each node that can hold a process.
        gpus: the same.
        checkpoint: the newest one of the run, if it has any.
        learns: False = for one evaluation alone.
    """
    policy = config.model_roles[config.answers]
    made = made_model(policy.model.path, config) is not None  # its tokenizer, of single characters, has no template
    return Facts(
        nodes=len(cores),
        cores=min(cores, default=1),
        gpus=sum(gpus),
        has_chat_template=not made and has_chat_template(policy.model.path),
        sent_bytes=0 if config.drawing is None else sent_bytes(config.drawing),
        checkpoint=checkpoint,
        learns=learns,
    )


def facts_here(config: Config, machine: Machine | None, *, learns: bool = True) -> Facts:
    """Of a run that would start on this machine; None = on a cluster of which nothing is known yet, which is taken for
    one core. A checkpoint is believed to be whole, since nothing is read in full."""
    cores, gpus = (machine.cores, machine.gpus) if machine is not None else (1, 0)
    return facts_of(config, cores=[cores], gpus=[gpus], checkpoint=_newest_checkpoint(config), learns=learns)


def has_chat_template(directory: str) -> bool:
    """Whether the tokenizer in a directory has one, as transformers would find it."""
    folder = Path(directory).expanduser()
    files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    try:
        if any(file.read_text() for file in files if file.is_file()):
            return True
        return bool(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))
    except (OSError, ValueError):  # what is wrong there is said where models are looked at
        return False


def _newest_checkpoint(config: Config) -> str | None:
    try:
        found = CheckpointStore(Path(config.run.dir) / "checkpoints", 1).latest(verify=False).checkpoint
    except (CheckpointError, OSError):  # what is wrong there is said as the run starts
        return None
    return None if found is None else str(found.path)
