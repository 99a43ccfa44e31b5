"""The order of a weight sync: what the actor and all replicas are called for, and when.

Invariant: when `sync` returns, every replica that it was called with holds the
actor's weights, cast to the engine's dtype, under the requested version. If the sync
is verified by log-probs, it also computes with them what the actor computes. If
anything differs, an error is raised, and replicas that failed a check refuse to
generate.

Bucket i + 1 is sent while bucket i is loaded; a slot is filled again only after all
replicas have received it. Over a wire that announces buckets, the calls that send and
receive one are made at once, and the driver stands between no two of them.

Where rollout engines share the trainers' GPUs, the engines' weights wake after all
offloadable training state except the actor's weights has left the GPU. Their KV cache
wakes after the actor's weights have left, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from controllers.devices import DeviceSharing
from controllers.publishing.sync_clock import SyncClock
from controllers.publishing.verification import ProbeCall, Verification
from controllers.publishing.wire import Receivers, SendCall, WeightWire
from verl_ray.cluster.calls import Call
from verl_ray.cluster.group import WorkerGroup
from verl_ray.cluster.signals import finishing
from verl_ray.config.rollout_task import RolloutTaskConfig
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.transport import SendResult
from workers.actor import ActorWorker
from workers.rollout import RolloutWorker


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
        clock = SyncClock()
        # In other phases the actor's weights are offloaded, and are sent from the host.
        if self._device_sharing.phase == "training":
            self._device_sharing.switch_to("publishing")
        clock.count_as("offload")

        sent = self._send_buckets(version, receivers, again=again)
        commit_calls, probe_call, verify_calls = self._commit(
            sent, version, receivers, verifies=verifies
        )
        # The actor does this after its probe, and nobody needs it yet.
        finish_call = self._wire.finish()
        clock.count_as("stream")

        self._verification.store_probe(version, probe_call, receivers)
        clock.count_as("prove")

        self._device_sharing.switch_to("rollouts")
        clock.count_as("offload")

        if self._device_sharing.plan.engines_free is not None:
            receivers.wait(receivers.broadcast(RolloutWorker.wake, "kv_cache"))
        clock.count_as("wake")

        metrics = self._sent_metrics(sent.result)
        if verifies:
            verify_calls = verify_calls or self._begin_to_verify(version, receivers)
            difference = self._largest_difference(verify_calls, receivers)
            metrics["weight_sync/probe_difference"] = difference
        receivers.wait([finish_call])
        clock.count_as("prove")

        load_s = max(seconds for call in commit_calls for seconds in call.result())
        fingerprints_s = sent.result.fingerprints.seconds + load_s
        return metrics | clock.metrics(fingerprints_s, sent.result.nbytes)

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

    def _largest_difference(
        self, calls: Sequence[Call[Any]], receivers: Receivers
    ) -> float:
        """Return the largest difference of a log-prob that any replica found."""
        largest: float = max(difference for (difference,) in receivers.wait(calls))
        self._verification.note_difference(largest)
        return largest

    def _sent_metrics(self, sent: SendResult) -> dict[str, float]:
        """Return what was sent, in parameters and bytes."""
        metrics = {
            "weight_sync/verified": float(len(sent.fingerprints.by_name)),
            "weight_sync/bytes": float(sent.nbytes),
        }
        if self._delta:
            parameters = self._wire.manifest.sent
            numel = sum(parameter.numel for parameter in parameters)
            metrics["weight_sync/changed_fraction"] = sent.changed / numel
        return metrics
