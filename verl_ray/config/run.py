"""What a run of any task has: its folder and length, its cluster, and where its record goes.

Deliberately not here: what the run computes (`schema`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from verl_ray.config.section import Auto, NonNegative, Positive, PositiveFloat, Section, Seed


@with_config(ConfigDict(extra="forbid", strict=True))
class Threads(TypedDict):
    """CPU threads of each worker process, by what it does."""

    trainers: Positive
    """Computes with models on a training backend."""
    engines: Positive
    """Is a rank of a rollout engine, or of a judge."""
    graders: Positive
    """Grades texts, by functions or a service."""


class RunConfig(Section):
    name: str
    """Name of the run: its folder, and its name in W&B."""
    dir: str
    """Where everything the run writes goes."""
    seed: Seed
    """Root of every random stream: data order, sampling, new parameters."""
    total_steps: Positive
    """Training steps in all, those before a resume included."""
    evaluate_every: NonNegative
    """Evaluate before the first step and every N steps; 0 = never."""
    checkpoint_every: NonNegative
    """Write a checkpoint every N steps, after the last one, and where a run is stopped; 0 = never, not even then."""
    checkpoint_behind: bool
    """Go on training while a checkpoint is written, from a copy of the state in host memory; it counts a step later."""
    keep_checkpoints: Positive
    """How many of the newest checkpoints stay on disk."""
    resume: str
    """auto = from the newest checkpoint in run.dir if there is one; none = refuse a run.dir that has one; or a path."""
    threads_per_rank: Positive | Threads | Auto
    """CPU threads of each worker process, or of each kind of them; auto keeps the total within the cores."""
    max_skipped_steps: Positive
    """Optimizer steps of a role without finite gradients, one after another, before the run stops. Each is skipped."""
    stall_s: PositiveFloat
    """How long a worker process may make no progress with what it was asked for, its start included, before the run
    stops and shows where it is stuck; a rollout replica is replaced. Progress are rows, micro-batches, tokens or bytes:
    work that goes on is never late, however long it takes."""

    @property
    def threads(self) -> Threads:
        """`threads_per_rank`, once it is resolved."""
        given = self.threads_per_rank
        assert given != "auto", "a setting is read before the configuration is resolved"
        return Threads(trainers=given, engines=given, graders=given) if isinstance(given, int) else given


class RayConfig(Section):
    address: str | None
    """Address of a running cluster; null = RAY_ADDRESS, else a cluster of the run's own."""


class WandbConfig(Section):
    mode: Literal["offline", "online", "disabled"]
    project: str
    entity: str | None
    group: str | None
    tags: Annotated[tuple[str, ...], Field(examples=["[first,second]"])]


class TrackingConfig(Section):
    console: bool
    """A live line per step."""
    tensorboard: bool
    wandb: WandbConfig
