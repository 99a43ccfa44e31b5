import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.weight_sync.fingerprints import EMPTY, fingerprint
from verl_ray.errors import WeightSyncError
from verl_ray.private_files import shared_folder
from verl_ray.profiling.progress import progress
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import Manifest, Parameter, Slice, plan_buckets
from verl_ray.weight_sync.shared_memory import (
    SharedMemoryAddress,
    SharedMemorySender,
    create,
    map_slots,
    remove,
)
from verl_ray.weight_sync.transport import WireEndpoint, WireSpec

MANIFEST = Manifest(
    (
        Parameter("w", (6, 10), "bfloat16"),
        Parameter("b", (7,), "float32"),
        Parameter("s", (), "float32"),
    )
)
(BUCKET,) = plan_buckets(MANIFEST, 1 << 20)


BUCKETS = plan_buckets(MANIFEST, 64)
ENDPOINT = WireEndpoint(WireSpec(BUCKETS, 1, 60.0), 0, torch.device("cpu"))


@pytest.fixture
def address() -> Iterator[SharedMemoryAddress]:
    made = create("test", BUCKET.nbytes)
    yield made
    remove(made)


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        p.name: torch.randn(p.shape, generator=generator) for p in MANIFEST.parameters
    }


def _send_half(
    address: SharedMemoryAddress,
    rank: int,
    answers: "multiprocessing.Queue[dict[str, Fingerprint]]",
) -> None:
    """Send as one of two ranks: half of the columns of w, a part of b.

    Parameter s belongs to rank 0.
    """
    weights, transport = _weights(), map_slots(address)
    columns, rows = ((0, 5), (0, 4)) if rank == 0 else ((5, 10), (4, 7))
    shards = [
        (Slice("w", (0, columns[0]), (6, 5)), weights["w"][:, slice(*columns)]),
        (Slice("b", (rows[0],), (rows[1] - rows[0],)), weights["b"][slice(*rows)]),
    ]
    if rank == 0:
        shards.append((Slice("s", (), ()), weights["s"]))
    answers.put(transport.fill(BUCKET, shards).by_name)


@pytest.mark.processes
def test_two_processes_write_slices_and_a_third_reads_whole_parameters(
    address: SharedMemoryAddress,
) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=_send_half, args=(address, rank, answers))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    first, second = answers.get(timeout=200), answers.get(timeout=200)
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0

    read = dict(map_slots(address).receive(BUCKET))
    weights = _weights()
    assert torch.equal(read["w"], weights["w"].to(torch.bfloat16))
    assert torch.equal(read["b"], weights["b"])
    assert torch.equal(read["s"], weights["s"])
    sent = {name: first.get(name, EMPTY) + second.get(name, EMPTY) for name in read}
    assert sent == {name: fingerprint(tensor) for name, tensor in read.items()}
    # Of the bits that travelled: not those of float32, and not with one of them changed.
    assert sent["w"] != fingerprint(weights["w"])
    changed = read["w"].clone()
    changed.view(torch.int16)[5, 9] ^= 1
    assert sent["w"] != fingerprint(changed)


def test_reading_copies_nothing(address: SharedMemoryAddress) -> None:
    writer, reader = map_slots(address), map_slots(address)
    read = dict(reader.receive(BUCKET))
    writer.fill(BUCKET, [(Slice("b", (0,), (7,)), torch.arange(7.0))])
    assert read["b"].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_the_place_of_slices_is_computed_once(address: SharedMemoryAddress) -> None:
    slots = map_slots(address)
    halves = [
        (Slice("b", (0,), (4,)), torch.ones(4)),
        (Slice("b", (4,), (3,)), torch.full((3,), 2.0)),
    ]
    slots.fill(BUCKET, halves)
    first = list(slots._plans[0].places)
    slots.fill(BUCKET, halves)
    again = slots._plans[0].places
    assert all(one is other for one, other in zip(first, again, strict=True))
    slots.fill(BUCKET, halves[::-1])  # in another order they go to the same places
    assert dict(slots.receive(BUCKET))["b"].tolist() == [1, 1, 1, 1, 2, 2, 2]


