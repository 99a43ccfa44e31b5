"""Checkpoints of a run, measured one after another by the same processes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.controllers.runs import Inputs, command_here
from verl_ray.cluster.session import Session
from verl_ray.tracking.jsonl import read_metrics

SUMS = "val-core/arithmetic/acc/mean@2"


@pytest.mark.cluster
@pytest.mark.vllm
@pytest.mark.slow
def test_each_checkpoint_is_measured_as_its_run_measured_it(
    cluster: Session, inputs: Inputs, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    settings = [
        "--config-name", "ppo", *inputs.rl(run_dir), "run.total_steps=2", "run.evaluate_every=1",
        "run.checkpoint_every=1", "run.keep_checkpoints=2", "evaluation.group_size=2", "evaluation.temperature=1",
        "actor.optimizer.lr=1e-2",
    ]  # fmt: skip
    command_here(cluster, "train", *settings)
    recorded = [
        {name: value for name, value in line.items() if name.startswith("val-core/")}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]

    # Another run, of another seed and estimator, which has no critic.
    other = tmp_path / "other"
    command_here(
        cluster, "train", "--config-name", "grpo", *inputs.rl(other), "run.total_steps=1",
        "run.checkpoint_every=1", "run.seed=7", "rollout.group_size=2", "algorithm.advantage=rloo",
    )  # fmt: skip

    # Overrides stand behind the option.
    steps = [str(run_dir / "checkpoints" / f"step_{step:08d}") for step in (1, 2)]
    fresh = tmp_path / "compared"
    said = command_here(
        cluster, "evaluate", "--checkpoints", "base", *steps, str(other), *settings,
        f"run.dir={fresh}",
    )  # fmt: skip
    folder = fresh / "evaluated"
    with (folder / "comparison" / "comparison.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] in recorded[0]]
    other_rows = [row for row in rows if row["name"] == "other/step_1"]
    assert len(other_rows) == len(recorded[0])
    assert all(row["step"] == "1" and row["paired"] == "16" for row in other_rows)
    rows = [row for row in rows if row not in other_rows]
    # The base model comes first, and the steps of the run after it.
    assert [int(row["step"]) for row in rows] == [0, 1, 2] * len(recorded[0])
    for row in rows:
        expected = recorded[int(row["step"])][row["metric"]]
        assert float(row["value"]) == pytest.approx(expected, abs=1e-12)
    assert len({row["value"] for row in rows}) > 1

    for metric in recorded[0]:
        metric_rows = [row for row in rows if row["metric"] == metric]
        first, *others = [float(row["value"]) for row in metric_rows]
        changes = [float(row["difference"]) for row in metric_rows[1:]]
        assert changes == pytest.approx([value - first for value in others])
        assert {row["paired"] for row in metric_rows[1:]} == {"16"}

    written = [
        json.loads((folder / f"step_{step:06d}" / "metrics.json").read_text())
        for step in (0, 1, 2)
    ]
    assert written[0]["checkpoint"] is None
    assert written[2]["checkpoint"].endswith("step_00000002")
    assert said.stdout.count("auto: what these settings become here") == 1
    assert "run/step_2" in said.stdout
