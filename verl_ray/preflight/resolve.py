"""The resolution of every `auto` of a configuration, before anything starts.

Invariant: a resolution is a pure function of the configuration, the models' directories
and a few facts about the cluster. A resolved configuration holds no `auto` and resolves
to itself. Whoever reads such a setting later does so through `section.resolved`,
without which mypy reports an error. A setting that vLLM calls auto is none of these.

Likewise run.total_epochs becomes a number of steps, once the data are counted. Every
example is used at least as often as the setting says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from verl_ray.agents.thoughts import USUAL_PARSER
from verl_ray.backends import BACKENDS
from verl_ray.config.load import to_tree, with_changes, with_record
from verl_ray.config.rollout import CONCURRENCY, HEAD, VLLM_LORA_RANKS
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.device_defaults import (
    CPU_KV_CACHE_GIB,
    CPU_MICRO_BATCH_TOKENS,
    SNAPSHOT_COPIES,
    SNAPSHOT_EVERY,
    AutoValue,
    device_values,
    host_values,
)
from verl_ray.preflight.facts import ClusterFacts
from verl_ray.preflight.footprints import sent_width
from verl_ray.settings.section import resolved
from verl_ray.weight_sync import SLOTS

MIB = 2**20

PROBE_EVERY = 1
"""Weight syncs from one probe to the next on a CPU, where vLLM packs every weight."""

PROBE_EVERY_ON_GPUS = 10
"""Weight syncs from one probe to the next on GPUs."""

PROBE_TOLERANCE = 1e-3
"""Largest difference of a log-prob where both sides compute in float32."""

JUDGE_REPLICAS = 1
"""Engines of a judge that is not given more."""

BUCKETS_PER_MODEL = 12
"""Number of buckets that a model is cut into.

More buckets let the first one be loaded earlier, fewer need fewer calls. There are at
least two, of which the second is sent while the first is loaded.
"""

SMALLEST_BUCKET_MIB = 16
LARGEST_BUCKET_MIB = 512

C = TypeVar("C", bound=Config)

ValueAndReason = tuple[object, str]
"""The value that an `auto` becomes, and why."""


@dataclass(frozen=True)
class Resolution:
    """The plain value that one `auto` becomes, and why."""

    key: str
    value: object
    because: str


def resolve(config: C, facts: ClusterFacts) -> C:
    """Return the configuration with every `auto` replaced by its value."""
    return _resolved(config, facts)[0]


def resolutions(config: Config, facts: ClusterFacts) -> list[Resolution]:
    """Return what each `auto` of the configuration becomes.

    Settings with another value than `auto` are not listed.
    """
    return _resolved(config, facts)[1]


def _resolved(config: C, facts: ClusterFacts) -> tuple[C, list[Resolution]]:
    """Return the resolved configuration, and what each `auto` became."""
    resolutions: list[Resolution] = []
    # Each stage reads what the stages before it have resolved.
    for stage in (_of_devices, _of_rules, device_values, host_values):
        stage_resolutions = [Resolution(*each) for each in stage(config, facts)]
        changes = {resolution.key: resolution.value for resolution in stage_resolutions}
        config = with_changes(config, changes)
        resolutions += stage_resolutions

    # Nothing reads the sections of roles that the run does not create.
    config = with_changes(config, dict(_unused(to_tree(config))))

    # A command finds anew which checkpoint is the newest.
    values = {each.key: each.value for each in resolutions if each.key != "run.resume"}
    return with_record(config, values, on_gpus=facts.gpus > 0), resolutions


def _unused(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every setting that is still `auto`, with any value that it may have."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _unused(value, f"{key}.")
        elif value == "auto" and may_be_auto(key):
            yield key, UNUSED[name]


def _of_rules(config: Config, facts: ClusterFacts) -> Iterator[AutoValue]:
    """Yield what follows from the other settings and the facts, key by key."""
    tree = to_tree(config)
    for key, rule in _RULES.items():
        # A task without the section has no such setting to resolve.
        if _value(tree, key) == "auto":
            yield key, *rule(config, facts)


def _value(tree: Mapping[str, Any], key: str) -> object:
    """Return the value of a dotted key; None if the task has no such section."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part, {})
    return node


# ------------------------------------------------------- settings of models and engines


