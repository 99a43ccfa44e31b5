from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from tests.leftovers import left_in_shared_memory
from verl_ray.cluster.session import (
    Session,
    ray_messages,
    store_bytes,
)
from verl_ray.cluster.session_folders import (
    name_owners,
    own_sessions,
    remove_ended_sessions,
)
from verl_ray.errors import ClusterError, InputError
from verl_ray.private_files import users_path

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).parent / "ray")

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
    # Ray's own handler would end this process wherever it is.
    handler = signal.getsignal(signal.SIGTERM)
    assert not getattr(handler, "__module__", "").startswith("ray")
    with pytest.raises(ClusterError, match="connected to a Ray cluster already"):
        Session.open(None)


@pytest.mark.cluster
def test_an_own_cluster_has_no_service_that_nobody_uses(cluster: Session) -> None:
    children = psutil.Process().children()
    assert {"gcs_server", "raylet"} <= {child.name() for child in children}
    programs = [Path(word).name for child in children for word in child.cmdline()]
    assert not {"monitor.py", "log_monitor.py", "dashboard.py"} & set(programs)


@pytest.mark.cluster
def test_no_other_user_or_machine_reaches_an_own_cluster(cluster: Session) -> None:
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = [
        connection.laddr.ip
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    # Those of this process, the head, the raylet and its two agents.
    assert len(listening) >= 6
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}

    assert cluster.folder is not None and cluster.folder.parent == own_sessions()
    outer = own_sessions().parent.lstat()
    assert outer.st_uid == os.geteuid() and stat.S_IMODE(outer.st_mode) == 0o700


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Return a folder with a shorter path than pytest's."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_rays_folder_is_made_where_its_sockets_have_short_paths(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    pid = Path("/proc/sys/kernel/pid_max").read_text().strip()
    inner = f"session_2026-01-31_12-00-00_123456_{pid}/sockets/plasma_store"

    def of_length(num_bytes: int) -> Path:
        """A folder that is missing, with one above, whose sockets have such a path."""
        rest = len(str(users_path(short_folder / "a" / "b") / "ray" / inner)) - 1
        return short_folder / "a" / ("b" * (num_bytes - rest))

    # Linux takes 107 bytes for the path of a socket.
    fits, is_too_long = of_length(107), of_length(108)
    socket = users_path(fits) / "ray" / inner
    assert len(str(socket)) == 107

    for variable in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.setenv(variable, str(fits))
        assert own_sessions() == users_path(fits) / "ray"
        assert stat.S_IMODE(users_path(fits).stat().st_mode) == 0o700
        shutil.rmtree(short_folder / "a")
    monkeypatch.setenv("RAY_TMPDIR", str(is_too_long))
    with pytest.raises(InputError) as refusal:
        own_sessions()
    begin = f"RAY_TMPDIR: {is_too_long} has {len(str(is_too_long))} bytes, too many"
    assert str(refusal.value).startswith(begin)
    assert f"expected at most {len(str(fits))}. Name" in str(refusal.value)
    assert not is_too_long.parent.exists()

    # The system chose it, and not for Ray.
    monkeypatch.setenv("TMPDIR", str(is_too_long))
    monkeypatch.delenv("RAY_TMPDIR")
    assert own_sessions() == users_path(Path("/tmp")) / "ray"

    (short_folder / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder / "file" / "x"))
    with pytest.raises(InputError, match=r"file/x cannot be made for Ray.*RAY_TMPDIR"):
        own_sessions()


