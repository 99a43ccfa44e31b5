"""The settings of a run of any task: its folder, its length, its cluster, its record.

Invariant: a setting of something that the run does not do is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, with_config
from typing_extensions import TypedDict

from verl_ray.config.optimizers import Pace
from verl_ray.config.paths import CheckpointPath, LocalPath
from verl_ray.errors import Problem
from verl_ray.settings.section import (
    Auto,
    NonNegative,
    NonNegativeFloat,
    OverriddenKeys,
    Positive,
    PositiveFloat,
    Section,
    Seed,
    ZeroIsNever,
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
    max_wait_s: NonNegativeFloat
    """Longest time in seconds that a run whose driver was replaced waits for what
    refuses its next start and may pass: a full disk, a taken port, a service that is
    away. 0 = a refusal ends it."""
    snapshot_every: ZeroIsNever | Literal["measured"] | Auto
    """Copy the state of every role that learns to the memory of its host every N steps,
    where a lost process finds it again; 0 = never. measured: as often as the
    copies take at most 2 % of the time. auto: measured where the memory is large
    enough."""
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
    evaluate_every: ZeroIsNever
    """Evaluate before the first step and every N steps; 0 = never."""
    checkpoint_every: ZeroIsNever
    """Write a checkpoint every N steps, and where a run is stopped; 0 = never, not even
    then."""
    save_at_end: bool
    """Write one after the last step, whatever checkpoint_every is, so that a finished
    run can get more steps."""
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
    trace: Literal["none", "steps"]
    """steps = write trace.json, what each process did in each step, for Perfetto."""
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
    paces: dict[str, Pace]
    """Where the schedules of roles are whose steps have got another number of updates,
    written by the run itself."""

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


def run_has_a_name(run: RunConfig) -> Iterator[Problem]:
    """Yield a problem unless the run has a name and a folder."""
    name = run.name

    # A name of dots alone would be a folder that exists already.
    is_folder_name = re.fullmatch(r"[A-Za-z0-9._-]+", name) is not None
    if not is_folder_name or name in (".", ".."):
        rule = "the name of a run is also the name of its folder"
        fix = "Use letters, digits, dots, - and _ ; run.dir takes a path."
        yield Problem("run.name", name, rule, fix)

    folder = run.dir
    if not folder.strip():
        rule = "the run needs a folder to write to"
        yield Problem("run.dir", folder, rule, "Use outputs/NAME.")


def run_has_one_length(run: RunConfig) -> Iterator[Problem]:
    """Yield a problem unless the length is given in steps or in epochs, not both."""
    steps = run.total_steps
    epochs = run.total_epochs

    if steps is not None and epochs is not None:
        rule = f"run.total_steps={steps} sets the length of the run as well"
        fix = (
            "Add run.total_steps=null to train for epochs, or use"
            " run.total_epochs=null."
        )
        yield Problem("run.total_epochs", epochs, rule, fix)

    if steps is None and epochs is None:
        rule = "the run needs a length, in steps or in epochs"
        fix = "Use a number of steps, or add run.total_epochs=1."
        yield Problem("run.total_steps", None, rule, fix)


def resume_is_a_choice_or_a_path(run: RunConfig) -> Iterator[Problem]:
    """Yield a problem if run.resume is empty, or a word that is meant as a choice."""
    resume = run.resume

    # Any other text may be a path, so only these words are refused.
    misspellings = ("auto", "none", "true", "false")
    is_choice = resume in ("auto", "none")
    is_misspelt = not is_choice and resume.lower() in misspellings

    if is_misspelt or resume.strip() == "":
        fix = "Use auto, none, or the path of a checkpoint."
        yield Problem("run.resume", resume, "no such choice", fix)


def evaluation_is_used(run: RunConfig, overridden: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting of evaluations that never happen."""
    if run.evaluate_every == 0 and not overridden.evaluates:
        keys = overridden.under("evaluation")
        reason = "run.evaluate_every=0 turns evaluation off"
        yield from overridden.ignored(keys, reason)


def best_is_measured(run: RunConfig, overridden: OverriddenKeys) -> Iterator[Problem]:
    """Yield a problem for each setting of a best step that is never looked for."""
    if run.best_metric is not None and not run.best_metric.startswith("val-"):
        rule = "names of metrics on held-out rows begin with val-"
        fix = "Use one of metrics.jsonl, such as val-core/*/acc/mean@1, or null."
        yield Problem("run.best_metric", run.best_metric, rule, fix)

    if run.best_metric is None and run.best_is is not None:
        rule = "run.best_metric=null is the task's own metric, which has its direction"
        fix = "Leave it out, or name a metric: run.best_metric=val-core/held_out/..."
        yield Problem("run.best_is", run.best_is, rule, fix)

    if run.evaluate_every == 0:
        reason = "run.evaluate_every=0 turns evaluation off"
        fix = "Leave it out, or use run.evaluate_every=10."
        for key in ("run.best_metric", "run.best_is", "run.early_stop"):
            yield from overridden.ignored(overridden.under(key), reason, fix)


def checkpoints_are_kept(
    run: RunConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of checkpoints that are not written."""
    if run.checkpoint_every == 0:
        reason = "run.checkpoint_every=0 writes no checkpoints on the way"
        for key in ("run.keep_checkpoints", "run.checkpoint_behind"):
            yield from overridden.ignored(overridden.under(key), reason)


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
    """Whether the run shows a live block on a terminal, or else prints its steps."""
    tensorboard: bool
    wandb: WandbConfig


class RolloutTrackingConfig(TrackingConfig):
    """Destinations of the record of a run, and the rows that it learns from."""

    rollouts: Literal["none", "sampled", "all"]
    """Rows that were learned from, written to rollouts/, a file per step: none, a few
    whole groups, examples or pairs of each step, or all. What is chosen once is chosen
    again when it returns."""
    rollouts_max_mb: Positive
    """Size of these files in megabytes; beyond it only every second step is kept, then
    every fourth, and so on. A step of more than a quarter of it is not kept."""


def wandb_settings_are_used(
    tracking: TrackingConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for each setting of W&B while it is disabled."""
    switch = "tracking.wandb.mode"
    if tracking.wandb.mode != "disabled":
        return

    # The mode is what switches it off.
    keys = [key for key in overridden.under("tracking.wandb") if key != switch]
    reason = f"{switch}=disabled writes nothing there"
    yield from overridden.ignored(keys, reason)


def rollout_bound_is_used(
    tracking: RolloutTrackingConfig, overridden: OverriddenKeys
) -> Iterator[Problem]:
    """Yield a problem for a bound on the size of rollouts that are not written."""
    if tracking.rollouts == "none":
        reason = "tracking.rollouts=none writes no rollouts"
        keys = overridden.under("tracking.rollouts_max_mb")
        yield from overridden.ignored(keys, reason)
