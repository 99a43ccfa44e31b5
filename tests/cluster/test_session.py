from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import ray

from tests.leftovers import left_in_shared_memory
from verl_ray.cluster.ray_patches import ray_messages
from verl_ray.cluster.session import Session, store_bytes
from verl_ray.cluster.session_folders import name_owners, remove_ended_sessions
from verl_ray.errors import ClusterError

ROOT = Path(__file__).parents[2]

DRIVER = """
import os, sys, time
from pathlib import Path
from tests.cluster.crew import Echo, processes
from verl_ray.cluster.launch import start_groups
from verl_ray.cluster.processes import Role
from verl_ray.cluster.session import Session
session = Session.open(None, cores=2, object_store_bytes=100 << 20)
role = Role("echo", "trainer", Echo)
groups = start_groups(
    [processes("trainer", 1)], [role], stall_s=60, log_dir=Path(sys.argv[1])
)
print("up", session.owns_cluster, groups[role].rank_zero(Echo.pid).result(), session.folder, flush=True)
"""


# What `timeout` and Slurm do. The driver is asked to stop; its cluster goes on, since
# the driver needs it for that.
TO_THE_GROUP = """
import signal
from verl_ray.cluster.signals import (
    deferring_signals, finishing, heed_signals, stop_on_signals,
)
from verl_ray.errors import Interrupted
stop_on_signals()
try:
    with deferring_signals():
        os.killpg(0, signal.SIGTERM)
        time.sleep(1)
        heed_signals()
except Interrupted as stop:
    with finishing():
        print(f"{stop}; still answers: {groups[role].rank_zero(Echo.pid).result()}", flush=True)
"""


def start(code: str, home: Path) -> subprocess.Popen[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, str(home / "logs")],
        cwd=ROOT,
        env={**inherited, "HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
        # A group of its own, which a test may signal as a whole
        start_new_session=True,
    )


def wait_until_gone(processes: list[psutil.Process], timeout_s: float = 30) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert [process.name() for process in alive] == []


@pytest.mark.processes
def test_a_store_that_has_no_room_is_refused() -> None:
    with pytest.raises(
        ClusterError,
        match=r"/dev/shm has \d+ MiB free, the object store needs 1073741824 MiB",
    ):
        store_bytes(1 << 50)
    remaining = left_in_shared_memory()
    assert store_bytes(200 << 20) == 200 << 20
    assert not any(
        path.exists() for path in remaining
    )  # what the dead had taken was given back first


@pytest.mark.processes
def test_only_folders_of_ended_sessions_are_removed(tmp_path: Path) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        for _ in range(2)
    ]
    driver, raylet = (child.pid for child in children)
    owners = {
        "ended": [driver, raylet],
        "lives": [driver, os.getpid()],
        "not_ours": None,
        "not_written": [],
    }
    for name, pids in owners.items():
        (tmp_path / f"session_{name}" / "logs").mkdir(parents=True)
        if pids is not None:
            name_owners(tmp_path / f"session_{name}", pids)
    (tmp_path / "session_latest").symlink_to(tmp_path / "session_ended")

    def folders() -> list[str]:
        remove_ended_sessions(tmp_path)
        return sorted(path.name for path in tmp_path.iterdir())

    everything = [
        "session_ended",
        "session_latest",
        "session_lives",
        "session_not_ours",
        "session_not_written",
    ]
    assert folders() == everything
    children[0].communicate()
    assert folders() == everything  # the driver is gone, but not all of Ray
    children[1].communicate()
    assert folders() == ["session_lives", "session_not_ours", "session_not_written"]


@pytest.mark.cluster
def test_the_session_tells_what_the_cluster_has(cluster: Session) -> None:
    (node,) = cluster.resources()
    assert node.total["CPU"] == 4
    assert cluster.owns_cluster
    with pytest.raises(ClusterError, match="connected to a Ray cluster already"):
        Session.open(None)


