"""Publishing of a policy version: a weight sync from the actor to rollout replicas.

Invariant: when `sync` returns, every replica that it was called with holds the
actor's weights, cast to the engine's dtype, under the requested version. If the sync
is verified by log-probs, it also computes with them what the actor computes. If
anything differs, an error is raised, and replicas that failed a check refuse to
generate. The wire is opened anew, and all weights are sent, whenever its peers are not
those of the last sync (another incarnation, other replicas) or that sync did not
finish.

Bucket i + 1 is sent while bucket i is loaded; a slot is filled again only after all
replicas have received it. Over a wire that announces buckets, the calls that send and
receive one are made at once, and the driver stands between no two of them.

Where rollout engines share the trainers' GPUs, the engines' weights wake after all
offloadable training state except the actor's weights has left the GPU. Their KV cache
wakes after the actor's weights have left, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from controllers.devices import DeviceSharing
from verl_ray.cluster.calls import Call, wait_all
from verl_ray.cluster.context import PEER_TIMEOUT_FRACTION, ProcessInfo
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.signals import finishing
from verl_ray.cluster.waiting import Background
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.config.section import resolved
from verl_ray.errors import VerlRayError, WeightSyncError, worker_error_of
from verl_ray.rollout.engine_state import Probe
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.manifest import (
    Bucket,
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
)
from workers.actor import ActorWorker
from workers.rollout import RolloutWorker

SendCall = Call[list[SendResult]]
"""A call of the actor's ranks that sends a portion of the buckets."""


@dataclass
class _SentBuckets:
    """Everything a sync has sent so far, and the calls that receive it.

    Attributes:
        result: What all ranks of the actor report together.
        opening_calls: Calls that wake the replicas' weights and open their updates.
        send_calls: The calls that send the last portions, and have no result yet.
        receive_calls: For each portion, the calls that receive it.
    """

    result: SendResult = field(default_factory=SendResult)
    opening_calls: list[Call[Any]] = field(default_factory=list)
    send_calls: list[SendCall] = field(default_factory=list)
    receive_calls: list[list[Call[Any]]] = field(default_factory=list)

    @property
    def calls(self) -> list[Call[Any]]:
        """All calls of replicas; the first that failed causes the others to fail."""
        calls = list(self.opening_calls)
        for calls_of_portion in self.receive_calls:
            calls += calls_of_portion
        return calls


