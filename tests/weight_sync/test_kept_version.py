"""The kept version is what was sent last, whatever has become of the weights since."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.weight_sync.endpoints import (
    BUCKETS,
    CPU,
    MANIFEST,
    WireEndpoints,
    joined,
    made,
    shards,
)
from tests.weight_sync.fingerprints import EMPTY
from verl_ray.weight_sync.fingerprint import Fingerprint
from verl_ray.weight_sync.manifest import Slice
from verl_ray.weight_sync.transport import KeptVersion

Shard = tuple[Slice, torch.Tensor]


def learn(weights: dict[str, torch.Tensor]) -> None:
    """Change every weight where it lies, as an optimizer does."""
    for tensor in weights.values():
        tensor.add_(1.0)


def send(
    endpoints: WireEndpoints, version: int, shards_of: dict[int, list[Shard]]
) -> None:
    endpoints.begin(version)
    sent: dict[str, Fingerprint] = {}
    for bucket in BUCKETS:
        result = endpoints.sender.send(bucket, shards_of[bucket.index], whole=True)
        for name, part in result.fingerprints.by_name.items():
            sent[name] = sent.get(name, EMPTY) + part
        for engine in endpoints.engines:
            engine.receive(bucket)
    for engine in endpoints.engines:
        engine.commit(sent)
    endpoints.sender.finish()


def test_a_replica_that_starts_again_gets_what_the_others_have(tmp_path: Path) -> None:
    """The actor has learned meanwhile. Fingerprints are those of the kept weights."""
    weights, kept = made(1), KeptVersion()
    first = joined("shared_memory", tmp_path, receivers=2)
    send(
        first,
        1,
        {b.index: list(kept.keep(b.index, shards(b, weights))) for b in BUCKETS},
    )
    published = {
        name: tensor.clone() for name, tensor in first.engines[0].weights.items()
    }

    learn(weights)
    again = joined("shared_memory", tmp_path, receivers=1)
    send(again, 1, {b.index: list(kept.shards(b.index, CPU) or ()) for b in BUCKETS})
    found = again.engines[0].weights
    assert found.keys() == {parameter.name for parameter in MANIFEST.parameters}
    for name, tensor in found.items():
        assert torch.equal(tensor, published[name]), name

    # The next version replaces it, and once it is kept, the earlier one is gone.
    send(
        first,
        2,
        {b.index: list(kept.keep(b.index, shards(b, weights))) for b in BUCKETS},
    )
    learn(weights)
    send(again, 2, {b.index: list(kept.shards(b.index, CPU) or ()) for b in BUCKETS})
    for name, tensor in again.engines[0].weights.items():
        assert torch.equal(tensor, first.engines[0].weights[name]), name
        assert not torch.equal(tensor, published[name]), name
    for endpoints in (first, again):
        endpoints.close()


ODD = torch.tensor([0x7FC12345, 0x80000000, 1, 0x7F800000], dtype=torch.int64)
"""A NaN with a payload, -0.0, the smallest number, and infinity."""


@pytest.mark.parametrize(
    "content",
    [
        ODD.to(torch.int32).view(torch.float32),
        torch.randn(3, 4).to(torch.bfloat16),
        torch.randn(4, 6)[:, 1:4],  # not contiguous
        torch.tensor(1.5),
        torch.empty(0, 3),
    ],
    ids=["odd numbers", "bfloat16", "a column", "a number", "nothing"],
)
def test_every_bit_is_kept(content: torch.Tensor) -> None:
    kept, piece = KeptVersion(), Slice("w", (0,) * content.dim(), tuple(content.shape))
    before = content.clone()
    ((sent_piece, sent),) = kept.keep(3, [(piece, content)])
    assert sent_piece is piece and sent is content
    content.zero_()
    shards_again = kept.shards(3, CPU)
    assert shards_again is not None
    ((again_piece, again),) = shards_again
    assert again_piece == piece and again.dtype == before.dtype
    raw = [part.contiguous().view(-1).view(torch.uint8) for part in (again, before)]
    assert torch.equal(*raw)


def test_the_memory_of_a_bucket_is_used_again() -> None:
    kept, weights = KeptVersion(), torch.zeros(4, 4)
    places = set()
    for _ in range(3):
        weights += 1
        list(kept.keep(0, [(Slice("w", (0, 0), (4, 4)), weights)]))
        ((_, again),) = kept.shards(0, CPU) or ()
        assert torch.equal(again, weights)
        places.add(again.data_ptr())
    assert len(places) == 1 and weights.data_ptr() not in places
    # Of other shapes, after another cut of the buckets.
    list(kept.keep(0, [(Slice("w", (0,), (3,)), torch.ones(3))]))
    ((_, again),) = kept.shards(0, CPU) or ()
    assert again.tolist() == [1, 1, 1]


def test_a_bucket_that_was_not_sent_is_not_kept() -> None:
    assert KeptVersion().shards(0, CPU) is None
