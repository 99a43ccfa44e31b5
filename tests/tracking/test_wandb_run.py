"""Real offline W&B runs, read back with W&B's own reader."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tracking.wandb_server import serving
from verl_ray.config.run import WandbConfig
from verl_ray.errors import ConfigError, TrackingError
from verl_ray.paths import program
from verl_ray.tracking.base import Sample, Trackers
from verl_ray.tracking.wandb_run import WandbTracker

PATIENCE_S = 120.0

OFFLINE = WandbConfig(
    mode="offline", project="tests", entity=None, group=None, tags=("a", "b")
)
ONLINE = OFFLINE.model_copy(update={"mode": "online"})
TREE = {"run": {"seed": 3}, "algorithm": {"name": "ppo"}}
SAMPLE = Sample(
    prompt="1+1=",
    response="3",
    answer="2",
    data_source="sums",
    score=0.0,
    truncated=True,
    entries={"n": 1.0},
)


def records(session: Path) -> list[dict[str, dict[str, object]]]:
    """Every record of one session, as `wandb leet inspect` prints them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(session)]
    printed = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=200
    ).stdout
    return [json.loads(line) for line in printed.splitlines()]


def sessions(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("offline-run-*"))


def history(session: Path) -> list[dict[str, object]]:
    items = [
        record["history"]["item"]
        for record in records(session)
        if record["type"] == "history"
    ]
    return [
        {key: value for key, value in item.items() if not key.startswith("_")}
        for item in items
    ]


