"""The values of `auto` that depend on memory: of a device, and of a node in /dev/shm.

Invariant: of all levels that leave a tenth of the device free by prediction, the
fastest by the time model is taken. The search passes over no option that could be
faster; of options that take equally long, an earlier one is preferred. On a CPU the
values are constants. The shared memory that a run needs of a node, and whether
snapshots fit there, are pure functions of the configuration and of facts about the
cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeVar, get_args

from verl_ray.config.load import to_tree, with_changes
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config, batch_algebra, row_tokens_per_rank
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.batch import Batch, Kind
from verl_ray.data.stages import Credit, LogProbs, Rollouts, Values
from verl_ray.preflight.assumptions import Links
from verl_ray.preflight.facts import ClusterFacts
from verl_ray.preflight.footprints import snapshot_bytes, wire_bytes
from verl_ray.preflight.machine import ASSUMED_LINK_GBIT_PER_S, GIB, GPUS, MIB
from verl_ray.preflight.memory_plan import (
    MICRO_BATCH_TOKENS,
    UNKNOWN_KV_CACHE_GIB,
    USED_SHARE,
    cache_bounds_gib,
    growing_roles,
    memory_plan,
    with_larger_batches,
    with_largest_batches,
    with_largest_caches,
)
from verl_ray.preflight.model_files import model_size, remembered_sizes
from verl_ray.preflight.step_time import step_time

CPU_MICRO_BATCH_TOKENS = 8192
CPU_KV_CACHE_GIB = 2.0

ASSUMED_GPU = GPUS["H100-80G"]
"""GPUs whose kind is not known are taken to be as fast as these."""

Offload = Literal["none", "optimizer", "all"]
Accumulate = Literal["whole", "sharded"]

AutoValue = tuple[str, object, str]
"""The key of an `auto`, the value that it becomes, and why."""


@dataclass(frozen=True)
class Level:
    """Values of the settings that trade time for memory, the same for every role."""

    recompute: bool
    offload: Offload
    accumulate: Accumulate
    tokens: int
    """Micro-batch tokens per rank, where a row is not longer."""
    growing_tokens: int = MICRO_BATCH_TOKENS[-1]
    """Those of the roles whose micro-batches take what remains, at least."""

    def changes(self, config: Config, keys: Iterable[str]) -> dict[str, object]:
        """Return what settings become on this level, by key."""
        return {key: self._value(key, config) for key in keys}

    def _value(self, key: str, config: Config) -> object:
        section, _, name = key.rpartition(".")
        if name == "offload":
            return self.offload if config.shares_processes else "none"
        if name == "accumulate":
            return self.accumulate

        role = section.removesuffix(".backend")
        if name == "micro_batch_tokens_per_rank":
            grows = role in growing_roles(config)
            tokens = self.growing_tokens if grows else self.tokens
            return max(tokens, row_tokens_per_rank(config, role))

        # A model that does not learn keeps no activations.
        recompute = self.recompute and role in config.learners
        if name == "recompute":
            return "full" if recompute else "none"
        return recompute


ON_CPU = Level(
    False,
    "none",
    "whole",
    CPU_MICRO_BATCH_TOKENS,
    growing_tokens=CPU_MICRO_BATCH_TOKENS,
)

LEVELS = tuple(
    Level(recompute, offload, accumulate, tokens)
    for recompute, offload, accumulate, tokens in product(
        (False, True),
        get_args(Offload),
        get_args(Accumulate),
        MICRO_BATCH_TOKENS,
    )
)
"""The last one needs least memory. Of those that take equally long, the first counts.

