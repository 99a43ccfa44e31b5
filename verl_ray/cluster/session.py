"""The driver's connection to a Ray cluster: a running cluster, or one that it starts.

Invariant: a cluster that the session started ends with the session, through its own
handle. A cluster that the session connected to is left as it was. Signals are the
driver's business. From the import of this module nothing of Ray's is printed on stdout,
and while Ray's messages are kept in a file, nothing on stderr either.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import math
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
from ray._private import services
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from verl_ray.checkpoint.snapshot_files import available_bytes
from verl_ray.cluster.guard import (
    STOPPED_S,
    HeadWatch,
    end_guard,
    patience_s,
    raylets_at,
    start_guard,
)
from verl_ray.cluster.placement import NodeResources, node_resources
from verl_ray.cluster.process_setup import compiler_environment
from verl_ray.cluster.session_folders import (
    name_owners,
    own_sessions,
    remove_ended_sessions,
    remove_folder,
)
from verl_ray.cluster.signals import deferring_signals, heed_signals
from verl_ray.cluster.waiting import CLUSTER_LOSS, RAY_CALLS
from verl_ray.errors import ClusterError, Interrupted, WorkerDied
from verl_ray.ownership import remove_stale
from verl_ray.private_files import SHARED_MEMORY, shared_folder

# Ray refuses an object store of less than 75 MiB.
_LEAST_STORE_BYTES = 80 << 20
# The only address with which Ray's servers do not listen on every interface.
_LOOPBACK = "127.0.0.1"
# A third of the weight of another session.
_WORKERS_NICENESS = 5
# Ray connects within seconds, also on a busy machine.
_CONNECT_S = 60.0
_NO_CONNECTION = (
    ConnectionError,
    RuntimeError,
    ValueError,
    ClusterError,
    ray.exceptions.RayError,
)
# Ray disconnects within a second, and within six from a cluster that is lost. After
# longer it would end this process in the middle of its final output.
_SHUTDOWN_S = 30.0
_SHUTDOWN_OF_LOST_S = 10.0


class Session:
    """An open connection to a cluster.

    Use it as a context manager, or call `close`. A process may have one open session
    at a time.

    Args:
        address: Address of the cluster.
        guard: Guard of the cluster; it only watches one that was not started here.
        environment: Environment variables to restore at the end, with their previous
            values.
        folder: Ray's folder of logs and spilled objects if the session started the
            cluster, else None.
        limit_s: Limit in seconds for each call into Ray.
    """

    def __init__(
        self,
        address: str,
        guard: subprocess.Popen[bytes],
        environment: dict[str, str | None],
        folder: Path | None,
        limit_s: float,
    ) -> None:
        self.address = address
        self.owns_cluster = folder is not None
        self.folder = folder
        self._guard: subprocess.Popen[bytes] | None = guard
        self._environment = environment
        self._has_ended = threading.Event()
        """What the thread waits for that started the cluster."""
        self._head: HeadWatch | None = None
        if folder is None:
            self._head = HeadWatch(address, min(limit_s, patience_s()), CLUSTER_LOSS)
        threading.Thread(
            target=_listen_to, args=[guard], name="guard", daemon=True
        ).start()
        RAY_CALLS.open(limit_s)

    # ----------------------------------------------------------------------------- open

    @classmethod
    def open(
        cls,
        address: str | None,
        *,
        cores: int | None = None,
        gpus: int | None = None,
        object_store_bytes: int | None = None,
        log_dir: Path | None = None,
        stall_s: float = math.inf,
    ) -> Session:
        """Connect to a cluster, or start one on this machine.

        Args:
            address: Cluster to connect to. None stands for RAY_ADDRESS; if that is not
                set either, a cluster is started.
            cores: CPU cores of a cluster that is started; None for all of the machine.
            gpus: GPUs of a cluster that is started; None for all of the machine.
            object_store_bytes: Size of the object store of a cluster that is started;
                None for the smaller of an eighth of the machine's memory and half of
                the available bytes in /dev/shm.
            log_dir: Directory for Ray's messages to this process; None for stderr.
            stall_s: Limit in seconds for each call into Ray.

        Raises:
            ClusterError: This process has an open session, or there is no connection,
                or the cluster could not be started.
        """
        refuse_connected()
        address = address or os.environ.get("RAY_ADDRESS") or None
        if log_dir is not None:
            ray_messages.keep_in(log_dir)
        try:
            if address is not None:
                return cls._connect(address, stall_s)
            size = store_bytes(object_store_bytes)
            return cls._start(cores, gpus, size, stall_s)
        except BaseException:
            ray_messages.release()
            raise

    @classmethod
    def _connect(cls, address: str, stall_s: float) -> Session:
        before = dict(os.environ)
        compiler = compiler_environment(before)
        # Ray connects for ever to a cluster whose processes are stopped.
        RAY_CALLS.open(min(stall_s, _CONNECT_S))
        try:
            with _heeding_signals_after(), _reachable(address):
                context = RAY_CALLS.make(
                    ray.init,
                    address=address,
                    log_to_driver=False,
                    logging_level="ERROR",
                )
        except BaseException as error:
            is_idle = RAY_CALLS.close(0.0)
            if isinstance(error, Interrupted) and is_idle:
                _shut_down_ray()
            if not isinstance(error, _NO_CONNECTION):
                raise
            raise ClusterError(
                f"no connection to the Ray cluster at {address} (ray.address, else"
                f" RAY_ADDRESS): {error}. If it uses token authentication, set"
                " RAY_AUTH_MODE=token here as well"
            ) from error
        os.environ.update(compiler)
        changes = _changes_since(before)
        raylets = raylets_at(ray._private.worker.global_worker.node.raylet_socket_name)
        guard = start_guard(None, raylets, min(stall_s, STOPPED_S))
        address = context.address_info["gcs_address"]
        return cls(address, guard, changes, None, stall_s)

    @classmethod
    def _start(
        cls,
        cores: int | None,
        gpus: int | None,
        object_store_bytes: int,
        stall_s: float,
    ) -> Session:
        sessions = own_sessions()
        remove_ended_sessions(sessions)
        before = dict(os.environ)
        compiler = compiler_environment(before)
        environment = _set_own_token()

        this_process = psutil.Process()
        children_before = this_process.children(recursive=True)
        has_ended = threading.Event()
        try:
            context = _start_ray(cores, gpus, object_store_bytes, sessions, has_ended)
        except BaseException as error:
            _shut_down_ray()
            has_ended.set()
            _restore_variables(environment)
            if isinstance(error, Exception) and not isinstance(error, Interrupted):
                raise ClusterError(
                    f"a Ray cluster could not be started on this machine: {error}"
                ) from error
            raise

        os.environ.update(compiler)
        # Ray starts its processes as children of this one.
        children = this_process.children(recursive=True)
        ray_pids = [child.pid for child in children if child not in children_before]
        _prefer_this_process_to(ray_pids)
        folder = Path(context.address_info["session_dir"])
        guard = start_guard(folder, ray_pids, min(stall_s, STOPPED_S))
        address = context.address_info["gcs_address"]
        session = cls(address, guard, _changes_since(before), folder, stall_s)
        session._has_ended = has_ended

        # If this process is killed, a later session can remove the folder.
        try:
            name_owners(folder, [os.getpid(), *ray_pids])
        except OSError as error:
            session.close()
            raise ClusterError(
                f"Ray's folder {folder} cannot be written: {error}"
            ) from error
        return session

    # ---------------------------------------------------------------------------- close

    def close(self, *, keep_logs: bool = False) -> None:
        """Disconnect, and stop the cluster if the session started it.

        Ray's folder of such a cluster is removed.

        Args:
            keep_logs: Whether to keep Ray's folder until the next session starts.
        """
        if self._guard is not None:
            self._disconnect(self._guard)
        self._guard = None

        if self.folder is not None and keep_logs:
            _say(f"Ray's own logs stay in {self.folder}/logs until the next run starts")
        elif self.folder is not None:
            remove_folder(self.folder)
        self.folder = None

        _restore_variables(self._environment)
        self._environment = {}

    def _disconnect(self, guard: subprocess.Popen[bytes]) -> None:
        """Disconnect from Ray, and end the cluster if the session started it."""
        if self._head is not None:
            self._head.close()
        is_lost = CLUSTER_LOSS.has_happened
        limit_s = _SHUTDOWN_OF_LOST_S if is_lost else _SHUTDOWN_S
        is_idle = RAY_CALLS.close(limit_s)
        if is_lost and is_idle:
            # Ray would ask processes that do not reply.
            end_guard(guard)

        is_closed = is_idle and RAY_CALLS.attempt(limit_s, ray.shutdown)
        ray_messages.release()
        if is_closed:
            self._has_ended.set()
            end_guard(guard)
            CLUSTER_LOSS.forget()
        else:
            # The end of the raylet would end this process in the middle of its final
            # output. The guard follows this process.
            atexit.unregister(ray.shutdown)
            _say("Ray hangs; what is left of it ends with this process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Where Ray or one of its processes failed, the reason may be in Ray's logs
        # alone.
        failures_of_ray = ClusterError | WorkerDied | ray.exceptions.RayError
        self.close(keep_logs=isinstance(error, failures_of_ray))

    # ------------------------------------------------------------------------ resources

    def resources(self) -> list[NodeResources]:
        """Resources of each live node.

        The available amounts lag a release by up to about a second.
        """
        return node_resources()


def _shut_down_ray() -> None:
    """Disconnect from Ray within a limit: one of its processes may be stopped."""
    if not RAY_CALLS.attempt(_SHUTDOWN_S, ray.shutdown):
        atexit.unregister(ray.shutdown)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _listen_to(guard: subprocess.Popen[bytes]) -> None:
    """Note the loss of the cluster, of which the guard knows first."""
    assert guard.stdout is not None, "it was started with a pipe"
    with guard.stdout as names:
        for name in names:
            # Ray itself ends them when the session closes.
            if ray.is_initialized():
                CLUSTER_LOSS.note(name.decode().strip())


def _changes_since(before: Mapping[str, str]) -> dict[str, str | None]:
    """Return environment variables that have changed, with their previous values."""
    names = before.keys() | os.environ.keys()
    return {
        name: before.get(name)
        for name in sorted(names)
        if before.get(name) != os.environ.get(name)
    }


def refuse_connected() -> None:
    """Refuse a process that has called `ray.init`.

    Raises:
        ClusterError: The process is connected to a cluster.
    """
    if ray.is_initialized():
        raise ClusterError(
            "this process is connected to a Ray cluster already, by ray.init or by a"
            " run that is open. Call ray.shutdown(), or close that run. A run starts a"
            " cluster of its own, or uses the one at ray.address"
        )


def _start_ray(
    cores: int | None,
    gpus: int | None,
    object_store_bytes: int,
    folder: Path,
    has_ended: threading.Event,
) -> Any:
    """Start a cluster on this machine, in a folder; return Ray's context of it.

    A thread of its own starts the cluster and waits for its end: Linux ends Ray's
    processes together with the thread that started them. In the main thread Ray would
    also replace this process's handler of SIGTERM.
    """
    system_config = {
        # Workers are started for actors as these come. Spare workers would only take
        # start-up time and memory.
        "prestart_worker_first_driver": False,
        # Ray would run workers at a niceness of 15, so that anything else on the
        # machine would come first.
        "worker_niceness": 0,
    }
    start = functools.partial(
        ray.init,
        address="local",
        num_cpus=cores,
        num_gpus=gpus,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address=_LOOPBACK,
        _temp_dir=str(folder),
        _system_config=system_config,
    )
    started: Future[Any] = Future()

    def start_and_stay() -> None:
        try:
            started.set_result(start())
        except BaseException as error:
            started.set_exception(error)
        has_ended.wait()

    with (
        _heeding_signals_after(),
        _in_sessions_of_their_own(),
        _without_services(),
        on_loopback(),
    ):
        threading.Thread(target=start_and_stay, name="cluster", daemon=True).start()
        return started.result()


def _prefer_this_process_to(ray_pids: Iterable[int]) -> None:
    """Let this process go first where workers keep all cores busy.

    The raylet and the workers, its children, are a session of the operating system, and
    Linux shares cores out among sessions in proportion to their load (autogroup,
    `man 7 sched`). This process is idle most of the time, so it would wait for hundreds
    of milliseconds to start what comes next. Nothing happens where that is switched off
    or a control group shares the cores out.
    """
    for pid in ray_pids:
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{pid}")
            if (folder / "comm").read_text() == "raylet\n":
                (folder / "autogroup").write_text(str(_WORKERS_NICENESS))


def store_bytes(requested_bytes: int | None) -> int:
    """Size of an object store on this machine.

    Args:
        requested_bytes: Requested size; None for the default of `Session.open`.

    Raises:
        ClusterError: /dev/shm has less available bytes than the store needs.
    """
    remove_stale(shared_folder())
    free_bytes = available_bytes()
    size = requested_bytes
    if size is None:
        size = min(psutil.virtual_memory().total // 8, free_bytes // 2)

    needed_bytes = max(size, _LEAST_STORE_BYTES)
    if needed_bytes > free_bytes:
        raise ClusterError(
            f"{SHARED_MEMORY} has {free_bytes >> 20} MiB free, the object store needs"
            f" {needed_bytes >> 20} MiB. In a container, raise it (docker run"
            " --shm-size=4g)"
        )
    return needed_bytes


# ---------------------------------------------------------- the token of an own cluster

# The token is in the environment of this process alone, never in a file. The user sets
# those of clusters that the session connects to.


def _set_own_token() -> dict[str, str | None]:
    """Give this process a token for a cluster of its own, unless the user has set one.

    Without it, Ray would save a token in the home directory. A later `ray start` would
    adopt that token and refuse `ray job submit` from shells that do not know it.

    Returns:
        Previous values of the environment variables that were set, for
        `_restore_variables`.
    """
    changes: dict[str, str] = {}
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":
        changes["RAY_AUTH_MODE"] = "token"
        user_settings = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
        if not user_settings:
            changes["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

    previous = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    _reload_token()
    return previous


def _restore_variables(previous: dict[str, str | None]) -> None:
    """Restore environment variables; None stands for a variable that was not set."""
    for name, value in previous.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if previous:
        _reload_token()


def _reload_token() -> None:
    # Ray reads RAY_AUTH_* once per process. The configuration comes first, since
    # threads reload the token by it.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


# ------------------------------------------------------------------ Ray's own behaviour

# What Ray has no settings for. `ray start` as a child process needs none of this: a
# variable that is meant for other systems than Linux keeps it on 127.0.0.1. But it
# outlives a driver that is killed, opens a port for Ray's clients, which is the same
# for all clusters of a machine, and always starts the dashboard's server. Until an
# actor replies, it takes 6.4 s of processor time in place of 3.0 s, and 465 MiB in
# place of 243 MiB (Ray 2.60, two busy cores).


@contextlib.contextmanager
def _replacing(*functions: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace functions of Ray within the block.

    Args:
        functions: Owner, name and replacement of each.
    """
    with contextlib.ExitStack() as originals:
        for owner, name, replacement in functions:
            originals.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


