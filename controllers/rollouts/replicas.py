"""The owner of the rollout replicas: drawing, publishing, health and restart go through it.

Invariant: a replica that does not hold the present policy version gets no request; a version is published to all
replicas that are there, or to none. Everything happens in the driver's thread, a little at a time: `advance` returns at
once, and is called wherever the driver waits. Deliberately not here: how a version travels (`controllers/publishing`),
who draws what (`drawing.py`), and scores (`producer.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from controllers.devices.residency import Residency
from controllers.publishing.publisher import Publisher, Receivers
from controllers.rollouts.drawing import Dealer, Drawing, Server
from controllers.rollouts.endpoints import Endpoints
from controllers.rollouts.restarts import Replica, Roster
from verl_ray.cluster.failures import Member
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
        residency: Residency,
        config: RolloutConfig,
        endpoints: Endpoints | None = None,
    ) -> None:
        self._publisher, self._residency = publisher, residency
        self._roster = Roster(replicas, config.health, residency, endpoints)
        self._dealer = Dealer(config.in_flight)
        self._version = -1
        self._holders: set[Server] = set()
        """Those that were given the present version, whether or not they are still there."""
        self._brings_up = False
        self._switch_s = 0.0

    @property
    def there(self) -> tuple[Replica, ...]:
        """Those that are there now."""
        return self._roster.there

    def members(self) -> list[Member]:
        """Their processes."""
        return self._roster.members()

    def take_counts(self) -> dict[str, float]:
        """Replicas restarted and responses drawn again since the last call."""
        counts = {"rollout/restarts": self._roster.take_count(), "rollout/reissued": self._dealer.take_count()}
        return {name: float(count) for name, count in counts.items()}

    def close(self) -> None:
        """End what is drawn, and replicas that are being restarted; the others are not ended here."""
        self._dealer.close()
        self._roster.close()

    # ------------------------------------------------------------------------------------------------------ weights

    def publish(self, version: int) -> dict[str, float]:
        """The actor's weights into every replica, verified; metrics of the sync. One that is lost meanwhile starts
        again and everything begins anew."""
        while True:
            there = self._roster.gather()
            receivers = Receivers(there, functools.partial(self._roster.watch, there))
            try:
                metrics = self._publisher.publish(version, receivers)
                break
            except VerlRayError as error:
                lost = self._roster.lose(error)
                self._holders.clear()
                self._publisher.give_up()
                self._roster.of_each([one for one in there if one is not lost], RolloutWorker.abort_update)
                self._publisher.make_room(version)
        self._version = version
        self._holders = {(replica, replica.incarnation) for replica in there}
        self._roster.published()
        return metrics | {"timing_s/weight_sync/hand_back": self._switch_s}

    def switch_to_training(self) -> None:
        """Generation is over: engines free what the trainers need, and the training state comes back to the device."""
        began = time.perf_counter()
        sleeps = self._residency.sharing.sleeps
        while sleeps is not None:
            # one that starts takes memory, too; one that is lost now starts now
            self._roster.of_each(self._roster.gather(all_of_them=True), RolloutWorker.sleep, sleeps)
            if not self._roster.restarting:
                break
        self._residency.arrange("training")
        self._switch_s = time.perf_counter() - began

    # ------------------------------------------------------------------------------------------------------ drawing

    def draw(self, prompts: Prompts, generation: Generation) -> Drawing:
        """Begin to draw responses to these prompts; `advance` goes on with it."""
        drawing = Drawing(prompts, generation)
        self._dealer.open(drawing)
        return drawing

    def stop_drawing(self) -> None:
        """Give up what is being drawn."""
        self._dealer.close()

    def references(self) -> list[Any]:
        """What the next pieces come from."""
        return self._dealer.references()

    def advance(self, timeout_s: float = 0.0) -> None:
        """See how the replicas are and go on with restarts; deal, and take what is finished, which is waited for up to
        `timeout_s` seconds.

        Raises:
            VerlRayError: a replica refused, or more were lost than rollout.health.max_restarts allows.
        """
        heed_signals()
        self._roster.take_started()
        if self._dealer.is_idle:
            return
        self._roster.see()
        if not self._brings_up:
            for replica in self.there:
                if (replica, replica.incarnation) not in self._holders:
                    self._bring_up(replica)

        self._dealer.serve([(one, one.incarnation) for one in self.there if (one, one.incarnation) in self._holders])
        try:
            self._dealer.deal()
            if self._dealer.references():
                self._dealer.take(timeout_s)
            elif timeout_s:
                time.sleep(min(timeout_s, TICK_S / 10))  # until a replica is there
        except VerlRayError as error:
            self._roster.lose(error)

    def _bring_up(self, replica: Replica) -> None:
        """The present weights into a replica that has started again; the others go on drawing meanwhile."""
        watch = functools.partial(self._roster.watch, (replica,))
        self._brings_up = True
        try:
            self._publisher.bring_up(self._version, Receivers((replica,), watch, background=self))
            self._holders.add((replica, replica.incarnation))
        except VerlRayError as error:
            self._roster.lose(error)
        finally:
            self._brings_up = False
