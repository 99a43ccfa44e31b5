"""The wire of a run: its sending side, and the replicas that receive from it.

Invariant: the wire is opened anew, and all weights are sent, whenever its peers are not
those of the last sync (another incarnation, other replicas) or that sync did not
finish.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.context import PEER_TIMEOUT_FRACTION, ProcessInfo
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.waiting import Background
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.errors import VerlRayError, WeightSyncError, worker_error_of
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.manifest import (
    Bucket,
    Experts,
    Manifest,
    cast_for_engine,
    plan_buckets,
)
from verl_ray.weight_sync.transport import (
    SealedAddress,
    SendResult,
    WireRoot,
    WireSpec,
)
from verl_ray.weight_sync.wires import (
    WireLayout,
    announces_buckets,
    carrier_device,
    choose_roots,
    sends_to_holders,
)
from workers.actor import ActorWorker
from workers.rollout import RolloutWorker

ReplicaGroups = Sequence[WorkerGroup[RolloutWorker]]

SendCall = Call[list[SendResult]]
"""A call of the actor's ranks that sends a portion of the buckets."""

Watch = Callable[[], None]
"""A check of the replicas during a wait; it raises for one that does not reply."""


@dataclass(frozen=True)
class Receivers:
    """The replicas of a sync, and how to wait for them.

    Attributes:
        replicas: The replicas that receive the weights.
        watch: A check of the replicas that is called while they are waited for, and
            while the actor sends.
        background: Work of the driver that goes on during every wait.
    """

    replicas: ReplicaGroups
    watch: Watch
    background: Background | None = None

    def broadcast(self, verb: Callable[..., Any], *args: object) -> list[Call[Any]]:
        """Start the same call on every replica."""
        return [replica.broadcast(verb, *args) for replica in self.replicas]

    def wait(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Wait for calls and return their results in order."""
        return wait_all(calls, self.watch, self.background)

    def wait_for_sender(self, call: Call[Any]) -> list[Any]:
        """Wait for ranks of the actor that open a wire, and may still be learning."""
        (results,) = wait_all([call], None, self.background)
        return list(results)


class WeightWire:
    """The sending side of the wire, and the replicas that receive from it."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        config: RolloutTaskConfig,
        *,
        has_gpus: bool,
        shares_gpus: bool,
    ) -> None:
        """Prepare for syncs; no wire is open yet.

        Args:
            actor: The ranks that send.
            config: The run's configuration.
            has_gpus: Whether the run has GPUs.
            shares_gpus: Whether rollout engines run on the actor's GPUs.
        """
        self._actor = actor
        self._config = config.rollout
        self._has_gpus = has_gpus
        self._shares_gpus = shares_gpus

        self._keeps_version = config.keeps_published_version
        self._separate_adapter = config.sends_adapter_alone
        manifest = actor.rank_zero(ActorWorker.manifest, self._separate_adapter)
        self._manifest = cast_for_engine(manifest.result(), config.rollout.dtype)
        self._buckets: tuple[Bucket, ...] = ()

        self._is_open = False
        self._sends_all = True
        self._peers: tuple[object, ...] = ()
        self._synced_peers: tuple[object, ...] = ()

    def connect(self, receivers: Receivers) -> None:
        """Make the wire ready for a sync with these replicas.

        Raises:
            WeightSyncError: The configured wire cannot connect them, or peers did not
                come in time.
        """
        incarnations = [
            (replica, replica.incarnation) for replica in receivers.replicas
        ]
        self._peers = (self._actor.incarnation, *incarnations)
        self._sends_all = self._peers != self._synced_peers

        # If this sync does not finish, the next one has to open the wire anew.
        self._synced_peers = ()
        if self._sends_all:
            self._open(receivers)

    @property
    def manifest(self) -> Manifest:
        """The parameters of this sync: the model, or only its adapter."""
        # The model came with the first sync over this wire, and does not change.
        if self._sends_adapter_only:
            return self._manifest.adapter
        return self._manifest

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of this sync, in the order in which they are sent."""
        if self._sends_adapter_only:
            return tuple(bucket for bucket in self._buckets if bucket.adapter)
        return self._buckets

    @property
    def _sends_adapter_only(self) -> bool:
        return self._separate_adapter and not self._sends_all

    @property
    def announces_buckets(self) -> bool:
        """Whether a bucket may be received while it is still being sent."""
        return announces_buckets(self._config.sync.wire)

    @property
    def portions(self) -> Sequence[tuple[Bucket, ...]]:
        """The buckets of this sync, by the calls that send and receive them.

        There is one call for all, if each of them has a slot of its own.
        """
        if self.announces_buckets and len(self.buckets) <= SLOTS:
            return (self.buckets,)
        return [(bucket,) for bucket in self.buckets]

    def send(self, portion: Sequence[Bucket], *, again: bool = False) -> SendCall:
        """Start to write buckets to the wire.

        Args:
            portion: The buckets.
            again: Whether to send what was sent last, instead of the present weights.
        """
        indices = [bucket.index for bucket in portion]
        return self._actor.broadcast(ActorWorker.send, indices, self._sends_all, again)

    def sent(self, call: SendCall, receivers: Receivers) -> SendResult:
        """Wait until a portion is on the wire; return the result of all ranks together.

        Args:
            call: The call that sends it.
            receivers: The replicas of the sync.

        Raises:
            WeightSyncError: The wire is broken. The receiver that failed has the
                reason.
        """
        (parts,) = receivers.wait([call])

        broken = [part.broken for part in parts if part.broken is not None]
        if broken:
            self._finish_sync()
            raise WeightSyncError(broken[0])
        return SendResult.of_ranks(parts)

    def abandon_sync(self) -> None:
        """Let ranks of the actor return that wait at the wire of a broken sync."""
        if self._is_open:
            self._finish_sync()

    def finish(self) -> Call[Any]:
        """End the sync, after every receiver has committed what was sent.

        Returns:
            The call by which the actor's ranks free what the sync needed.
        """
        self._synced_peers = self._peers
        return self._actor.broadcast(ActorWorker.finish_sync)

    def _finish_sync(self) -> None:
        self._actor.broadcast(ActorWorker.finish_sync).result()

    # -------------------------------------------------------------------------- opening

    def _open(self, receivers: Receivers) -> None:
        """Open a wire, and connect the actor's ranks with all receivers."""
        replicas = receivers.replicas
        wire = self._config.sync.wire
        # The same for the replicas of any sync, since all hold the same experts.
        holders = self._holders(receivers) if sends_to_holders(wire) else ()
        self._buckets = plan_buckets(
            self._manifest, self._config.sync.bucket_bytes, holders
        )
        wire_spec = self._wire_spec(replicas)
        opening = self._actor.broadcast(ActorWorker.open_wire, wire, wire_spec)
        address = receivers.wait_for_sender(opening)[0]
        self._is_open = True

        # Both sides wait for each other, so both calls are made before either wait.
        senders = self._actor.broadcast(ActorWorker.connect_wire, address)
        connecting = self._connect_receivers(replicas, address, wire_spec)
        try:
            receivers.wait(connecting)
        except VerlRayError as error:
            # A replica that failed will not come, so the actor need not wait for it.
            if worker_error_of(error) is None:
                raise
            self._actor.broadcast(ActorWorker.stop_waiting_for_receivers).result()
            raise

        results = receivers.wait_for_sender(senders)
        failures = [failure for failure in results if failure is not None]
        if failures:
            raise WeightSyncError(failures[0])

    def _holders(self, receivers: Receivers) -> list[Experts]:
        """Return the experts that each receiver holds; none if all take everything."""
        if not self._config.expert_parallel:
            return []
        results = receivers.wait(receivers.broadcast(RolloutWorker.experts))
        # Each process of a replica reports for its engine's ranks.
        reports = itertools.chain.from_iterable(results)
        return list(itertools.chain.from_iterable(reports))

    def _connect_receivers(
        self, replicas: ReplicaGroups, address: SealedAddress, wire_spec: WireSpec
    ) -> list[Call[Any]]:
        calls: list[Call[Any]] = []
        first_receiver = 0
        for replica in replicas:
            call = replica.broadcast(
                RolloutWorker.connect, address, wire_spec, first_receiver
            )
            calls.append(call)
            first_receiver += replica.num_ranks * self._config.ranks_per_replica
        return calls

    def _wire_spec(self, replicas: ReplicaGroups) -> WireSpec:
        sync = self._config.sync
        actor_processes = _processes(self._actor)
        replica_processes = [
            process for replica in replicas for process in _processes(replica)
        ]
        wire_layout = WireLayout(
            [process.host_name for process in actor_processes],
            [process.host_name for process in replica_processes],
            gpus=self._has_gpus,
            shares_gpus=self._shares_gpus,
        )

        # Peers stop waiting before their calls would count as stalled, so that they can
        # report which peer is missing.
        stall_limits = [self._actor.stall_s, *(replica.stall_s for replica in replicas)]
        num_ranks = sum(replica.num_ranks for replica in replicas)
        return WireSpec(
            self._buckets,
            receivers=num_ranks * self._config.ranks_per_replica,
            patience_s=PEER_TIMEOUT_FRACTION * min(stall_limits),
            roots=tuple(
                WireRoot(rank, actor_processes[rank].address)
                for rank in choose_roots(sync.wire, wire_layout, len(self._buckets))
            ),
            folder=sync.folder,
            delta=sync.delta,
            separate_adapter=self._separate_adapter,
            keeps_version=self._keeps_version,
            device_type=carrier_device(sync.wire, wire_layout),
        )


def _processes(group: WorkerGroup[Any]) -> list[ProcessInfo]:
    """Return where the processes of a group run, by rank."""
    processes = [member.process_info for member in group.members()]
    return [process for process in processes if process is not None]
