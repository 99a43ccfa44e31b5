"""The report that a run makes while it goes on, and at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.recorded_runs import write_run
from verl_ray.report.tracker import PERIOD_S, ReportTracker, last_report
from verl_ray.tracking.base import Trackers

LINE = {"training/global_step": 1}


def test_it_is_made_during_the_run_but_not_at_every_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    html = folder / "report.html"
    now = [100.0]

    def clock() -> float:
        # A report takes four seconds, so the next one is due 200 later.
        now[0] += 2.0
        return now[0]

    tracker = ReportTracker(folder, clock=clock)
    tracker.log(1, LINE)
    assert not html.exists()
    now[0] += PERIOD_S
    tracker.log(2, LINE)
    assert html.stat().st_size > 50_000
    html.unlink()
    now[0] += 90
    tracker.log(3, LINE)
    assert not html.exists()
    now[0] += 10
    tracker.log(4, LINE)
    assert html.exists()
    assert tracker.outputs() == {"report": str(html)}


def test_a_report_that_cannot_be_made_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "report.html").mkdir()
    now = [0.0]
    trackers = Trackers([ReportTracker(folder, clock=lambda: now[0])])
    for step in (1, 2, 3):
        now[0] += 1000
        trackers.log(step, LINE)
    trackers.close(failed=False)
    assert capsys.readouterr().err.count("ReportTracker failed and is off") == 1
    last_report(folder)
    assert "report.html cannot be made: IsADirectoryError" in capsys.readouterr().err
    # Each process writes to a part of its own, and removes it.
    assert not list(folder.glob("*.part"))
