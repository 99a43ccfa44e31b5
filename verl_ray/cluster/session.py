"""The driver's connection to a Ray cluster: a running one, or one of its own.

Invariant: a cluster that this session started ends with it, through its own handle; a cluster that it found is left
as it was. Deliberately not here: which processes run on it (`placement.py`, `launch.py`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from verl_ray.errors import ClusterError

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_STORE_BYTES = 80 << 20  # Ray refuses less than 75 MiB
# Ray exchanges 127.0.0.1 for the address of a network interface, which may vanish (Wi-Fi, VPN) while the run goes on.
# Any other loopback address it keeps.
_LOOPBACK = "127.0.0.2"
# When a driver is killed, the kernel ends the head processes of its own cluster, but Ray's agents linger for a minute:
# they first report the death of the raylet to a server that died with it. This process holds on to all of them, waits
# for the end of its input, which is the end of the driver or of the session, and ends what is left.
_GUARD = """
import contextlib, os, signal, sys
processes = [os.pidfd_open(int(pid)) for pid in sys.argv[1:]]
sys.stdin.read()
for process in processes:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
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

    def __init__(self, address: str, guard: subprocess.Popen[bytes] | None, environment: dict[str, str | None]) -> None:
        self.address = address
        self.own = guard is not None
        self._guard = guard
        self._environment = environment

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
            context = ray.init(address=address, log_to_driver=False, logging_level="ERROR")
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
        before = psutil.Process().children(recursive=True)
        try:
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
            if isinstance(error, Exception):
                raise ClusterError(f"a Ray cluster could not be started on this machine: {error}") from error
            raise
        started = [child for child in psutil.Process().children(recursive=True) if child not in before]
        guard = subprocess.Popen(
            [sys.executable, "-ISc", _GUARD, *(str(child.pid) for child in started)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the driver, which ends the session in order
        )
        return cls(context.address_info["gcs_address"], guard, environment)

    def resources(self) -> list[NodeResources]:
        """What each live node has and what of it is free now. The latter lags a release by up to about a second."""
        return node_resources()

    def close(self) -> None:
        """Disconnect; a cluster of the session's own ends, and all its processes with it."""
        ray.shutdown()
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None
        _restore(self._environment)
        self._environment = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


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
    room = shutil.disk_usage(_SHARED_MEMORY).free
    size = asked if asked is not None else min(psutil.virtual_memory().total // 8, room // 2)
    needed = max(size, _LEAST_STORE_BYTES)
    if needed > room:
        raise ClusterError(
            f"{_SHARED_MEMORY} has {room >> 20} MiB free, the object store needs {needed >> 20} MiB. In a container, "
            "raise it (docker run --shm-size=4g)"
        )
    return needed


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
