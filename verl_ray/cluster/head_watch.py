"""The control store (gcs) of a cluster of somebody else's: whether it replies.

Ray waits a minute for a control store that does not reply, and then ends this process
without a word. It waits for ever where one is stopped.

Invariant: the loss is noted before Ray's limit, and not while the control store
replies. Deliberately not here: a cluster of the session's own, whose processes have a
guard (`guard.py`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import ray

from verl_ray.cluster.cluster_loss import ClusterLoss

_RAYS_LIMIT = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Environment variable with Ray's own limit in seconds; it ends a process then."""

_RAYS_LIMIT_S = 60.0

_ASK_S = 2.0
_REPLY_S = 5.0


def patience_s() -> float:
    """Return for how many seconds a control store may be gone, as while it restarts.

    It is half of Ray's own limit, so that this process can still say why it ends.
    """
    return float(os.environ.get(_RAYS_LIMIT, _RAYS_LIMIT_S)) / 2


class HeadWatch:
    """Asks the control store every few seconds, in a thread of its own."""

    def __init__(self, address: str, limit_s: float, loss: ClusterLoss) -> None:
        """Begin to ask.

        Args:
            address: Address of the control store.
            limit_s: Seconds without a reply after which the cluster is lost.
            loss: Where this is noted.
        """
        self._address = address
        self._limit_s = limit_s
        self._loss = loss
        self._ask = _question(address)
        self._replied_s = time.monotonic()
        self._is_closed = threading.Event()
        for work in (self._ask_on, self._look_on):
            threading.Thread(target=work, name="head watch", daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._is_closed.set()

    def _ask_on(self) -> None:
        # Asks until the watch is closed. Where the store is gone, Ray may keep a
        # question for longer than its own limit, so another thread looks at the time.
        while not self._is_closed.wait(_ASK_S):
            if self._ask(_REPLY_S):
                self._replied_s = time.monotonic()

    def _look_on(self) -> None:
        # Ends when the watch is closed, or with the loss.
        last_look_s = time.monotonic()
        while not self._is_closed.wait(_ASK_S):
            now_s = time.monotonic()
            # This process may have been stopped itself.
            if now_s - last_look_s > 2 * _ASK_S:
                self._replied_s = now_s
            last_look_s = now_s
            silent_s = now_s - self._replied_s
            if silent_s > self._limit_s:
                self._loss.note(
                    f"gcs_server at {self._address} has not replied for"
                    f" {silent_s:.0f} s"
                )
                return


def _question(address: str) -> Callable[[float], bool]:
    """Return a function that asks for a reply within seconds, whatever it is."""
    client = ray._raylet.GcsClient(address=address)

    def replies(within_s: float) -> bool:
        try:
            client.internal_kv_exists(b"verl_ray", namespace=None, timeout=within_s)
            return True
        # Ray's classes of errors of a connection have nothing in common.
        except Exception:
            return False

    return replies
