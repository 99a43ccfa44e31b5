"""Publishing a policy version: from the actor's ranks into every rollout replica, as one verified transaction.

Invariant: when `publish` returns, every replica holds exactly the weights that the actor holds, under the version
asked for; if anything differs, it raises and no replica generates. Bucket i + 1 is written while bucket i is loaded;
a slot is written again only after all replicas have read it. Deliberately not here: how weights are cut (engine),
bucketed and carried (weight_sync), and loaded (rollout engine).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from controllers.ledger import WIRE_BUCKET_BYTES
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.config.rollout import RolloutConfig
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.buckets import plan_buckets
from verl_ray.weight_sync.fingerprint import EMPTY, Fingerprint
from workers.actor import ActorWorker
from workers.model_worker import ModelWorker
from workers.rollout import RolloutWorker

SLOTS = 2


class Publisher:
    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        rollout: WorkerGroup[RolloutWorker],
        config: RolloutConfig,
        *,
        sharing: Sequence[WorkerGroup[Any]],
    ) -> None:
        """`sharing`: groups of models that take turns with the rollout engines on the same GPUs, the actor included;
        while rollouts are drawn their state is on the host. None of them on a CPU."""
        hosts = {member.facts.host_name for group in (actor, rollout) for member in group.members() if member.facts}
        if len(hosts) > 1:
            raise WeightSyncError(
                "weights travel through shared memory, which actor and rollout must share; they run on "
                f"{sorted(hosts)}. Give the cluster one node with room for both"
            )
        self._actor, self._rollout = actor, rollout
        self._sleep = config.frees(shares_a_gpu=bool(sharing))
        self._sharing = tuple(sharing)
        self._manifest = actor.rank_zero(ActorWorker.manifest).result()
        self._buckets = plan_buckets(self._manifest, WIRE_BUCKET_BYTES)
        slot_bytes = max(bucket.nbytes for bucket in self._buckets)
        self._address = actor.rank_zero(ActorWorker.open_wire, uuid.uuid4().hex[:8], slot_bytes).result()
        self._bytes = sum(bucket.nbytes for bucket in self._buckets)

    def publish(self, version: int) -> dict[str, float]:
        """wake weights -> stream buckets -> verify -> training state to host -> wake KV cache."""
        began = time.perf_counter()
        actor, rollout = self._actor, self._rollout
        opening: list[Call[list[None]]] = []
        if self._sleep == "weights":
            opening.append(rollout.broadcast(RolloutWorker.wake, "weights"))
        opening.append(rollout.broadcast(RolloutWorker.begin_update, self._manifest, version))
        sent: dict[str, Fingerprint] = {}
        received: list[Call[list[None]]] = []
        for i, bucket in enumerate(self._buckets):
            if i >= SLOTS:
                wait_all([*opening, received[i - SLOTS]])
            for part in actor.broadcast(ActorWorker.write_bucket, bucket, self._address).result():
                for name, print_ in part.items():
                    sent[name] = sent.get(name, EMPTY) + print_
            received.append(rollout.broadcast(RolloutWorker.receive, bucket, self._address))
        committed = rollout.broadcast(RolloutWorker.commit, sent)
        wait_all([*opening, *received, committed])  # in this order: the first failure is the reason of the others
        self._place("host")
        if self._sleep != "never":
            rollout.broadcast(RolloutWorker.wake, "kv_cache").result()
        seconds = time.perf_counter() - began
        return {
            "weight_sync/bytes": self._bytes,
            "weight_sync/bytes_per_s": self._bytes / seconds,
            "weight_sync/verified": float(len(sent)),
        }

    def hand_back(self) -> None:
        """Generation is over: free what the trainer needs, and bring its state back to the device."""
        if self._sleep != "never":
            self._rollout.broadcast(RolloutWorker.sleep, "weights" if self._sleep == "weights" else "kv_cache").result()
        self._place("device")

    def _place(self, where: str) -> None:
        wait_all([group.broadcast(ModelWorker.place, where, where) for group in self._sharing])
