"""The driver's connection to a Ray cluster: a running one, or one of its own.

Invariant: a cluster that this session started ends with it, through its own handle; a cluster that it found is left
as it was. Deliberately not here: which processes run on it (`placement.py`, `launch.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import services
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from verl_ray.cluster.signals import heed_signals, noting
from verl_ray.errors import ClusterError, Interrupted, WorkerDied
from verl_ray.ownership import Owner
from verl_ray.weight_sync.shared_files import FOLDER, room

_LEAST_STORE_BYTES = 80 << 20  # Ray refuses less than 75 MiB
# Ray exchanges 127.0.0.1 for the address of a network interface, which may vanish (Wi-Fi, VPN) while the run goes on.
# Any other loopback address it keeps.
_LOOPBACK = "127.0.0.2"
_OWNERS = "verl_ray_owners"  # in Ray's folder of a cluster of our own: the driver, then Ray's processes, one a line
_PATIENCE_S = 5.0  # for processes that were told to end
# When a driver is killed, the kernel ends the head processes of its own cluster, but Ray's agents linger for a minute:
# they first report the death of the raylet to a server that died with it. And a worker that has only just been started
# looks for its raylet for as long. This process holds on to the first, waits for the end of its input, which is the end
# of the driver or of the session, and ends what is left; it knows the others by what they were started with.
_GUARD = """
import contextlib, os, signal, sys
mark = os.fsencode(sys.argv[1])
def end(process):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
processes = []
for pid in sys.argv[2:]:
    with contextlib.suppress(ProcessLookupError):
        processes.append(os.pidfd_open(int(pid)))
sys.stdin.read()
for process in processes:
    end(process)
for pid in filter(str.isdecimal, os.listdir('/proc')):
    with contextlib.suppress(OSError):
        process = os.pidfd_open(int(pid))
        with open(f'/proc/{pid}/cmdline', 'rb') as file:
            if int(pid) != os.getpid() and mark in file.read():
                end(process)
        os.close(process)
"""


@dataclass(frozen=True)
class NodeResources:
    """One live node: `total` and `available` are amounts by Ray's resource names (CPU, GPU, memory in bytes, ...)."""

    node_id: str
    address: str
    total: dict[str, float]
    available: dict[str, float]


