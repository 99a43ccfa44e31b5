"""The record of a run, in several places behind one small contract.

Metric names are the published ones of the field. They reach every tracker unchanged, so
there is no second spelling to translate.

It may import `rewards` and `models`, and what lies below them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verl_ray.config.run import RunConfig, TrackingConfig
from verl_ray.tracking.base import GLOBAL_STEP, Sample, Tracker, Trackers
from verl_ray.tracking.console import ConsoleTracker
from verl_ray.tracking.jsonl import JsonlTracker
from verl_ray.tracking.tensorboard import TensorBoardTracker
from verl_ray.tracking.wandb_run import open_wandb

__all__ = ["GLOBAL_STEP", "Sample", "Tracker", "Trackers", "open_trackers"]


def open_trackers(
    config: TrackingConfig,
    run: RunConfig,
    tree: Mapping[str, object],
    *,
    report: Tracker,
    committed_step: int | None = None,
    state: Mapping[str, str] | None = None,
    follows: bool = False,
) -> Trackers:
    """Open the trackers of a run.

    `metrics.jsonl`, `evaluations/` and the report are always written, the others as
    configured.

    Args:
        config: Section `tracking` of the configuration.
        run: Section `run` of the configuration.
        tree: Whole resolved configuration, for W&B.
        report: The tracker that makes the report of the run.
        committed_step: Step of the checkpoint that the run continues from; None if it
            starts from the beginning.
        state: `Trackers.state()` from that checkpoint.
        follows: Whether another driver of the same command came before.

    Raises:
        TrackingError: A tracker cannot start.
        ConfigError: W&B is online and there are no credentials.
    """
    run_dir = Path(run.dir)
    opened: list[Tracker] = []
    try:
        # The record comes first, since a failure here ends the run: no other tracker
        # should hold more than the record.
        opened.append(JsonlTracker(run_dir, committed_step, state))

        opened.append(report)
        if config.wandb.mode != "disabled":
            wandb = open_wandb(
                config.wandb, run_dir, run.name, tree, state or {}, follows=follows
            )
            opened.append(wandb)
        if config.tensorboard:
            opened.append(TensorBoardTracker(run_dir, committed_step))
        if config.console:
            opened.append(ConsoleTracker(run.steps, run_dir))
    except BaseException:
        Trackers(opened).close(failed=True)
        raise
    return Trackers(opened)