class Publisher:
    """Weight syncs of a run, from its actor to its replicas."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        config: RolloutTaskConfig,
        device_sharing: DeviceSharing,
        *,
        has_gpus: bool,
    ) -> None:
        """Prepare for syncs; nothing is sent yet.

        Args:
            actor: The ranks that have the weights.
            config: The run's configuration.
            device_sharing: The devices that trainers and engines share, if any.
            has_gpus: Whether the run has GPUs.
        """
        self._device_sharing = device_sharing
        self._wire = WeightWire(
            actor,
            config,
            has_gpus=has_gpus,
            shares_gpus=device_sharing.plan.shares_devices,
        )
        self._verification = Verification(actor, config)
        self._delta = config.rollout.sync.delta
        self._keeps_version = config.keeps_published_version
        self._num_syncs = 0

    def sync(self, version: int, receivers: Receivers) -> dict[str, float]:
        """Send the actor's weights to all replicas.

        Args:
            version: The policy version of the actor's weights.
            receivers: All available replicas.

        Returns:
            Metrics of the sync.
        """
        verifies = self._verification.is_due(self._num_syncs)
        metrics = self._send(version, receivers, verifies=verifies)
        self._num_syncs += 1
        return metrics

    def catch_up(self, version: int, receivers: Receivers) -> None:
        """Send the present version to a replica that was restarted.

        The probe of that version is used again. Where the actor learns meanwhile, it
        sends the weights that it has kept.
        """
        # A request to stop the run waits, since a sync that breaks off would leave the
        # actor waiting for its receiver.
        with finishing():
            again = self._keeps_version
            self._send(version, receivers, verifies=True, again=again)

    def abandon_sync(self) -> None:
        """Unblock the actor's ranks that wait for peers of a broken sync."""
        self._wire.abandon_sync()

    def prepare_restart(self, version: int) -> None:
        """Free device memory for a replica that starts, and is awake at first.

        The training state is offloaded, as for rollouts, after the actor has made its
        probe.
        """
        if self._device_sharing.offloads_actor:
            probe_call = self._verification.request_probe(version)
            self._verification.store_probe(version, probe_call)
        self._device_sharing.switch_to("rollouts")

    # ------------------------------------------------------------------ the weight sync

    def _send(
        self,
        version: int,
        receivers: Receivers,
        *,
        verifies: bool,
        again: bool = False,
    ) -> dict[str, float]:
        """Send all weights, load them, verify them, and return metrics.

        Memory is freed before it is needed: training state that is not sent is
        offloaded, the engines' weights wake, the buckets are sent and committed, the
        actor's weights are offloaded, the KV caches wake, and the log-probs are
        verified.
        """
        began = time.perf_counter()
        # In other phases the actor's weights are offloaded, and are sent from the host.
        if self._device_sharing.phase == "training":
            self._device_sharing.switch_to("publishing")

        cleared = time.perf_counter()
        sent = self._send_buckets(version, receivers, again=again)
        commit_calls, probe_call, verify_calls = self._commit(
            sent, version, receivers, verifies=verifies
        )
        # The actor does this after its probe, and nobody needs it yet.
        finish_call = self._wire.finish()

        streamed = time.perf_counter()
        self._verification.store_probe(version, probe_call, receivers)

        probed = time.perf_counter()
        self._device_sharing.switch_to("rollouts")

        placed = time.perf_counter()
        if self._device_sharing.plan.engines_free is not None:
            receivers.wait(receivers.broadcast(RolloutWorker.wake, "kv_cache"))

        woken = time.perf_counter()
        metrics = self._metrics_of(sent.result)
        if verifies:
            verify_calls = verify_calls or self._begin_to_verify(version, receivers)
            metrics["weight_sync/probe_difference"] = self._verified(
                verify_calls, receivers
            )
        receivers.wait([finish_call])
        load_s = max(seconds for call in commit_calls for seconds in call.result())

        seconds = {
            "stream": streamed - cleared,
            "offload": cleared - began + placed - probed,
            "wake": woken - placed,
            "prove": probed - streamed + time.perf_counter() - woken,
            # Fingerprints of both sides; their time is part of the stream's.
            "fingerprints": sent.result.fingerprints.seconds + load_s,
        }
        return metrics | _timings(seconds, sent.result.nbytes)

    def _send_buckets(
        self, version: int, receivers: Receivers, *, again: bool
    ) -> _SentBuckets:
        """Start the calls that send and receive every bucket.

        Before a bucket is sent, the loop waits until all replicas have received the
        bucket that had the same slot. It ends with the last bucket, or with the first
        failure of a sender or receiver.
        """
        sent = _SentBuckets()
        self._wire.connect(receivers)

        for number, portion in enumerate(self._wire.portions):
            if number >= SLOTS:
                self._wait_for_senders(sent, receivers, under_way=SLOTS - 1)
                calls_of_slot = sent.receive_calls[number - SLOTS]
                receivers.wait([*sent.opening_calls, *calls_of_slot])

            sent.send_calls.append(self._wire.send(portion, again=again))
            if number == 0:
                sent.opening_calls += self._open_updates(version, receivers)
            if not self._wire.announces_buckets:
                self._wait_for_senders(sent, receivers)
            calls_of_portion = receivers.broadcast(RolloutWorker.receive, portion)
            sent.receive_calls.append(calls_of_portion)
        return sent

    def _open_updates(self, version: int, receivers: Receivers) -> list[Call[Any]]:
        """Let the replicas wake their weights and begin, and wait for none of them."""
        calls: list[Call[Any]] = []
        if self._device_sharing.plan.engines_free == "weights":
            calls += receivers.broadcast(RolloutWorker.wake, "weights")
        calls += receivers.broadcast(
            RolloutWorker.begin_update, self._wire.manifest, version
        )
        return calls

    def _wait_for_senders(
        self, sent: _SentBuckets, receivers: Receivers, under_way: int = 0
    ) -> None:
        """Wait for the senders of all portions but the last ones, and add these up.

        Args:
            sent: The buckets of the sync.
            receivers: The replicas that get them.
            under_way: How many portions may still be written.
        """
        while len(sent.send_calls) > under_way:
            try:
                sent.result += self._wire.sent(sent.send_calls[0], receivers)
            except WeightSyncError as error:
                # An error without an origin only reports that the wire is broken. The
                # reason is the failure of a receiver, which this wait raises.
                if error.origin is None:
                    receivers.wait(sent.calls)
                raise
            del sent.send_calls[0]

    def _commit(
        self,
        sent: _SentBuckets,
        version: int,
        receivers: Receivers,
        *,
        verifies: bool,
    ) -> tuple[list[Call[Any]], ProbeCall | None, list[Call[Any]]]:
        """Let every replica commit what was sent, and return when all have.

        Returns:
            The calls that commit, that of the actor's probe, and those that verify if
            they have begun.
        """
        # The actor goes on with the probe as soon as it has sent the last bucket.
        # `catch_up` needs it later, when an actor that is offloaded, or learns, cannot
        # make one.
        probe_call = None
        if verifies or self._keeps_version or self._device_sharing.offloads_actor:
            probe_call = self._verification.request_probe(version)

        self._wait_for_senders(sent, receivers)
        commit_calls = receivers.broadcast(
            RolloutWorker.commit, sent.result.fingerprints.by_name, verifies
        )

        verify_calls: list[Call[Any]] = []
        if verifies and self._device_sharing.moves_nothing:
            # No memory is needed that somebody still holds, so the proof follows the
            # commit without the driver.
            self._verification.store_probe(version, probe_call, receivers)
            verify_calls = self._begin_to_verify(version, receivers)
        receivers.wait([*sent.calls, *commit_calls])
        return commit_calls, probe_call, verify_calls

    def _begin_to_verify(self, version: int, receivers: Receivers) -> list[Call[Any]]:
        """Let every replica verify the version by the actor's probe."""
        probe = self._verification.probe_of(version)
        return receivers.broadcast(RolloutWorker.verify, probe)

    def _verified(self, calls: Sequence[Call[Any]], receivers: Receivers) -> float:
        """Return the largest difference of a log-prob that any replica found."""
        largest: float = max(difference for (difference,) in receivers.wait(calls))
        self._verification.note_difference(largest)
        return largest

    def _metrics_of(self, sent: SendResult) -> dict[str, float]:
        metrics = {
            "weight_sync/verified": float(len(sent.fingerprints.by_name)),
            "weight_sync/bytes": float(sent.nbytes),
        }
        if self._delta:
            parameters = self._wire.manifest.sent
            numel = sum(parameter.numel for parameter in parameters)
            metrics["weight_sync/changed_fraction"] = sent.changed / numel
        return metrics