@contextlib.contextmanager
def _heeding_signals_after() -> Iterator[None]:
    """Heed a signal that arrives within the block at its end.

    Ray would log its exception in the middle of the start, or lose it.
    """
    with deferring_signals():
        yield
    heed_signals()


def on_loopback() -> contextlib.AbstractContextManager[None]:
    """Let a cluster that is started or reached in the block have the address 127.0.0.1.

    Ray would take that of a network interface, which other nodes can reach, and which
    may vanish (Wi-Fi, VPN) during the run.
    """
    return _replacing((services, "resolve_ip_for_localhost", lambda host: host))


def _in_sessions_of_their_own() -> contextlib.AbstractContextManager[None]:
    """Let processes of Ray that start in the block lead sessions.

    A signal to the driver's process group (`timeout`, Slurm, Ctrl-C in a terminal)
    would otherwise end the cluster together with the driver, which still needs it to
    stop in order.
    """
    popen = functools.partial(services.ConsolePopen, start_new_session=True)
    return _replacing((services, "ConsolePopen", popen))


def _without_services() -> contextlib.AbstractContextManager[None]:
    """Let a cluster that starts in the block do without what nobody asks of it.

    The server behind Ray's dashboard takes 1.0 s of a processor's time and 73 MiB, and
    Ray waits for it before it starts the raylet. Without a dashboard it does nothing
    but to report usage. An autoscaler and a reader of logs take 0.6 s and 47 MiB each.
    No log is read where the driver does not print them.
    """
    parameters = functools.partial(
        ray._private.parameter.RayParams, no_monitor=True, include_log_monitor=False
    )
    return _replacing(
        (ray._private.parameter, "RayParams", parameters),
        (ray._private.node.Node, "start_api_server", _start_nothing),
    )


