"""The record of a run, in several places behind one small contract.

`open_trackers` turns the configuration into one `Trackers`. Metric names are the published ones of the field and
reach every tracker unchanged, so that there is no second spelling to translate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verl_ray.config.run import RunConfig, TrackingConfig
from verl_ray.tracking.base import GLOBAL_STEP, Sample, Tracker, Trackers
from verl_ray.tracking.console import ConsoleTracker
from verl_ray.tracking.jsonl import JsonlTracker
from verl_ray.tracking.tensorboard import TensorBoardTracker
from verl_ray.tracking.wandb_run import WandbTracker

__all__ = ["GLOBAL_STEP", "Sample", "Tracker", "Trackers", "open_trackers"]


def open_trackers(
    config: TrackingConfig,
    run: RunConfig,
    tree: Mapping[str, object],
    *,
    committed_step: int | None = None,
    state: Mapping[str, str] | None = None,
) -> Trackers:
    """Open the trackers that `config` asks for; `metrics.jsonl` and `samples/` are always among them.

    Args:
        config: section `tracking`.
        run: section `run`.
        tree: the whole resolved configuration, for W&B.
        committed_step: the step of the checkpoint that the run continues from; None = from its beginning.
        state: `Trackers.state()` out of that checkpoint.

    Raises:
        TrackingError: a tracker cannot start.
        ConfigError: W&B online without credentials.
    """
    run_dir = Path(run.dir)
    opened: list[Tracker] = []
    try:
        # First, because a failure here ends the run: no other tracker should hold more than the record.
        opened.append(JsonlTracker(run_dir, committed_step, state))
        if config.wandb.mode != "disabled":
            opened.append(WandbTracker(config.wandb, run_dir, run.name, tree, state or {}))
        if config.tensorboard:
            opened.append(TensorBoardTracker(run_dir, committed_step))
        if config.console:
            opened.append(ConsoleTracker(run.total_steps))
    except BaseException:
        Trackers(opened).close(failed=True)
        raise
    return Trackers(opened)
