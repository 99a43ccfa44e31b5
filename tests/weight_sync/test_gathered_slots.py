"""Buckets that real processes make whole: on their roots, or on every rank."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.weight_sync.endpoints import BUCKETS, MANIFEST, made
from tests.weight_sync.fingerprints import fingerprint
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.gathered_slots import GatheredSlots
from verl_ray.weight_sync.manifest import Bucket, Slice

RANKS = 3
NOTHING: list[tuple[Slice, torch.Tensor]] = []


def _owned(bucket: Bucket, step: int, rank: int) -> list[tuple[Slice, torch.Tensor]]:
    """Rows of the first bucket, columns of the second, and whole ones of the third."""
    slices: list[tuple[Slice, torch.Tensor]] = []
    for entry in bucket.entries:
        name, tensor = entry.parameter.name, made(step)[entry.parameter.name]
        if bucket.index == 2:
            if rank == (1 if name == "layer4" else 2):
                whole = Slice(name, (0,) * tensor.dim(), tuple(tensor.shape))
                slices.append((whole, tensor))
            continue
        # 32 rows are 11, 11 and 10; 16 columns are 6, 6 and 4.
        dim = bucket.index
        starts = [0, 11, 22, 32] if dim == 0 else [0, 6, 12, 16]
        start, size = starts[rank], starts[rank + 1] - starts[rank]
        content = tensor.narrow(dim, start, size)
        first = (start, 0) if dim == 0 else (0, start)
        slices.append((Slice(name, first, tuple(content.shape)), content))
    return slices


def _gather(rank: int, rendezvous: str, outbox: Any) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    for everywhere in (False, True):
        buffers = [torch.full((2048,), 255, dtype=torch.uint8) for _ in range(2)]
        slots = GatheredSlots(buffers, roots=(2, 1), everywhere=everywhere)
        for step in range(2):
            whole: dict[str, Any] = {}
            for bucket in BUCKETS:
                slots.gather(bucket, _owned(bucket, step, rank))
                if slots.holds(bucket):
                    for name, tensor in slots.receive(bucket):
                        whole[name] = fingerprint(tensor)
            outbox.put(whole)

    messages = {
        index: [
            (message.owner, message.packed.nbytes, len(message.slices))
            for message in exchange.messages
        ]
        for index, exchange in slots._exchanges.items()
    }
    outbox.put(messages)
    try:
        slots.gather(BUCKETS[1], NOTHING)
    except WeightSyncError as error:
        outbox.put(str(error))
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_roots_or_all_ranks_get_whole_buckets_to_the_bit(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.weight_sync.endpoints", "verl_ray.weight_sync.broadcast"]
    )
    outboxes = [context.Queue() for _ in range(RANKS)]
    rendezvous = f"file://{tmp_path}/meeting"
    processes = [
        context.Process(target=_gather, args=(rank, rendezvous, outbox), daemon=True)
        for rank, outbox in enumerate(outboxes)
    ]
    for process in processes:
        process.start()

    for everywhere in (False, True):
        for step in range(2):
            expected = {
                parameter.name: fingerprint(
                    made(step)[parameter.name].to(getattr(torch, parameter.dtype))
                )
                for parameter in MANIFEST.parameters
            }
            first, second, third = (outbox.get(timeout=100) for outbox in outboxes)
            if everywhere:
                assert first == second == third == expected
                continue
            # Of roots 2 and 1 the first has buckets 0 and 2, the other bucket 1.
            assert first == {}
            assert set(second) == {"layer2", "layer3"}
            assert second | third == expected

    # Two layers of 32 x 16 in bfloat16: two slices each. A layer that one rank owns lies
    # in its slot as it travels; a norm and a scale, in float32, do not.
    rows = [(0, 2 * 11 * 16 * 2, 2), (1, 2 * 11 * 16 * 2, 2), (2, 2 * 10 * 16 * 2, 2)]
    columns = [(0, 2 * 32 * 6 * 2, 2), (1, 2 * 32 * 6 * 2, 2), (2, 2 * 32 * 4 * 2, 2)]
    whole_ones = [(1, 32 * 16 * 2, 0), (2, (7 + 1) * 4, 2)]
    for rank, outbox in enumerate(outboxes):
        assert outbox.get(timeout=100) == {0: rows, 1: columns, 2: whole_ones}
        error = outbox.get(timeout=100)
        assert f"rank {rank} owns other slices of bucket 1" in error
        assert "0 in place of 2" in error
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