@pytest.mark.cluster
def test_an_own_cluster_ends_with_its_session_and_leaves_no_token(
    tmp_path: Path,
) -> None:
    code = (
        DRIVER
        + TO_THE_GROUP
        + "import psutil; children = psutil.Process().children(recursive=True)\n"
    )
    # A worker that has only just been started, and has not met Ray yet.
    code += "young = ['-c', 'import time; time.sleep(100)']\n"
    code += "young.append(f'--raylet-name={session.folder}/sockets/raylet')\n"
    code += "children.append(psutil.Popen([sys.executable, *young]))\n"
    code += "groups.close(); session.close()\n"
    code += "print(len(children), len(psutil.wait_procs(children, timeout=30)[1]))\n"
    code += "print([name for name in os.environ if name.startswith('RAY_AUTH')])\n"
    # The same process may open another cluster, with a token of that one's own.
    # Where Ray or one of its processes failed, Ray's logs stay.
    code += "from verl_ray.errors import ClusterError\n"
    code += "try:\n"
    code += "    with finishing(), Session.open(None, cores=1, object_store_bytes=100 << 20) as second:\n"
    code += "        print(second.owns_cluster, second.folder)\n"
    code += "        raise ClusterError('the raylet died')\n"
    code += "except ClusterError: pass\n"
    driver = start(code, tmp_path)
    output = driver.communicate(timeout=180)[0].split("\n")
    assert driver.returncode == 0
    assert output[0].startswith("up True ")
    folder = Path(output[0].split()[-1])
    assert (
        folder.name.startswith("session_")
        and folder.parent.is_dir()
        and not folder.exists()
    )
    latest = folder.parent / "session_latest"  # of another cluster by now, or of none
    assert not latest.is_symlink() or latest.readlink() != folder
    assert output[1].startswith("stopped by SIGTERM; still answers: ")
    del output[1]
    started, remaining = map(int, output[1].split())
    assert started >= 5  # the head's processes and the workers
    assert remaining == 0
    assert output[2] == "[]"
    own, kept_folder = output[3].split()
    assert own == "True" and (Path(kept_folder) / "logs" / "raylet.out").is_file()
    shutil.rmtree(kept_folder)
    assert not (tmp_path / ".ray").exists()


@pytest.mark.cluster
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_every_process_goes_when_the_driver_does(
    tmp_path: Path, sent: signal.Signals
) -> None:
    driver = start(DRIVER + "time.sleep(60)", tmp_path)
    assert driver.stdout is not None
    up = driver.stdout.readline()
    assert up.startswith("up")
    folder = Path(up.split()[-1])
    remove_ended_sessions(folder.parent)
    assert folder.exists()
    processes = psutil.Process(driver.pid).children(recursive=True)
    assert any(
        process.cmdline()[0].startswith("ray::WorkerHost")
        for process in processes
        if process.cmdline()
    )
    driver.send_signal(sent)
    driver.wait(100)
    wait_until_gone(processes)
    remove_ended_sessions(folder.parent)
    assert not folder.exists()


@pytest.mark.cluster
def test_a_running_cluster_is_found_by_address_and_left_running(tmp_path: Path) -> None:
    # Short, since the names of sockets in it are limited to 107 bytes.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    ray = str(Path(sys.executable).parent / "ray")
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    environment = {
        **inherited,
        "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "5" * 64,
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    arguments = [
        "--head",
        "--block",
        "--port=0",
        "--num-cpus=2",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    head = subprocess.Popen(
        [ray, "start", *arguments, f"--temp-dir={folder}"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        address = None
        until = time.monotonic() + 120
        current = folder / "ray_current_cluster"
        while address is None and time.monotonic() < until:
            time.sleep(0.2)
            address = current.read_text().strip() if current.exists() else None
        assert address
        code = DRIVER + "groups.close(); session.close()"
        completed = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "logs")],
            cwd=ROOT,
            env={**environment, "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert completed.stdout.startswith("up False "), completed.stderr
        assert (
            subprocess.run(
                [ray, "status"],
                env={**environment, "RAY_ADDRESS": address},
                timeout=100,
            ).returncode
            == 0
        )
        assert head.poll() is None
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(100)
        shutil.rmtree(folder)


def test_what_ray_tells_goes_to_a_file_or_to_stderr(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A benchmark's figures are alone on stdout."""
    logger = logging.getLogger("ray")
    handlers = logger.handlers[:]

    def tell(line: str) -> None:
        message = {
            "lines": [line],
            "pid": "raylet",
            "is_err": False,
            "job": None,
            "ip": "127.0.0.2",
        }
        ray._private.worker.print_to_stdstream(message, ignore_prefix=False)

    unexpected = "A worker died or was killed while executing a task"
    ray_messages.keep_in(tmp_path / "logs")
    try:
        tell(unexpected)
        logger.error("no connection")
    finally:
        ray_messages.release()
    assert capfd.readouterr() == ("", "")
    first, second = (tmp_path / "logs" / "ray.log").read_text().splitlines()
    assert first.endswith(f" (raylet) {unexpected}")
    assert second.endswith("no connection")

    tell("the disk is nearly full")
    tell(unexpected)
    output = capfd.readouterr()
    assert output.out == "" and unexpected not in output.err
    assert "the disk is nearly full" in output.err and logger.handlers == handlers
