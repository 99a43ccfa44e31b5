"""CUDA IPC on a GPU: another process reads in place, and opens slots once for all syncs."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from tests.weight_sync.endpoints import BUCKETS, MANIFEST, made, shards
from tests.weight_sync.fingerprints import fingerprint
from verl_ray.weight_sync.cuda_ipc import CudaIpcSender
from verl_ray.weight_sync.transport import Address, WireEndpoint, WireSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]

WIRE_SPEC = WireSpec(BUCKETS, receivers=1, patience_s=60, device_type="cuda")


def _receive(address: Address, inbox: Any, outbox: Any) -> None:
    opened = address.open(WireEndpoint(WIRE_SPEC, 0, torch.device("cuda:0")))
    while (index := inbox.get()) is not None:
        outbox.put(
            {
                name: fingerprint(tensor)
                for name, tensor in opened.receive(BUCKETS[index])
            }
        )
        opened.release()
    opened.close()
    outbox.put("closed")


def test_another_process_reads_in_place_and_opens_once() -> None:
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    sender = CudaIpcSender(WIRE_SPEC, 0, torch.device("cuda:0"))
    address = sender.offer()
    receiver = context.Process(target=_receive, args=(address, inbox, outbox))
    receiver.start()
    sender.connect(address)
    for step in range(3):
        weights = {name: value.cuda() for name, value in made(step).items()}
        received = {}
        for bucket in BUCKETS:
            sender.send(bucket, shards(bucket, weights), whole=True)
            inbox.put(bucket.index)
            received |= outbox.get(timeout=100)
        sender.finish()
        assert received == {
            one.name: fingerprint(weights[one.name].to(getattr(torch, one.dtype)))
            for one in MANIFEST.parameters
        }
    inbox.put(None)
    assert outbox.get(timeout=60) == "closed"
    receiver.join(60)
    sender.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert (
        torch.cuda.memory_allocated() < 1 << 20
    )  # what was exported is given back, since it was released once