@pytest.mark.processes
def test_an_offline_run_reads_back_and_a_resumed_one_continues_its_id(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "all outputs" / "run"  # not there yet
    first = WandbTracker(OFFLINE, run_dir, "first try", TREE, {})
    trackers = Trackers([first])
    trackers.samples(0, [SAMPLE])
    trackers.log(0, {"val-core/sums/acc/mean@1": 0.25})
    trackers.log(1, {"critic/rewards/mean": 0.5, "actor/kl_loss": float("nan")})
    state = trackers.state()
    assert (
        first._run.settings.x_transaction_log_flush_interval == 1.0
    )  # a kill costs no more than that
    trackers.close(failed=True)

    (session,) = sessions(run_dir)
    lines = history(session)
    assert len(lines) == 2
    # The reader spells what the table's entry holds as val/generations.<key>.
    table = {
        key.removeprefix("val/generations."): lines[0].pop(key)
        for key in list(lines[0])
        if "generations" in key
    }
    assert lines == [
        {"training/global_step": 0, "val-core/sums/acc/mean@1": 0.25},
        {"training/global_step": 1, "critic/rewards/mean": 0.5, "actor/kl_loss": "NaN"},
    ]
    assert json.loads((session / "files" / table["path"]).read_text()) == {
        "columns": [
            "training/global_step",
            "prompt",
            "response",
            "answer",
            "data_source",
            "score",
            "truncated",
            "entries",
        ],
        "data": [[0, "1+1=", "3", "2", "sums", 0.0, True, '{"n": 1.0}']],
    }
    everything = records(session)
    (start,) = [record["run"] for record in everything if record["type"] == "run"]
    assert start["run_id"] == state["wandb_run_id"]
    assert (start["display_name"], start["project"], start["tags"]) == (
        "first try",
        "tests",
        ["a", "b"],
    )
    assert {key: start["config"]["update"][key] for key in TREE} == TREE
    metrics = [record["metric"] for record in everything if record["type"] == "metric"]
    assert any(
        metric.get("glob_name") == "*"
        and metric["step_metric"] == "training/global_step"
        for metric in metrics
    )
    assert [
        record["exit"]["exit_code"] for record in everything if record["type"] == "exit"
    ] == [1]

    time.sleep(1.1)  # W&B names the folder of a session by the second.
    second = WandbTracker(OFFLINE, run_dir, "first try", TREE, state)
    Trackers([second]).log(1, {"critic/rewards/mean": 0.75})
    second.close(failed=False)
    second.close(failed=False)
    _, resumed = sessions(run_dir)
    (start,) = [record["run"] for record in records(resumed) if record["type"] == "run"]
    assert start["run_id"] == state["wandb_run_id"] and start["resume"] is True
    assert history(resumed) == [
        {"training/global_step": 1, "critic/rewards/mean": 0.75}
    ]
    commands = second.outputs()
    wandb = program("wandb")
    assert commands == {
        "W&B, part 1 of 2": f"{wandb} sync '{session}'",
        "W&B, part 2 of 2": f"{wandb} sync '{resumed}'",
    }

    with serving() as server:
        environment = {
            **os.environ,
            "HOME": str(tmp_path),
            "WANDB_API_KEY": "0" * 40,
            "WANDB_BASE_URL": server.url,
        }
        for command in commands.values():
            synced = [sys.executable, "-m", "wandb", *shlex.split(command)[1:]]
            # It keeps a log in the current folder.
            subprocess.run(
                synced, check=True, timeout=120, env=environment, cwd=tmp_path
            )
    # One run, with the lines of both sessions.
    uploaded = [
        line["training/global_step"] for line in server.history[state["wandb_run_id"]]
    ]
    assert uploaded == [0, 1, 1] and len(server.history) == 1
    assert second.outputs() == {}


PROGRAM = """
import sys
from pathlib import Path
from verl_ray.config.run import WandbConfig
from verl_ray.tracking.wandb_run import WandbTracker
config = WandbConfig(mode="offline", project="tests", entity=None, group=None, tags=())
tracker = WandbTracker(config, Path(sys.argv[1]), "killed", {}, {})
tracker.log(0, {"x": 1.5, "training/global_step": 0})
sys.stdin.read()
"""


@pytest.mark.processes
def test_what_was_flushed_outlives_a_kill(tmp_path: Path) -> None:
    """Nothing closes the run, so what its file holds is what W&B flushed by itself."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }
    with subprocess.Popen(command, text=True, **pipes) as process:
        until = time.monotonic() + PATIENCE_S
        while not (sessions(tmp_path) and held(sessions(tmp_path)[0])):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        process.kill()
        assert process.communicate() == ("", "")  # nothing was printed
    (session,) = sessions(tmp_path)
    assert history(session) == [{"training/global_step": 0, "x": 1.5}]


@pytest.mark.processes
def test_wandbs_own_process_may_be_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`ray job stop` signals whatever the driver has started, and the step that has
    begun is still recorded.
    """
    tracker = WandbTracker(OFFLINE, tmp_path, "stopped", {}, {})
    (started,) = [
        child for child in psutil.Process().children() if child.name() == "wandb-core"
    ]
    trackers = Trackers([tracker])
    trackers.log(1, {"x": 1.5})
    time.sleep(1.5)  # it is flushed, and the next session gets another name
    started.terminate()
    started.wait(PATIENCE_S)
    trackers.samples(2, [SAMPLE])
    trackers.log(2, {"x": 2.5})
    trackers.close(failed=True)
    assert capfd.readouterr() == ("", "")

    first, second = sessions(tmp_path)
    assert (
        first.name.rpartition("-")[2]
        == second.name.rpartition("-")[2]
        == tracker.state()["wandb_run_id"]
    )
    assert history(first) == [{"training/global_step": 1, "x": 1.5}]
    (line,) = history(second)
    assert (
        line["x"] == 2.5
        and line["training/global_step"] == 2
        and "val/generations.path" in line
    )


def held(session: Path) -> bool:
    """Whether the file of the session holds the record of a step; it is not compressed."""
    content = b"".join(path.read_bytes() for path in session.glob("*.wandb"))
    return b"training/global_step" in content and b"1.5" in content


def test_online_without_credentials_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    with pytest.raises(
        ConfigError, match=r"(?s)tracking.wandb.mode = online\n.*WANDB_API_KEY"
    ):
        WandbTracker(ONLINE, tmp_path, "run", {}, {})


ONLINE_PROGRAM = """
import sys
from pathlib import Path
from verl_ray.config.run import WandbConfig
from verl_ray.errors import TrackingError
from verl_ray.tracking import wandb_run
wandb_run.INIT_TIMEOUT_S = 2.0
config = WandbConfig(mode="online", project="tests", entity=None, group=None, tags=())
try:
    wandb_run.WandbTracker(config, Path(sys.argv[1]), "run", {}, {})
except TrackingError as error:
    print(error)
"""


@pytest.mark.processes
def test_online_without_a_server_is_an_error(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "WANDB_API_KEY": "0" * 40,
        "WANDB_HTTP_TIMEOUT": "2",
        # The discard port, where nothing listens
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }
    command = [sys.executable, "-c", ONLINE_PROGRAM, str(tmp_path)]
    ended = subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert (
        "W&B did not start: " in ended.stdout
        and "tracking.wandb.mode=offline" in ended.stdout
    )


class _ServiceError(Exception):
    """As W&B's own process raises them: of none of the classes that its documentation
    names.
    """


def test_whatever_keeps_wandb_from_starting_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**settings: object) -> None:
        raise _ServiceError("the service process is busy")

    monkeypatch.setattr("wandb.init", refuse)
    with pytest.raises(
        TrackingError, match="W&B did not start: the service process is busy"
    ):
        WandbTracker(OFFLINE, tmp_path, "run", {}, {})
