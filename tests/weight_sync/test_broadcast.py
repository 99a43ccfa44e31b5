"""A broadcast between real processes: two ranks send, two receive, then one dies."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.weight_sync.endpoints import BUCKETS, CPU, MANIFEST, made, shards
from tests.weight_sync.fingerprints import fingerprint
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.broadcast import (
    BroadcastAddress,
    BroadcastSender,
    gather,
    invite,
    join,
)
from verl_ray.weight_sync.fingerprint import EMPTY, Fingerprint
from verl_ray.weight_sync.transport import Address, WireEndpoint, WireSpec

WIRE_SPEC = WireSpec(BUCKETS, receivers=2, patience_s=60)
SYNCS = 2


def _send(rank: int, rendezvous: str, inbox: Any, outbox: Any) -> None:
    """Send as a rank of the actor, which owns every second slice."""
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    for _ in range(2):  # the second time to other receivers
        sender = BroadcastSender(WIRE_SPEC, rank, CPU)
        outbox.put(sender.offer())
        sender.connect(inbox.get())
        for step in range(SYNCS):
            outbox.put(_sync(sender, rank, step))
        inbox.get()  # when a receiver is dead
        outbox.put(_sync(sender, rank, 9))
        sender.close()


def _sync(
    sender: BroadcastSender, rank: int, step: int
) -> tuple[dict[str, Fingerprint], int, str | None]:
    fingerprints: dict[str, Fingerprint] = {}
    nbytes = 0
    broken = None
    for bucket in BUCKETS:
        sent = sender.send(bucket, shards(bucket, made(step))[rank::2], whole=True)
        fingerprints |= sent.fingerprints.by_name
        nbytes += sent.nbytes
        broken = broken or sent.broken
    sender.finish()
    return fingerprints, nbytes, broken


def _receive(number: int, address: Address, outbox: Any) -> None:
    receiver = address.open(WireEndpoint(WIRE_SPEC, number, CPU))
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
def test_slices_of_two_ranks_reach_two_processes_sync_after_sync_until_one_of_them_dies(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context(
        "forkserver"
    )  # torch is imported once, for all of them
    context.set_forkserver_preload(
        ["tests.weight_sync.endpoints", "verl_ray.weight_sync.broadcast"]
    )
    inboxes, told = ([context.Queue() for _ in range(2)] for _ in range(2))
    rendezvous = f"file://{tmp_path}/meeting"

    def start(method: Any, *arguments: Any) -> Any:
        process = context.Process(target=method, args=arguments, daemon=True)
        process.start()
        return process

    senders = [
        start(_send, rank, rendezvous, inboxes[rank], told[rank]) for rank in range(2)
    ]
    addresses = []
    for _ in range(2):
        address, _ = (queue.get(timeout=100) for queue in told)
        addresses.append(address)
        heard = [context.Queue() for _ in range(2)]
        receivers = [
            start(_receive, number, address, heard[number]) for number in range(2)
        ]
        for inbox in inboxes:
            inbox.put(address)
        for step in range(SYNCS):
            (first, nbytes, broken), (second, none, _) = (
                queue.get(timeout=100) for queue in told
            )
            sent = {
                name: first.get(name, EMPTY) + second.get(name, EMPTY)
                for name in first | second
            }
            weights = made(step)
            expected = {
                one.name: fingerprint(weights[one.name].to(getattr(torch, one.dtype)))
                for one in MANIFEST.parameters
            }
            assert sent == expected
            assert [queue.get(timeout=100) for queue in heard] == [expected, expected]
            assert (nbytes, none, broken) == (
                sum(bucket.nbytes for bucket in BUCKETS),
                0,
                None,
            )

        receivers[1].join(60)
        assert receivers[1].exitcode == 9
        for inbox in inboxes:
            inbox.put(None)
        (_, _, broken), (helped, _, _) = (queue.get(timeout=100) for queue in told)
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


def test_receivers_that_do_not_come_are_named() -> None:
    rendezvous, listener = invite("127.0.0.1", receivers=2)
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
        WireSpec(BUCKETS, 2, 3600.0), 0, CPU
    )  # longer than anybody waits here
    rendezvous = sender.offer().rendezvous
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(sender.connect, BroadcastAddress(rendezvous))
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
