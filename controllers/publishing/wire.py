"""The wire of a run: between the actor's ranks and those rollout replicas that are there.

Invariant: it is opened anew, and all of the weights travel, whenever its ends are not those of the last sync (another
incarnation, other replicas) or that sync did not finish. Deliberately not here: the transaction that a sync is
(`publisher.py`), and how any wire works (`verl_ray/weight_sync`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl_ray.cluster.calls import wait_all
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.messages import PATIENCE, Facts
from verl_ray.config.drawing import DrawingConfig
from verl_ray.errors import VerlRayError, WeightSyncError, failure_of_worker
from verl_ray.weight_sync.buckets import Bucket, plan_buckets
from verl_ray.weight_sync.fingerprint import Prints
from verl_ray.weight_sync.manifest import Manifest, as_loaded
from verl_ray.weight_sync.transport import Route, Sent
from verl_ray.weight_sync.wires import Layout, carried_from
from workers.actor import ActorWorker
from workers.rollout import RolloutWorker

Replicas = Sequence[WorkerGroup[RolloutWorker]]
Watch = Callable[[], None]  # raises for a replica that does not answer


class WeightWire:
    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        config: DrawingConfig,
        *,
        has_gpus: bool,
        shares_gpus: bool,
    ) -> None:
        """`shares_gpus`: whether rollout engines run on the actor's GPUs."""
        self._actor, self._config = actor, config.rollout
        self._apart = config.sends_adapter_alone
        self._manifest = as_loaded(actor.rank_zero(ActorWorker.manifest, self._apart).result(), config.rollout.dtype)
        self._gpus = {"gpus": has_gpus, "shares_gpus": shares_gpus}
        self._buckets = plan_buckets(self._manifest, config.rollout.sync.bucket_bytes)
        self._is_open = False
        self._ends: tuple[object, ...] = ()
        self._synced_ends: tuple[object, ...] = ()
        self._whole = True

    def meet(self, replicas: Replicas, watch: Watch) -> None:
        """Before each sync: the ends are these, and ready.

        Raises:
            WeightSyncError: the configured wire cannot join them, or some did not come in time.
        """
        self._ends = (self._actor.incarnation, *((replica, replica.incarnation) for replica in replicas))
        self._whole = self._ends != self._synced_ends
        self._synced_ends = ()  # until this sync has finished, too
        if self._whole:
            self._open(replicas, watch)

    @property
    def manifest(self) -> Manifest:
        """What travels in this sync: the model, or only the adapter beside it."""
        return self._manifest.adapter if self._apart and not self._whole else self._manifest

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The same, in the order it travels."""
        return tuple(one for one in self._buckets if one.adapter or not self._apart or self._whole)

    def send(self, bucket: Bucket, watch: Watch) -> Sent:
        """Put a bucket on the wire; what all ranks of the actor did together.

        Raises:
            WeightSyncError: the wire is broken; the receiver that is gone says more.
        """
        (parts,) = wait_all([self._actor.broadcast(ActorWorker.send, bucket.index, self._whole)], watch)
        for broken in (part.broken for part in parts if part.broken is not None):
            self._actor.broadcast(ActorWorker.finish_sync).result()
            raise WeightSyncError(broken)
        prints = sum((part.prints for part in parts), Prints())
        slowest = max(part.prints.seconds for part in parts)
        return Sent(
            Prints(prints.by_name, slowest), sum(part.nbytes for part in parts), sum(part.changed for part in parts)
        )

    def give_up(self) -> None:
        """The sync broke off: who still waits at the wire waits no longer."""
        if self._is_open:
            self._actor.broadcast(ActorWorker.finish_sync).result()

    def finish(self) -> None:
        """Every receiver has committed what was sent."""
        self._actor.broadcast(ActorWorker.finish_sync).result()
        self._synced_ends = self._ends

    def _open(self, replicas: Replicas, watch: Watch) -> None:
        sync, parallel = self._config.sync, self._config.tensor_parallel
        home = _facts(self._actor)
        hosts = [one.host_name for replica in replicas for one in _facts(replica)]
        over = carried_from(sync.wire, Layout([one.host_name for one in home], hosts, **self._gpus))
        route = Route(
            self._buckets,
            receivers=sum(replica.num_ranks for replica in replicas) * parallel,
            patience_s=PATIENCE * min(self._actor.stall_s, *(replica.stall_s for replica in replicas)),
            host=home[0].address,
            folder=sync.folder,
            delta=sync.delta,
            apart=self._apart,
            over=over,
        )
        address = self._actor.broadcast(ActorWorker.open_wire, sync.wire, route).result()[0]
        self._is_open = True
        meeting = self._actor.broadcast(ActorWorker.connect_wire, address)
        joining, first = [], 0
        for replica in replicas:
            joining.append(replica.broadcast(RolloutWorker.connect, address, route, first))
            first += replica.num_ranks * parallel
        try:
            wait_all(joining, watch)
        except VerlRayError as error:
            if failure_of_worker(error) is None:
                raise
            self._actor.broadcast(ActorWorker.leave_wire).result()
            raise
        for missing in (told for told in meeting.result() if told is not None):
            raise WeightSyncError(missing)


def _facts(group: WorkerGroup[Any]) -> list[Facts]:
    """Where the processes of a group run, by rank."""
    return [member.facts for member in group.members() if member.facts is not None]