To compute every layer again costs a third of an update. Offloading costs two copies of
the state per step. Sharded sums of gradients, and smaller micro-batches, cost
exchanges, which hide behind computation where links are fast.
"""

LEVEL_SETTINGS = (
    "micro_batch_tokens_per_rank",
    "accumulate",
    "activation_checkpointing",
    "recompute",
)
"""The settings of a backend that a level has a value for."""


def device_values(config: Config, facts: ClusterFacts) -> Iterator[AutoValue]:
    """Yield every `auto` that depends on the memory of a device.

    Args:
        config: Configuration in which no other setting is `auto`.
        facts: The cluster.
    """
    search = _Search(config, facts)
    if facts.gpus:
        # Plans of all levels are of the same models.
        with remembered_sizes():
            chosen, because = search.chosen()
    else:
        chosen = search.on(ON_CPU, dict.fromkeys(search.engines, CPU_KV_CACHE_GIB))
        because = "the run computes on a CPU"

    tree = to_tree(chosen)
    for key in search.level_keys:
        yield key, _value(tree, key), because

    for name in search.engines:
        engine = chosen.engines[name]
        key = f"{engine.section}.kv_cache_gib"
        cache_gib = _value(tree, key)
        if facts.gpus:
            _, most = cache_bounds_gib(engine, chosen, learns=facts.learns)
            reason = f"all its rows could use {most:.1f}; {because}"
            if cache_gib == most:
                reason = "as much as the rows that it runs at once can use"
            yield key, cache_gib, reason
        else:
            yield key, cache_gib, because


def _value(tree: Any, key: str) -> object:
    """Return the value of a dotted key."""
    for name in key.split("."):
        tree = tree[name]
    return tree


def _level_keys(config: Config) -> Iterator[str]:
    """Yield the keys of the settings of a level that are `auto`."""
    if isinstance(config, RolloutTaskConfig) and config.placement.offload == "auto":
        yield "placement.offload"

    for name, role in config.model_roles.items():
        for setting in LEVEL_SETTINGS:
            if getattr(role.backend, setting, None) == "auto":
                yield f"{name}.backend.{setting}"


class _Search:
    """The search for the fastest level that fits a GPU."""

    def __init__(self, config: Config, facts: ClusterFacts) -> None:
        self._config = config
        self._facts = facts
        self._links, self._assumed = _links(facts)

        self.level_keys = tuple(_level_keys(config))
        self.engines = tuple(
            name
            for name, engine in config.active_engines(learns=facts.learns).items()
            if engine.config.kv_cache_gib == "auto"
        )
        self._growing = [
            name
            for name in growing_roles(config)
            if f"{name}.backend.micro_batch_tokens_per_rank" in self.level_keys
        ]

    def on(self, level: Level, caches: dict[str, float]) -> Config:
        """Return the configuration on a level, with caches in GiB by engine."""
        changes = level.changes(self._config, self.level_keys)
        for name, cache_gib in caches.items():
            section = self._config.engines[name].section
            changes[f"{section}.kv_cache_gib"] = cache_gib
        return with_changes(self._config, changes)

    def chosen(self) -> tuple[Config, str]:
        """Return the configuration with the values of a GPU, and why."""
        memory_bytes = self._facts.gpu_memory_bytes
        if memory_bytes is None:
            return self._most_frugal(), "the memory of the GPUs is not known"
        if not self._has_shapes():
            return self._most_frugal(), "the sizes of the model's layers are not known"

        size = f"the {memory_bytes / GIB:.0f} GiB of a GPU"
        for share in (USED_SHARE, 1.0):
            config = self._fastest(share * memory_bytes)
            if config is None:
                continue
            because = f"the fastest that fits {size}, by estimate"
            if share == 1.0:
                because = f"nothing leaves a tenth of {size} free; {because}"
            if self._assumed:
                because += f"; assumed is {self._assumed}"
            return config, because

        return self._most_frugal(), f"nothing fits {size}, and this needs least"

    def _has_shapes(self) -> bool:
        """Return whether memory and time of every pass can be estimated."""
        config = self._config
        return all(
            model_size(name, role, config).shape is not None
            for name, role in config.model_roles.items()
        )

    def _fastest(self, usable_bytes: float) -> Config | None:
        """Return the fastest configuration that fits; None if there is none.

        Args:
            usable_bytes: Bytes of a device that may be filled.
        """

        learns = self._facts.learns

        def fits(config: Config) -> bool:
            plan = memory_plan(config, on_gpus=True, learns=learns)
            _, needed = plan.fullest(on_device=True)
            return needed <= usable_bytes

        def fitted(level: Level) -> Iterator[Config]:
            least = self.on(level, self._caches(smallest=True))
            cached = with_largest_caches(
                least, self.engines, usable_bytes, learns=learns
            )
            if cached is not None and fits(cached):
                yield with_largest_batches(cached, self._growing, fits)

        return fastest(
            LEVELS, least_s=self._least_s, fitted=fitted, seconds=self._seconds
        )

    def _least_s(self, level: Level) -> float:
        """Return the time on a level if memory were no matter for all else."""
        config = self.on(level, self._caches(smallest=False))
        larger = with_larger_batches(config, self._growing, MICRO_BATCH_TOKENS[0])
        return self._seconds(larger)

    def _seconds(self, config: Config) -> float:
        """Return the time of a step; differences below a millisecond are none."""
        return round(step_time(config, self._links).total_s, 3)

    def _most_frugal(self) -> Config:
        """Return the configuration on the level that needs least.

        Its caches hold a row, and no more than is modest.
        """
        least = self._caches(smallest=True)
        most = self._caches(smallest=False)
        modest = {
            name: max(least[name], min(most[name], UNKNOWN_KV_CACHE_GIB))
            for name in self.engines
        }
        return self.on(LEVELS[-1], modest)

    def _caches(self, *, smallest: bool) -> dict[str, float]:
        """Return the least or the largest useful cache of each engine, in GiB."""
        config = self._config
        learns = self._facts.learns
        caches = {}
        for name in self.engines:
            least, most = cache_bounds_gib(config.engines[name], config, learns=learns)
            caches[name] = least if smallest else most
        return caches


def _links(facts: ClusterFacts) -> tuple[Links, str]:
    """Return the links of a cluster's GPUs, and what was assumed of them."""
    assumed = []
    gpu = facts.gpu
    if gpu is None:
        gpu = ASSUMED_GPU
        assumed.append(f"gpu={gpu.name}")

    link = facts.link_bytes_per_s
    if link is None:
        link = ASSUMED_LINK_GBIT_PER_S * 10**9 / 8
        # Nothing goes over it on a single node.
        if facts.nodes > 1:
            assumed.append(f"link={ASSUMED_LINK_GBIT_PER_S}G")

    gpus_per_node = max(1, -(-facts.gpus // facts.nodes))
    return Links.between(gpu, gpus_per_node, link), ",".join(assumed)


# --------------------------------------------------------------------------- the search

Option = TypeVar("Option")
Fitted = TypeVar("Fitted")


def fastest(
    options: Iterable[Option],
    *,
    least_s: Callable[[Option], float],
    fitted: Callable[[Option], Iterable[Fitted]],
    seconds: Callable[[Fitted], float],
    is_allowed: Callable[[Fitted], bool] = lambda _: True,
) -> Fitted | None:
    """Return the fastest form of an option that fits; None if there is none.

    Options are visited in the order of their lower bounds, until no bound is lower than
    the best time.

    Args:
        options: What to choose among.
        least_s: A lower bound of the time of each form of an option.
        fitted: The forms of an option that fit.
        seconds: The time of such a form.
        is_allowed: Whether nothing else prevents a form; called for those alone that
            are faster than all before them.
    """
    bounds = [(least_s(option), index, option) for index, option in enumerate(options)]
    bounds.sort(key=lambda entry: entry[:2])

    best: Fitted | None = None
    best_s = float("inf")
    for bound, _, option in bounds:
        if bound >= best_s:
            break
        for form in fitted(option):
            form_s = seconds(form)
            if form_s < best_s and is_allowed(form):
                best, best_s = form, form_s
    return best


# ------------------------------------------------------------------------ shared memory


def _bytes_per_token(stage: type[Batch], *without: str) -> int:
    """Return the bytes of a token in all token columns of a stage, but for some."""
    return sum(
        column.dtype.itemsize
        for name, column in stage.columns().items()
        if column.kind is Kind.TOKEN and name not in without
    )


# The reference is asked for log-probs alone.
BYTES_PER_TOKEN_OF_A_ROW = (
    _bytes_per_token(Rollouts)
    + _bytes_per_token(LogProbs)
    + _bytes_per_token(LogProbs, "entropy", "squared_probs")
    + _bytes_per_token(Values)
    + _bytes_per_token(Credit)
)
"""Bytes of a token at most: itself, its mask and what a step adds to a row, which are
log-probs of sampler, policy and reference, entropy, squared probabilities, values,
advantages and returns."""

OBJECT_STORE_FLOOR_BYTES = 128 * MIB
"""Smallest object store. Ray refuses to start with much less."""

LARGEST_SHARE = 0.9
"""Share of a host's memory that a run with snapshots may take, by prediction."""

SNAPSHOT_EVERY = "run.recovery.snapshot_every"

SNAPSHOT_COPIES = "run.recovery.snapshot_copies"


def waiting_bytes(config: Config) -> int:
    """Return the bytes of the rows that wait between two steps, at most.

    They are of batches that are drawn ahead, and of groups that may be replayed.
    """
    if not isinstance(config, RolloutTaskConfig):
        return 0
    sizes = batch_algebra(config)
    rows = sizes.rows * config.rollout.staleness + _replayed_rows(config)
    return rows * sizes.max_row_tokens * BYTES_PER_TOKEN_OF_A_ROW


def shared_memory_bytes(config: Config, nodes: int) -> int:
    """Return a node's shared memory, which its rows and the weights travel through.

    The rows of a step are shared out over the nodes. Where rollouts are older than the
    policy, so are those of the steps that follow. Snapshots lie there, too; each of the
    two refers to the rows that were finished when it was taken.
    """
    sizes = batch_algebra(config)
    num_snapshots = 2 if config.run.recovery.taken_every else 0
    rows = sizes.rows * sizes.max_row_tokens * BYTES_PER_TOKEN_OF_A_ROW
    rows += waiting_bytes(config) * (1 + num_snapshots)
    object_store = max(rows // nodes, OBJECT_STORE_FLOOR_BYTES)
    wire = wire_bytes(config) if isinstance(config, RolloutTaskConfig) else 0

    snapshots = 0
    if config.run.recovery.taken_every:
        of_ranks = snapshot_bytes(config).items()
        snapshots = sum(
            config.model_roles[name].num_ranks * nbytes for name, nbytes in of_ranks
        )
    return object_store + wire + snapshots // nodes


def _replayed_rows(config: Config) -> int:
    """Return how many rows of earlier steps are in memory, to be replayed.

    A row keeps those alive that were stored with it, of any groups of its step.
    """
    if not isinstance(config, RLConfig) or config.algorithm.replay is None:
        return 0
    replay_age = config.algorithm.replay_age
    assert replay_age is not None, "it goes with replay"
    stored = config.algorithm.replay * config.rollout.group_size
    of_steps = (replay_age + 1) * config.rows_per_step
    return min(stored * config.rollout.stream_rows, of_steps)


def host_values(config: Config, facts: ClusterFacts) -> Iterator[AutoValue]:
    """Yield every `auto` that depends on the memory of the hosts, and why.

    Args:
        config: Configuration in which no other setting is `auto`.
        facts: The cluster.
    """
    recovery = config.run.recovery
    if recovery.snapshot_every == "auto":
        yield SNAPSHOT_EVERY, *_snapshot_rhythm(config, facts)
    if recovery.snapshot_copies == "auto":
        yield SNAPSHOT_COPIES, *_snapshot_copies(config, facts)


def _snapshot_rhythm(config: Config, facts: ClusterFacts) -> tuple[int | str, str]:
    """Return how often snapshots are taken, and why."""
    if not facts.learns or not config.run.recovery.enabled:
        return 0, "the run does not go back"
    taken = with_changes(config, {SNAPSHOT_EVERY: "measured"})
    fit, because = _fit(taken, facts)
    return ("measured" if fit else 0), because


def _snapshot_copies(config: Config, facts: ClusterFacts) -> tuple[int, str]:
    """Return how many copies of a snapshot there are, and why."""
    if facts.nodes == 1:
        return 1, "there is one node"
    if config.run.recovery.snapshot_every == "auto":
        config = with_changes(config, {SNAPSHOT_EVERY: "measured"})
    if not facts.learns or not config.run.recovery.taken_every:
        return 1, "the run takes no snapshots"
    fit, because = _fit(with_changes(config, {SNAPSHOT_COPIES: 2}), facts)
    return (2 if fit else 1), because


def _fit(config: Config, facts: ClusterFacts) -> tuple[bool, str]:
    """Return whether the hosts have room for the snapshots of a run, and why."""
    if not facts.memory_bytes:
        return False, "nothing is known of the memory of the hosts"
    copies = "snapshots" if config.run.recovery.num_copies == 1 else "second copies"
    shared = shared_memory_bytes(config, facts.nodes)
    if shared > facts.shm_free_bytes:
        free_gib = facts.shm_free_bytes / GIB
        return False, f"/dev/shm has {free_gib:.1f} GiB of {shared / GIB:.1f} free"

    plan = memory_plan(config, on_gpus=facts.gpus > 0)
    needed = max(
        plan.node_bytes(phase, facts.gpus // facts.nodes)
        if facts.gpus
        else plan.host_bytes(phase, nodes=facts.nodes) // facts.nodes
        for phase in plan.phases
    )
    size = f"{facts.memory_bytes / GIB:.1f} GiB, and {needed / GIB:.1f} are predicted"
    if needed > LARGEST_SHARE * facts.memory_bytes:
        return False, f"a host has {size} with {copies}"
    return True, f"a host has {size}"
