"""The owner of the rollout replicas: generation, publishing, health and restart.

Invariant: a replica without the present policy version gets no request. A version is
published to all available replicas, or to none. Everything happens in the driver's
thread, a little at a time: `advance` returns at once, and is called wherever the driver
waits.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

from controllers.devices import DeviceSharing
from controllers.publishing.publisher import Publisher
from controllers.publishing.wire import Receivers
from controllers.rollouts.concurrency import AdaptiveConcurrency
from controllers.rollouts.endpoints import Endpoints
from controllers.rollouts.generation import (
    GenerationScheduler,
    ReplicaIncarnation,
)
from controllers.rollouts.supervisor import Replica, ReplicaSupervisor
from controllers.rollouts.time_at_work import Occupancy
from verl_ray.cluster.members import Member
from verl_ray.cluster.signals import heed_signals
from verl_ray.cluster.stalls import IDLE_PROCESSES
from verl_ray.cluster.waiting import TICK_S, Background
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.errors import RolloutError, VerlRayError, worker_error_of
from verl_ray.rollout.episode_counts import EpisodeCounts
from verl_ray.rollout.server import PauseMode
from workers.generation import TRAINING
from workers.rollout import RolloutWorker


class Replicas:
    """The rollout replicas of a run."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        publisher: Publisher,
        device_sharing: DeviceSharing,
        config: RolloutTaskConfig,
        endpoints: Endpoints | None = None,
    ) -> None:
        """Take the replicas, which are all running and have no weights yet.

        Args:
            replicas: The replicas of the run.
            publisher: Sends the actor's weights to replicas.
            device_sharing: The devices, which trainers may share with the replicas.
            config: The configuration of the run.
            endpoints: Publishes where clients find each replica; None without clients.
        """
        self._publisher = publisher
        self._max_restarts = config.run.recovery.max_restarts
        self.device_sharing = device_sharing
        """The devices, which the trainer switches to training."""
        self._supervisor = ReplicaSupervisor(
            replicas,
            config.rollout.health,
            self._max_restarts,
            device_sharing,
            endpoints,
        )
        self._concurrency = AdaptiveConcurrency(config.rollout)
        self.scheduler = GenerationScheduler(self._concurrency.first)
        """Opens generation, which `advance` continues."""
        self._supervisor.is_excused = self.scheduler.runs_retried_prompts
        self.occupancy = Occupancy()
        """The clock of trainers and engines, which the trainer reads."""
        self._runs_episodes = config.episodes is not None
        self._takes_turns = config.rollout.schedule == "carry_over"
        self._pause_mode: PauseMode | None = config.rollout.kv
        self._paused = False
        self._given_up_since_publish = 0

        self._version = -1
        self._up_to_date: set[ReplicaIncarnation] = set()
        """Replicas that got the present version, also those that are lost by now."""
        self._catching_up: Replica | None = None
        """The replica that gets the present version now, while all else goes on."""

    @property
    def available(self) -> tuple[Replica, ...]:
        """The replicas that are running."""
        return self._supervisor.available

    def members(self) -> list[Member]:
        """Return the processes of the available replicas."""
        return self._supervisor.members()

    def take_counts(self) -> dict[str, float]:
        """Return metrics: what was started again since the last call.

        They are of replicas, of responses and, where rollouts are episodes, of these,
        whose warnings are printed.
        What a lost replica had counted is lost with it.
        """
        restarts = self._supervisor.take_restart_count()
        reissued = self.scheduler.take_reissued_count()
        counts = {
            "rollout/restarts": float(restarts),
            "rollout/reissued": float(reissued),
        }
        counts |= self._concurrency.metrics()
        return counts | self._episode_counts()

    def _episode_counts(self) -> dict[str, float]:
        if not self._runs_episodes:
            return {}
        counts = self._supervisor.call_each(
            self.available, RolloutWorker.take_episode_counts
        )
        events = sum(counts, EpisodeCounts())
        # Each is in the log of its replica; several may say the same.
        for warning in dict.fromkeys(events.warnings):
            print(f"warning: {warning}.", file=sys.stderr, flush=True)
        return events.metrics()

    def close(self) -> None:
        """Abandon all generation, and kill the replicas that are restarting.

        The available replicas are stopped elsewhere.
        """
        self.scheduler.close()
        self._supervisor.close()

    def abandon_sync(self) -> None:
        """Let the actor return from a sync that broke off, if it can."""
        try:
            self._publisher.abandon_sync()
        except VerlRayError as error:
            # What the actor says does not matter any more.
            if worker_error_of(error) is None:
                raise

    # -------------------------------------------------------------------------- weights

    def sync_weights(self, version: int) -> dict[str, float]:
        """Send the actor's weights to every available replica, and verify them.

        If a replica is lost meanwhile, the weight sync begins anew without it. Open
        rows are paused for it, and go on with the new weights.

        Args:
            version: Version of the policy that the actor holds.

        Returns:
            Metrics of the weight sync.
        """
        supervisor = self._supervisor
        began = time.perf_counter()
        self._pause_open_rows()
        pause_s = time.perf_counter() - began

        # Each round is one weight sync. It ends with its success, or with an error that
        # is no loss of a replica.
        while True:
            if not self.available and not self.device_sharing.engine_fits:
                # None could start before the trainers have freed its memory.
                self._publisher.prepare_restart(version)
            replicas = supervisor.wait_for_replicas()
            watch = functools.partial(supervisor.check_health, replicas)
            receivers = Receivers(replicas, watch)
            try:
                metrics = self._publisher.sync(version, receivers)
                break
            except VerlRayError as error:
                lost = supervisor.handle_failure(error)
                survivors = [replica for replica in replicas if replica is not lost]
                self._break_off_sync(version, survivors)

        self._version = version
        self._up_to_date = {_incarnation(replica) for replica in replicas}
        supervisor.note_published()
        self._given_up_since_publish = 0
        began = time.perf_counter()
        self._resume_open_rows()
        pause_s += time.perf_counter() - began
        metrics["timing_s/weight_sync/pause"] = pause_s
        return metrics

    def _pause_open_rows(self) -> None:
        """Let the replicas stop where they are, if rows are open and may stay so."""
        if self._pause_mode is None or self.scheduler.is_idle:
            return
        self._set_paused(True)
        # Also again after a pause for training: another replica may be there.
        self._supervisor.take_started()
        self._supervisor.call_each(
            self.available, RolloutWorker.pause, self._pause_mode
        )
        self._note_occupancy()

    def _resume_open_rows(self) -> None:
        """Let the rows that were paused go on, with the present weights."""
        if self._paused:
            self._supervisor.call_each(self.available, RolloutWorker.resume)
            self._set_paused(False)
            self.scheduler.note_resumed()
            self._note_occupancy()

    def _set_paused(self, paused: bool) -> None:
        """Note whether open rows stand still, which is no lack of progress."""
        self._paused = paused
        self._supervisor.expects_progress = not paused

    def _note_occupancy(self) -> None:
        """Note which share of the replicas generates from now on."""
        num_replicas = max(len(self.available), 1)
        busy, to_learn_from = self.scheduler.busy(), self.scheduler.busy(TRAINING)
        if self._paused:
            busy = to_learn_from = set()
        self.occupancy.note_rollouts(
            min(len(busy) / num_replicas, 1.0),
            min(len(to_learn_from) / num_replicas, 1.0),
        )

    def _break_off_sync(self, version: int, survivors: Sequence[Replica]) -> None:
        """Undo a weight sync that lost a receiver, on both of its sides."""
        # The survivors may hold a part of the new weights.
        self._up_to_date.clear()
        self._publisher.abandon_sync()
        self._supervisor.call_each(survivors, RolloutWorker.abort_update)
        # The lost replica needs memory to start again.
        self._publisher.prepare_restart(version)

    def free_devices(self) -> None:
        """Let engines free what the trainers need of the devices that they share."""
        if self._takes_turns:
            self._pause_open_rows()
        engines_free = self.device_sharing.plan.engines_free
        # Each round puts all replicas to sleep. It is repeated while replicas restart:
        # they take memory too, and there is none for them once the trainers are back.
        while engines_free is not None:
            replicas = self._supervisor.wait_for_replicas(all_of_them=True)
            self._supervisor.call_each(replicas, RolloutWorker.sleep, engines_free)
            if not self._supervisor.restarting:
                break

    # ----------------------------------------------------------------------- generation

    def stop_generation(self) -> None:
        """Abandon all generation."""
        self.scheduler.close()

    def references(self) -> list[Any]:
        """Return the object references of the next pieces."""
        return self.scheduler.references()

    def advance(
        self, timeout_s: float = 0.0, background: Background | None = None
    ) -> None:
        """Advance health checks, restarts and generation.

        Args:
            timeout_s: For how long to wait for finished responses, in seconds.
            background: Work of the driver that goes on while a replica that has
                started again gets its weights. None stands for these replicas alone.

        Raises:
            VerlRayError: A replica refused a request, or more replicas were lost than
                run.recovery.max_restarts allows, or a process that nobody waits for is
                lost.
        """
        heed_signals()
        IDLE_PROCESSES.raise_if_lost()
        self._supervisor.take_started()
        if self.scheduler.is_idle:
            return

        # What paused replicas have finished is taken, but they get nothing new.
        if not self._paused:
            # An unhealthy replica would never return its pending responses.
            # One that gets weights is checked there, where its loss has to be known.
            self._supervisor.fence_unhealthy(but=self._catching_up)
            self._follow_loads()
            # `_catch_up` waits, and its wait advances the replicas again.
            if self._catching_up is None:
                self._catch_up_outdated(background or self)

        incarnations = [_incarnation(replica) for replica in self.available]
        ready = [
            incarnation
            for incarnation in incarnations
            if incarnation in self._up_to_date
        ]
        self.scheduler.set_replicas(ready, running=incarnations)
        self._excuse_losses()
        try:
            self._dispatch()
            if self.scheduler.references():
                self.scheduler.take(timeout_s, paused=self._paused)
                # Others take the place of what has ended.
                self._dispatch()
            elif not self.available and not self._supervisor.restarting:
                raise RolloutError(
                    "no replica is left to generate, and none starts again"
                    " (run.recovery.max_restarts)"
                )
            elif timeout_s:
                # No replica is ready yet, so there is nothing else to wait for.
                time.sleep(min(timeout_s, TICK_S / 10))
        except VerlRayError as error:
            self._supervisor.handle_failure(error)
        self._note_occupancy()

    def _dispatch(self) -> None:
        """Send queued groups to replicas with capacity, unless they are paused."""
        if not self._paused:
            self.scheduler.dispatch()
            # All of it may have ended when the wait that follows returns.
            self._note_occupancy()

    def _excuse_losses(self) -> None:
        """Let the losses of replicas that prompts have caused not count.

        Raises:
            RolloutError: More prompts have caused losses than may.
        """
        count = self.scheduler.take_given_up_count()
        self._supervisor.excuse_losses(count)
        self._given_up_since_publish += count
        if self._given_up_since_publish > self._max_restarts:
            raise RolloutError(
                f"more than run.recovery.max_restarts = {self._max_restarts} prompts in"
                " a row ended the replica that generated for them alone, so it is"
                " rather the engine that fails; its log says why"
            )

    def _follow_loads(self) -> None:
        """Let each replica generate as many responses at a time as its cache allows."""
        for replica, load in self._supervisor.take_loads().items():
            incarnation = _incarnation(replica)
            pending = self.scheduler.pending(incarnation)
            limit = self._concurrency.observe(incarnation, load, pending)
            if limit is not None:
                self.scheduler.set_limit(incarnation, limit)

    def _catch_up_outdated(self, background: Background) -> None:
        """Send the present weights to every replica that does not hold them."""
        for replica in self.available:
            # It may have been lost while another one caught up.
            is_available = replica in self.available
            if is_available and _incarnation(replica) not in self._up_to_date:
                self._catch_up(replica, background)

    def _catch_up(self, replica: Replica, background: Background) -> None:
        """Send the present weights to a replica that has started again.

        An actor that learns sends them after the updates that it was asked for. The
        other replicas continue to generate meanwhile.
        """
        watch = functools.partial(self._supervisor.check_health, (replica,))
        receivers = Receivers((replica,), watch, background)

        self._catching_up = replica
        try:
            self._publisher.catch_up(self._version, receivers)
            self._up_to_date.add(_incarnation(replica))
        except VerlRayError as error:
            self._supervisor.handle_failure(error)
        finally:
            self._catching_up = None


def _incarnation(replica: Replica) -> ReplicaIncarnation:
    """Return a replica together with the number of its present process."""
    return replica, replica.incarnation
