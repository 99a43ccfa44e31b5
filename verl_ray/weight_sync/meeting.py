"""A process group of a wire's own, beside whatever groups its processes are in already.

Invariant: it stands only when every end is there, and nobody waits longer than the deadline: who did not come is named.
Member 0 is the sender. Deliberately not here: what is sent.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl_ray.cluster.rendezvous import interface_of, listen
from verl_ray.errors import WeightSyncError
from verl_ray.profiling.progress import waiting_for_others

_KEY = "run.stall_s"
_COMPLETE, _LEFT = "complete", "left"
_LOOK_S = 0.02
_ON_ERROR, _CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"


@dataclass(frozen=True)
class Meeting:
    """Where the ends of one group meet."""

    host: str
    port: int
    receivers: int
    token: str
    """No two meetings are the same, though a port may come again."""

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Group:
    """All ends of one wire. `over`: "cpu" = gloo, "cuda" = NCCL."""

    def __init__(self, group: Any, store: Any, deadline: timedelta, what: str) -> None:
        self._group, self._store, self._deadline, self._what = group, store, deadline, what

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to bring member 0's content into everybody's tensor, which is to be left alone until `wait`."""
        with self._named():
            return self._group.broadcast(tensor, 0, self._deadline)

    def wait(self, work: Any) -> None:
        """Until a broadcast is done here. Raises WeightSyncError at the deadline, or when another end is gone."""
        with self._named(), waiting_for_others():
            work.wait(self._deadline)

    def close(self) -> None:
        """Give up what is still under way."""
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch has no narrower class for it
            raise WeightSyncError(
                f"{self._what}: a broadcast of weights did not end within {self._deadline.total_seconds():.0f} s "
                f"({_KEY}), or the other end is gone: {error}"
            ) from error


def invite(host: str, receivers: int) -> tuple[Meeting, socket.socket]:
    """On the sender: a free port of this node, and the socket that listens there."""
    place, listener = listen(host, receivers + 1)
    return Meeting(place.address, place.port, receivers, secrets.token_hex(4)), listener


@waiting_for_others()
def gather(
    meeting: Meeting, listener: socket.socket, patience_s: float, over: str, leaves: threading.Event | None = None
) -> Group:
    """On the sender: the group, once every receiver is there.

    Args:
        leaves: set by who knows that one will not come: nobody waits any longer then.

    Raises:
        WeightSyncError: names the receivers that did not come in time.
    """
    deadline = timedelta(seconds=patience_s)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        meeting.host, meeting.port, meeting.receivers + 1, is_master=True, timeout=deadline, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    keys = [_arrival(receiver) for receiver in range(meeting.receivers)]
    began = time.monotonic()
    while missing := [receiver for receiver, key in enumerate(keys) if not store.check([key])]:
        waited_s = time.monotonic() - began
        left = leaves is not None and leaves.is_set()
        if left or waited_s > patience_s:
            store.set(_LEFT, "")
            raise WeightSyncError(
                f"weight sync: of {meeting.receivers} receivers {missing} "
                + ("will not come" if left else "did not come")
                + f" to {meeting}, which was open for {waited_s:.0f} s (at most {patience_s:.0f}, of {_KEY}). Can the "
                "nodes of the rollout engines reach that address?"
            )
        time.sleep(_LOOK_S)
    store.set(_COMPLETE, "")
    return _group(meeting, store, 0, deadline, over)


@waiting_for_others()
def join(meeting: Meeting, receiver: int, patience_s: float, over: str) -> Group:
    """On a receiver: the same.

    Raises:
        WeightSyncError: the sender cannot be reached, or another receiver did not come.
    """
    deadline = timedelta(seconds=patience_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            meeting.host, meeting.port, meeting.receivers + 1, timeout=deadline, wait_for_workers=False
        )
        store.set(_arrival(receiver), "")
        until = time.monotonic() + patience_s
        while not store.check([_COMPLETE]):
            if time.monotonic() > until or store.check([_LEFT]):
                raise dist.DistError("the sender waits no longer")
            time.sleep(_LOOK_S)
    except dist.DistError as error:
        raise WeightSyncError(
            f"weight sync: receiver {receiver} waited {patience_s:.0f} s ({_KEY}) at {meeting}, where the sender or "
            f"another receiver did not come: {error}"
        ) from error
    return _group(meeting, store, receiver + 1, deadline, over)


def _arrival(receiver: int) -> str:
    return f"arrived/{receiver}"


def _group(meeting: Meeting, store: Any, member: int, deadline: timedelta, over: str) -> Group:
    own = f"weight sync, member {member} of {meeting.receivers + 1} at {meeting}"
    size = meeting.receivers + 1
    mine = dist.PrefixStore("group", store)  # type: ignore[attr-defined]
    group: Any
    try:
        if over == "cpu":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = deadline
            options._devices = [_network_device(meeting)]
            group = dist.ProcessGroupGloo(mine, member, size, options)
        else:
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = deadline
            with _an_end_of_the_others_is_survived():
                group = dist.ProcessGroupNCCL(mine, member, size, nccl)
    except RuntimeError as error:
        raise WeightSyncError(f"{own}: the ends found each other but could not connect: {error}") from error
    made = Group(group, store, deadline, own)
    made.wait(made.broadcast(torch.zeros(1, device=over)))  # NCCL connects with the first of them
    return made


@contextmanager
def _an_end_of_the_others_is_survived() -> Iterator[None]:
    """torch's watchdog of a group that is made here gives the group up when a member is gone; by default it would end
    this process."""
    before = os.environ.get(_ON_ERROR)
    os.environ[_ON_ERROR] = _CLEAN_UP_ONLY
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ON_ERROR]
        else:
            os.environ[_ON_ERROR] = before


def _network_device(meeting: Meeting) -> Any:
    """The interface of this node that leads to the sender. On the sender's node its own address does."""
    family = socket.AF_INET6 if ":" in meeting.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect((meeting.host, meeting.port))
        own = probe.getsockname()[0]
    interface = interface_of(own)
    make = dist.ProcessGroupGloo.create_device
    return make(interface=interface) if interface is not None else make(hostname=own)
