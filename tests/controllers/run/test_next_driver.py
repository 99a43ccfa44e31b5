"""What a refused driver says to its supervisor, to the status of the run and to W&B."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from controllers import supervisor
from controllers.command_line import main
from controllers.commands.watch import FAILED, WatchedRun
from controllers.run.next_driver import ask_for_another_driver, report_refusal
from controllers.supervisor import Reports
from tests.controllers.commands.test_status import said, status_here
from tests.report.recorded_runs import drive_by
from tests.tracking.wandb_server import serving
from verl_ray.errors import (
    ClusterLost,
    ConfigError,
    Interrupted,
    Problem,
    WorkerDied,
)
from verl_ray.ownership import Owner
from verl_ray.profiling.process_table import read_status, uptime_s, write_status
from verl_ray.report.record import read_run
from verl_ray.tracking.history import begin_segment

RULE = "another process listens on it"
TAKEN = Problem("rollout.endpoint.port", 80, RULE, "Free it.", may_pass=True)
SUPERVISOR = Owner.of(os.getppid())
CONFIG = {
    "run": {"name": "first", "recovery": {"max_wait_s": 3600.0}},
    "tracking": {
        "wandb": {
            "mode": "online",
            "project": "tests",
            "entity": None,
            "group": None,
            "tags": ["a"],
        }
    },
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose driver was killed, and that is in W&B."""
    folder = tmp_path / "first"
    (folder / "wandb" / "run-20260101_000000-ab12").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    here = Owner.here()
    killed = replace(here, started=here.started + 1)
    status = status_here(driver=str(killed), supervisor=str(SUPERVISOR))
    write_status(folder, status)
    begin_segment(folder, 0, begun_s=1.0)
    drive_by(folder, killed)
    return folder


def reported(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_alerted: bool = False,
    follows_begun: bool = False,
    failure: Exception | None = None,
) -> list[dict[str, object]]:
    """Let a driver fail as it starts; return what its supervisor reads."""
    reading, writing = os.pipe()
    follower = Reports(
        writing,
        1,
        supervisor=SUPERVISOR.pid,
        run_dir=str(run),
        has_alerted=has_alerted,
        follows_begun=follows_begun,
    )
    monkeypatch.setattr(supervisor, "_reports", follower)
    failure = failure or ConfigError([TAKEN])
    ask_for_another_driver(failure)
    report_refusal(failure)
    os.close(writing)
    with os.fdopen(reading) as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.processes
def test_a_refusal_is_told_to_the_supervisor_the_status_and_once_to_wandb(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = f"driver {os.getpid()} on {status_here().host} has ended; supervisor"
    assert said(capsys, run).startswith(state)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        reports = reported(run, monkeypatch)
        again = reported(run, monkeypatch, has_alerted=True)
    assert [list(report) for report in reports] == [["refused"], ["alerted"]]
    assert [list(report) for report in again] == [["refused"]]
    reason = str(reports[0]["refused"])
    assert "rollout.endpoint.port = 80" in reason and RULE in reason
    (alert,) = server.alerts
    assert (alert["runName"], alert["title"]) == ("ab12", "first waits")
    assert reason in alert["text"] and "3600 s at most" in alert["text"]
    # Nothing of it is on the disk of the run, which may be full.
    assert len(list((run / "wandb").iterdir())) == 1

    waits = f"the run waits for what refuses its start: {reason}; supervisor"
    assert said(capsys, run).startswith(waits)
    status = read_status(run)
    assert status is not None
    watched = WatchedRun(run, replace(status, written=0.0, uptime_s=0.0))
    watched.look()
    assert not watched.has_ended and watched.view.doing.text.startswith(waits)
    assert read_run(run).state == "running"


def test_an_end_of_the_wait_says_what_it_was_for(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("controllers.run.next_driver._alert", lambda *_: None)
    reported(run, monkeypatch)
    status = read_status(run)
    assert status is not None
    # The supervisor has given up, a minute ago.
    gone = replace(SUPERVISOR, started=SUPERVISOR.started + 1)
    minute_ago = uptime_s() - 61
    write_status(run, replace(status, supervisor=str(gone), uptime_s=minute_ago))
    text = said(capsys, run)
    assert text.startswith("the run has ended: ConfigError, 61 s ago: ")
    assert RULE in text and RULE in read_run(run).reason
    (run / "metrics.jsonl").touch()
    assert main(["watch", str(run)]) == FAILED
    assert RULE in capsys.readouterr().out


def test_the_status_of_somebody_elses_run_stays(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controllers.run.next_driver._alert", lambda *_: None)
    other = status_here(supervisor=str(Owner.here()))
    write_status(run, other)
    reported(run, monkeypatch)
    assert read_status(run) == other


def test_an_alert_that_is_not_sent_is_tried_at_the_next_refusal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "2")
    monkeypatch.setattr("verl_ray.tracking.wandb_run.REOPEN_TIMEOUT_S", 2.0)
    assert [list(report) for report in reported(run, monkeypatch)] == [["refused"]]
    assert "W&B's alert was not sent: W&B did not start" in capsys.readouterr().err
    # What is wrong with its record hides nothing of what refuses the start.
    for record, rule in (
        ("run: [", "config.yaml cannot be read"),
        ("tracking: {}", "'wandb'"),
        (yaml.safe_dump(CONFIG | {"run": {"name": "first"}}), "'recovery'"),
    ):
        (run / "config.yaml").write_text(record)
        assert [list(report) for report in reported(run, monkeypatch)] == [["refused"]]
        said_so = capsys.readouterr().err
        assert "warning: W&B's alert was not sent: " in said_so and rule in said_so

    def stop(*_: object) -> None:
        raise Interrupted("SIGTERM")

    monkeypatch.setattr("controllers.run.next_driver.read_config", stop)
    with pytest.raises(Interrupted):
        reported(run, monkeypatch)


@pytest.mark.parametrize(
    "failure",
    [
        ClusterLost("the raylet has ended"),
        WorkerDied("it was killed", role="actor", rank=0, node="a"),
    ],
)
def test_a_death_at_the_start_asks_or_waits_and_not_both(
    run: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr("controllers.run.next_driver._alert", lambda *_: None)
    (asked,) = reported(run, monkeypatch, failure=failure)
    assert asked == {"retry": str(failure), "once": True}
    assert supervisor.reports().has_asked
    (waits,) = reported(run, monkeypatch, failure=failure, follows_begun=True)
    assert waits == {"refused": str(failure)}

    # Without a supervisor none follows: a later run of the process keeps nothing.
    monkeypatch.setattr(supervisor, "_reports", Reports())
    ask_for_another_driver(failure)
    assert not supervisor.reports().has_asked
