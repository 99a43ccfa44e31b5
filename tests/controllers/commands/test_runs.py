"""`verl-ray runs`, on folders alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from controllers.command_line import main
from tests.report.recorded_runs import write_run


def test_runs_are_listed_with_their_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_run(tmp_path / "whole")
    write_run(tmp_path / "sweep" / "0", ending="failed")
    damaged = write_run(tmp_path / "damaged")
    (damaged / "config.yaml").write_text("- 1\n")
    unreadable = write_run(tmp_path / "unreadable") / "metrics.jsonl"
    unreadable.unlink()
    unreadable.symlink_to("/proc/self/mem")
    (tmp_path / "other").mkdir()

    assert main(["runs", str(tmp_path)]) == 0
    lines = [line.split(maxsplit=4) for line in capsys.readouterr().out.splitlines()]
    by_name = {words[0]: words for words in lines}
    assert by_name.keys() == {"run", "whole", "sweep/0", "damaged", "unreadable"}
    assert by_name["whole"][1:3] == ["finished", "4/4"]
    assert by_name["whole"][4].strip() == "sums/acc/mean@1 0.375 -> 0.625 at step 4"
    assert by_name["sweep/0"][1] == "failed"
    assert "holds no configuration" in by_name["damaged"][4]
    assert "metrics.jsonl cannot be read" in by_name["unreadable"][4]

    empty = tmp_path / "other"
    assert main(["runs", str(empty)]) == 0
    assert capsys.readouterr().out == f"{empty} holds no runs\n"
    assert main(["runs", str(tmp_path / "none")]) == 2
