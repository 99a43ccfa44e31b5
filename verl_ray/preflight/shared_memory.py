"""Shared memory that a run needs of a node, in /dev/shm, and whether snapshots fit.

Invariant: a pure function of the configuration and of facts about the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_ray.config.algebra import batch_algebra
from verl_ray.config.load import with_changes
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.schema import Config
from verl_ray.config.tasks.rl import RLConfig
from verl_ray.data.batch import Batch, Kind
from verl_ray.data.stages import Credit, LogProbs, Rollouts, Values
from verl_ray.preflight.device_defaults import AutoValue
from verl_ray.preflight.facts import ClusterFacts
from verl_ray.preflight.footprints import snapshot_bytes, wire_bytes
from verl_ray.preflight.machine import GIB, MIB
from verl_ray.preflight.memory_plan import memory_plan


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


def shared_memory_bytes(config: Config, nodes: int) -> int:
    """Return a node's shared memory, which its rows and the weights travel through.

    The rows of a step are shared out over the nodes. Where rollouts are older than the
    policy, so are those of the steps that follow. Snapshots lie there, too; each of the
    two refers to the rows that were finished when it was taken.
    """
    sizes = batch_algebra(config)
    bytes_per_row = sizes.max_row_tokens * BYTES_PER_TOKEN_OF_A_ROW
    rows = sizes.rows * bytes_per_row
    if isinstance(config, RolloutTaskConfig):
        num_snapshots = 2 if config.run.recovery.taken_every else 0
        rows *= 1 + config.rollout.staleness * (1 + num_snapshots)
        rows += _replayed_rows(config) * (1 + num_snapshots) * bytes_per_row
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
