"""The resolution of every `auto` of a configuration, before anything starts.

Invariant: a resolution is a pure function of the configuration and of a few facts about
the cluster. A resolved configuration holds no `auto` and resolves to itself. Whoever
reads such a setting later does so through `section.resolved`, without which mypy
reports an error. Deliberately not here: how the facts are collected
(`verl_ray/preflight/facts.py`), and settings that vLLM calls auto.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from verl_ray.config.load import parse, to_tree
from verl_ray.config.rollout import HEAD, VLLM_LORA_RANKS
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config

MIB = 2**20

PROBE_EVERY = 1
"""Weight syncs from one probe to the next on a CPU, where vLLM packs every weight."""

PROBE_EVERY_ON_GPUS = 10
"""Weight syncs from one probe to the next on GPUs."""

PROBE_TOLERANCE = 1e-3
"""Largest difference of a log-prob where both sides compute in float32."""

BUCKETS_PER_MODEL = 12
"""Number of buckets that a model is cut into.

More buckets let the first one be loaded earlier, fewer need fewer calls.
"""

SMALLEST_BUCKET_MIB = 16
LARGEST_BUCKET_MIB = 512

C = TypeVar("C", bound=Config)

ValueAndReason = tuple[object, str]
"""The value that an `auto` becomes, and why."""


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
    """Whether the tokenizer of the prompts has a chat template."""
    sent_bytes: int
    """Bytes of the actor's weights as they are sent; 0 if none are."""
    checkpoint: str | None
    """Path of the newest checkpoint of the run; None if it has none yet."""
    learns: bool = True
    """False for a single evaluation, which starts fewer processes."""


@dataclass(frozen=True)
class Resolution:
    """The plain value that one `auto` becomes, and why."""

    key: str
    value: object
    because: str


def resolve(config: C, facts: ClusterFacts) -> C:
    """Return the configuration with every `auto` replaced by its value."""
    tree = to_tree(config)

    for resolution in resolutions(config, facts):
        section, _, name = resolution.key.rpartition(".")
        _section(tree, section)[name] = resolution.value

    return parse(tree, type(config))


def with_total_steps(config: C, num_examples: int) -> C:
    """Return the configuration with run.total_epochs replaced by run.total_steps.

    A configuration with a number of steps stays as it is.

    Args:
        config: Configuration of the run.
        num_examples: Number of examples that the data cursor leads to.
    """
    resolution = resolution_of_steps(config, num_examples)
    if resolution is None:
        return config

    steps = {"total_steps": resolution.value, "total_epochs": None}
    run = config.run.model_copy(update=steps)
    return config.model_copy(update={"run": run})


