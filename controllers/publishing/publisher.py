"""Publishing a policy version: from the actor's ranks into every rollout replica, as one verified transaction.

Invariant: when `publish` returns, every replica holds exactly the weights that the actor holds, under the version
asked for, and computes with them what the actor does; if anything differs, it raises and no replica generates. Bucket
i + 1 is sent while bucket i is loaded; a slot is filled again only after all replicas have received it. Where rollout
engines share the trainers' GPUs, the engines' weights wake only when nothing but the actor's weights is left of the
state that placement.offload moves, and their KV cache only when the actor's weights have gone, too. Deliberately not
here: which ends the wire has (`wire.py`), how weights are cut (engine), bucketed and carried (weight_sync), and
loaded (rollout engine).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from controllers.publishing.wire import WeightWire
from controllers.rollouts.replicas import Replica, RolloutServers
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.signals import finishing
from verl_ray.config.schema import RLConfig
from verl_ray.errors import WeightSyncError, WorkerError
from verl_ray.rollout.base import Part, Probe
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.fingerprint import Fingerprint
from workers.actor import ActorWorker
from workers.model_worker import ModelWorker
from workers.rollout import RolloutWorker

Arrangement = Literal["training", "publishing", "rollouts"]
"""Which of the training state is on shared GPUs: all of it; of what placement.offload moves, only the actor's weights,
which are sent from there; or nothing of that."""

PROBE_TOKENS = 16
PROBE_EVERY = {False: 1, True: 10}
"""Syncs from one probe to the next, without and with GPUs: on a CPU vLLM packs every weight that it receives."""
PROBE_TOLERANCE = 1e-3
"""Largest difference of a log-prob, where both sides compute in float32."""
ROUNDED_TOLERANCE = (0.1, 1.0)
"""The same where one of them rounds. The first probe of a run, of weights that were sent as a whole, may find as much
as the larger; it shows how much rounding does, and later ones may find so many times as much, within these limits."""
TIMES_THE_FIRST = 5


class Publisher:
    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        servers: RolloutServers,
        config: RLConfig,
        *,
        sharing: Sequence[WorkerGroup[Any]],
        has_gpus: bool,
    ) -> None:
        """`sharing`: groups of models that take turns with the rollout engines on the same GPUs, the actor included;
        while rollouts are drawn, what placement.offload says of their state is on the host. None of them on a CPU."""
        self._actor, self._servers = actor, servers
        servers.bring_up = self._bring_up
        self._version, self._syncs, self._hand_back_s = -1, 0, 0.0
        self._probe: tuple[int, Probe] | None = None
        rollout = config.rollout
        self._sleep = rollout.frees(shares_a_gpu=bool(sharing))
        self._offloading = () if config.placement.offload == "none" else tuple(sharing)
        self._arrangement: Arrangement = "training"
        if self._offloading:
            servers.room.clear()  # the training state is there
        self._offloads_weights = config.placement.offloads_weights
        self._goes_away = bool(self._offloading) and self._offloads_weights  # the actor, until rollouts are drawn
        self._wire = WeightWire(actor, config, has_gpus=has_gpus, shares_gpus=bool(sharing))
        self._delta = rollout.sync.delta
        self._probe_every = PROBE_EVERY[has_gpus] if rollout.sync.probe_every == "auto" else rollout.sync.probe_every
        dtypes = frozenset((config.actor.backend.dtype, rollout.dtype))
        given = rollout.sync.probe_tolerance
        self._measures_rounding = given == "auto" and dtypes != {"float32"}
        self._tolerance = PROBE_TOLERANCE if given == "auto" else given
        if self._measures_rounding:
            self._tolerance = ROUNDED_TOLERANCE[1]
        self._longest = min(PROBE_TOKENS, config.data.max_prompt_tokens + rollout.max_response_tokens - 1)

    def publish(self, version: int) -> dict[str, float]:
        """The actor's weights into every replica. A replica that is lost meanwhile starts again and everything begins
        anew: a version is published to all that are there, or to none."""
        while True:
            replicas = self._servers.gather()
            try:
                found = self._send(version, replicas)
                break
            except WorkerError as error:
                lost = self._servers.lose(error)
                self._wire.give_up()
                left = [replica for replica in replicas if replica is not lost]
                self._servers.of_each(left, RolloutWorker.abort_update)
                self._make_room(version)
        self._version = version
        self._syncs += 1
        self._servers.published()
        seconds = sum(found[f"timing_s/weight_sync/{phase}"] for phase in ("stream", "prove"))
        return found | {
            "weight_sync/bytes_per_s": found["weight_sync/bytes"] / seconds,
            "timing_s/weight_sync/hand_back": self._hand_back_s,
        }

    def _make_room(self, version: int) -> None:
        """For a replica that starts, and is awake at first: the training state goes to the host, as for rollouts, once
        the actor has made its probe."""
        if self._goes_away and self._probe_of(version) is None:
            self._keep_probe(version, self._ask_probe())
        self._arrange("rollouts")

    def _bring_up(self, replica: Replica) -> None:
        """The present version into a replica that has started again. The actor has not learned since, so the probe of
        this version serves again. A stop waits: half of a sync would leave the actor waiting for its receiver."""
        with finishing():
            self._send(self._version, [replica], proves=True)

    def _send(self, version: int, replicas: Sequence[Replica], *, proves: bool | None = None) -> dict[str, float]:
        """what is not sent to host -> wake weights -> stream buckets -> verify -> actor's weights to host -> wake KV
        cache -> prove."""
        proves = self._syncs % self._probe_every == 0 if proves is None else proves

        def all_(verb: Callable[..., Any], *args: object) -> list[Call[Any]]:
            return [replica.broadcast(verb, *args) for replica in replicas]

        watch = functools.partial(self._servers.watch, replicas)
        wait = functools.partial(wait_all, watch=watch)
        began = time.perf_counter()
        if self._arrangement == "training":  # else the actor's weights are on the host already, and are sent from there
            self._arrange("publishing")
        cleared = time.perf_counter()
        self._wire.meet(replicas, watch)
        opening: list[Call[Any]] = []
        if self._sleep == "weights":
            opening += all_(RolloutWorker.wake, "weights")
        opening += all_(RolloutWorker.begin_update, self._wire.manifest, version)
        sent: dict[str, Fingerprint] = {}
        nbytes, changed, fingerprint_s = 0, 0, 0.0
        received: list[list[Call[Any]]] = []
        for i, bucket in enumerate(self._wire.buckets):
            if i >= SLOTS:
                wait([*opening, *received[i - SLOTS]])
            try:
                part = self._wire.send(bucket, watch)
            except WeightSyncError:
                wait([*opening, *(call for calls in received for call in calls)])  # a receiver that failed is why
                raise
            sent |= part.prints.by_name
            nbytes, changed = nbytes + part.nbytes, changed + part.changed
            fingerprint_s += part.prints.seconds
            received.append(all_(RolloutWorker.receive, bucket))
        committed = all_(RolloutWorker.commit, sent, proves)
        probe = self._probe_of(version)
        asked = None
        if probe is None and (proves or self._goes_away):  # on the host it could not make one for `_bring_up`
            asked = self._ask_probe()
        # In this order: the first failure is the reason of the others.
        wait([*opening, *(call for calls in received for call in calls), *committed])
        self._wire.finish()
        streamed = time.perf_counter()
        if asked is not None:
            probe = self._keep_probe(version, asked)
        probed = time.perf_counter()
        self._arrange("rollouts")
        placed = time.perf_counter()
        if self._sleep != "never":
            wait(all_(RolloutWorker.wake, "kv_cache"))
        woken = time.perf_counter()
        fingerprint_s += max(seconds for call in committed for seconds in call.result())
        found = {"weight_sync/verified": float(len(sent)), "weight_sync/bytes": float(nbytes)}
        if self._delta:
            found["weight_sync/changed_fraction"] = changed / sum(one.numel for one in self._wire.manifest.sent)
        if proves:
            differences = wait(all_(RolloutWorker.prove, probe))
            found["weight_sync/probe_difference"] = worst = max(worst for (worst,) in differences)
            if self._measures_rounding:
                least, most = ROUNDED_TOLERANCE
                self._tolerance = min(max(TIMES_THE_FIRST * worst, least), most)
                self._measures_rounding = False
        seconds = {
            "stream": streamed - cleared,
            "offload": cleared - began + placed - probed,
            "wake": woken - placed,
            "prove": probed - streamed + time.perf_counter() - woken,
            "fingerprints": fingerprint_s,  # the sender's and the receiver's, which lie within the stream
        }
        return found | {f"timing_s/weight_sync/{phase}": value for phase, value in seconds.items()}

    def _ask_probe(self) -> Call[list[Probe | None]]:
        return self._actor.broadcast(ActorWorker.probe, self._longest, self._tolerance)

    def _keep_probe(self, version: int, asked: Call[list[Probe | None]]) -> Probe:
        (probe,) = (told for told in asked.result() if told is not None)
        self._probe = version, probe
        return probe

    def _probe_of(self, version: int) -> Probe | None:
        return self._probe[1] if self._probe is not None and self._probe[0] == version else None

    def hand_back(self) -> None:
        """Generation is over: free what the trainer needs, and bring its state back to the device."""
        began = time.perf_counter()
        if self._sleep != "never":
            part: Part = "weights" if self._sleep == "weights" else "kv_cache"
            while True:
                # one that starts takes memory, too; one that is lost now starts now
                self._servers.of_each(self._servers.gather(all_of_them=True), RolloutWorker.sleep, part)
                if not self._servers.restarting:
                    break
        self._arrange("training")
        self._hand_back_s = time.perf_counter() - began

    def _arrange(self, wanted: Arrangement) -> None:
        """Move the state of all models that share GPUs; returns when it is there."""
        if self._offloading and wanted != "rollouts":
            self._servers.room.clear()
        moves: list[Call[list[None]]] = []
        for group in self._offloading:
            optimizer = "device" if wanted == "training" else "host"
            sends = wanted == "publishing" and group is self._actor
            params = "host" if optimizer == "host" and self._offloads_weights and not sends else "device"
            moves.append(group.broadcast(ModelWorker.place, params, optimizer))
        wait_all(moves)
        self._arrangement = wanted
        if wanted == "rollouts":
            self._servers.room.set()