def _start_nothing(node: Any, **settings: Any) -> None: ...


_CONNECT_TO_ITSELF_S = 1.0
"""Limit in seconds of a connection to this machine itself."""


@contextlib.contextmanager
def _reachable(address: str) -> Iterator[None]:
    """Let Ray connect by 127.0.0.1 to a cluster that listens nowhere else."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        is_local = host in (_LOOPBACK, "localhost") and port.isdecimal()
        if is_local and not _listens(ray.util.get_node_ip_address(), int(port)):
            stack.enter_context(on_loopback())
        yield


def _listens(host: str, port: int) -> bool:
    """Return whether a process of this machine accepts connections at an address."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TO_ITSELF_S).close()
    except OSError:
        return False
    return True


_WORKER_ENDED = "A worker died or was killed"
_LOG_NAME = "ray.log"
_LOG_FORMAT = "%(asctime)s %(levelname)s %(filename)s:%(lineno)s: %(message)s"


class _Messages:
    """Where Ray's messages to the driver go: to a file, or to stderr without one."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._handler: logging.Handler | None = None
        self._replaced: list[logging.Handler] = []

    def keep_in(self, folder: Path) -> None:
        """Keep all messages in a file of this folder from now on."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _LOG_NAME

        # Python's side of Ray has a logger whose handler prints on stderr. The file is
        # made by the first message.
        self._handler = logging.FileHandler(self._path, delay=True)
        self._handler.setFormatter(logging.Formatter(_LOG_FORMAT))
        self._replaced = _RAY_LOGGER.handlers[:]
        _RAY_LOGGER.handlers[:] = [self._handler]

    def release(self) -> None:
        """Close the file; later messages go to stderr."""
        if self._handler is None:
            return
        _RAY_LOGGER.handlers[:] = self._replaced
        self._handler.close()
        self._handler = None
        self._path = None

    def show(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Handle messages of Ray's processes, as that its memory monitor killed one.

        Ray prints them on stdout, in the middle of a command's own output. They say
        that each worker which was killed died unexpectedly. Without a file this remark
        is left out: where the end was not intended, an error names the worker, its
        call and its output.
        """
        path = self._path
        if path is not None:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            lines = [f"{now} ({data['pid']}) {line}\n" for line in data["lines"]]
            # Where the disk is full, the run has worse to tell.
            with contextlib.suppress(OSError), path.open("a") as file:
                file.writelines(lines)
        elif not any(line.startswith(_WORKER_ENDED) for line in data["lines"]):
            _print(data | {"is_err": True}, *args, **kwargs)


_RAY_LOGGER = logging.getLogger("ray")
_print = ray._private.worker.print_to_stdstream
ray_messages = _Messages()
"""Ray's messages to this process, which has at most one session at a time."""
ray._private.worker.print_to_stdstream = ray_messages.show
