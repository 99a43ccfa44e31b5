"""A broadcast between real processes: three ranks send, two receive, then one dies."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.weight_sync.endpoints import BUCKETS, CPU, MANIFEST, made, shards
from tests.weight_sync.fingerprints import fingerprint
from verl_ray.errors import WeightSyncError
from verl_ray.rollout.engine_state import WeightUpdate
from verl_ray.weight_sync import SLOTS
from verl_ray.weight_sync.broadcast import (
    BroadcastAddress,
    BroadcastSender,
    GroupKey,
    gather,
    invite,
    join,
)
from verl_ray.weight_sync.fingerprint import Fingerprint, Fingerprints
from verl_ray.weight_sync.manifest import (
    Bucket,
    Manifest,
    Parameter,
    Slice,
    plan_buckets,
)
from verl_ray.weight_sync.transport import (
    Address,
    Inbox,
    SendResult,
    WireEndpoint,
    WireRoot,
    WireSpec,
)

# Two ranks take turns with the buckets, and the last owns nothing.
ROOTS = (WireRoot(0, "127.0.0.1"), WireRoot(1, "127.0.0.1"))
WIRE_SPEC = WireSpec(BUCKETS, receivers=2, patience_s=60, roots=ROOTS)
RANKS = 3
SYNCS = 2


def _send(rank: int, rendezvous: str, inbox: Any, outbox: Any) -> None:
    """Send as a rank of the actor, which owns every second slice or nothing."""
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    for delta in (False, True):  # the second time to other receivers
        sender = BroadcastSender(replace(WIRE_SPEC, delta=delta), rank, CPU)
        outbox.put(sender.offer())
        sender.connect(inbox.get())
        for step in range(SYNCS):
            outbox.put(_sync(sender, rank, step))
        inbox.get()  # when a receiver is dead
        outbox.put(_sync(sender, rank, 9))
        sender.close()


def _owned(bucket: Bucket, step: int, rank: int) -> list[tuple[Slice, torch.Tensor]]:
    """The rows of two ranks; the third has none."""
    return shards(bucket, made(step))[rank::2] if rank < 2 else []


def _sync(
    sender: BroadcastSender, rank: int, step: int
) -> tuple[dict[str, Fingerprint], int, str | None]:
    fingerprints: dict[str, Fingerprint] = {}
    nbytes = 0
    broken = None
    for bucket in BUCKETS:
        sent = sender.send(bucket, _owned(bucket, step, rank), whole=step == 0)
        fingerprints |= sent.fingerprints.by_name
        nbytes += sent.nbytes
        broken = broken or sent.broken
    sender.finish()
    return fingerprints, nbytes, broken


def _receive(number: int, address: Address, delta: bool, outbox: Any) -> None:
    wire_spec = replace(WIRE_SPEC, delta=delta)
    receiver = address.open(WireEndpoint(wire_spec, number, CPU))
    for _ in range(SYNCS):
        outbox.put(
            {
                name: fingerprint(tensor)
                for bucket in BUCKETS
                for name, tensor in receiver.receive(bucket)
            }
        )
        receiver.release()
    if number == 1:
        outbox.close()
        outbox.join_thread()
        os._exit(9)
    try:
        for bucket in BUCKETS:
            dict(receiver.receive(bucket))
    except WeightSyncError as error:
        outbox.put(str(error))
    receiver.close()


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_slices_of_ranks_reach_two_processes_sync_after_sync_until_one_of_them_dies(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context(
        "forkserver"
    )  # torch is imported once, for all of them
    context.set_forkserver_preload(
        ["tests.weight_sync.endpoints", "verl_ray.weight_sync.broadcast"]
    )
    inboxes, told = ([context.Queue() for _ in range(RANKS)] for _ in range(2))
    rendezvous = f"file://{tmp_path}/meeting"

    def start(method: Any, *arguments: Any) -> Any:
        process = context.Process(target=method, args=arguments, daemon=True)
        process.start()
        return process

    senders = [
        start(_send, rank, rendezvous, inboxes[rank], told[rank])
        for rank in range(RANKS)
    ]
    addresses = []
    for delta in (False, True):
        address, *_ = (queue.get(timeout=100) for queue in told)
        addresses.append(address)
        heard = [context.Queue() for _ in range(2)]
        receivers = [
            start(_receive, number, address, delta, heard[number])
            for number in range(2)
        ]
        for inbox in inboxes:
            inbox.put(address)
        for step in range(SYNCS):
            results = [queue.get(timeout=100) for queue in told]
            sent = sum((Fingerprints(part) for part, _, _ in results), Fingerprints())
            weights = made(step)
            expected = {
                one.name: fingerprint(weights[one.name].to(getattr(torch, one.dtype)))
                for one in MANIFEST.parameters
            }
            assert sent.by_name == expected
            assert [queue.get(timeout=100) for queue in heard] == [expected, expected]
            # Two layers and two layers; then one, a norm and a scale. All of them
            # changed, so a delta has a header of two numbers and a count of each more.
            first, second, third = 2048, 2048, 1024 + 64 + 64
            headers = (8 * (4 + 5), 8 * 4, 0) if delta else (0, 0, 0)
            sent_by_rank = (first + third, second, 0)
            assert [(nbytes, broken) for _, nbytes, broken in results] == [
                (sent_bytes + header, None)
                for sent_bytes, header in zip(sent_by_rank, headers, strict=True)
            ]

        receivers[1].join(60)
        assert receivers[1].exitcode == 9
        for inbox in inboxes:
            inbox.put(None)
        (_, _, broken), (helped, _, _), _ = (queue.get(timeout=100) for queue in told)
        assert (
            "or another member has exited" in broken
        )  # and is no error: the ranks of the actor stay in step
        assert len(helped) == 6
        assert "member 1 of 3" in heard[0].get(timeout=100)
        receivers[0].join(60)
        assert receivers[0].exitcode == 0
    for one in senders:
        one.join(60)
        assert one.exitcode == 0
    assert addresses[0] != addresses[1]


EXPERTS = Manifest(
    (
        *(
            Parameter(f"layers.{i}.mlp.experts.{j}.up.weight", (32, 16), "bfloat16")
            for i in range(2)
            for j in range(4)
        ),
        Parameter("norm", (7,), "float32"),
    )
)

# Two engines of two ranks each, with half of the experts on each rank.
HOLDERS = [frozenset({0, 1}), frozenset({2, 3})] * 2


@dataclass
class ExpertWire:
    """A sender, and the inboxes of four ranks of two engines."""

    buckets: tuple[Bucket, ...]
    sender: BroadcastSender
    inboxes: list[Inbox]
    threads: ThreadPoolExecutor

    def sync(
        self, weights: dict[str, torch.Tensor], *, whole: bool
    ) -> tuple[SendResult, list[dict[str, torch.Tensor]]]:
        """Return what was sent, and what each rank got."""
        arrived: list[dict[str, torch.Tensor]] = [{} for _ in self.inboxes]
        for inbox in self.inboxes:
            inbox.begin()

        def send(buckets: Sequence[Bucket]) -> SendResult:
            results = [
                self.sender.send(bucket, shards(bucket, weights), whole=whole)
                for bucket in buckets
            ]
            return sum(results, SendResult())

        result = send(self.buckets[:1])
        for place, bucket in enumerate(self.buckets):
            bucket_of_each = [bucket] * len(self.inboxes)
            parts = list(self.threads.map(Inbox.receive, self.inboxes, bucket_of_each))
            # The next two leave before this one is read, as from an eager sender.
            already_sent = place + SLOTS if place else 1
            result += send(self.buckets[already_sent : place + 1 + SLOTS])
            for inbox, own, part in zip(self.inboxes, arrived, parts, strict=True):
                own |= {name: tensor.clone() for name, tensor in part.items()}
                inbox.release()
        self.sender.finish()
        return result, arrived

    def check(self, sent: SendResult, first: int, ranks: Sequence[int]) -> None:
        """Compare as an engine does, whose first rank is this receiver."""
        update = WeightUpdate(1, {each.name for each in EXPERTS.sent}, first)
        for bucket in self.buckets:
            update.note_received(bucket)
        update.require_complete()
        received = [self.inboxes[rank].fingerprints for rank in ranks]
        update.require_equal(sent.fingerprints.by_name, received)


@pytest.fixture(params=[False, True], ids=["whole", "changes"])
def expert_wire(request: pytest.FixtureRequest) -> Iterator[ExpertWire]:
    buckets = plan_buckets(EXPERTS, 2048, HOLDERS)
    wire_spec = WireSpec(buckets, receivers=4, patience_s=60, delta=request.param)
    sender = BroadcastSender(wire_spec, 0, CPU)
    address = sender.offer()
    inboxes = [Inbox() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        connecting = [
            threads.submit(inbox.connect, address, WireEndpoint(wire_spec, number, CPU))
            for number, inbox in enumerate(inboxes)
        ]
        sender.connect(address)
        for call in connecting:
            call.result()
        yield ExpertWire(buckets, sender, inboxes, threads)
    for inbox in inboxes:
        inbox.close()
    sender.close()


def test_a_rank_gets_the_experts_that_it_holds_and_no_others(
    expert_wire: ExpertWire, request: pytest.FixtureRequest
) -> None:
    delta = "changes" in request.node.name
    for number in range(2):
        weights = made(number, EXPERTS)
        sent, arrived = expert_wire.sync(weights, whole=not number)
        # A norm for all, then two experts of each layer for each half; a delta has two
        # numbers for each bucket and a count for each parameter more.
        headers = 8 * (5 * 2 + 9) if delta else 0
        assert sent.nbytes == 64 + 4 * 2048 + headers
        for experts, received in zip(HOLDERS, arrived, strict=True):
            names = {
                f"layers.{i}.mlp.experts.{j}.up.weight" for i in (0, 1) for j in experts
            }
            assert received.keys() == {"norm", *names}
            assert sum(each.nbytes for each in received.values()) == 4 * 1024 + 28
            for name, tensor in received.items():
                assert torch.equal(tensor, weights[name].to(tensor.dtype))
        expert_wire.check(sent, 0, [0, 1])
        expert_wire.check(sent, 2, [2, 3])

    lacking = r"no rank of the engine received \['layers.0.mlp.experts.2.*experts.3.up"
    with pytest.raises(WeightSyncError, match=lacking):
        expert_wire.check(sent, 0, [0])
    with pytest.raises(WeightSyncError, match=r"experts.2.* on rank 1 of the 2 of"):
        expert_wire.check(sent, 0, [0, 0])


@pytest.mark.parametrize("expert_wire", [True], ids=["changes"], indirect=True)
def test_a_flipped_bit_in_an_expert_is_named_by_the_engine_that_has_it(
    expert_wire: ExpertWire,
) -> None:
    weights = made(0, EXPERTS)
    expert_wire.sync(weights, whole=True)
    # What the last rank keeps of the third expert of the second layer.
    expert_wire.inboxes[3]._receiver._decoder._copies[4].flat[7] ^= 1  # type: ignore
    sent, _ = expert_wire.sync(weights, whole=False)
    assert sent.changed == 0
    expert_wire.check(sent, 0, [0, 1])
    flipped = r"differ in \['layers.1.mlp.experts.2.up.weight'\] on rank 1 of the 2"
    with pytest.raises(WeightSyncError, match=flipped):
        expert_wire.check(sent, 2, [2, 3])


def test_receivers_that_do_not_come_are_named() -> None:
    rendezvous, listener = invite("127.0.0.1", receivers=range(2))
    with pytest.raises(
        WeightSyncError,
        match=r"of 2 receivers \[0, 1\] did not connect to 127.0.0.1:\d+, which was open for 0 s",
    ):
        gather(rendezvous, listener, 0.2, "cpu")
    with pytest.raises(
        WeightSyncError,
        match=r"receiver 1 waited 0 s .* at 127.0.0.1:\d+, where the sender",
    ):
        join(rendezvous, 1, 0.2, "cpu")


def test_a_rendezvous_ends_when_a_receiver_will_not_come() -> None:
    sender = BroadcastSender(
        WireSpec(BUCKETS, 2, 3600.0, roots=ROOTS), 1, CPU
    )  # longer than anybody waits here, and for the second root
    rendezvous = sender.offer().rendezvous[GroupKey(1, (0, 1))]
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(sender.connect, BroadcastAddress({}))
        other = pool.submit(join, rendezvous, 1, 3600.0, "cpu")
        time.sleep(0.5)
        assert not sending.done() and not other.done()
        sender.stop_waiting()
        with pytest.raises(
            WeightSyncError, match=r"of 2 receivers \[0\] will not connect"
        ):
            sending.result(120)
        with pytest.raises(WeightSyncError, match="receiver 1 waited"):
            other.result(120)
    sender.close()


def test_a_root_that_gives_up_is_named_and_the_group_of_the_other_is_closed() -> None:
    first, listener = invite("127.0.0.1", receivers=range(1))
    second, other_listener = invite("127.0.0.1", receivers=range(2))
    endpoint = WireEndpoint(WireSpec(BUCKETS, 1, 60.0, roots=ROOTS), 0, CPU)
    with ThreadPoolExecutor(2) as pool:
        gathering = pool.submit(gather, first, listener, 60.0, "cpu")
        address = BroadcastAddress(
            {GroupKey(0, (0,)): first, GroupKey(1, (0,)): second}
        )
        opening = pool.submit(address.open, endpoint)
        group = gathering.result(120)
        with pytest.raises(WeightSyncError, match=rf"1\] did not connect to {second}"):
            gather(second, other_listener, 1.0, "cpu")
        with pytest.raises(WeightSyncError, match=rf"receiver 0 waited .* at {second}"):
            opening.result(120)

    with pytest.raises(WeightSyncError, match="another member has exited") as caught:
        group.wait(group.broadcast(torch.zeros(1 << 20)))
    assert "timed out" not in str(caught.value)
    group.close()