def _timings(seconds: Mapping[str, float], nbytes: int) -> dict[str, float]:
    """Return the times of a sync by phase, and the bytes per second."""
    metrics = {
        f"timing_s/weight_sync/{phase}": value for phase, value in seconds.items()
    }
    # The other times are of offloading and waking, which send no weights, and of
    # fingerprints, which the stream includes.
    sending_s = seconds["stream"] + seconds["prove"]
    return metrics | {"weight_sync/bytes_per_s": nbytes / sending_s}


# ------------------------------------------------------------------------- verification

# Verification of weight syncs by log-probs of a few fixed tokens.
#
# The actor and every replica have to agree on the log-probs.
#
# Invariant: the actor makes the probe of a version while it holds that version's
# weights, and the probe serves every replica that gets the version, however late.

PROBE_TOKENS = 16

ROUNDED_TOLERANCE = (0.1, 1.0)
"""Limits of the tolerance where rollout.sync.probe_tolerance=measured.

The first probe of a run is of weights that were sent as a whole, and may differ by
the upper limit. It shows how much rounding does. Later probes may differ by
`TIMES_THE_FIRST` as much, within these limits.
"""

TIMES_THE_FIRST = 5

ProbeCall = Call[list[Probe | None]]
"""A call of the actor's ranks for a probe, which only one of the ranks returns."""


