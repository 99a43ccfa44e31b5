"""The end of a sweep: what its runs reached, and what to try next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controllers.commands.multirun import RunEnd, print_summary
from tests.controllers.run.checkpoints import write_checkpoints
from tests.controllers.runs import Inputs
from verl_ray.config.tasks.rl import RLConfig

SUMS = "val-core/sums/acc/mean@1"


def record(config: RLConfig, values: dict[int, float]) -> RunEnd:
    folder = Path(config.run.dir)
    folder.mkdir(parents=True)
    lines = [{"training/global_step": s, SUMS: value} for s, value in values.items()]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    return RunEnd([f"run.seed={folder.name}"], config, "done", 2.0)


def cells(text: str) -> list[list[str]]:
    return [line.replace("│", " ").split() for line in text.splitlines()]


def test_the_best_run_and_its_commands_are_printed_and_written(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [inputs.config("ppo", tmp_path / str(number)) for number in range(4)]
    ends = [
        record(configs[0], {0: 0.25, 2: 0.5, 4: 0.375}),
        record(configs[1], {0: 0.25, 2: 0.75, 4: 0.625}),
        RunEnd(["run.seed=2"], configs[2], "not started", None),
        RunEnd(["run.seed=3"], configs[3], "failed", 0.1),
    ]
    write_checkpoints(configs[1], 2, 4)
    print_summary("4 runs", "train", ends, tmp_path)

    text = capsys.readouterr().out
    rows = cells(text)
    assert ["0", "run.seed=0", "done", "2.0", "0.25", "0.375", "0.5"] in rows
    assert ["1", "run.seed=1", "done", "2.0", "0.25", "0.625", "0.75"] in rows
    assert ["2", "run.seed=2", "not", "started", "-", "-", "-", "-"] in rows
    assert ["3", "run.seed=3", "failed", "0.1", "-", "-", "-"] in rows
    *_, command, best = text.splitlines()
    report = f"report {tmp_path}/0 {tmp_path}/1 --output {tmp_path}/report.html"
    assert command.endswith(report)
    assert best == (
        f"best: run 1, with sums/acc/mean@1 0.75 at step 2, in {tmp_path}/1"
    )
    assert (
        f"export {tmp_path}/1/checkpoints/step_00000004 {tmp_path}/1/exported" in text
    )

    written = (tmp_path / "sweep.txt").read_text()
    assert written.splitlines()[-2:] == [command, best]
    assert ["1", "run.seed=1", "done", "2.0", "0.25", "0.625", "0.75"] in cells(written)


def test_a_sweep_of_evaluations_has_their_results(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = inputs.config("ppo", tmp_path / "0")
    folder = tmp_path / "0" / "evaluated" / "step_000003"
    folder.mkdir(parents=True)
    result = {"step": 3, "metrics": {SUMS: 0.0, "val-aux/x": None}}
    (folder / "metrics.json").write_text(json.dumps(result))
    print_summary("1 run", "evaluate", [RunEnd(["a=1"], config, "done", 1.0)], None)
    text = capsys.readouterr().out
    assert ["0", "a=1", "done", "1.0", "-", "0", "0"] in cells(text)
    assert "next" not in text