@pytest.mark.cluster
def test_this_process_goes_first_where_workers_keep_all_cores_busy(
    cluster: Session,
) -> None:
    names = {child.name(): child.pid for child in psutil.Process().children()}
    try:
        own = Path("/proc/self/autogroup").read_text()
        workers_group = Path(f"/proc/{names['raylet']}/autogroup").read_text()
    except FileNotFoundError:
        assert not Path("/proc/sys/kernel/sched_autogroup_enabled").exists()
        return
    assert workers_group.endswith(" nice 5\n")
    # A process of no session has no group, and its file is empty.
    assert own.partition(" ")[0] != workers_group.partition(" ")[0]


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
@pytest.mark.parametrize(
    "sent", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
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


# What is done in a run whose Ray does not reply any more.
WITH_A_STOPPED_PROCESS = """
import psutil
from tests.cluster.crew import rows_of
from verl_ray.cluster.placement import node_resources
from verl_ray.cluster.waiting import put
from verl_ray.errors import ClusterError, InputError
from verl_ray.private_files import users_path
children = psutil.Process().children(recursive=True)
for name, call in [
    ("raylet", lambda: put(rows_of([1 << 20]))),
    ("gcs_server", node_resources),
]:
    if name == victim:
        (process,) = [child for child in children if child.name() == name]
        process.suspend()
        try:
            while True:
                call()
                time.sleep(0.1)
        except ClusterError as error:
            print(error, flush=True)
groups.close()
session.close()
print(len(psutil.wait_procs(children, timeout=30)[1]), flush=True)
"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    "victim", ["raylet", pytest.param("gcs_server", marks=pytest.mark.slow)]
)
def test_a_stopped_process_of_ray_is_named_and_the_driver_leaves(
    tmp_path: Path, victim: str
) -> None:
    code = f"victim = {victim!r}\n" + DRIVER + WITH_A_STOPPED_PROCESS
    driver = start(code, tmp_path)
    output = driver.communicate(timeout=120)[0].split("\n")
    assert driver.returncode == 0, output
    assert f"Ray's process {victim} was stopped (SIGSTOP) for 5 s" in output[1]
    assert output[2] == "0"


@contextlib.contextmanager
def head_of_somebody_else(
    home: Path,
) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """A head on this machine, and the environment of those that connect to it."""
    # Short, since the names of sockets in it are limited to 107 bytes.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    environment = {
        **inherited,
        "HOME": str(home),
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
        [RAY, "start", *arguments, f"--temp-dir={folder}"],
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
        yield psutil.Process(head.pid), {**environment, "RAY_ADDRESS": address}
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(100)
        shutil.rmtree(folder)


@pytest.mark.cluster
def test_a_running_cluster_is_found_by_address_and_left_running(tmp_path: Path) -> None:
    with head_of_somebody_else(tmp_path) as (head, environment):
        ray_processes = [head, *head.children(recursive=True)]
        code = DRIVER + "groups.close(); session.close()"
        completed = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "logs")],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert completed.stdout.startswith("up False "), completed.stderr
        assert {"gcs_server", "raylet"} <= {process.name() for process in ray_processes}
        assert all(process.is_running() for process in ray_processes)


ON_A_CLUSTER_OF_SOMEBODY_ELSES = """
import time
from tests.cluster.crew import rows_of
from verl_ray.cluster.session import Session
from verl_ray.cluster.waiting import put
from verl_ray.errors import ClusterError, InputError
from verl_ray.private_files import users_path
try:
    with Session.open(None, stall_s=20.0):
        print("up", flush=True)
        while True:
            put(rows_of([1 << 20]))
            time.sleep(0.1)
except ClusterError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_lost_head_of_somebody_elses_is_named_and_the_driver_leaves(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", ON_A_CLUSTER_OF_SOMEBODY_ELSES]
    with head_of_somebody_else(tmp_path) as (head, environment):
        stopped = {child.name(): child for child in head.children(recursive=True)}

        def start_driver() -> subprocess.Popen[str]:
            pipe = subprocess.PIPE
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=pipe, text=True
            )

        try:
            for victim, reason in [
                ("raylet", "Ray's process raylet was stopped (SIGSTOP) for 5 s"),
                ("gcs_server", "has not replied for"),
            ]:
                driver = start_driver()
                assert driver.stdout is not None
                assert driver.stdout.readline() == "up\n"
                stopped[victim].suspend()
                output, _ = driver.communicate(timeout=100)
                # It is no signal that ends it, although a call may still hang.
                assert driver.returncode in (0, 1) and reason in output
                if victim == "raylet":
                    assert stopped[victim].status() == psutil.STATUS_STOPPED
                    stopped[victim].resume()

            # Another driver does not wait for it for ever.
            output, _ = start_driver().communicate(timeout=100)
            assert "no connection to the Ray cluster at" in output
        finally:
            for process in stopped.values():
                process.resume()


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
