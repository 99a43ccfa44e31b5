"""Supervision of replicas: their health, and the restart of lost ones.

Invariant: a replica that died, is stuck or cannot continue is fenced (its process is
killed), and a new process takes its place as soon as there is memory for it. Only
`wait_for_replicas` waits for a restart.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from controllers.devices import DeviceSharing
from controllers.rollouts.endpoints import Endpoints
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.context import Status
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.members import Member
from verl_ray.cluster.processes import Restart
from verl_ray.cluster.rank_calls import stalled
from verl_ray.cluster.signals import heed_signals
from verl_ray.cluster.stalls import IDLE_PROCESSES
from verl_ray.cluster.waiting import TICK_S
from verl_ray.config.rollout import HealthConfig
from verl_ray.errors import (
    DeadlineExceeded,
    EngineFailed,
    VerlRayError,
    WorkerDied,
    WorkerError,
    worker_error_of,
)
from verl_ray.rollout.requests import EngineLoad
from workers.rollout import ReplicaHealth, RolloutWorker

T = TypeVar("T")

Replica = WorkerGroup[RolloutWorker]


class ReplicaSupervisor:
    """The replicas of a run, at least one of which is available or restarting."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        config: HealthConfig,
        max_restarts: int,
        device_sharing: DeviceSharing,
        endpoints: Endpoints | None = None,
    ) -> None:
        """Take the replicas, which are all running, and announce them.

        Args:
            replicas: The replicas of the run.
            config: When a replica is lost.
            max_restarts: How many may be lost from one published policy to the next.
            device_sharing: Knows when there is memory for an engine that starts.
            endpoints: Publishes where clients find each replica; None without clients.
        """
        self._config = config
        self._max_restarts = max_restarts
        self._device_sharing = device_sharing
        self._endpoints = endpoints

        self._available = list(replicas)
        self._restarts: dict[Replica, Restart | None] = {}
        """Replicas that are not available; None for one that waits for memory."""
        self._unhealthy: set[Replica] = set()
        """Replicas that failed a health check. Later replies do not change that."""

        self.expects_progress = True
        """Whether a replica with open rows has to make progress with them."""

        self._loads: dict[Replica, EngineLoad] = {}
        """Loads that were reported since they were last taken."""

        self._lost_since_publish = 0
        self._restarted = 0

        self.is_excused: Callable[[Replica], bool] = lambda _: False
        """Returns whether the loss of a replica does not count, since its rows may have
        ended another one."""

        for replica in replicas:
            self._announce(replica)

    @property
    def available(self) -> tuple[Replica, ...]:
        """The replicas that are running, in no particular order."""
        return tuple(self._available)

    @property
    def restarting(self) -> bool:
        """Whether some replicas are restarting."""
        return bool(self._restarts)

    def members(self) -> list[Member]:
        """Return the processes of the available replicas."""
        return [member for replica in self._available for member in replica.members()]

    def wait_for_replicas(self, *, all_of_them: bool = False) -> tuple[Replica, ...]:
        """Return the available replicas, once there is one, or once all are back."""
        self.take_started()
        # Waits for restarts. Ends when enough replicas are available, or with the error
        # of a replica that cannot be restarted.
        while self._restarts and (all_of_them or not self._available):
            heed_signals()
            IDLE_PROCESSES.raise_if_lost()
            time.sleep(TICK_S / 10)
            self.take_started()
        return self.available

    def note_published(self) -> None:
        """Note that all available replicas hold a new version of the policy."""
        self._lost_since_publish = 0

    def excuse_losses(self, count: int) -> None:
        """Let so many losses not count, which prompts have caused."""
        self._lost_since_publish = max(0, self._lost_since_publish - count)

    def take_loads(self) -> dict[Replica, EngineLoad]:
        """Return the loads of engines that were reported since the last call."""
        loads = self._loads
        self._loads = {}
        return loads

    def take_restart_count(self) -> int:
        """Return the number of replicas restarted since the last call."""
        count = self._restarted
        self._restarted = 0
        return count

    def close(self) -> None:
        """Kill the replicas that are restarting; the others are stopped elsewhere."""
        for replica in self._restarts:
            replica.kill()
        self._restarts.clear()
        if self._endpoints is not None:
            self._endpoints.close()

    # --------------------------------------------------------------------------- health

    def call_each(
        self,
        replicas: Sequence[Replica],
        method: Callable[..., T],
        *args: object,
    ) -> list[T]:
        """Call the same method of several replicas, and wait for all that survive it.

        Returns:
            What the method returned, for each replica that survived.

        Raises:
            VerlRayError: A call failed in a way that is no loss of a replica.
        """
        calls: dict[Replica, Call[list[Any]]] = {}
        for replica in replicas:
            try:
                calls[replica] = replica.broadcast(method, *args)
            except VerlRayError as error:
                # The replica has failed before this call.
                self.handle_failure(error)

        # Each round waits for all calls. It ends with their results, or with the loss
        # of one replica, whose call is dropped.
        while calls:
            check = functools.partial(self.check_health, list(calls))
            try:
                replies = wait_all(list(calls.values()), check)
                return [reply for (reply,) in replies]
            except VerlRayError as error:
                lost = self.handle_failure(error)
                del calls[lost]
        return []

    def check_health(self, replicas: Sequence[Replica]) -> None:
        """Check replicas while their replies are waited for. Returns at once.

        Raises:
            WorkerError: A replica does not reply, its engine failed, or it makes no
                progress.
        """
        for replica in replicas:
            self._check(replica)

    def fence_unhealthy(self, *, but: Replica | None = None) -> None:
        """Check available replicas, but one; fence and restart the unhealthy ones."""
        for replica in self.available:
            if replica is but:
                continue
            try:
                self._check(replica)
            except WorkerError as error:
                self._fence(replica, error)

    def handle_failure(self, error: VerlRayError) -> Replica:
        """Fence and restart the replica that an error is about, if it is lost.

        Returns:
            The lost replica. Its restart continues in the background.

        Raises:
            VerlRayError: `error` itself. It is not about a replica, or the replica is
                as good as before, or too many replicas were lost.
        """
        failure = worker_error_of(error)
        if failure is None:
            raise error

        owners = (replica for replica in self._available if replica.owns(failure))
        replica = next(owners, None)
        if replica is None or not self._is_lost(replica, failure):
            raise error

        self._fence(replica, error)
        return replica

    def _check(self, replica: Replica) -> None:
        """Raise WorkerError if a replica is unhealthy, and remember that it is."""
        deadline_s = self._config.deadline_s
        limit = f"rollout.health.deadline_s = {deadline_s:g}"
        try:
            status = replica.check_heartbeat(
                self._config.interval_s,
                deadline_s,
                limit,
            )
            if status is not None:
                _check_engine(replica, status)
                if self.expects_progress:
                    _check_progress(replica, status)
                health: ReplicaHealth | None = status.health.get(replica.role)
                if health is not None:
                    self._note_health(replica, health)
        except WorkerError as error:
            replica.fail(error)
            self._unhealthy.add(replica)
            raise

    def _note_health(self, replica: Replica, health: ReplicaHealth) -> None:
        self._loads[replica] = health.load
        # An endpoint may have waited for its port.
        if self._endpoints is not None and health.endpoint_port is not None:
            (member,) = replica.members()
            self._endpoints.announce(member, health.endpoint_port)

    def _is_lost(self, replica: Replica, error: WorkerError) -> bool:
        """Return whether a replica has to be restarted after a call of it failed."""
        if replica in self._unhealthy or isinstance(error, WorkerDied):
            return True

        if isinstance(error, DeadlineExceeded):
            # A replica that replies and waits for its peer on a wire may be fine: the
            # peer is the one that makes no progress.
            heartbeat = replica.members()[0].heartbeat
            replies = heartbeat.unanswered_s < self._config.deadline_s
            waits_for_peer = (
                heartbeat.status is not None
                and heartbeat.status.progress.waits_for_others
            )
            return not (replies and waits_for_peer)

        # A failed engine may be the cause of another error.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, EngineFailed):
            cause = cause.__cause__
        return cause is not None

    # ------------------------------------------------------------------------- restarts

    def take_started(self) -> list[Replica]:
        """Advance all restarts, without waiting. Return the replicas that came back.

        They are available from now on, without weights.
        """
        started: list[Replica] = []
        for replica, restart in list(self._restarts.items()):
            try:
                if restart is None:
                    self._begin_restart(replica)
                elif restart.poll():
                    del self._restarts[replica]
                    self._available.append(replica)
                    self._announce(replica)
                    started.append(replica)
            except VerlRayError as error:
                # The restart failed. It is repeated until too many replicas are lost.
                self._fence(replica, error)
        return started

    def _fence(self, replica: Replica, error: VerlRayError) -> None:
        """Kill a lost replica and begin its restart.

        Raises:
            VerlRayError: `error` itself, if too many replicas were lost, or if it is
                not about a process, such as a stop of the run.
        """
        failure = worker_error_of(error)
        if failure is None:
            raise error

        if replica in self._available:
            self._available.remove(replica)
            # One whose restart failed is not announced, and may have no process.
            if self._endpoints is not None:
                (member,) = replica.members()
                self._endpoints.withdraw(member)
        self._unhealthy.discard(replica)

        if not self.is_excused(replica):
            self._lost_since_publish += 1
        self._restarted += 1
        if self._lost_since_publish > self._max_restarts:
            limit = f"run.recovery.max_restarts = {self._max_restarts}"
            error.add_note(f"more than {limit} replicas were lost in a row")
            raise error

        name = f"{failure.role} rank {failure.rank} on {failure.node}"
        print(
            f"warning: {name} is lost and starts again: {failure.message}",
            file=sys.stderr,
            flush=True,
        )
        # A stopped process could continue later, with weights that are old by then.
        replica.kill()
        self._begin_restart(replica)

    def _begin_restart(self, replica: Replica) -> None:
        """Start a replica again if there is memory for an engine that is awake.

        Otherwise it waits until the trainers free memory for the next rollouts.
        """
        restart: Restart | None = None
        if self._device_sharing.engine_fits:
            restart = replica.restart()
        self._restarts[replica] = restart

    def _announce(self, replica: Replica) -> None:
        """Publish the address of a replica that has started, if its port is open."""
        if self._endpoints is None:
            return

        port = replica.rank_zero(RolloutWorker.endpoint_port).result()
        (member,) = replica.members()
        if port is not None:
            self._endpoints.announce(member, port)
        else:
            self._endpoints.warn_of_wait(member)


def _check_engine(replica: Replica, status: Status) -> None:
    """Raise WorkerError if the engine of a replica has failed."""
    # A process reports no health while its worker is built.
    health = status.health.get(replica.role)
    if health is None or health.failure is None:
        return

    (member,) = replica.members()
    raise WorkerError(
        f"its engine failed: {health.failure}",
        role=member.role,
        rank=member.rank,
        node=member.node,
    )


def _check_progress(replica: Replica, status: Status) -> None:
    """Raise DeadlineExceeded if a replica makes no progress with one of its calls.

    A process that waits for others is not to blame.
    """
    if status.running is None or status.progress.waits_for_others:
        return

    _, method, running_s = status.running
    stalled_s = min(running_s, status.progress.idle_s)
    if stalled_s >= replica.stall_s:
        limit = f"run.stall_s = {replica.stall_s:g}"
        raise stalled(replica.members(), method, limit)
