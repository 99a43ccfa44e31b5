"""Which replicas are there: how they are, and the restart of those that are lost.

Invariant: a replica that died, is stuck or cannot go on is fenced (its process ends), and a new one takes its place as
soon as it finds memory. Nothing here waits for a restart but `gather`. Deliberately not here: what a lost replica owes
(`drawing.py`), and its weights (`controllers/publishing`).
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from controllers.devices.residency import Residency
from controllers.rollouts.endpoints import Endpoints
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.failures import Member, stalled
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.messages import Status
from verl_ray.cluster.processes import Restart
from verl_ray.cluster.signals import heed_signals
from verl_ray.cluster.waiting import TICK_S
from verl_ray.config.rollout import HealthConfig
from verl_ray.errors import DeadlineExceeded, EngineFailed, VerlRayError, WorkerDied, WorkerError, failure_of_worker
from workers.rollout import RolloutWorker

Replica = WorkerGroup[RolloutWorker]


class Roster:
    """The replicas of a run, of which at least one is there or on its way."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        config: HealthConfig,
        residency: Residency,
        endpoints: Endpoints | None = None,
    ) -> None:
        """`residency`: says when one that starts finds memory; `endpoints`: tells where clients find each replica."""
        self._config, self._residency, self._endpoints = config, residency, endpoints
        self._there = list(replicas)
        self._condemned: set[Replica] = set()  # seen not to answer: what they say later changes nothing
        self._restarts: dict[Replica, Restart | None] = {}  # None = waits for memory
        self._lost_since_publish = 0
        self._restarted = 0
        for replica in replicas:
            self._tell(replica)

    @property
    def there(self) -> tuple[Replica, ...]:
        """Those that are there now, in no particular order."""
        return tuple(self._there)

    @property
    def restarting(self) -> bool:
        """Whether some are on their way."""
        return bool(self._restarts)

    def members(self) -> list[Member]:
        """The processes of those that are there."""
        return [member for replica in self._there for member in replica.members()]

    def gather(self, *, all_of_them: bool = False) -> tuple[Replica, ...]:
        """Those that are there, with the new ones that have started meanwhile; waits until there is one, or all."""
        self.take_started()
        while self._restarts and (all_of_them or not self._there):
            heed_signals()
            time.sleep(TICK_S / 10)
            self.take_started()
        return self.there

    def published(self) -> None:
        """All that are there hold a new version."""
        self._lost_since_publish = 0

    def take_count(self) -> int:
        """Replicas restarted since the last call."""
        count, self._restarted = self._restarted, 0
        return count

    def close(self) -> None:
        """End the replicas that are being restarted; the others are not ended here."""
        for replica in self._restarts:
            replica.kill()
        self._restarts.clear()
        if self._endpoints is not None:
            self._endpoints.close()

    # ------------------------------------------------------------------------------------------------------- health

    def of_each(self, replicas: Sequence[Replica], verb: Callable[..., object], *args: object) -> None:
        """The same call of several replicas; one that is lost meanwhile does not keep the others from it."""
        calls: dict[Replica, Call[Any]] = {}
        for replica in replicas:
            try:
                calls[replica] = replica.broadcast(verb, *args)
            except VerlRayError as error:  # it has failed before
                self.lose(error)
        while calls:
            try:
                wait_all(list(calls.values()), functools.partial(self.watch, list(calls)))
                return
            except VerlRayError as error:
                del calls[self.lose(error)]

    def watch(self, replicas: Sequence[Replica]) -> None:
        """While their answers are waited for: ask how they are, and raise for one that does not say."""
        for replica in replicas:
            self._look_at(replica)

    def see(self) -> None:
        """Ask all that are there how they are; those that do not say are lost."""
        for replica in self.there:
            try:
                self._look_at(replica)
            except WorkerError as error:
                self._fence(replica, error)

    def lose(self, error: VerlRayError) -> Replica:
        """The replica that failed, which is fenced and started anew, beside everything else.

        Raises `error` if it is not about a replica, or says nothing against the process; or if too many were lost.
        """
        failure = failure_of_worker(error)
        replica = next((one for one in self._there if failure is not None and one.owns(failure)), None)
        if failure is None or replica is None or not self._is_lost(replica, failure):
            raise error
        self._fence(replica, error)
        return replica

    def _look_at(self, replica: Replica) -> None:
        limit = f"rollout.health.deadline_s = {self._config.deadline_s:g}"
        try:
            status = replica.beat(self._config.interval_s, self._config.deadline_s, limit)
            told = status.health.get(replica.role) if status is not None else None  # none while it was built
            if told is not None and told.failure is not None:
                (member,) = replica.members()
                what = f"its engine failed: {told.failure}"
                raise WorkerError(what, role=member.role, rank=member.rank, node=member.node)
            if status is not None and _stands_still(status, replica.stall_s):
                assert status.running is not None
                raise stalled(replica.members(), status.running[1], f"run.stall_s = {replica.stall_s:g}")
        except WorkerError as error:
            replica.fail(error)
            self._condemned.add(replica)
            raise

    def _is_lost(self, replica: Replica, error: WorkerError) -> bool:
        if replica in self._condemned or isinstance(error, WorkerDied):
            return True
        if isinstance(error, DeadlineExceeded):  # one that waits for the other end of a wire may be as good as ever
            heartbeat = replica.members()[0].heartbeat
            answers = heartbeat.unanswered_s < self._config.deadline_s
            return not (answers and heartbeat.status is not None and heartbeat.status.progress.waits_for_others)
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, EngineFailed):
            cause = cause.__cause__
        return cause is not None

    # ----------------------------------------------------------------------------------------------------- restarts

    def take_started(self) -> list[Replica]:
        """Those that have started again since the last call: they are there now, without weights. Returns at once."""
        started = []
        for replica, restart in list(self._restarts.items()):
            try:
                if restart is None:
                    self._begin(replica)
                elif restart.poll():
                    del self._restarts[replica]
                    self._there.append(replica)
                    self._tell(replica)
                    started.append(replica)
            except VerlRayError as error:  # it did not come up: once more, while there are others
                self._fence(replica, error)
        return started

    def _fence(self, replica: Replica, error: VerlRayError) -> None:
        failure = failure_of_worker(error)
        if failure is None:  # a stop, for instance
            raise error
        if replica in self._there:
            self._there.remove(replica)
        self._condemned.discard(replica)
        self._lost_since_publish += 1
        self._restarted += 1
        if self._lost_since_publish > self._config.max_restarts:
            limit = f"rollout.health.max_restarts = {self._config.max_restarts}"
            error.add_note(f"more than {limit} replicas were lost in a row")
            raise error
        who = f"{failure.role} rank {failure.rank} on {failure.node}"
        print(f"warning: {who} is lost and starts again: {failure.what}", file=sys.stderr, flush=True)
        replica.kill()
        self._begin(replica)

    def _begin(self, replica: Replica) -> None:
        """Start it again, if there is memory for an engine that is awake; else with the next rollouts."""
        self._restarts[replica] = replica.restart() if self._residency.has_room else None

    def _tell(self, replica: Replica) -> None:
        if self._endpoints is not None:
            self._endpoints.tell(replica)


def _stands_still(status: Status, stall_s: float) -> bool:
    """Whether a process makes no progress with one of its calls, and does not wait for others."""
    if status.running is None or status.progress.waits_for_others:
        return False
    _, _, so_far_s = status.running
    return min(so_far_s, status.progress.idle_s) >= stall_s