def resolution_of_steps(config: Config, num_examples: int) -> Resolution | None:
    """Return what run.total_steps becomes, and why; None if it is a number.

    The cursor does not drop the tail of an epoch, so only the last step is rounded up.

    Args:
        config: Configuration of the run.
        num_examples: Number of examples that the data cursor leads to.
    """
    epochs = config.run.total_epochs
    if config.run.total_steps is not None or epochs is None:
        return None

    per_step = config.examples_per_step
    drawn = epochs * num_examples
    # Divide and round up.
    steps = -(-drawn // per_step)

    because = (
        f"run.total_epochs={epochs} x {num_examples} examples / {per_step} per step"
    )
    if drawn % per_step:
        because += (
            f" is {drawn / per_step:.1f}, rounded up so that each is used at least"
            f" {_times(epochs)}"
        )
    return Resolution("run.total_steps", steps, because)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def with_threads_unresolved(config: C) -> C:
    """Return a resolved configuration whose threads per rank are to be resolved again.

    It serves for other processes or another machine, where the cores are to be divided
    anew. A number of threads that the user has set stays.
    """
    # The user's own number holds on any machine.
    if isinstance(config.run.threads_per_rank, int):
        return config

    run = config.run.model_copy(update={"threads_per_rank": "auto"})
    return config.model_copy(update={"run": run})


def resolutions(config: Config, facts: ClusterFacts) -> list[Resolution]:
    """Return what each `auto` of the configuration becomes.

    Settings with another value than `auto` are not listed.
    """
    tree = to_tree(config)
    resolutions = []

    for key, rule in _RULES.items():
        section, _, name = key.rpartition(".")

        # A task without the section has no such setting to resolve.
        if _section(tree, section).get(name) == "auto":
            value, because = rule(config, facts)
            resolutions.append(Resolution(key, value, because))

    return resolutions


def _section(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the section with a dotted key; an empty one if the task has none."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part, {})

    assert isinstance(node, dict)
    return node


# ------------------------------------------------------------------ settings of any run


def _resume(_: Config, facts: ClusterFacts) -> ValueAndReason:
    if facts.checkpoint is None:
        return "none", "run.dir has no checkpoint"
    return facts.checkpoint, "it is the newest checkpoint in run.dir"


def _threads_per_rank(config: Config, facts: ClusterFacts) -> ValueAndReason:
    """Divide the cores of a node between the processes that compute at the same time.

    Trainers and rollout engines take turns, so each side may use all cores of its node.
    Processes of one side work at the same time and divide them; so do judges and the
    engines of the policy. Graders of texts need no more than one thread.
    """
    training_ranks, engine_ranks = _computing_ranks(config, learns=facts.learns)

    threads = {
        "trainers": _cores_per_rank(facts, training_ranks),
        "engines": _cores_per_rank(facts, engine_ranks),
        "graders": 1,
    }

    because = f"{facts.cores} cores are shared by {training_ranks} ranks of trainers"
    if engine_ranks:
        because += f", and in turn by {engine_ranks} of engines"
    return threads, because


def _cores_per_rank(facts: ClusterFacts, ranks: int) -> int:
    # Where ranks are more than cores, each still has a thread.
    return max(1, facts.cores // max(1, ranks))


def _computing_ranks(config: Config, *, learns: bool) -> tuple[int, int]:
    """Return the number of processes that train and of engine ranks that generate.

    Each number counts processes that work at the same time.
    """
    graders = config.active_graders(learns=learns)

    engine_ranks = 0
    for name, engine in config.engines.items():
        is_idle_judge = name in config.judges and name not in graders
        if not is_idle_judge:
            engine_ranks += engine.ranks

    # Colocated roles on one kind of backend share a process per rank, so they are
    # counted once, under the name of the backend.
    ranks_by_process: dict[str, int] = {}
    for name, role in config.model_roles.items():
        if learns or name == config.evaluated_role or name in graders:
            process = role.backend.kind if config.shares_processes else name
            ranks_by_process[process] = role.num_ranks

    return sum(ranks_by_process.values()), engine_ranks


def _apply_chat_template(_: Config, facts: ClusterFacts) -> ValueAndReason:
    if facts.has_chat_template:
        return True, "the tokenizer has a chat template"
    return False, "the tokenizer has no chat template"


# -------------------------------------------------- settings of runs that have rollouts


def _offload(config: RolloutTaskConfig, facts: ClusterFacts) -> ValueAndReason:
    if _shares_gpus(config, facts):
        return "all", "rollout engines and trainers share GPUs"
    return "none", "rollout engines and trainers share no GPU"


def _sleep(config: RolloutTaskConfig, facts: ClusterFacts) -> ValueAndReason:
    if not _shares_gpus(config, facts):
        return "never", "rollout engines and trainers share no GPU"

    if config.rollout.sync.adapter == "alone":
        because = (
            "they share GPUs, and rollout.sync.adapter=alone keeps the model where it"
            " is"
        )
        return "kv_cache", because

    because = (
        "rollout engines and trainers share GPUs, and each sync brings new weights"
    )
    return "weights", because


def _transport(_: RolloutTaskConfig, facts: ClusterFacts) -> ValueAndReason:
    if facts.nodes == 1:
        return "shared_memory", "the cluster is one node"

    because = (
        f"the cluster is {facts.nodes} nodes, and a broadcast between GPUs has not run"
        " yet"
    )
    return "host_broadcast", because


def _bucket_mib(_: RolloutTaskConfig, facts: ClusterFacts) -> ValueAndReason:
    # Divide and round up.
    share = -(-facts.sent_bytes // (BUCKETS_PER_MODEL * MIB))
    bucket = min(max(share, SMALLEST_BUCKET_MIB), LARGEST_BUCKET_MIB)

    model_mib = facts.sent_bytes / MIB
    because = (
        f"a part in {BUCKETS_PER_MODEL} of {model_mib:.0f} MiB, at least"
        f" {SMALLEST_BUCKET_MIB} and at most {LARGEST_BUCKET_MIB}"
    )
    return bucket, because


def _adapter(config: RolloutTaskConfig, facts: ClusterFacts) -> ValueAndReason:
    lora = config.actor.lora
    if lora.rank == 0:
        return "merged", "there is no adapter"

    if lora.rank > VLLM_LORA_RANKS[-1] or HEAD in lora.targets:
        because = (
            "the rollout engine does not take an adapter of this rank, or on these"
            " layers"
        )
        return "merged", because

    # What `sleep` becomes decides, so an `auto` there is resolved here, too.
    sleep: object = config.rollout.sleep
    if sleep == "auto":
        sleep, _ = _sleep(config, facts)
    if sleep == "weights":
        return "merged", "rollout engines free their weights while trainers work"

    return "alone", "rollout engines keep the model"


def _probe_every(_: RolloutTaskConfig, facts: ClusterFacts) -> ValueAndReason:
    if facts.gpus == 0:
        return PROBE_EVERY, "on a CPU the engine packs what it receives"

    because = (
        "fingerprints verify every sync, and on GPUs engines do not pack what they"
        " receive"
    )
    return PROBE_EVERY_ON_GPUS, because


def _probe_tolerance(config: RolloutTaskConfig, _: ClusterFacts) -> ValueAndReason:
    dtypes = {config.actor.backend.dtype, config.rollout.dtype}
    if dtypes == {"float32"}:
        return PROBE_TOLERANCE, "trainer and rollout engine compute in float32"

    # Rounding differs between the sides, so the first sync has to show by how much.
    names = " and ".join(sorted(dtypes))
    return "measured", f"{names} round"


def _shares_gpus(config: RolloutTaskConfig, facts: ClusterFacts) -> bool:
    # Without GPUs there is no device memory to free.
    return facts.gpus > 0 and config.placement.kind == "colocated"


_RULES: Mapping[str, Callable[[Any, ClusterFacts], ValueAndReason]] = {
    "run.resume": _resume,
    "run.threads_per_rank": _threads_per_rank,
    "data.apply_chat_template": _apply_chat_template,
    "placement.offload": _offload,
    "rollout.sleep": _sleep,
    "rollout.sync.transport": _transport,
    "rollout.sync.bucket_mib": _bucket_mib,
    "rollout.sync.adapter": _adapter,
    "rollout.sync.probe_every": _probe_every,
    "rollout.sync.probe_tolerance": _probe_tolerance,
}

AUTO_KEYS = frozenset(_RULES)
"""The keys whose value may be `auto`."""
