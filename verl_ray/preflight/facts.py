"""Facts about cluster, models' files and run's folder that every `auto` follows from.

Invariant: no framework is imported, and no tensor is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from verl_ray.agents.thoughts import reasoning_parser_of
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.reward import JudgeReward, ModelReward
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.data.tokenizers import PRESENT_TIME, TEMPLATE_FILE, template_of
from verl_ray.errors import CheckpointError
from verl_ray.hub.model_folders import json_object
from verl_ray.preflight.machine import Machine
from verl_ray.preflight.model_files import made_model, model_size

UNKNOWN_MACHINE = Machine(cores=1, gpus=0, memory_bytes=0, shm_free_bytes=0)
"""What is assumed of a cluster of which nothing is known yet."""


@dataclass(frozen=True)
class ClusterFacts:
    """Everything that a resolution depends on besides the configuration."""

    nodes: int
    """Number of nodes that can hold a process."""
    cores: int
    """Number of cores of the node that has the fewest."""
    gpus: int
    """Number of GPUs of all nodes together."""
    has_chat_template: bool
    """Whether the prompts have a chat template, of their tokenizer or of the run."""
    sent_parameters: int
    """Parameters of the actor that are sent to rollout engines; 0 if none are."""
    checkpoint: str | None
    """Path of the newest checkpoint of the run; None if it has none yet."""
    learns: bool = True
    """False for a single evaluation, which starts fewer processes."""
    gpu_memory_bytes: int | None = None
    """Memory of the smallest GPU; None without a GPU, or if it is not known."""
    memory_bytes: int = 0
    """Memory of the host of a node; 0 if it is not known."""
    shm_free_bytes: int = 0
    """Free bytes in /dev/shm of a node; 0 if it is not known."""
    template_day: str | None = None
    """Day on which the run began, if the chat template writes the day."""
    reasoning_parser: str | None = None
    """Name of vLLM's parser of the thoughts that the chat template writes; None if it
    writes no mark that is known."""


def facts_of(
    config: Config,
    *,
    cores: Sequence[int],
    gpus: Sequence[int],
    checkpoint: str | None,
    learns: bool = True,
    gpu_memory_bytes: int | None = None,
    memory_bytes: int = 0,
    shm_free_bytes: int = 0,
) -> ClusterFacts:
    """Return the facts of a run on a cluster.

    Args:
        config: Configuration of the run.
        cores: Number of cores of each node that can hold a process.
        gpus: Number of GPUs of each of these nodes.
        checkpoint: Path of the newest checkpoint of the run, if it has any.
        learns: Whether the run trains. False stands for an evaluation alone.
        gpu_memory_bytes: Memory of the smallest GPU, if it is known.
        memory_bytes: Memory of the host of a node, if it is known.
        shm_free_bytes: Free bytes in /dev/shm of a node, if they are known.
    """
    path = config.model_roles[config.evaluated_role].model.folder
    # The tokenizer that a run makes has single characters, and no template.
    is_made = made_model(path, config) is not None
    has_own = not is_made and has_chat_template(path)

    # A task without rollouts sends no weights.
    sent_parameters = 0
    if isinstance(config, RolloutTaskConfig):
        actor = config.actor
        sent_parameters = model_size("actor", actor, config).parameters

    return ClusterFacts(
        nodes=len(cores),
        cores=min(cores, default=1),
        gpus=sum(gpus),
        has_chat_template=has_own or config.data.chat_template is not None,
        sent_parameters=sent_parameters,
        checkpoint=checkpoint,
        learns=learns,
        gpu_memory_bytes=gpu_memory_bytes,
        memory_bytes=memory_bytes,
        shm_free_bytes=shm_free_bytes,
        template_day=_day_of(config, checkpoint) if writes_day(config) else None,
        reasoning_parser=reasoning_parser_of(_applied_template(config)),
    )


def facts_here(
    config: Config, machine: Machine | None, *, learns: bool = True
) -> ClusterFacts:
    """Return the facts of a run that would start on a machine.

    The newest checkpoint is assumed to be whole, since nothing is read in full.

    Args:
        config: Configuration of the run.
        machine: This machine, or one that was described, of whose folders nothing is
            known. None stands for a cluster of which nothing is known yet; it is
            assumed to have one core.
        learns: Whether the run trains. False stands for an evaluation alone.
    """
    if machine is None:
        machine = UNKNOWN_MACHINE

    checkpoint = None
    if not machine.is_described:
        checkpoint = _newest_checkpoint(config)

    return facts_of(
        config,
        cores=[machine.cores] * machine.nodes,
        gpus=[machine.gpus] * machine.nodes,
        checkpoint=checkpoint,
        learns=learns,
        gpu_memory_bytes=machine.gpu_memory_bytes,
        memory_bytes=machine.memory_bytes,
        shm_free_bytes=machine.shm_free_bytes,
    )


def has_chat_template(directory: str) -> bool:
    """Return whether transformers would find a chat template in a directory.

    A file that cannot be read counts as none; it is reported where models are checked.
    """
    folder = Path(directory)
    templates = [
        folder / TEMPLATE_FILE,
        *folder.glob("additional_chat_templates/*.jinja"),
    ]
    try:
        if any(file.read_text() for file in templates if file.is_file()):
            return True
    except (OSError, ValueError):
        return False
    return bool(json_object(folder / "tokenizer_config.json").get("chat_template"))


def writes_day(config: Config) -> bool:
    """Return whether a chat template that a run applies asks for the present time.

    Args:
        config: Configuration of the run, with `auto` or without.
    """
    applied = [
        _template_in(grader.model.folder)
        for grader in config.graders.values()
        if isinstance(grader, JudgeReward | ModelReward)
    ]
    if config.data.apply_chat_template:
        applied.append(_applied_template(config))
    return any(PRESENT_TIME in template for template in applied)


def _applied_template(config: Config) -> str:
    """Return the chat template of a run's prompts, if they go through one."""
    folder = config.model_roles[config.evaluated_role].model.folder
    return template_of(config.data) or _template_in(folder)


def _template_in(directory: str) -> str:
    """Return the chat template that is applied with a tokenizer; "" if none is found.

    A file that cannot be read is reported where models are checked.
    """
    folder = Path(directory)
    with contextlib.suppress(OSError, ValueError):
        text = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        if text:
            return text
    template = json_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = [each for each in template if isinstance(each, dict)]
        templates_by_name = {each.get("name"): each.get("template") for each in named}
        template = templates_by_name.get("default")
    return template if isinstance(template, str) else ""


def _day_of(config: Config, checkpoint: str | None) -> str:
    """Return the day that the checkpoint of a run has recorded, or else today."""
    resume = config.run.resume
    source = resume if checkpoint is None else checkpoint
    if resume != "none":
        try:
            saved = CheckpointStore.open(Path(source), verify=False).config
        except (CheckpointError, OSError):
            saved = {}
        day = saved.get("data", {}).get("template_day")
        if isinstance(day, str) and day != "auto":
            return day
    return datetime.now(UTC).date().isoformat()


def _newest_checkpoint(config: Config) -> str | None:
    """Return the path of the newest checkpoint in run.dir, if there is any.

    A damaged checkpoint is reported when the run starts.
    """
    # The store is only read, so the number of checkpoints to keep does not matter.
    store = CheckpointStore(Path(config.run.dir) / "checkpoints", keep=1)
    try:
        checkpoint = store.latest(verify=False).checkpoint
    except (CheckpointError, OSError):
        return None
    if checkpoint is None:
        return None
    return str(checkpoint.path)
