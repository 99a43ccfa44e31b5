"""The owner of the rollout replicas: generation, publishing, health and restart.

Invariant: a replica without the present policy version gets no request. A version is
published to all available replicas, or to none. Everything happens in the driver's
thread, a little at a time: `advance` returns at once, and is called wherever the driver
waits. Deliberately not here: how a version travels (`controllers/publishing`), who
generates what (`generation.py`), and scores (`producer.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from controllers.devices.device_sharing import DeviceSharing
from controllers.publishing.publisher import Publisher, Receivers
from controllers.rollouts.endpoints import Endpoints
from controllers.rollouts.generation import (
    GenerationJob,
    GenerationScheduler,
    ReplicaIncarnation,
)
from controllers.rollouts.supervisor import Replica, ReplicaSupervisor
from verl_ray.cluster.members import Member
from verl_ray.cluster.signals import heed_signals
from verl_ray.cluster.waiting import TICK_S
from verl_ray.config.rollout import RolloutConfig
from verl_ray.data.stages import Prompts
from verl_ray.errors import VerlRayError
from workers.rollout import Generation, RolloutWorker


class Replicas:
    """The rollout replicas of a run."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        publisher: Publisher,
        device_sharing: DeviceSharing,
        config: RolloutConfig,
        endpoints: Endpoints | None = None,
    ) -> None:
        """Take the replicas, which are all running and have no weights yet.

        Args:
            replicas: The replicas of the run.
            publisher: Sends the actor's weights to replicas.
            device_sharing: The devices, which trainers may share with the replicas.
            config: The settings of rollouts.
            endpoints: Publishes where clients find each replica; None without clients.
        """
        self._publisher = publisher
        self._device_sharing = device_sharing
        self._supervisor = ReplicaSupervisor(
            replicas,
            config.health,
            device_sharing,
            endpoints,
        )
        self._scheduler = GenerationScheduler(config.in_flight)

        self._version = -1
        self._up_to_date: set[ReplicaIncarnation] = set()
        """Replicas that got the present version, also those that are lost by now."""
        self._brings_up = False
        self._switch_s = 0.0

    @property
    def available(self) -> tuple[Replica, ...]:
        """The replicas that are running."""
        return self._supervisor.available

    def members(self) -> list[Member]:
        """Return the processes of the available replicas."""
        return self._supervisor.members()

    def take_counts(self) -> dict[str, float]:
        """Return metrics: restarts and reissued responses since the last call."""
        restarts = self._supervisor.take_restart_count()
        reissued = self._scheduler.take_reissued_count()
        return {
            "rollout/restarts": float(restarts),
            "rollout/reissued": float(reissued),
        }

    def close(self) -> None:
        """Abandon all generation, and kill the replicas that are restarting.

        The available replicas are stopped elsewhere.
        """
        self._scheduler.close()
        self._supervisor.close()

    # -------------------------------------------------------------------------- weights

    def publish(self, version: int) -> dict[str, float]:
        """Send the actor's weights to every available replica, and verify them.

        If a replica is lost meanwhile, the weight sync begins anew without it.

        Args:
            version: Version of the policy that the actor holds.

        Returns:
            Metrics of the weight sync.
        """
        supervisor = self._supervisor

        # Each round is one weight sync. It ends with its success, or with an error that
        # is no loss of a replica.
        while True:
            replicas = supervisor.wait_for_replicas()
            watch = functools.partial(supervisor.check_health, replicas)
            receivers = Receivers(replicas, watch)
            try:
                metrics = self._publisher.publish(version, receivers)
                break
            except VerlRayError as error:
                lost = supervisor.handle_failure(error)
                survivors = [replica for replica in replicas if replica is not lost]
                self._break_off_sync(version, survivors)

        self._version = version
        self._up_to_date = {_incarnation(replica) for replica in replicas}
        supervisor.note_published()
        return metrics | {"timing_s/weight_sync/hand_back": self._switch_s}

    def _break_off_sync(self, version: int, survivors: Sequence[Replica]) -> None:
        """Undo a weight sync that lost a receiver, on both of its sides."""
        # The survivors may hold a part of the new weights.
        self._up_to_date.clear()
        self._publisher.abandon_sync()
        self._supervisor.call_each(survivors, RolloutWorker.abort_update)
        # The lost replica needs memory to start again.
        self._publisher.prepare_restart(version)

    def switch_to_training(self) -> None:
        """Switch shared devices from rollouts to training.

        Engines free what the trainers need, and the training state comes back.
        """
        began = time.perf_counter()
        engines_free = self._device_sharing.plan.engines_free

        # Each round puts all replicas to sleep. It is repeated while replicas restart:
        # they take memory too, and there is none for them once the trainers are back.
        while engines_free is not None:
            replicas = self._supervisor.wait_for_replicas(all_of_them=True)
            self._supervisor.call_each(replicas, RolloutWorker.sleep, engines_free)
            if not self._supervisor.restarting:
                break

        self._device_sharing.switch_to("training")
        self._switch_s = time.perf_counter() - began

    # ----------------------------------------------------------------------- generation

    def generate(self, prompts: Prompts, generation: Generation) -> GenerationJob:
        """Begin to generate responses to these prompts; `advance` continues."""
        job = GenerationJob(prompts, generation)
        self._scheduler.open(job)
        return job

    def stop_generation(self) -> None:
        """Abandon all generation."""
        self._scheduler.close()

    def references(self) -> list[Any]:
        """Return the object references of the next pieces."""
        return self._scheduler.references()

    def advance(self, timeout_s: float = 0.0) -> None:
        """Advance health checks, restarts and generation.

        Wait for finished responses for up to `timeout_s` seconds.

        Raises:
            VerlRayError: A replica refused a request, or more replicas were lost than
                rollout.health.max_restarts allows.
        """
        heed_signals()
        self._supervisor.take_started()
        if self._scheduler.is_idle:
            return

        # An unhealthy replica would never return its pending responses.
        self._supervisor.fence_unhealthy()
        # `_bring_up` waits, and its wait advances the replicas again.
        if not self._brings_up:
            self._bring_up_outdated()

        incarnations = [_incarnation(replica) for replica in self.available]
        ready = [
            incarnation
            for incarnation in incarnations
            if incarnation in self._up_to_date
        ]
        self._scheduler.set_replicas(ready)
        try:
            self._scheduler.dispatch()
            if self._scheduler.references():
                self._scheduler.take(timeout_s)
            elif timeout_s:
                # No replica is ready yet, so there is nothing else to wait for.
                time.sleep(min(timeout_s, TICK_S / 10))
        except VerlRayError as error:
            self._supervisor.handle_failure(error)

    def _bring_up_outdated(self) -> None:
        """Send the present weights to every replica that does not hold them."""
        for replica in self.available:
            if _incarnation(replica) not in self._up_to_date:
                self._bring_up(replica)

    def _bring_up(self, replica: Replica) -> None:
        """Send the present weights to a replica that has started again.

        The other replicas continue to generate meanwhile.
        """
        watch = functools.partial(self._supervisor.check_health, (replica,))
        receivers = Receivers((replica,), watch, background=self)

        self._brings_up = True
        try:
            self._publisher.catch_up(self._version, receivers)
            self._up_to_date.add(_incarnation(replica))
        except VerlRayError as error:
            self._supervisor.handle_failure(error)
        finally:
            self._brings_up = False


def _incarnation(replica: Replica) -> ReplicaIncarnation:
    """Return a replica together with the number of its present process."""
    return replica, replica.incarnation