class Verification:
    """The probe of the present version, its tolerance, and when a probe is due."""

    def __init__(
        self, actor: WorkerGroup[ActorWorker], config: RolloutTaskConfig
    ) -> None:
        """Begin without a probe."""
        self._actor = actor
        rollout = config.rollout
        self._every: int = resolved(rollout.sync.probe_every)
        self._version: int | None = None
        self._probe: Probe | None = None

        tolerance: float | Literal["measured"] = resolved(rollout.sync.probe_tolerance)
        self._measures_rounding = tolerance == "measured"
        if tolerance == "measured":
            self._tolerance = ROUNDED_TOLERANCE[1]
        else:
            self._tolerance = tolerance

        # The engine generates a token after the probe's, so one token less fits.
        longest_row = config.data.max_prompt_tokens + rollout.max_response_tokens
        self._num_tokens = min(PROBE_TOKENS, longest_row - 1)

    def is_due(self, num_syncs: int) -> bool:
        """Whether the next sync is to be verified.

        Args:
            num_syncs: Number of syncs so far.
        """
        return num_syncs % self._every == 0

    def probe_of(self, version: int) -> Probe | None:
        """Return the probe of this version, or None if the actor has made none."""
        return self._probe if self._version == version else None

    def request_probe(self, version: int) -> ProbeCall | None:
        """Request the probe of a version from the actor, which holds that version.

        Returns:
            The call to wait for, or None if the probe is there already.
        """
        if self.probe_of(version) is not None:
            return None
        return self._actor.broadcast(
            ActorWorker.probe, self._num_tokens, self._tolerance
        )

    def store_probe(
        self, version: int, call: ProbeCall | None, receivers: Receivers | None = None
    ) -> None:
        """Wait for the call of `request_probe`, and keep the probe.

        Args:
            version: The version.
            call: The call; None does nothing.
            receivers: The replicas of the sync, if there is one.
        """
        if call is not None:
            probes = call.result() if receivers is None else receivers.wait([call])[0]
            # All ranks compute, and one of them returns the probe.
            (probe,) = (probe for probe in probes if probe is not None)
            probe.require_finite(version)
            self._probe = probe
            self._version = version

    def note_difference(self, difference: float) -> None:
        """Derive the tolerance of later probes from the first difference.

        Args:
            difference: The largest difference of a log-prob that a replica has found.
        """
        if self._measures_rounding:
            lower, upper = ROUNDED_TOLERANCE
            self._tolerance = min(max(TIMES_THE_FIRST * difference, lower), upper)
            self._measures_rounding = False


# ----------------------------------------------------------------------------- the wire

ReplicaGroups = Sequence[WorkerGroup[RolloutWorker]]

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
        """Plan the buckets; no wire is open yet.

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
        self._buckets = plan_buckets(self._manifest, config.rollout.sync.bucket_bytes)

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
        wire_spec = self._wire_spec(replicas)
        wire = self._config.sync.wire
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
            first_receiver += replica.num_ranks * self._config.tensor_parallel
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
            receivers=num_ranks * self._config.tensor_parallel,
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
