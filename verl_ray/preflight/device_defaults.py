"""The values of `auto` that depend on memory: of a device, and of a node in /dev/shm.

Invariant: on GPUs settings climb the ladder (`ladder.py`) until the memory plan leaves
a tenth of the device free, first those for models that compute and learn, then those
for engines that generate. What then remains is used: caches take it first, then
micro-batches. On a CPU the values are constants. The shared memory that a run needs of
a node, and whether snapshots fit there, are pure functions of the configuration and of
facts about the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_ray.columns.batch import Batch, Kind
from verl_ray.columns.stages import Credit, LogProbs, Rollouts, Values
from verl_ray.config.load import to_tree, with_changes
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config, batch_algebra, row_tokens_per_rank
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.preflight.facts import ClusterFacts
from verl_ray.preflight.footprints import snapshot_bytes, wire_bytes
from verl_ray.preflight.ladder import (
    MICRO_BATCH_TOKENS,
    WHILE_GENERATING,
    WHILE_LEARNING,
    Rung,
)
from verl_ray.preflight.machine import GIB, MIB
from verl_ray.preflight.memory_plan import (
    UNKNOWN_KV_CACHE_GIB,
    USED_SHARE,
    cache_bounds_gib,
    growing_roles,
    memory_plan,
    wanted_cache_gib,
    with_largest_batches,
    with_largest_caches,
)
from verl_ray.preflight.model_files import model_size, remembered_sizes
from verl_ray.preflight.role_memory import Phase, phases_of
from verl_ray.settings.section import resolved

CPU_MICRO_BATCH_TOKENS = 8192
CPU_KV_CACHE_GIB = 2.0

AutoValue = tuple[str, object, str]
"""The key of an `auto`, the value that it becomes, and why."""

_WITH_ENGINES: frozenset[Phase] = frozenset({"generate", "publish"})
"""Phases in which engines are awake; models learn in the others."""


def device_values(config: Config, facts: ClusterFacts) -> Iterator[AutoValue]:
    """Yield every `auto` that depends on the memory of a device.

    Args:
        config: Configuration in which no other setting is `auto`.
        facts: The cluster.
    """
    open_settings = _OpenSettings(config, learns=facts.learns)
    if facts.gpus:
        # Plans of all rungs are of the same models.
        with remembered_sizes():
            chosen, reasons = _on_gpus(open_settings, facts.gpu_memory_bytes)
    else:
        chosen = open_settings.below_all_rungs(
            CPU_MICRO_BATCH_TOKENS,
            CPU_MICRO_BATCH_TOKENS,
            dict.fromkeys(open_settings.caches, CPU_KV_CACHE_GIB),
        )
        reasons = dict.fromkeys(open_settings.keys, "the run computes on a CPU")

    tree = to_tree(chosen)
    for key, because in reasons.items():
        yield key, _value(tree, key), because


def _value(tree: Any, key: str) -> object:
    """Return the value of a dotted key."""
    for name in key.split("."):
        tree = tree[name]
    return tree


class _OpenSettings:
    """The settings of a configuration that are `auto` and follow from memory."""

    def __init__(self, config: Config, *, learns: bool) -> None:
        self.config = config
        self.learns = learns

        self.batches = [
            name
            for name, role in config.model_roles.items()
            if role.backend.micro_batch_tokens_per_rank == "auto"
        ]
        """Roles whose micro-batches are chosen."""
        self.growing = [name for name in growing_roles(config) if name in self.batches]
        """Those whose micro-batches take what remains."""
        self.trades = dict(_trades(config))
        """Other settings of the ladder, with the value that saves nothing."""
        self.caches = {
            name: cache_bounds_gib(engine, config, learns=learns)
            for name, engine in config.active_engines(learns=learns).items()
            if engine.config.kv_cache_gib == "auto"
        }
        """The least and the largest useful cache of each engine, in GiB."""

    @property
    def on_ladder(self) -> list[str]:
        """Keys of the settings that a rung may change."""
        return [*map(_tokens_key, self.batches), *self.trades]

    @property
    def keys(self) -> list[str]:
        """Keys of all settings that are chosen."""
        return [*self.on_ladder, *map(self.cache_key, self.caches)]

    def cache_key(self, engine: str) -> str:
        """Return the key of the cache of an engine."""
        return f"{self.config.engines[engine].section}.kv_cache_gib"

    def below_all_rungs(
        self, tokens: int, growing_tokens: int, caches: Mapping[str, float]
    ) -> Config:
        """Return the configuration in which nothing is saved.

        Args:
            tokens: Micro-batch tokens per rank, where a row is not longer.
            growing_tokens: Those of the roles whose micro-batches take what remains.
            caches: Caches in GiB, by engine.
        """
        changes = dict(self.trades)
        for name in self.batches:
            most = growing_tokens if name in self.growing else tokens
            changes[_tokens_key(name)] = max(
                most, row_tokens_per_rank(self.config, name)
            )
        return self.with_caches(with_changes(self.config, changes), caches)

    def with_caches(self, config: Config, caches: Mapping[str, float]) -> Config:
        """Return a configuration with caches in GiB, by engine."""
        return with_changes(
            config, {self.cache_key(name): gib for name, gib in caches.items()}
        )


def _tokens_key(role: str) -> str:
    return f"{role}.backend.micro_batch_tokens_per_rank"


def _tokens(config: Config, role: str) -> int:
    return resolved(config.model_roles[role].backend.micro_batch_tokens_per_rank)


def _trades(config: Config) -> Iterator[tuple[str, object]]:
    """Yield the settings that trade time for memory and are `auto`, as the fastest."""
    if isinstance(config, RolloutTaskConfig) and config.placement.offload == "auto":
        yield "placement.offload", "none"
    for name, role in config.model_roles.items():
        for trade in role.backend.trades():
            if getattr(role.backend, trade.setting) == "auto":
                yield f"{name}.backend.{trade.setting}", trade.fast


# --------------------------------------------------------------------------- the ladder


def _on_gpus(
    settings: _OpenSettings, memory_bytes: int | None
) -> tuple[Config, dict[str, str]]:
    """Return the configuration with the values of a GPU, and why, by key."""
    if memory_bytes is None:
        because = "the memory of the GPUs is not known"
    elif not _has_shapes(settings.config):
        because = "the sizes of the model's layers are not known"
    else:
        for share in (USED_SHARE, 1.0):
            climb = _Climb(settings, memory_bytes, share)
            if climb.reaches_a_fit():
                return climb.config, climb.reasons
        because = f"nothing fits the {memory_bytes / GIB:.0f} GiB of a GPU, and this"
        because += " needs least"
    return _most_frugal(settings), dict.fromkeys(settings.keys, because)


def _has_shapes(config: Config) -> bool:
    """Return whether the memory of every pass can be estimated."""
    return all(
        model_size(name, role, config).shape is not None
        for name, role in config.model_roles.items()
    )


def _most_frugal(settings: _OpenSettings) -> Config:
    """Return the configuration on all rungs; its caches are modest, and hold a row."""
    modest = {
        name: max(least, min(most, UNKNOWN_KV_CACHE_GIB))
        for name, (least, most) in settings.caches.items()
    }
    tokens = (MICRO_BATCH_TOKENS[0], MICRO_BATCH_TOKENS[-1])
    config = settings.below_all_rungs(*tokens, modest)
    for rung in (*WHILE_LEARNING, *WHILE_GENERATING):
        config = with_changes(config, _steps(rung, config, settings))
    return config


def _steps(rung: Rung, config: Config, settings: _OpenSettings) -> dict[str, object]:
    """Return what a rung changes of the settings that are `auto`."""
    on_ladder = settings.on_ladder
    return {key: value for key, value in rung(config) if key in on_ladder}


class _Climb:
    """A climb of the ladder with devices of some size, one rung after the other.

    Attributes:
        config: The configuration on the rung that was reached.
        reasons: Why each setting has its value there, by key.
    """

    def __init__(
        self, settings: _OpenSettings, memory_bytes: int, share: float
    ) -> None:
        self._settings = settings
        self._usable_bytes = share * memory_bytes
        self._size = f"{self._usable_bytes / GIB:.1f} GiB of a GPU"
        if share == 1.0:
            self._size += ", since nothing leaves a tenth of it free"

        least = {name: least for name, (least, _) in settings.caches.items()}
        tokens = (MICRO_BATCH_TOKENS[0], MICRO_BATCH_TOKENS[-1])
        self.config = settings.below_all_rungs(*tokens, least)
        because = f"nothing has to be saved to fit {self._size}"
        self.reasons = dict.fromkeys(settings.keys, because)

    def reaches_a_fit(self) -> bool:
        """Climb as far as needed; return whether everything fits then."""
        phases = phases_of(self.config, learns=self._settings.learns)
        learning = [phase for phase in phases if phase not in _WITH_ENGINES]
        self._climb(WHILE_LEARNING, learning)

        learns = self._settings.learns
        half_caches = {
            name: wanted_cache_gib(engine, self.config, learns=learns)
            for name, engine in self.config.engines.items()
            if name in self._settings.caches
        }
        self.config = self._settings.with_caches(self.config, half_caches)
        generating = [phase for phase in phases if phase in _WITH_ENGINES]
        self._climb(WHILE_GENERATING, generating)
        return self._takes_what_remains()

    def _climb(self, rungs: Sequence[Rung], phases: Sequence[Phase]) -> None:
        """Take one rung after the other, until some phases fit."""
        for rung in rungs:
            needed, phase = self._fullest(self.config, phases)
            if needed <= self._usable_bytes:
                return
            steps = _steps(rung, self.config, self._settings)
            because = f"else {phase} needs {needed / GIB:.1f}, to fit {self._size}"
            self.reasons |= dict.fromkeys(steps, because)
            self.config = with_changes(self.config, steps)

    def _fullest(self, config: Config, phases: Sequence[Phase]) -> tuple[int, str]:
        """Return the bytes of the fullest device in some phases, and the phase."""
        plan = memory_plan(config, on_gpus=True, learns=self._settings.learns)
        sizes = [(plan.device_bytes(phase), phase) for phase in phases]
        return max(sizes, default=(0, ""))

    def _fits(self, config: Config) -> bool:
        phases = phases_of(config, learns=self._settings.learns)
        return self._fullest(config, phases)[0] <= self._usable_bytes

    def _takes_what_remains(self) -> bool:
        """Let caches, then micro-batches grow; return whether everything fits."""
        settings = self._settings
        cached = with_largest_caches(
            self.config, settings.caches, self._usable_bytes, learns=settings.learns
        )
        if cached is None or not self._fits(cached):
            return False
        for name, (_, most) in settings.caches.items():
            because = f"all its rows could use {most:.1f}; it has what remains"
            if cached.engines[name].config.kv_cache_gib == most:
                because = "as much as the rows that it runs at once can use"
            self.reasons[settings.cache_key(name)] = because

        self.config = cached
        others = [name for name in settings.batches if name not in settings.growing]
        for names in (others, settings.growing):
            larger = with_largest_batches(self.config, names, self._fits)
            for name in names:
                if _tokens(larger, name) != _tokens(self.config, name):
                    because = f"the most beside all else to fit {self._size}"
                    self.reasons[_tokens_key(name)] = because
            self.config = larger
        return True


# ------------------------------------------------------------------------ shared memory


def _bytes_per_token(stage: type[Batch], *without: str) -> int:
    """Return the bytes of a token in all token columns of a stage, but for some."""
    return sum(
        column.dtype.itemsize
        for name, column in stage.columns().items()
        if column.kind is Kind.TOKEN and name not in without
    )


_TOP = "top_tokens", "top_log_probs"

# The reference is asked for log-probs alone.
BYTES_PER_TOKEN_OF_A_ROW = (
    _bytes_per_token(Rollouts, "routed_experts", "candidates")
    + _bytes_per_token(LogProbs, *_TOP)
    + _bytes_per_token(LogProbs, "entropy", "squared_probs", *_TOP)
    + _bytes_per_token(Values)
    + _bytes_per_token(Credit)
)
"""Bytes of a token at most: itself, its mask and what a step adds to a row, which are
log-probs of sampler, policy and reference, entropy, squared probabilities, values,
advantages and returns. Recorded experts come besides, and a teacher's most probable
tokens."""

OBJECT_STORE_FLOOR_BYTES = 128 * MIB
"""Smallest object store. Ray refuses to start with much less."""

LARGEST_SHARE = 0.9
"""Share of a host's memory that a run with snapshots may take, by prediction."""

