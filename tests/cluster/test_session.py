from __future__ import annotations

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

from verl_ray.cluster.session import Session, store_bytes
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
    [processes("trainer", 1)], [role], start_deadline_s=60, call_deadline_s=20, log_dir=Path(sys.argv[1])
)
print("up", session.own, groups[role].rank_zero(Echo.pid).result(), flush=True)
"""


def start(code: str, home: Path) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(home / "logs")],
        cwd=ROOT,
        env={**inherited, "HOME": str(home)},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_until_gone(processes: list[psutil.Process], timeout_s: float = 10) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert [process.name() for process in alive] == []


def test_a_store_that_has_no_room_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"/dev/shm has \d+ MiB free, the object store needs 1073741824 MiB"):
        store_bytes(1 << 50)
    assert store_bytes(200 << 20) == 200 << 20


@pytest.mark.cluster
def test_the_session_tells_what_the_cluster_has(cluster: Session) -> None:
    (node,) = cluster.resources()
    assert node.total["CPU"] == 4
    assert cluster.own
    with pytest.raises(ClusterError, match="connected to a Ray cluster already"):
        Session.open(None)


@pytest.mark.cluster
def test_an_own_cluster_ends_with_its_session_and_leaves_no_token(tmp_path: Path) -> None:
    code = DRIVER + "sys.stdin.close(); import psutil; children = psutil.Process().children(recursive=True)\n"
    code += "groups.close(); session.close()\n"
    code += "print(len(children), len(psutil.wait_procs(children, timeout=10)[1]))\n"
    code += "print([name for name in os.environ if name.startswith('RAY_AUTH')])\n"
    # The same process may open another cluster, with a token of that one's own.
    code += "with Session.open(None, cores=1, object_store_bytes=100 << 20) as second: print(second.own)\n"
    driver = start(code, tmp_path)
    output = driver.communicate(timeout=60)[0].split("\n")
    assert driver.returncode == 0
    assert output[0].startswith("up True ")
    started, left = map(int, output[1].split())
    assert started >= 4  # the head's processes and the worker
    assert left == 0
    assert output[2:4] == ["[]", "True"]
    assert not (tmp_path / ".ray").exists()


@pytest.mark.cluster
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_every_process_goes_when_the_driver_does(tmp_path: Path, sent: signal.Signals) -> None:
    driver = start(DRIVER + "time.sleep(60)", tmp_path)
    assert driver.stdout is not None
    assert driver.stdout.readline().startswith("up")
    processes = psutil.Process(driver.pid).children(recursive=True)
    assert any(process.cmdline()[0].startswith("ray::WorkerHost") for process in processes if process.cmdline())
    driver.send_signal(sent)
    driver.wait(20)
    wait_until_gone(processes)


@pytest.mark.cluster
def test_a_running_cluster_is_found_by_address_and_left_running(tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # short: the names of sockets in it are limited to 107 bytes
    ray = str(Path(sys.executable).parent / "ray")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**inherited, "HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
    environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
    arguments = ["--head", "--block", "--port=0", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]
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
        found = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "logs")],
            cwd=ROOT,
            env={**environment, "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert found.stdout.startswith("up False "), found.stderr
        assert subprocess.run([ray, "status"], env={**environment, "RAY_ADDRESS": address}, timeout=100).returncode == 0
        assert head.poll() is None
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(100)
        shutil.rmtree(folder)
