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

from tests.tracking.wandb_files import history, records, sessions, steps_of
from tests.tracking.wandb_server import serving
from tests.waiting import until
from verl_ray.config.run import WandbConfig
from verl_ray.errors import ConfigError, TrackingError
from verl_ray.paths import program
from verl_ray.tracking import base as base_module
from verl_ray.tracking.base import Sample, Trackers, UnhurriedTracker
from verl_ray.tracking.jsonl import JsonlTracker
from verl_ray.tracking.wandb_run import RUN_ID, WandbTracker, open_wandb

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

    let_its_second_pass(session)
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
from verl_ray.tracking.jsonl import JsonlTracker
from verl_ray.tracking.base import UnhurriedTracker
from verl_ray.tracking.wandb_run import RUN_ID, WandbTracker, open_wandb
config = WandbConfig(mode="offline", project="tests", entity=None, group=None, tags=())
tracker = WandbTracker(config, Path(sys.argv[1]), "killed", {}, {})
tracker.log(0, {"x": 1.5, "training/global_step": 0})
sys.stdin.read()
"""


@pytest.mark.slow
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
        end = time.monotonic() + PATIENCE_S
        while not (sessions(tmp_path) and held(sessions(tmp_path)[0])):
            assert process.poll() is None and time.monotonic() < end
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
    until(lambda: held(sessions(tmp_path)[0]), PATIENCE_S)
    let_its_second_pass(sessions(tmp_path)[-1])
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


@pytest.mark.processes
def test_what_a_killed_process_of_wandbs_has_lost_is_sent_again(tmp_path: Path) -> None:
    """With the next line, or at the end of the run."""
    tracker = WandbTracker(OFFLINE, tmp_path, "killed", {}, {})
    trackers = Trackers([JsonlTracker(tmp_path), tracker])
    trackers.log(1, {"x": 1.5})
    until(lambda: held(sessions(tmp_path)[0]), PATIENCE_S)
    # These are not flushed yet.
    trackers.log(2, {"x": 2.5})
    trackers.log(3, {"x": 3.5})
    kill_wandb(tmp_path)
    trackers.log(4, {"x": 4.5})
    kill_wandb(tmp_path)
    trackers.close(failed=False)
    assert len(sessions(tmp_path)) == 3 and steps_of(tmp_path) == [1, 2, 3, 4]
    assert [line["x"] for line in history(sessions(tmp_path)[-1])][-1] == 4.5


def kill_wandb(folder: Path) -> None:
    """Kill W&B's process; the next one's session has a folder of its own."""
    (started,) = [
        child for child in psutil.Process().children() if child.name() == "wandb-core"
    ]
    started.kill()
    started.wait(PATIENCE_S)
    let_its_second_pass(sessions(folder)[-1])


def let_its_second_pass(session: Path) -> None:
    """W&B names the folder of a session by the second of its start."""
    until(lambda: time.strftime("%Y%m%d_%H%M%S") not in session.name, PATIENCE_S)


@pytest.mark.processes
def test_a_driver_that_follows_another_one_sends_what_wandb_lacks_and_no_more(
    tmp_path: Path,
) -> None:
    first = WandbTracker(OFFLINE, tmp_path, "killed", {}, {})
    record = JsonlTracker(tmp_path)
    for step in range(5):
        metrics = {"x": float(step), "training/global_step": step}
        record.log(step, metrics)
        # The driver was killed before W&B had the first step.
        if step != 1:
            first.log(step, metrics)
    first.close(failed=True)
    record.close(failed=True)

    # It goes on after step 2.
    let_its_second_pass(sessions(tmp_path)[-1])
    continued = JsonlTracker(tmp_path, 2, record.state())
    second = WandbTracker(OFFLINE, tmp_path, "killed", {}, first.state(), follows=True)
    both = Trackers([continued, second])
    for step in (3, 4, 5):
        both.log(step, {"x": float(step)})
    both.close(failed=False)
    # What reads the session before keeps its log here, not where all users may write.
    assert list(tmp_path.glob("wandb/debug-cli.*.log"))
    assert steps_of(tmp_path) == [0, 2, 3, 4, 1, 5]


@pytest.mark.processes
def test_a_process_of_wandbs_that_is_stopped_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another process of W&B's has to start within this limit.
    monkeypatch.setattr(base_module, "_ABORT_S", PATIENCE_S)
    tracker = WandbTracker(OFFLINE, tmp_path, "stopped", {}, {})
    unhurried = UnhurriedTracker(tracker, tracker.kill_process, patience_s=2.0)
    unhurried.log(1, {"x": 1.5, "training/global_step": 1})
    until(lambda: sessions(tmp_path) and held(sessions(tmp_path)[0]), PATIENCE_S)
    for child in psutil.Process().children():
        if child.name() == "wandb-core":
            child.suspend()

    # Its sockets take some of this, and not all. What they do not take goes to another
    # process.
    for step in range(2, 250):
        metrics = {f"x{number}": 0.5 for number in range(300)}
        unhurried.log(step, metrics | {"training/global_step": step})
    unhurried.close(failed=False)
    first, second = sessions(tmp_path)
    assert history(first)[0]["x"] == 1.5
    assert history(second)[-1]["training/global_step"] == 249


@pytest.mark.processes
def test_a_run_that_continues_goes_on_where_wandb_cannot_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "2")
    monkeypatch.setattr("verl_ray.tracking.wandb_run.INIT_TIMEOUT_S", 2.0)
    trackers = Trackers([open_wandb(ONLINE, tmp_path, "run", {}, {RUN_ID: "abc"})])
    trackers.log(1, {"x": 1.5})
    trackers.close(failed=False)
    assert "the run goes on without: W&B did not start" in capsys.readouterr().err
    # A driver that reaches it continues the same run of W&B's.
    assert trackers.state() == {RUN_ID: "abc"} and trackers.outputs() == {}


@pytest.mark.processes
def test_what_a_killed_process_has_not_sent_to_the_server_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file on the disk has what the server has not."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    record = JsonlTracker(tmp_path)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        tracker = WandbTracker(ONLINE, tmp_path, "killed", TREE, {})
        both = Trackers([record, tracker])
        for step in range(3):
            both.log(step, {"x": step + 0.5})
        (session,) = (tmp_path / "wandb").glob("run-*")
        until(lambda: held(session), PATIENCE_S)
        for child in tracker._process.present():
            child.kill()
            child.wait()
        let_its_second_pass(session)
        tracker.samples(3, [SAMPLE])
        for step in range(3, 6):
            both.log(step, {"x": float(step)})
        both.close(failed=False)
        (lines,) = server.history.values()
    assert [line["training/global_step"] for line in lines] == [0, 1, 2, 3, 4, 5]


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
import os
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
    print(error, flush=True)
import psutil
alive = [child for child in psutil.Process().children() if child.status() != "zombie"]
print(len(alive), flush=True)
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
        timeout=PATIENCE_S,
        env=environment,
    )
    # Nothing of W&B's holds up the exit.
    assert ended.stdout.endswith("\n0\n")
    assert (
        "W&B did not start: " in ended.stdout
        and "tracking.wandb.mode=offline" in ended.stdout
    )


STOPPED_PROGRAM = """
import os
import signal
import sys
from pathlib import Path
from wandb.sdk.lib.service import service_process
from verl_ray.config.run import WandbConfig
from verl_ray.errors import TrackingError
from verl_ray.tracking import wandb_process, wandb_run

