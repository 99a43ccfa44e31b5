"""The settings of a run of any task: its folder, its length, its cluster, its record.

Deliberately not here: what the run computes (`schema`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, with_config
from typing_extensions import TypedDict

from verl_ray.config.paths import CheckpointPath, LocalPath
from verl_ray.config.section import (
    Auto,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Seed,
)


@with_config(ConfigDict(extra="forbid", strict=True))
class Threads(TypedDict):
    """CPU threads of each worker process, by the kind of its work."""

    trainers: Positive
    """Processes that compute with models on a training backend."""
    engines: Positive
    """Ranks of a rollout engine or of a judge."""
    graders: Positive
    """Processes that grade texts, by functions or a service."""


class ResolvedConfig(Section):
    """The settings that were auto, by key, with the values that a run gave them.

    A setting that has another value by now is the user's own.
    """

    cpu: dict[str, JsonValue]
    """What was resolved for a CPU."""
    gpu: dict[str, JsonValue]
    """What was resolved for GPUs."""


class RecoveryConfig(Section):
    """The cure of a run whose processes fail."""

    enabled: bool
    """Whether the run starts lost processes again and goes on from its last state; if
    not, their failure ends it. Rollout replicas are started again in any case."""
    max_restarts: NonNegative
    """Restarts without a new finished step before the run stops: of rollout replicas,
    and of all other processes. The same failure at the same step stops it at once."""
    snapshot_every: NonNegative | Literal["measured"] | Auto
    """Copy the state of every role that learns to the memory of its host every N steps,
    where a lost process finds it again; 0 = never. measured: as often as the copies
    take at most 2 % of the time. auto: measured where the memory is large enough."""
    snapshot_copies: Literal[1, 2] | Auto
    """2 = another node has a copy of each snapshot, for the loss of a whole node. auto:
    2 where there are several nodes whose memory is large enough."""

    @property
    def taken_every(self) -> int | Literal["measured"]:
        """The value of `snapshot_every` where the run recovers; 0 while it is auto.

        The other settings that are auto do not depend on it.
        """
        if not self.enabled or self.snapshot_every == "auto":
            return 0
        return self.snapshot_every

    @property
    def num_copies(self) -> int:
        """The value of `snapshot_copies`; 1 while it is auto."""
        return 1 if self.snapshot_copies == "auto" else self.snapshot_copies


class RunConfig(Section):
    """The run as a whole."""

    name: str
    """Name of the run, of its folder, and of the run in W&B."""
    dir: LocalPath
    """Folder of everything that the run writes."""
    seed: Seed
    """Root of every random stream: data order, sampling, new parameters."""
    total_steps: Positive | None
    """Training steps in all, those before a resume included; null = by total_epochs."""
    total_epochs: Positive | None
    """Times that every example of the training data is used, at least; null = by
    total_steps. The run counts the examples and records the steps as total_steps."""
    evaluate_every: NonNegative
    """Evaluate before the first step and every N steps; 0 = never."""
    checkpoint_every: NonNegative
    """Write a checkpoint every N steps, after the last one, and where a run is stopped;
    0 = never, not even then."""
    checkpoint_behind: bool
    """Go on training while a checkpoint is written, from a copy of the state in host
    memory; it counts a step later."""
    keep_checkpoints: Positive
    """Number of newest checkpoints that stay on disk, besides that of the best step.

    A step with the best evaluation so far is saved even if no checkpoint is due.
    """
    max_failed_checkpoints: NonNegative
    """Checkpoints, one after another, that a full or broken disk may prevent before the
    run stops. The next step tries again."""
    best_metric: str | None
    """Held-out metric that the best step is chosen by, as in metrics.jsonl; * stands
    for anything, and several metrics are averaged. null = the task's own: accuracy or
    reward, the mean over data sources; the loss of a supervised run."""
    best_is: Literal["highest", "lowest"] | None
    """Which value of that metric is the best; null = the lowest of a loss or a
    perplexity, else the highest."""
    early_stop: Positive | None
    """End the run after N evaluations in a row that brought no improvement of that
    metric; null = never."""
    resume: CheckpointPath
    """auto = from the newest checkpoint in run.dir if there is one; none = refuse a
    run.dir that has one; or the path of a checkpoint."""
    threads_per_rank: Positive | Threads | Auto
    """CPU threads of each worker process, or of each kind of them; auto keeps the total
    within the cores."""
    max_skipped_steps: Positive
    """Optimizer steps of a role, one after another, that may lack finite gradients and
    be skipped before the run stops."""
    stall_s: PositiveFloat
    """Longest time that a worker process may make no progress with a request, its start
    included, before the run shows where it is stuck and counts it as lost.

    What follows is set by run.recovery; a rollout replica is replaced. Progress is
    counted in rows, micro-batches, tokens or bytes: work that goes on is never late,
    however long it takes.
    """
    recovery: RecoveryConfig
    resolved: ResolvedConfig
    """What was auto, written by the run itself, so that an evaluation or an export on
    another machine resolves the same settings anew."""

    @property
    def steps(self) -> int:
        """The value of `total_steps`, once run.total_epochs is resolved."""
        assert self.total_steps is not None, (
            "the length of a run is read before its data were counted"
        )
        return self.total_steps

    @property
    def threads(self) -> Threads:
        """The value of `threads_per_rank` for each kind of process, once resolved."""
        threads = self.threads_per_rank
        assert threads != "auto", (
            "a setting is read before the configuration is resolved"
        )

        if isinstance(threads, int):
            return Threads(trainers=threads, engines=threads, graders=threads)
        return threads


class RayConfig(Section):
    """The Ray cluster."""

    address: str | None
    """Address of a running cluster; null = RAY_ADDRESS, else a new cluster for the run
    alone."""


class WandbConfig(Section):
    """The record in Weights & Biases."""

    mode: Literal["offline", "online", "disabled"]
    project: str
    entity: str | None
    group: str | None
    tags: Annotated[tuple[str, ...], Field(examples=["[first,second]"])]


class TrackingConfig(Section):
    """Destinations of the run's record, in addition to metrics.jsonl."""

    console: bool
    """Whether the terminal shows a live line per step."""
    tensorboard: bool
    wandb: WandbConfig
