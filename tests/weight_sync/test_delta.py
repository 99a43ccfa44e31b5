"""Deltas are lossless, and name the bucket that they start from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.delta import ALL, DeltaDecoder, DeltaEncoder
from verl_ray.weight_sync.manifest import Bucket, Manifest, Parameter, plan_buckets
from verl_ray.weight_sync.transport import parameter_view

(BUCKET,) = plan_buckets(
    Manifest((Parameter("a", (4, 5), "float32"), Parameter("b", (3,), "bfloat16"))),
    1 << 20,
)


def _flat(bucket: Bucket, **values: torch.Tensor) -> torch.Tensor:
    flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    for entry in bucket.entries:
        parameter_view(flat, entry).copy_(values[entry.parameter.name])
    return flat


def test_a_small_one_by_hand() -> None:
    a, b = torch.arange(20.0).view(4, 5), torch.ones(3)
    sender, receiver = DeltaEncoder(), DeltaDecoder()
    first = sender.pack(BUCKET, _flat(BUCKET, a=a, b=b), whole=False)
    assert first.header.tolist() == [0, 1, ALL, ALL]
    assert (first.changed, len(first.body)) == (23, 128 + 64)
    receiver.unpack(BUCKET, first.header, first.body)

    a[1, 2], a[3, 4] = -7.0, 5.5
    second = sender.pack(BUCKET, _flat(BUCKET, a=a, b=b), whole=False)
    assert second.header.tolist() == [1, 2, 2, 0]
    assert (second.changed, len(second.body)) == (2, 64 + 64)
    assert second.body[:8].view(torch.int32).tolist() == [7, 19]
    assert second.body[64:72].view(torch.float32).tolist() == [-7.0, 5.5]
    assert torch.equal(
        receiver.unpack(BUCKET, second.header, second.body), _flat(BUCKET, a=a, b=b)
    )

    # Ten of twenty: an index and a value of each take as much as all values do. All of
    # it travels then.
    a.view(-1)[:10] += 1
    b[0] = 2
    third = sender.pack(BUCKET, _flat(BUCKET, a=a, b=b), whole=False)
    assert third.header.tolist() == [
        2,
        3,
        ALL,
        ALL,
    ]  # of three values of two bytes, one change takes six
    assert third.changed == 11


def test_bits_are_compared_not_values() -> None:
    sender, receiver = DeltaEncoder(), DeltaDecoder()
    a, b = torch.zeros(4, 5), torch.full((3,), float("nan"))
    first = sender.pack(BUCKET, _flat(BUCKET, a=a, b=b), whole=True)
    receiver.unpack(BUCKET, first.header, first.body)
    a[0, 0] = -0.0
    packed = sender.pack(BUCKET, _flat(BUCKET, a=a, b=b), whole=False)
    assert packed.changed == 1  # the sign of a zero, and no NaN
    assert torch.equal(
        receiver.unpack(BUCKET, packed.header, packed.body), _flat(BUCKET, a=a, b=b)
    )


def test_changes_to_what_is_not_held_are_refused() -> None:
    sender, receiver, late = DeltaEncoder(), DeltaDecoder(), DeltaDecoder()
    packs = [
        sender.pack(
            BUCKET,
            _flat(BUCKET, a=torch.full((4, 5), float(i > 1)), b=torch.ones(3) * i),
            whole=i == 0,
        )
        for i in range(3)
    ]
    receiver.unpack(BUCKET, packs[0].header, packs[0].body)
    with pytest.raises(
        WeightSyncError,
        match=r"changes to its number 2, this receiver holds number 1; all of \['a', 'b'\]",
    ):
        receiver.unpack(BUCKET, packs[2].header, packs[2].body)
    with pytest.raises(WeightSyncError, match="this receiver holds number 0"):
        late.unpack(BUCKET, packs[1].header, packs[1].body)
    whole = sender.pack(
        BUCKET, _flat(BUCKET, a=torch.ones(4, 5), b=torch.ones(3)), whole=True
    )
    assert whole.header.tolist() == [0, 4, ALL, ALL]
    assert torch.equal(
        late.unpack(BUCKET, whole.header, whole.body),
        _flat(BUCKET, a=torch.ones(4, 5), b=torch.ones(3)),
    )


@given(
    seeds=st.lists(st.integers(0, 2**16), min_size=2, max_size=5), share=st.floats(0, 1)
)
@settings(max_examples=40, deadline=None)
def test_any_series_arrives_to_the_bit(seeds: list[int], share: float) -> None:
    sender, receiver = DeltaEncoder(), DeltaDecoder()
    values = {"a": torch.zeros(4, 5), "b": torch.zeros(3)}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for value in values.values():
            chosen = torch.rand(value.shape, generator=generator) < share
            value[chosen] = torch.randn(value.shape, generator=generator)[chosen]
        flat = _flat(BUCKET, **values)
        packed = sender.pack(BUCKET, flat, whole=False)
        assert len(packed.body) <= BUCKET.nbytes + 64 * len(BUCKET.entries)
        assert torch.equal(receiver.unpack(BUCKET, packed.header, packed.body), flat)
