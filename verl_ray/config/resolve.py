"""What every `auto` of a configuration stands for, decided once, before anything starts.

Invariant: a pure function of the configuration and a few facts; what it returns holds no `auto`, and resolves to
itself. Whoever reads such a setting later does so through `section.resolved`, without which mypy complains.
Deliberately not here: how the facts are found (`verl_ray/preflight/facts.py`), and settings that vLLM calls auto.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from verl_ray.config.drawing import DrawingConfig
from verl_ray.config.load import parse, to_tree
from verl_ray.config.rollout import HEAD, VLLM_LORA_RANKS
from verl_ray.config.schema import Config

MIB = 2**20

PROBE_EVERY, PROBE_EVERY_ON_GPUS = 1, 10
"""Syncs from one probe to the next: on a CPU vLLM packs every weight that it receives."""

PROBE_TOLERANCE = 1e-3
"""Largest difference of a log-prob, where both sides compute in float32."""

BUCKETS = 12
"""Into how many a model is cut: so little has to come before the first can be loaded, and few calls are made."""

BUCKET_MIB = (16, 512)
"""The smallest bucket, and the largest."""

C = TypeVar("C", bound=Config)

Answer = tuple[object, str]  # the value, and why


@dataclass(frozen=True)
class Facts:
    """What a resolution depends on besides the configuration."""

    nodes: int
    """Of the cluster, those that can hold a process."""
    cores: int
    """Of the node that has the fewest."""
    gpus: int
    """Of all nodes."""
    has_chat_template: bool
    """Of the tokenizer that prompts go through."""
    sent_bytes: int
    """The weights of the actor as they travel; 0 where none do."""
    checkpoint: str | None
    """The newest one of the run; None = it has none yet."""
    learns: bool = True
    """False = for one evaluation alone, which starts fewer processes."""


@dataclass(frozen=True)
class Resolution:
    """What one `auto` became, as plain values."""

    key: str
    value: object
    because: str


def resolve(config: C, facts: Facts) -> C:
    """The same configuration with every `auto` replaced by what it stands for on this cluster."""
    tree = to_tree(config)
    for one in resolutions(config, facts):
        section, _, name = one.key.rpartition(".")
        _section(tree, section)[name] = one.value
    return parse(tree, type(config))


def shared_anew(config: C) -> C:
    """A resolved configuration for other processes, or another machine: cores are to be shared out anew, unless
    somebody has said how many threads there are."""
    if isinstance(config.run.threads_per_rank, int):
        return config
    run = config.run.model_copy(update={"threads_per_rank": "auto"})
    return config.model_copy(update={"run": run})


def resolutions(config: Config, facts: Facts) -> list[Resolution]:
    """What each `auto` of this configuration becomes; settings that say something else are not among them."""
    tree = to_tree(config)
    found = []
    for key, rule in _RULES.items():
        section, _, name = key.rpartition(".")
        if _section(tree, section).get(name) == "auto":
            value, because = rule(config, facts)
            found.append(Resolution(key, value, because))
    return found


def _section(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The section with this dotted key; an empty one where this task has none."""
    node: Any = tree
    for part in key.split("."):
        node = node.get(part, {})
    assert isinstance(node, dict)
    return node


def _resume(_: Config, facts: Facts) -> Answer:
    if facts.checkpoint is None:
        return "none", "run.dir has no checkpoint"
    return facts.checkpoint, "it is the newest checkpoint in run.dir"


def _threads_per_rank(config: Config, facts: Facts) -> Answer:
    """Trainers and rollout engines take turns, so each may use all cores of its node; processes of one kind, and judges
    beside rollouts, work at the same time and divide them. Graders of texts need no more than one."""
    training, drawing = _computing_ranks(config, learns=facts.learns)

    def share(ranks: int) -> int:
        return max(1, facts.cores // max(1, ranks))

    shares = {"trainers": share(training), "engines": share(drawing), "graders": 1}
    in_turn = f", and in turn by {drawing} of engines" if drawing else ""
    return shares, f"{facts.cores} cores are shared by {training} ranks of trainers{in_turn}"


def _computing_ranks(config: Config, *, learns: bool) -> tuple[int, int]:
    """Processes that train, and ranks of engines that draw; in each case all at the same time."""
    graders = config.graders_at_work(learns=learns)
    drawing = sum(one.ranks for name, one in config.engines.items() if name not in config.judges or name in graders)
    homes = {
        role.backend.kind if config.shares_processes else name: role.num_ranks
        for name, role in config.model_roles.items()
        if learns or name == config.answers or name in graders
    }
    return sum(homes.values()), drawing


def _apply_chat_template(_: Config, facts: Facts) -> Answer:
    return facts.has_chat_template, f"the tokenizer has {'a' if facts.has_chat_template else 'no'} chat template"


def _offload(config: DrawingConfig, facts: Facts) -> Answer:
    if _shares_gpus(config, facts):
        return "all", "rollout engines and trainers share GPUs"
    return "none", "rollout engines and trainers share no GPU"


def _sleep(config: DrawingConfig, facts: Facts) -> Answer:
    if not _shares_gpus(config, facts):
        return "never", "rollout engines and trainers share no GPU"
    if config.rollout.sync.adapter == "alone":
        return "kv_cache", "they share GPUs, and rollout.sync.adapter=alone keeps the model where it is"
    return "weights", "rollout engines and trainers share GPUs, and each sync brings new weights"


def _transport(_: DrawingConfig, facts: Facts) -> Answer:
    if facts.nodes == 1:
        return "shared_memory", "the cluster is one node"
    return "host_broadcast", f"the cluster is {facts.nodes} nodes, and a broadcast between GPUs has not run yet"


def _bucket_mib(_: DrawingConfig, facts: Facts) -> Answer:
    least, most = BUCKET_MIB
    share = -(-facts.sent_bytes // (BUCKETS * MIB))
    because = f"a part in {BUCKETS} of {facts.sent_bytes / MIB:.0f} MiB, at least {least} and at most {most}"
    return min(max(share, least), most), because


def _adapter(config: DrawingConfig, facts: Facts) -> Answer:
    lora, sleep = config.actor.lora, config.rollout.sleep
    if lora.rank == 0:
        return "merged", "there is no adapter"
    if lora.rank > VLLM_LORA_RANKS[-1] or HEAD in lora.targets:
        return "merged", "the rollout engine does not take an adapter of this rank, or on these layers"
    if (_sleep(config, facts)[0] if sleep == "auto" else sleep) == "weights":
        return "merged", "rollout engines free their weights while trainers work"
    return "alone", "rollout engines keep the model"


def _probe_every(_: DrawingConfig, facts: Facts) -> Answer:
    if facts.gpus:
        return PROBE_EVERY_ON_GPUS, "fingerprints prove every sync, and on GPUs engines do not pack what they receive"
    return PROBE_EVERY, "on a CPU the engine packs what it receives"


def _probe_tolerance(config: DrawingConfig, _: Facts) -> Answer:
    dtypes = {config.actor.backend.dtype, config.rollout.dtype}
    if dtypes == {"float32"}:
        return PROBE_TOLERANCE, "trainer and rollout engine compute in float32"
    return "measured", f"{' and '.join(sorted(dtypes))} round"


def _shares_gpus(config: DrawingConfig, facts: Facts) -> bool:
    return facts.gpus > 0 and config.placement.kind == "colocated"


_RULES: Mapping[str, Callable[[Any, Facts], Answer]] = {
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
