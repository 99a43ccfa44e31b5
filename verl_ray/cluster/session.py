"""The driver's connection to a Ray cluster: a running cluster, or one that it starts.

Invariant: a cluster that the session started ends with the session, through its own
handle. A cluster that the session connected to is left as it was. Deliberately not
here: the processes that run on the cluster (`placement.py`, `launch.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir

from verl_ray.cluster import authentication
from verl_ray.cluster.guard import start_guard
from verl_ray.cluster.ray_patches import leaving_signals_to_driver, ray_messages
from verl_ray.cluster.session_folders import (
    name_owners,
    remove_ended_sessions,
    remove_folder,
)
from verl_ray.errors import ClusterError, Interrupted, WorkerDied
from verl_ray.weight_sync.shared_files import FOLDER, available_bytes

# Ray refuses an object store of less than 75 MiB.
_LEAST_STORE_BYTES = 80 << 20
# Ray exchanges 127.0.0.1 for the address of a network interface, which may vanish
# (Wi-Fi, VPN) during the run. Any other loopback address stays.
_LOOPBACK = "127.0.0.2"


@dataclass(frozen=True)
class NodeResources:
    """Resources of one live node.

    Attributes:
        node_id: Ray's id of the node.
        address: IP address of the node.
        total: Amounts that the node has, by Ray's resource names (CPU, GPU, memory in
            bytes, ...).
        available: Amounts that are free now.
    """

    node_id: str
    address: str
    total: dict[str, float]
    available: dict[str, float]


class Session:
    """An open connection to a cluster.

    Use it as a context manager, or call `close`. A process may have one open session
    at a time.

    Args:
        address: Address of the cluster.
        guard: Guard of the cluster if the session started it, else None.
        environment: Environment variables to restore at the end, with their previous
            values.
        folder: Ray's folder of logs and spilled objects if the session started the
            cluster, else None.
    """

    def __init__(
        self,
        address: str,
        guard: subprocess.Popen[bytes] | None,
        environment: dict[str, str | None],
        folder: Path | None = None,
    ) -> None:
        self.address = address
        self.owns_cluster = guard is not None
        self.folder = folder
        self._guard = guard
        self._environment = environment

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
    ) -> Session:
        """Connect to a cluster, or start one on this machine.

        Call it from the main thread: Linux ends Ray's processes together with the
        thread that started them.

        Args:
            address: Cluster to connect to. None stands for RAY_ADDRESS; if that is not
                set either, a cluster is started.
            cores: CPU cores of a cluster that is started; None for all of the machine.
            gpus: GPUs of a cluster that is started; None for all of the machine.
            object_store_bytes: Size of the object store of a cluster that is started;
                None for the smaller of an eighth of the machine's memory and half of
                the available bytes in /dev/shm.
            log_dir: Directory for Ray's messages to this process; None for stderr.

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
                return cls._connect(address)
            return cls._start(cores, gpus, store_bytes(object_store_bytes))
        except BaseException:
            ray_messages.release()
            raise

    @classmethod
    def _connect(cls, address: str) -> Session:
        before = dict(os.environ)
        try:
            with leaving_signals_to_driver():
                context = ray.init(
                    address=address, log_to_driver=False, logging_level="ERROR"
                )
        except Interrupted:
            ray.shutdown()
            raise
        except (
            ConnectionError,
            RuntimeError,
            ValueError,
            ray.exceptions.RayError,
        ) as error:
            raise ClusterError(
                f"no connection to the Ray cluster at {address} (ray.address, else"
                f" RAY_ADDRESS): {error}. If it uses token authentication, set"
                " RAY_AUTH_MODE=token here as well"
            ) from error
        changes = _changes_since(before)
        return cls(context.address_info["gcs_address"], None, changes)

    @classmethod
    def _start(
        cls, cores: int | None, gpus: int | None, object_store_bytes: int
    ) -> Session:
        before = dict(os.environ)
        environment = authentication.set_own_token()
        remove_ended_sessions(Path(get_default_ray_temp_dir()))

        this_process = psutil.Process()
        children_before = this_process.children(recursive=True)
        try:
            context = _start_ray(cores, gpus, object_store_bytes)
        except BaseException as error:
            ray.shutdown()
            authentication.restore(environment)
            if isinstance(error, Exception) and not isinstance(error, Interrupted):
                raise ClusterError(
                    f"a Ray cluster could not be started on this machine: {error}"
                ) from error
            raise

        # Ray starts its processes as children of this one.
        children = this_process.children(recursive=True)
        ray_pids = [child.pid for child in children if child not in children_before]
        folder = Path(context.address_info["session_dir"])
        guard = start_guard(folder, ray_pids)
        address = context.address_info["gcs_address"]
        session = cls(address, guard, _changes_since(before), folder)

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
        ray.shutdown()
        ray_messages.release()
        if self._guard is not None:
            # This closes the guard's input, and waits until it has killed what remains.
            self._guard.communicate()
            self._guard = None

        if self.folder is not None and keep_logs:
            print(
                f"Ray's own logs stay in {self.folder}/logs until the next run starts",
                file=sys.stderr,
                flush=True,
            )
        elif self.folder is not None:
            remove_folder(self.folder)
        self.folder = None

        authentication.restore(self._environment)
        self._environment = {}

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


def _start_ray(cores: int | None, gpus: int | None, object_store_bytes: int) -> Any:
    """Start a cluster on this machine and return Ray's context of it."""
    system_config = {
        # Workers are started for actors as these come. Spare workers would only take
        # start-up time and memory.
        "prestart_worker_first_driver": False,
        # Ray would run workers at a niceness of 15, so that anything else on the
        # machine would come first.
        "worker_niceness": 0,
    }
    with leaving_signals_to_driver():
        return ray.init(
            address="local",
            num_cpus=cores,
            num_gpus=gpus,
            object_store_memory=object_store_bytes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address=_LOOPBACK,
            _system_config=system_config,
        )


def node_resources() -> list[NodeResources]:
    """Resources of each live node of the connected cluster (`Session.resources`)."""
    available = ray._private.state.available_resources_per_node()
    resources = []
    for node in ray.nodes():
        if node["Alive"]:
            node_id = node["NodeID"]
            resources.append(
                NodeResources(
                    node_id=node_id,
                    address=node["NodeManagerAddress"],
                    total=dict(node["Resources"]),
                    available=dict(available.get(node_id, {})),
                )
            )
    return resources


def store_bytes(requested_bytes: int | None) -> int:
    """Size of an object store on this machine.

    Args:
        requested_bytes: Requested size; None for the default of `Session.open`.

    Raises:
        ClusterError: /dev/shm has less available bytes than the store needs.
    """
    free_bytes = available_bytes()
    size = requested_bytes
    if size is None:
        size = min(psutil.virtual_memory().total // 8, free_bytes // 2)

    needed_bytes = max(size, _LEAST_STORE_BYTES)
    if needed_bytes > free_bytes:
        raise ClusterError(
            f"{FOLDER} has {free_bytes >> 20} MiB free, the object store needs"
            f" {needed_bytes >> 20} MiB. In a container, raise it (docker run"
            " --shm-size=4g)"
        )
    return needed_bytes