def test_a_bucket_is_read_once_every_rank_has_sent_it() -> None:
    first, second = (
        SharedMemorySender(ENDPOINT.wire_spec, rank, ENDPOINT.device) for rank in (0, 1)
    )
    address = replace(first.offer(), senders=2)
    for rank in (first, second):
        rank.connect(address)
    receiver = address.open(ENDPOINT)
    halves = [
        [(Slice("w", (start, 0), (3, 10)), torch.full((3, 10), float(start)))]
        for start in (0, 3)
    ]

    with ThreadPoolExecutor(1) as thread:
        # Both calls were made before anything is sent.
        receiving = thread.submit(lambda: dict(receiver.receive(BUCKETS[0])))
        first.send(BUCKETS[0], halves[0], whole=True)
        while receiver._announced[0] < 1:
            assert not receiving.done()
        assert progress().waits_for_others
        second.send(BUCKETS[0], halves[1], whole=True)
        assert receiving.result(60)["w"].sum() == 3 * 30
        assert not progress().waits_for_others

        # One rank is ahead, and the other one fails.
        first.send(BUCKETS[1], [], whole=True)
        receiving = thread.submit(receiver.receive, BUCKETS[1])
        with pytest.raises(WeightSyncError, match="x was sent with bucket 1"):
            second.send(BUCKETS[1], [(Slice("x", (), ()), torch.ones(()))], whole=True)
        second.close()
        with pytest.raises(WeightSyncError, match=r"bucket 1 will not .* given up"):
            receiving.result(60)

    # The memory is free although the receiver has mapped it, for the next wire.
    with Path(address.paths[0]).open("rb") as file:
        assert os.fstat(file.fileno()).st_blocks > 0
        first.close()
        assert os.fstat(file.fileno()).st_blocks == 0
    receiver.close()
    assert not any(Path(path).exists() for path in (*address.paths, *address.pipes))


def test_what_was_announced_arrives_although_the_sync_is_given_up() -> None:
    sender = SharedMemorySender(ENDPOINT.wire_spec, 0, ENDPOINT.device)
    address = sender.offer()
    sender.connect(address)
    receiver = address.open(ENDPOINT)
    ones = [(Slice("w", (0, 0), (6, 10)), torch.ones(6, 10))]
    sender.send(BUCKETS[0], ones, whole=True)
    sender.close()
    assert [*dict(receiver.receive(BUCKETS[0]))] == ["w"]
    with pytest.raises(WeightSyncError, match="bucket 1 will not arrive"):
        receiver.receive(BUCKETS[1])
    receiver.close()


def test_consecutive_buckets_use_different_slots(address: SharedMemoryAddress) -> None:
    transport = map_slots(address)
    transport.fill(BUCKETS[1], [(Slice("b", (0,), (7,)), torch.ones(7))])
    transport.fill(BUCKETS[2], [(Slice("s", (), ()), torch.tensor(5.0))])
    assert dict(transport.receive(BUCKETS[1]))["b"].tolist() == [1] * 7
    assert dict(transport.receive(BUCKETS[2]))["s"].item() == 5


def test_no_address_is_used_twice() -> None:
    first = create("again", 64)
    remove(first)
    second = create("again", 64)
    remove(second)
    assert first != second


def test_slices_that_do_not_belong_are_refused(address: SharedMemoryAddress) -> None:
    transport = map_slots(address)
    with pytest.raises(
        WeightSyncError, match="x was sent with bucket 0, which does not hold it"
    ):
        transport.fill(BUCKET, [(Slice("x", (0,), (1,)), torch.ones(1))])
    with pytest.raises(
        WeightSyncError, match=r"b: \(3,\) was sent as a slice of shape \(4,\)"
    ):
        transport.fill(BUCKET, [(Slice("b", (0,), (4,)), torch.ones(3))])
    with pytest.raises(
        WeightSyncError, match=r"b: the slice \(4,\) at \(5,\) of \(7,\) does not exist"
    ):
        transport.fill(BUCKET, [(Slice("b", (5,), (4,)), torch.ones(4))])
    released = torch.ones(4)
    released.untyped_storage().resize_(
        0
    )  # as megatron-core leaves those that went to the host
    with pytest.raises(
        WeightSyncError, match=r"b has no memory.* placement.offload=optimizer"
    ):
        transport.fill(BUCKET, [(Slice("b", (0,), (4,)), released)])


def test_too_little_memory_is_a_clear_error_and_leaves_nothing() -> None:
    with pytest.raises(
        WeightSyncError,
        match=r"needs 2 x \d+ MiB in /dev/shm, found \d+ of \d+ MiB free",
    ):
        create("too-large", 1 << 50)
    assert list(shared_folder().glob("*too-large*")) == []


@pytest.mark.processes
def test_what_a_dead_owner_left_is_removed_and_what_a_live_one_has_stays(
    address: SharedMemoryAddress,
) -> None:
    code = """
import os, tempfile
from verl_ray.ownership import prefix
from verl_ray.private_files import shared_folder
from verl_ray.weight_sync.shared_memory import create
folder = tempfile.mkdtemp(prefix=prefix("adapter"), dir=shared_folder())
open(f"{folder}/adapter_model.safetensors", "w").close()
address = create("dies", 256, receivers=1)
print(folder, *address.paths, *address.pipes, flush=True)
os._exit(9)
"""
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    left = died.stdout.split()
    assert died.returncode == 9
    assert len(left) == 4 and all(Path(path).exists() for path in left)
    receiver = SharedMemoryAddress((left[1], left[2]), 256, (left[3],)).open(ENDPOINT)
    with pytest.raises(WeightSyncError, match=r"the process of rank 0 .* has exited"):
        receiver.receive(BUCKET)
    remove(create("next", 64))
    assert not any(Path(path).exists() for path in left)
    assert all(Path(path).exists() for path in address.paths)