SNAPSHOT_EVERY = "run.recovery.snapshot_every"

SNAPSHOT_COPIES = "run.recovery.snapshot_copies"


def _bytes_per_row_token(config: Config) -> int:
    """Return the bytes of a token at most, with its experts where they are recorded."""
    routing = 0
    if isinstance(config, RolloutTaskConfig) and config.rollout.routing_replay:
        shape = model_size("actor", config.actor, config).shape
        routing = 0 if shape is None else shape.routing_bytes
    return BYTES_PER_TOKEN_OF_A_ROW + routing


def _teacher_bytes_per_token(config: Config) -> int:
    """Return the bytes of a teacher's most probable tokens in the place of one."""
    if not isinstance(config, RLConfig) or config.distill is None:
        return 0
    columns = LogProbs.columns()
    return config.distill.num_top * sum(columns[name].dtype.itemsize for name in _TOP)


def waiting_bytes(config: Config) -> int:
    """Return the bytes of the rows that wait between two steps, at most.

    They are of batches that are drawn ahead, and of groups that may be replayed.
    """
    if not isinstance(config, RolloutTaskConfig):
        return 0
    sizes = batch_algebra(config)
    rows = sizes.rows * config.rollout.staleness + _replayed_rows(config)
    return rows * sizes.max_row_tokens * _bytes_per_row_token(config)


def shared_memory_bytes(config: Config, nodes: int) -> int:
    """Return a node's shared memory, which its rows and the weights travel through.

    The rows of a step are shared out over the nodes. Where rollouts are older than the
    policy, so are those of the steps that follow. Snapshots lie there, too; each of the
    two refers to the rows that were finished when it was taken.
    """
    sizes = batch_algebra(config)
    num_snapshots = 2 if config.run.recovery.taken_every else 0
    per_token = _bytes_per_row_token(config) + _teacher_bytes_per_token(config)
    rows = sizes.rows * sizes.max_row_tokens * per_token
    rows += waiting_bytes(config) * (1 + num_snapshots)
    object_store = max(rows // nodes, OBJECT_STORE_FLOOR_BYTES)
    wire = wire_bytes(config) if isinstance(config, RolloutTaskConfig) else 0

    snapshots = 0
    if config.run.recovery.taken_every:
        rank_snapshots = snapshot_bytes(config).items()
        snapshots = sum(
            config.model_roles[name].num_ranks * nbytes
            for name, nbytes in rank_snapshots
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
    replayed_rows = (replay_age + 1) * config.rows_per_step
    return min(stored * config.rollout.stream_rows, replayed_rows)


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
