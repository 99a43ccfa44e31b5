"""Two steps of each algorithm on each backend: real runs, one after another.

As a program this file prints a line for each run: its losses, gradient norms and
seconds, or what went wrong::

    python -m tests.algorithm_runs [--algorithm NAME ...] [--backend NAME ...]
        [--steps 2] [--ranks 2]

`tests/test_algorithm_runs.py` makes one run for each path of the code. Deliberately not
here: whether an algorithm learns.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

from tests.algorithms.choices import REWARDED, learning_at_once
from tests.controllers.runs import Inputs, command, command_here, make_inputs
from verl_ray.cluster.session import Session
from verl_ray.tracking.jsonl import read_metrics

BACKENDS = ("engine", "fsdp", "megatron")

_ROW = "{:30}{:10}{:>5}  {:>24}  {:>20}  {}"


def run(
    cluster: Session | None,
    inputs: Inputs,
    folder: Path,
    algorithm: str,
    backend: str,
    *changes: str,
    steps: int = 2,
) -> list[dict[str, float]]:
    """Make a run of a few steps and return the metrics of each.

    Args:
        cluster: The cluster that is used; None for one of its own.
        inputs: Its model and data.
        folder: Its run.dir.
        algorithm: Name of the algorithm.
        backend: Name of the backend.
        changes: Further overrides.
        steps: Number of its steps.
    """
    arguments = [
        "train", "--config-name", "grpo", *inputs.rl(folder), *learning_at_once(algorithm),
        f"backend={backend}", f"run.total_steps={steps}", *changes,
    ]  # fmt: skip
    if cluster is None:
        command(None, *arguments)
    else:
        command_here(cluster, *arguments)
    return read_metrics(folder / "metrics.jsonl")


def problem(lines: list[dict[str, float]], steps: int) -> str | None:
    """Return what is wrong with the metrics of a run, else None."""
    if [line["training/global_step"] for line in lines] != list(range(1, steps + 1)):
        return "steps are missing"
    for line in lines:
        norm = line.get("actor/grad_norm", math.nan)
        if not math.isfinite(norm) or norm == 0 or line["actor/skipped_steps"]:
            return f"step {line['training/global_step']:.0f} has learned nothing"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = REWARDED
    parser.add_argument("--algorithm", nargs="+", choices=every, default=every)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the actor")
    options = parser.parse_args()

    wrong = 0
    print(_ROW.format("algorithm", "backend", "s", "loss", "gradient norm", ""))
    with (
        tempfile.TemporaryDirectory() as name,
        Session.open(None, cores=4 + options.ranks, object_store_bytes=1 << 30) as session,
    ):  # fmt: skip
        inputs = make_inputs(Path(name))
        for algorithm in options.algorithm:
            for backend in options.backend:
                folder = Path(name) / f"{algorithm}-{backend}"
                began_s = time.monotonic()
                lines: list[dict[str, float]] = []
                try:
                    lines = run(
                        session, inputs, folder, algorithm, backend,
                        f"actor.num_ranks={options.ranks}", steps=options.steps,
                    )  # fmt: skip
                    fault = problem(lines, options.steps)
                except AssertionError as error:
                    fault = str(error).strip().rpartition("\n")[2]
                wrong += fault is not None
                seconds = f"{time.monotonic() - began_s:.0f}"
                losses = " ".join(f"{line['actor/loss']:.4g}" for line in lines)
                norms = " ".join(f"{line['actor/grad_norm']:.4g}" for line in lines)
                print(
                    _ROW.format(
                        algorithm, backend, seconds, losses, norms, fault or "right"
                    ),
                    flush=True,
                )
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