class Session:
    """An open connection. Use as a context manager, or call `close`; at most one per process at a time."""

    def __init__(
        self,
        address: str,
        guard: subprocess.Popen[bytes] | None,
        environment: dict[str, str | None],
        folder: Path | None = None,
    ) -> None:
        """`folder`: where Ray keeps logs and spilled objects of a cluster of the session's own."""
        self.address = address
        self.own = guard is not None
        self._guard = guard
        self._environment = environment
        self.folder = folder

    @classmethod
    def open(
        cls,
        address: str | None,
        *,
        cores: int | None = None,
        gpus: int | None = None,
        object_store_bytes: int | None = None,
    ) -> Session:
        """Connect to `address`, else to RAY_ADDRESS, else start a cluster on this machine.

        `cores`, `gpus` and `object_store_bytes` describe a cluster that is started; None = what the machine has, and
        for the store the smaller of an eighth of its memory and half of the room in /dev/shm. Open it from the main
        thread: Linux ends Ray's processes with the thread that started them.
        """
        if ray.is_initialized():
            raise ClusterError("this process is connected to a Ray cluster already; close that session first")
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is not None:
            return cls._connect(address)
        return cls._start(cores, gpus, store_bytes(object_store_bytes))

    @classmethod
    def _connect(cls, address: str) -> Session:
        try:
            with _signals_left_to_the_driver():
                context = ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Interrupted:
            ray.shutdown()
            raise
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ClusterError(
                f"no connection to the Ray cluster at {address} (ray.address, else RAY_ADDRESS): {error}. If it uses "
                "token authentication, set RAY_AUTH_MODE=token here as well"
            ) from error
        return cls(context.address_info["gcs_address"], None, {})

    @classmethod
    def _start(cls, cores: int | None, gpus: int | None, store: int) -> Session:
        # A token of this cluster's own, in the environment only. Left to itself Ray would save one in the home
        # directory, and a later `ray start` would adopt it and refuse `ray job submit` from shells that do not know.
        changed: dict[str, str] = {}
        if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":
            changed["RAY_AUTH_MODE"] = "token"
            if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
                changed["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        environment = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        _reload_authentication()
        remove_ended_sessions(Path(get_default_ray_temp_dir()))
        before = psutil.Process().children(recursive=True)
        try:
            with _signals_left_to_the_driver():
                context = ray.init(
                    address="local",
                    num_cpus=cores,
                    num_gpus=gpus,
                    object_store_memory=store,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="ERROR",
                    _node_ip_address=_LOOPBACK,
                    # Workers are started for actors as they come; spare ones would only take start-up time and memory.
                    # Ray would run them at a niceness of 15: anything else on the machine would come first.
                    _system_config={"prestart_worker_first_driver": False, "worker_niceness": 0},
                )
        except BaseException as error:
            ray.shutdown()
            _restore(environment)
            if isinstance(error, Exception) and not isinstance(error, Interrupted):
                raise ClusterError(f"a Ray cluster could not be started on this machine: {error}") from error
            raise
        started = [child for child in psutil.Process().children(recursive=True) if child not in before]
        folder = Path(context.address_info["session_dir"])
        guard = subprocess.Popen(
            [sys.executable, "-ISc", _GUARD, f"--raylet-name={folder}/", *(str(child.pid) for child in started)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the driver, which ends the session in order
        )
        session = cls(context.address_info["gcs_address"], guard, environment, folder)
        try:
            name_owners(folder, [os.getpid(), *(child.pid for child in started)])
        except OSError as error:
            session.close()
            raise ClusterError(f"Ray's folder {folder} cannot be written: {error}") from error
        return session

    def resources(self) -> list[NodeResources]:
        """What each live node has and what of it is free now. The latter lags a release by up to about a second."""
        return node_resources()

    def close(self, *, keep_logs: bool = False) -> None:
        """Disconnect; a cluster of the session's own ends, and all its processes and Ray's folder with it.

        `keep_logs`: Ray's folder stays until the next session starts.
        """
        ray.shutdown()
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None
        if self.folder is not None and keep_logs:
            print(f"Ray's own logs stay in {self.folder}/logs until the next run starts", file=sys.stderr, flush=True)
        elif self.folder is not None:
            _remove_folder(self.folder)
        self.folder = None
        _restore(self._environment)
        self._environment = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # Where Ray or one of its processes failed, the reason may stand in Ray's logs alone.
        self.close(keep_logs=isinstance(error, ClusterError | WorkerDied | ray.exceptions.RayError))


@contextlib.contextmanager
def _signals_left_to_the_driver() -> Iterator[None]:
    """While Ray starts: it sets no handlers of its own, and what it starts leads sessions of its own.

    A signal to the driver's process group (`timeout`, Slurm, Ctrl-C in a terminal) would else end the cluster beside
    the driver, which still needs it to stop in order. Ray's handler for SIGTERM waits 60 s for a node to drain. Ray has
    no settings for either. A signal that comes meanwhile is heeded at the end: Ray would log an exception in the middle
    of it, or lose it.
    """
    popen, set_handler = services.ConsolePopen, ray._private.utils.set_sigterm_handler
    services.ConsolePopen = functools.partial(popen, start_new_session=True)
    ray._private.utils.set_sigterm_handler = lambda handler: None
    try:
        with noting():
            yield
        heed_signals()
    finally:
        services.ConsolePopen = popen
        ray._private.utils.set_sigterm_handler = set_handler


def _print_on_stderr(data: dict[str, Any], *more: Any, **settings: Any) -> None:
    """What Ray has to tell, such as that its memory monitor killed a worker: it would be printed on stdout, in the
    middle of what a command has to say there. That a worker ended is left out: where nobody meant it to, the error says
    which one, in which call and with what output; and all of them end so at the end of a run."""
    if any(line.startswith(_A_WORKER_ENDED) for line in data["lines"]):
        return
    _print(data | {"is_err": True}, *more, **settings)


_A_WORKER_ENDED = "A worker died or was killed"
_print = ray._private.worker.print_to_stdstream
ray._private.worker.print_to_stdstream = _print_on_stderr


def node_resources() -> list[NodeResources]:
    """See `Session.resources`."""
    available = ray._private.state.available_resources_per_node()
    return [
        NodeResources(
            node["NodeID"], node["NodeManagerAddress"], dict(node["Resources"]), dict(available.get(node["NodeID"], {}))
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def store_bytes(asked: int | None) -> int:
    """Size of an object store on this machine. Raises ClusterError when /dev/shm has no room for it."""
    free = room()
    size = asked if asked is not None else min(psutil.virtual_memory().total // 8, free // 2)
    needed = max(size, _LEAST_STORE_BYTES)
    if needed > free:
        raise ClusterError(
            f"{FOLDER} has {free >> 20} MiB free, the object store needs {needed >> 20} MiB. In a container, "
            "raise it (docker run --shm-size=4g)"
        )
    return needed


def remove_ended_sessions(folder: Path) -> None:
    """Take away what Ray keeps in `folder` of clusters that sessions of this user have started, where the driver was
    killed and none of Ray's processes is left. Any other folder stays."""
    for file in folder.glob(f"session_*/{_OWNERS}"):
        if file.parent.is_symlink():
            continue  # session_latest
        try:
            ours = file.stat().st_uid == os.getuid()
            owners = [Owner.parse(line) for line in file.read_text().splitlines()]
        except OSError:  # another run was faster
            continue
        if ours and owners and all(owner is not None and owner.is_gone for owner in owners):
            _remove_folder(file.parent)


def name_owners(folder: Path, pids: Iterable[int]) -> None:
    """Say in Ray's folder of a cluster which processes must have ended before it may be removed."""
    (folder / _OWNERS).write_text("".join(f"{Owner.of(pid)}\n" for pid in pids))


def _remove_folder(folder: Path) -> None:
    """Remove Ray's folder of one cluster, with all logs that Ray's own processes wrote there."""
    latest = folder.parent / "session_latest"
    if latest.is_symlink() and latest.readlink() == folder:
        latest.unlink(missing_ok=True)  # Ray does not replace a link to nothing
    give_up = time.monotonic() + _PATIENCE_S
    while folder.exists() and time.monotonic() < give_up:  # a process that is ending may write there once more
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.1)


def _reload_authentication() -> None:
    """Ray reads RAY_AUTH_* once per process. The configuration first: its threads reload the token by it."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _restore(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if environment:
        _reload_authentication()
