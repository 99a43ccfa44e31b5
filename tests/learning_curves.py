"""Learning curves of the algorithms on the task of the quickstart: whether each learns.

As a program this file makes the quickstart's inputs once, then one run after another
from the same model, and prints the held-out accuracy of each as it goes on. `--json`
writes the numbers, and `verl-ray report FOLDER/*` draws them over each other. The same
command with the same `--folder` goes on where it stopped: runs that are complete are not
made again::

    python -m tests.learning_curves [--algorithm NAME ...] [--schedule NAME ...]
        [--seed N ...] [--steps 60] [--folder FOLDER] [--json FILE]

All runs have the settings of the quickstart, and those of their algorithm's file. They
are no comparison of algorithms: none has its best learning rate here. Deliberately not
here: two steps on each backend (`tests/algorithm_runs.py`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from itertools import product
from pathlib import Path

from tests.algorithms.choices import REWARDED, TAKES_SEVERAL_UPDATES
from tests.controllers.runs import command_here
from verl_ray.cluster.session import Session
from verl_ray.tracking.jsonl import read_metrics

EVALUATIONS = 4
"""Evaluations of a run after that of its beginning."""

_ROW = "{:26}{:>5}  {}"


def curve(lines: list[dict[str, float]]) -> dict[int, float]:
    """Return the held-out accuracy of a run, by step."""
    found = {}
    for line in lines:
        for name, value in line.items():
            if name.startswith("val-core/") and "/acc/" in name:
                found[int(line["training/global_step"])] = value
    return found


@dataclass(frozen=True)
class Kind:
    """What a run differs in from the others."""

    algorithm: str
    schedule: str
    seed: int

    @property
    def name(self) -> str:
        """Its name in tables and folders."""
        usual = (self.schedule, self.seed) == ("synchronous", 0)
        return self.algorithm if usual else "-".join(map(str, astuple(self)))

    @property
    def overrides(self) -> list[str]:
        """Its settings."""
        changes = [f"algorithm={self.algorithm}", f"run.seed={self.seed}"]
        if self.algorithm in TAKES_SEVERAL_UPDATES:
            changes.append(f"actor.mini_batch_size={_ROWS // 2}")
        if self.schedule != "synchronous":
            changes += [f"schedule={self.schedule}", "placement=separate"]
        return changes


_ROWS = 32 * 8  # of a step of the quickstart


def run(
    cluster: Session, folder: Path, inputs: Path, kind: Kind, steps: int
) -> dict[int, float]:
    """Make a run unless it is complete, and return its curve.

    Args:
        cluster: The cluster that is used.
        folder: Its run.dir. What an incomplete run has left there is deleted.
        inputs: Folder of the quickstart's model and data.
        kind: What the run differs in.
        steps: Number of steps.
    """
    metrics = folder / "metrics.jsonl"
    points = curve(read_metrics(metrics)) if metrics.exists() else {}
    if max(points, default=0) == steps:
        return points

    shutil.rmtree(folder, ignore_errors=True)
    command_here(
        cluster, "train", "--config-name", "quickstart", "prepare=null", *kind.overrides,
        f"run.dir={folder}", f"run.total_steps={steps}", f"run.evaluate_every={steps // EVALUATIONS}",
        "run.checkpoint_every=0", "run.save_at_end=false", "tracking.wandb.mode=disabled", f"model.path={inputs / 'model'}",
        f"data.train_path={inputs / 'train.jsonl'}", f"data.validation_path={inputs / 'validation.jsonl'}",
    )  # fmt: skip
    return curve(read_metrics(metrics))


def make_quickstart(cluster: Session, folder: Path) -> Path:
    """Make the inputs of the quickstart by its first step. Return their folder."""
    inputs = folder / "inputs"
    if (folder / "metrics.jsonl").exists():
        return inputs
    shutil.rmtree(folder, ignore_errors=True)
    command_here(
        cluster, "train", "--config-name", "quickstart", f"run.dir={folder}", "run.total_steps=1",
        "run.evaluate_every=0", "prepare.min_gain=0", "tracking.wandb.mode=disabled",
    )  # fmt: skip
    return inputs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = REWARDED
    parser.add_argument("--algorithm", nargs="+", choices=every, default=every)
    parser.add_argument("--schedule", nargs="+", default=["synchronous"])
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    curves: dict[str, dict[int, float]] = {}
    wrong = 0
    print(_ROW.format("algorithm", "s", "held-out accuracy by step"))
    with (
        tempfile.TemporaryDirectory() as name,
        Session.open(None, cores=5, object_store_bytes=1 << 30) as session,
    ):
        folder = (options.folder or Path(name)).resolve()
        inputs = make_quickstart(session, folder / "quickstart")
        for which in product(options.algorithm, options.schedule, options.seed):
            kind = Kind(*which)
            began_s = time.monotonic()
            try:
                points = run(session, folder / kind.name, inputs, kind, options.steps)
                curves[kind.name] = points
                said = " ".join(
                    f"{step}: {value:.3f}" for step, value in points.items()
                )
            except AssertionError as error:
                wrong += 1
                said = str(error).strip().rpartition("\n")[2]
            seconds = f"{time.monotonic() - began_s:.0f}"
            print(_ROW.format(kind.name, seconds, said), flush=True)
            # Each run takes Ctrl-C for itself.
            if "stopped by SIGINT" in said:
                return 130
            if options.json is not None:
                options.json.write_text(json.dumps(curves, indent=1) + "\n")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
