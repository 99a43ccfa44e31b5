"""The guard of a cluster; plain processes with the names of Ray's stand for it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl_ray.cluster.guard import end_guard, start_guard

pytestmark = pytest.mark.processes


@pytest.fixture
def head(tmp_path: Path) -> Iterator[dict[str, psutil.Popen]]:
    """Two processes that are needed, and one that is not."""
    processes = {}
    for name in ("raylet", "gcs_server", "monitor"):
        shutil.copy(str(shutil.which("sleep")), tmp_path / name)
        processes[name] = psutil.Popen([str(tmp_path / name), "100"])
    yield processes
    for process in processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait()


def guard_of(
    head: dict[str, psutil.Popen], folder: Path | None
) -> subprocess.Popen[bytes]:
    pids = [process.pid for process in head.values()]
    return start_guard(folder, pids, stopped_s=1.0)


def next_line(guard: subprocess.Popen[bytes]) -> str:
    assert guard.stdout is not None
    return guard.stdout.readline().decode().strip()


def leave(guard: subprocess.Popen[bytes]) -> None:
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait(30)


def test_a_stopped_process_is_named_and_goes_on(
    head: dict[str, psutil.Popen], tmp_path: Path
) -> None:
    guard = guard_of(head, tmp_path)
    head["monitor"].suspend()  # nothing depends on it
    for name in ("gcs_server", "raylet", "raylet"):
        head[name].suspend()
        assert next_line(guard) == f"{name} was stopped (SIGSTOP) for 1 s"
        while head[name].status() == psutil.STATUS_STOPPED:
            assert guard.poll() is None
    head["raylet"].kill()
    assert next_line(guard) == "raylet has ended"
    leave(guard)
    gone, alive = psutil.wait_procs(list(head.values()), timeout=30)
    assert len(gone) == 3 and not alive


def test_a_cluster_of_somebody_elses_is_only_watched(
    head: dict[str, psutil.Popen],
) -> None:
    guard = guard_of(head, None)
    head["raylet"].suspend()
    assert next_line(guard) == "raylet was stopped (SIGSTOP) for 1 s"
    leave(guard)
    assert head["raylet"].status() == psutil.STATUS_STOPPED
    assert head["gcs_server"].status() == psutil.STATUS_SLEEPING


def test_a_guard_that_is_stopped_holds_up_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verl_ray.cluster.guard._END_S", 0.5)
    guard = start_guard(None, [])
    guard.send_signal(signal.SIGSTOP)
    end_guard(guard)
    # It goes on, or is killed where the machine is slow.
    assert guard.returncode in (0, -signal.SIGKILL)
