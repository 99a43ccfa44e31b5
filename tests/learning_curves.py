"""Learning curves of the algorithms on the task of the quickstart: whether each learns.

As a program this file makes the quickstart's inputs once, then one run after another
from the same model, and prints the held-out accuracy of each as it goes on. `--plot`
draws the curves, and `--json` writes their numbers::

    python -m tests.learning_curves [--algorithm NAME ...] [--steps 60] [--plot FILE]
        [--json FILE]

All runs have the settings of the quickstart, and those of their algorithm's file. They
are no comparison of algorithms: none has its best learning rate here. Deliberately not
here: two steps on each backend (`tests/algorithm_runs.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import matplotlib

from controllers.compose.listing import groups
from tests.algorithms.choices import TAKES_SEVERAL_UPDATES
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


def run(
    cluster: Session, folder: Path, inputs: Path, algorithm: str, steps: int
) -> dict[int, float]:
    """Make a run, and return its curve.

    Args:
        cluster: The cluster that is used.
        folder: Its run.dir.
        inputs: Folder of the quickstart's model and data.
        algorithm: Name of the algorithm.
        steps: Number of steps.
    """
    rows = 32 * 8
    halves = [f"actor.mini_batch_size={rows // 2}"]
    command_here(
        cluster, "train", "--config-name", "quickstart", f"algorithm={algorithm}", "prepare=null",
        f"run.dir={folder}", f"run.total_steps={steps}", f"run.evaluate_every={steps // EVALUATIONS}",
        "run.checkpoint_every=0", "tracking.wandb.mode=disabled", f"model.path={inputs / 'model'}",
        f"data.train_path={inputs / 'train.jsonl'}", f"data.validation_path={inputs / 'validation.jsonl'}",
        *(halves if algorithm in TAKES_SEVERAL_UPDATES else ()),
    )  # fmt: skip
    return curve(read_metrics(folder / "metrics.jsonl"))


def make_quickstart(cluster: Session, folder: Path) -> Path:
    """Make the inputs of the quickstart by its first step. Return their folder."""
    command_here(
        cluster, "train", "--config-name", "quickstart", f"run.dir={folder}", "run.total_steps=1",
        "run.evaluate_every=0", "prepare.min_gain=0", "tracking.wandb.mode=disabled",
    )  # fmt: skip
    return folder / "inputs"


def draw(path: Path, curves: dict[str, dict[int, float]]) -> None:
    """Draw the curves of all algorithms, several in a panel."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    at_once = 7
    names = list(curves)
    parts = [names[i : i + at_once] for i in range(0, len(names), at_once)]
    figure, panels = pyplot.subplots(
        1, len(parts), figsize=(4 * len(parts), 4), sharey=True, squeeze=False
    )
    for panel, part in zip(panels[0], parts, strict=True):
        for name in part:
            panel.plot(list(curves[name]), list(curves[name].values()), label=name)
        panel.legend(fontsize="small")
        panel.set_xlabel("step")
    panels[0][0].set_ylabel("held-out accuracy")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*groups()["algorithm"]]
    parser.add_argument("--algorithm", nargs="+", choices=every, default=every)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    curves: dict[str, dict[int, float]] = {}
    wrong = 0
    print(_ROW.format("algorithm", "s", "held-out accuracy by step"))
    with (
        tempfile.TemporaryDirectory() as name,
        Session.open(None, cores=5, object_store_bytes=1 << 30) as session,
    ):
        inputs = make_quickstart(session, Path(name) / "quickstart")
        for algorithm in options.algorithm:
            began_s = time.monotonic()
            try:
                points = run(
                    session, Path(name) / algorithm, inputs, algorithm, options.steps
                )
                curves[algorithm] = points
                said = " ".join(
                    f"{step}: {value:.3f}" for step, value in points.items()
                )
            except AssertionError as error:
                wrong += 1
                said = str(error).strip().rpartition("\n")[2]
            seconds = f"{time.monotonic() - began_s:.0f}"
            print(_ROW.format(algorithm, seconds, said), flush=True)
            # Each run takes Ctrl-C for itself.
            if "stopped by SIGINT" in said:
                return 130
            if options.json is not None:
                options.json.write_text(json.dumps(curves, indent=1) + "\n")
            if options.plot is not None and curves:
                draw(options.plot, curves)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