def start_and_stop(settings):
    process = start(settings)
    os.kill(process._process.pid, signal.SIGSTOP)
    return process

config = WandbConfig(mode="offline", project="tests", entity=None, group=None, tags=())
folder = Path(sys.argv[1])
wandb_process._END_S = 0.5
start, limit_s = service_process.start, wandb_run.INIT_TIMEOUT_S
service_process.start, wandb_run.INIT_TIMEOUT_S = start_and_stop, 1.0
try:
    wandb_run.WandbTracker(config, folder, "run", {}, {})
except TrackingError as error:
    print(error)
print([name for name in os.environ if name == "WANDB_SERVICE"])

service_process.start, wandb_run.INIT_TIMEOUT_S = start, limit_s
tracker = wandb_run.WandbTracker(config, folder, "run", {}, {})
(process,) = tracker._process.present()
process.suspend()
tracker._process.end()
print([name for name in os.environ if name == "WANDB_SERVICE"])
"""


@pytest.mark.processes
def test_a_process_of_wandbs_that_is_stopped_keeps_no_process_from_its_end(
    tmp_path: Path,
) -> None:
    """As it starts, and as it ends."""
    command = [sys.executable, "-c", STOPPED_PROGRAM, str(tmp_path)]
    ended = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=PATIENCE_S
    )
    error, *left = ended.stdout.splitlines()
    assert error.startswith("W&B did not start: ") and left == ["[]", "[]"]


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
