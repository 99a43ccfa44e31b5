"""Publishing a policy version: from the actor's ranks into rollout replicas, as one verified transaction.

Invariant: when `publish` returns, every replica it was given holds exactly the weights that the actor holds, under the
version asked for, and computes with them what the actor does; if anything differs, it raises and none of them
generates. Bucket i + 1 is sent while bucket i is loaded; a slot is filled again only after all replicas have received
it. Where rollout engines share the trainers' GPUs, the engines' weights wake only when nothing but the actor's weights
is left of the state that placement.offload moves, and their KV cache only when the actor's weights have gone, too.
Deliberately not here: which replicas there are (`controllers/rollouts`), which ends the wire has (`wire.py`), how
weights are cut (engine), bucketed and carried (weight_sync), and loaded (rollout engine).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from controllers.devices.residency import Residency
from controllers.publishing.proof import Proof
from controllers.publishing.wire import Replicas, Watch, WeightWire
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.signals import finishing
from verl_ray.cluster.waiting import Background
from verl_ray.config.drawing import DrawingConfig
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.fingerprint import Fingerprint
from workers.actor import ActorWorker
from workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Receivers:
    """The replicas of one sync, and what is done while they are waited for."""

    replicas: Replicas
    watch: Watch
    background: Background | None = None

    def all(self, verb: Callable[..., Any], *args: object) -> list[Call[Any]]:
        """The same call of each of them."""
        return [replica.broadcast(verb, *args) for replica in self.replicas]

    def wait(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Their answers, in order."""
        return wait_all(calls, self.watch, self.background)


@dataclass
class _Stream:
    """What has been sent in one sync, and the calls that receive it."""

    prints: dict[str, Fingerprint] = field(default_factory=dict)
    nbytes: int = 0
    changed: int = 0
    fingerprint_s: float = 0.0
    opening: list[Call[Any]] = field(default_factory=list)
    received: list[list[Call[Any]]] = field(default_factory=list)

    @property
    def calls(self) -> list[Call[Any]]:
        """In this order the first failure is the reason of the others."""
        return [*self.opening, *(call for calls in self.received for call in calls)]


class Publisher:
    """One run's way from the actor to its replicas."""

    def __init__(
        self, actor: WorkerGroup[ActorWorker], config: DrawingConfig, residency: Residency, *, has_gpus: bool
    ) -> None:
        self._residency = residency
        self._wire = WeightWire(actor, config, has_gpus=has_gpus, shares_gpus=residency.sharing.devices)
        self._proof = Proof(actor, config)
        self._delta = config.rollout.sync.delta
        self._syncs = 0

    def publish(self, version: int, receivers: Receivers) -> dict[str, float]:
        """The actor's weights into these replicas, which are all that there are; metrics of the sync."""
        metrics = self._send(version, receivers, proves=self._proof.is_due(self._syncs))
        self._syncs += 1
        seconds = sum(metrics[f"timing_s/weight_sync/{phase}"] for phase in ("stream", "prove"))
        return metrics | {"weight_sync/bytes_per_s": metrics["weight_sync/bytes"] / seconds}

    def bring_up(self, version: int, receivers: Receivers) -> None:
        """The present version into a replica that has started again. The actor has not learned since, so the probe of
        this version serves again. A stop waits: half of a sync would leave the actor waiting for its receiver."""
        with finishing():
            self._send(version, receivers, proves=True)

    def give_up(self) -> None:
        """The sync broke off: the actor waits for nobody any more."""
        self._wire.give_up()

    def make_room(self, version: int) -> None:
        """For a replica that starts, and is awake at first: the training state goes to the host, as for rollouts, once
        the actor has made its probe."""
        if self._residency.actor_leaves:
            self._proof.keep(version, self._proof.ask(version))
        self._residency.arrange("rollouts")

    def _send(self, version: int, receivers: Receivers, *, proves: bool) -> dict[str, float]:
        """what is not sent to host -> wake weights -> stream buckets -> verify -> actor's weights to host -> wake KV
        cache -> prove."""
        began = time.perf_counter()
        if self._residency.arrangement == "training":  # else the actor's weights are on the host, and are sent from it
            self._residency.arrange("publishing")

        cleared = time.perf_counter()
        stream = self._stream(version, receivers)
        committed = receivers.all(RolloutWorker.commit, stream.prints, proves)
        # On the host the actor could not make a probe for `bring_up`.
        asked = self._proof.ask(version) if proves or self._residency.actor_leaves else None
        receivers.wait([*stream.calls, *committed])
        self._wire.finish()

        streamed = time.perf_counter()
        self._proof.keep(version, asked)
        probed = time.perf_counter()
        self._residency.arrange("rollouts")
        placed = time.perf_counter()
        if self._residency.sharing.sleeps is not None:
            receivers.wait(receivers.all(RolloutWorker.wake, "kv_cache"))

        woken = time.perf_counter()
        metrics = {"weight_sync/verified": float(len(stream.prints)), "weight_sync/bytes": float(stream.nbytes)}
        if self._delta:
            metrics["weight_sync/changed_fraction"] = stream.changed / sum(
                one.numel for one in self._wire.manifest.sent
            )
        if proves:
            metrics["weight_sync/probe_difference"] = self._prove(version, receivers)
        loaded_s = max(seconds for call in committed for seconds in call.result())
        seconds = {
            "stream": streamed - cleared,
            "offload": cleared - began + placed - probed,
            "wake": woken - placed,
            "prove": probed - streamed + time.perf_counter() - woken,
            "fingerprints": stream.fingerprint_s + loaded_s,  # both ends', which lie within the stream
        }
        return metrics | {f"timing_s/weight_sync/{phase}": value for phase, value in seconds.items()}

    def _stream(self, version: int, receivers: Receivers) -> _Stream:
        """Every bucket written, and asked to be received."""
        stream = _Stream()
        self._wire.meet(receivers.replicas, receivers.watch)
        if self._residency.sharing.sleeps == "weights":
            stream.opening += receivers.all(RolloutWorker.wake, "weights")
        stream.opening += receivers.all(RolloutWorker.begin_update, self._wire.manifest, version)

        for i, bucket in enumerate(self._wire.buckets):
            if i >= SLOTS:
                receivers.wait([*stream.opening, *stream.received[i - SLOTS]])
            try:
                part = self._wire.send(bucket, receivers.watch)
            except WeightSyncError as error:
                if error.origin is None:  # the wire is broken: a receiver that failed is why
                    receivers.wait(stream.calls)
                raise
            stream.prints |= part.prints.by_name
            stream.nbytes += part.nbytes
            stream.changed += part.changed
            stream.fingerprint_s += part.prints.seconds
            stream.received.append(receivers.all(RolloutWorker.receive, bucket))
        return stream

    def _prove(self, version: int, receivers: Receivers) -> float:
        """The largest difference of a log-prob that any replica found."""
        differences = receivers.wait(receivers.all(RolloutWorker.prove, self._proof.of(version)))
        worst: float = max(worst for (worst,) in differences)
        self._proof.found(worst)
        return worst