def _of_devices(config: Config, facts: ClusterFacts) -> Iterator[AutoValue]:
    """Yield types of computations, and the number of rollout engines."""
    dtype = "bfloat16" if facts.gpus else "float32"
    because = "the run computes on GPUs" if facts.gpus else "the run computes on a CPU"
    for name, role in config.model_roles.items():
        if role.backend.dtype == "auto":
            yield f"{name}.backend.dtype", dtype, because

    for name, engine in config.engines.items():
        if engine.config.dtype == "auto" and engine.config.quantization is not None:
            reason = f"{engine.section}.quantization is made of bfloat16"
            yield f"{engine.section}.dtype", "bfloat16", reason
        elif engine.config.dtype == "auto":
            yield f"{engine.section}.dtype", dtype, because
        if engine.config.num_replicas == "auto":
            value = JUDGE_REPLICAS
            reason = "a judge has one engine unless it is given more"
            if name not in config.judges:
                value, reason = _num_replicas(config, facts)
            yield f"{engine.section}.num_replicas", value, reason


def _num_replicas(config: Config, facts: ClusterFacts) -> tuple[int, str]:
    """Return as many replicas of the policy as there are devices for them."""
    assert isinstance(config, RolloutTaskConfig)
    if not facts.gpus:
        return 1, "the run computes on a CPU"

    width = config.rollout.ranks_per_replica
    if config.shares_processes:
        ranks = config.actor.num_ranks
        because = f"they share the GPUs of actor.num_ranks={ranks}"
        return max(1, ranks // width), because

    models = config.active_models(learns=facts.learns)
    others = sum(role.num_ranks for role in models.values())
    for name, engine in config.active_engines(learns=facts.learns).items():
        if name in config.judges:
            replicas = engine.config.num_replicas
            judge_replicas = JUDGE_REPLICAS if replicas == "auto" else replicas
            others += judge_replicas * engine.config.ranks_per_replica

    free = max(0, facts.gpus - others)
    because = f"{free} of {facts.gpus} GPUs are left by the other roles"
    # The ranks of an engine share a node.
    most = facts.nodes * (facts.gpus // facts.nodes // width)
    return max(1, min(free // width, most)), because


# ------------------------------------------------------------------ settings of any run


def _resume(_: Config, facts: ClusterFacts) -> ValueAndReason:
    if facts.checkpoint is None:
        return "none", "run.dir has no checkpoint"
    return facts.checkpoint, "it is the newest checkpoint in run.dir"


def _threads_per_rank(config: Config, facts: ClusterFacts) -> ValueAndReason:
    """Divide the cores of a node between the processes that compute at the same time.

    Trainers and rollout engines take turns, so each side may use all cores of its node,
    unless the schedule overlaps them. Processes of one side work at the same time and
    divide them; so do judges and the engines of the policy. Graders of texts need no
    more than one thread.
    """
    training_ranks, engine_ranks = _computing_ranks(config, learns=facts.learns)
    overlaps = facts.learns and config.overlaps

    # At the same time, each side leaves the other its cores.
    others = (engine_ranks, training_ranks) if overlaps else (0, 0)
    threads = {
        "trainers": _cores_per_rank(facts, training_ranks + others[0]),
        "engines": _cores_per_rank(facts, engine_ranks + others[1]),
        "graders": 1,
    }

    because = f"{facts.cores} cores are shared by {training_ranks} ranks of trainers"
    if engine_ranks:
        order = "at the same time" if overlaps else "in turn"
        because += f", and {order} by {engine_ranks} of engines"
    return threads, because


def _cores_per_rank(facts: ClusterFacts, ranks: int) -> int:
    # Where ranks are more than cores, each still has a thread.
    return max(1, facts.cores // max(1, ranks))


def _computing_ranks(config: Config, *, learns: bool) -> tuple[int, int]:
    """Return the number of processes that train and of engine ranks that generate.

    Each number counts processes that work at the same time.
    """
    engines = config.active_engines(learns=learns)
    engine_ranks = sum(engine.ranks for engine in engines.values())

    # Colocated roles on one kind of backend share a process per rank, so they are
    # counted once, under the name of the backend.
    ranks_by_process: dict[str, int] = {}
    for name, role in config.active_models(learns=learns).items():
        process = role.backend.kind if config.shares_processes else name
        ranks_by_process[process] = role.num_ranks

    return sum(ranks_by_process.values()), engine_ranks


def _apply_chat_template(config: Config, facts: ClusterFacts) -> ValueAndReason:
    if config.data.chat_template is not None:
        return True, "data.chat_template is set"
    if facts.has_chat_template:
        return True, "the tokenizer has a chat template"
    return False, "the tokenizer has no chat template"


def _template_day(_: Config, facts: ClusterFacts) -> ValueAndReason:
    began = "the day on which the run began"
    return facts.template_day, began if facts.template_day else "no template writes it"


# -------------------------------------------------- settings of runs that have rollouts


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


def _concurrency(config: RolloutTaskConfig, _: ClusterFacts) -> ValueAndReason:
    if config.rollout.schedule == "synchronous":
        return CONCURRENCY, "twice what vLLM runs at once, so that it never waits"
    return "adaptive", "rollouts go on for long, and the cache may become full"


def _transport(_: RolloutTaskConfig, facts: ClusterFacts) -> ValueAndReason:
    if facts.nodes == 1:
        return "shared_memory", "the cluster is one node"

    because = (
        f"the cluster is {facts.nodes} nodes, and a broadcast between GPUs has not run"
        " yet"
    )
    return "host_broadcast", because


def _bucket_mib(config: RolloutTaskConfig, facts: ClusterFacts) -> ValueAndReason:
    sent_bytes = facts.sent_parameters * sent_width(config)
    # Divide and round up.
    share = -(-sent_bytes // (BUCKETS_PER_MODEL * MIB))
    half = max(1, -(-sent_bytes // (SLOTS * MIB)))
    bucket = min(max(share, min(SMALLEST_BUCKET_MIB, half)), LARGEST_BUCKET_MIB)

    model_mib = sent_bytes / MIB
    because = (
        f"a part in {BUCKETS_PER_MODEL} of {model_mib:.0f} MiB, at least"
        f" {SMALLEST_BUCKET_MIB} or half of it, and at most {LARGEST_BUCKET_MIB}"
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
    if config.rollout.quantization is not None:
        return "merged", "no test has an adapter on a quantized engine"

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
    dtypes: set[str] = {
        config.actor.backend.compute_dtype,
        resolved(config.rollout.dtype),
    }
    if dtypes == {"float32"}:
        return PROBE_TOLERANCE, "trainer and rollout engine compute in float32"

    # Rounding differs between the sides, so the first sync has to show by how much.
    names = " and ".join(sorted(dtypes))
    return "measured", f"numbers are rounded to {names}"


def _reasoning_parser(config: RLConfig, facts: ClusterFacts) -> ValueAndReason:
    if not config.agent.is_used:
        return None, "no rollout is an episode"
    if facts.reasoning_parser is None:
        because = (
            "the chat template writes no marks of thoughts that are known; the usual"
            " ones are <think> and </think>"
        )
        return USUAL_PARSER, because
    return facts.reasoning_parser, "the marks of thoughts that the chat template writes"


def _shares_gpus(config: RolloutTaskConfig, facts: ClusterFacts) -> bool:
    # Without GPUs there is no device memory to free.
    return facts.gpus > 0 and config.placement.kind == "colocated"


_RULES: Mapping[str, Callable[[Any, ClusterFacts], ValueAndReason]] = {
    "run.resume": _resume,
    "run.threads_per_rank": _threads_per_rank,
    "data.apply_chat_template": _apply_chat_template,
    "data.template_day": _template_day,
    "agent.reasoning_parser": _reasoning_parser,
    "rollout.sleep": _sleep,
    "rollout.concurrency": _concurrency,
    "rollout.sync.transport": _transport,
    "rollout.sync.bucket_mib": _bucket_mib,
    "rollout.sync.adapter": _adapter,
    "rollout.sync.probe_every": _probe_every,
    "rollout.sync.probe_tolerance": _probe_tolerance,
}

_TRADES = [trade for backend in BACKENDS.values() for trade in backend.trades()]

AUTO_KEYS = (
    *_RULES,
    SNAPSHOT_EVERY,
    SNAPSHOT_COPIES,
    "placement.offload",
    "rollout.dtype",
    "rollout.num_replicas",
    "rollout.kv_cache_gib",
    "*.engine.dtype",
    "*.engine.num_replicas",
    "*.engine.kv_cache_gib",
    "*.backend.dtype",
    "*.backend.micro_batch_tokens_per_rank",
    *(f"*.backend.{trade.setting}" for trade in _TRADES),
)
"""The keys whose value may be `auto`; * stands for a role or a judge."""

UNUSED: Mapping[str, object] = {
    "dtype": "float32",
    "micro_batch_tokens_per_rank": CPU_MICRO_BATCH_TOKENS,
    "kv_cache_gib": CPU_KV_CACHE_GIB,
    **{trade.setting: trade.fast for trade in _TRADES},
}
"""Values of backends and engines of roles that the job does not create."""


def may_be_auto(key: str) -> bool:
    """Return whether a setting may be left to the run."""
    return any(fnmatchcase(key, pattern) for pattern in AUTO_KEYS)


# -------------------------------------------------------------------------------- steps


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
