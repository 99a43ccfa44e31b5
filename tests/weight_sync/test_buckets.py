import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.manifest import (
    Bucket,
    Entry,
    Manifest,
    Parameter,
    plan_buckets,
)


def test_a_plan_by_hand() -> None:
    a = Parameter("a", (10,), "float32")  # 40 bytes, 64 aligned
    b = Parameter("b", (16, 4), "bfloat16")  # 128 bytes
    tied = Parameter("c", (16, 4), "bfloat16", tied_to="b")
    d = Parameter("d", (), "float32")  # 4 bytes, 64 aligned
    assert plan_buckets(Manifest((a, b, tied, d)), 192) == (
        Bucket(0, (Entry(a, 0), Entry(b, 64)), 192),
        Bucket(1, (Entry(d, 0),), 64),
    )
    assert len(plan_buckets(Manifest((a, b, tied, d)), 256)) == 1
    assert plan_buckets(Manifest(()), 64) == ()


def test_what_is_needed_at_once_travels_together_if_it_fits() -> None:
    sizes = {"attn.q": 32, "attn.k": 16, "attn.v": 16, "mlp.up": 16, "mlp.down": 16}
    manifest = Manifest(
        tuple(
            Parameter(f"layers.0.{name}.weight", (size,), "float32")
            for name, size in sizes.items()
        )
    )

    def bytes_of_buckets(limit: int) -> list[int]:
        return [bucket.nbytes for bucket in plan_buckets(manifest, limit)]

    # 128, 64 and 64 bytes of attention, then 64 and 64: two buckets of 192 would balance.
    assert bytes_of_buckets(384) == [384]
    assert bytes_of_buckets(256) == [256, 128]
    # Attention fits into no bucket, so its parameters travel as they fit.
    assert bytes_of_buckets(192) == [192, 192]
    assert bytes_of_buckets(128) == [128, 128, 128]


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    limit=st.integers(64, 8192),
)
def test_every_parameter_travels_once_in_order_and_within_the_limit(
    sizes: list[int], limit: int
) -> None:
    manifest = Manifest(
        tuple(Parameter(f"p{i}", (size,), "bfloat16") for i, size in enumerate(sizes))
    )
    plan = plan_buckets(manifest, limit)
    assert [entry.parameter for bucket in plan for entry in bucket.entries] == list(
        manifest.parameters
    )
    assert [bucket.index for bucket in plan] == list(range(len(plan)))
    for bucket in plan:
        assert bucket.nbytes <= limit or len(bucket.entries) == 1
        assert all(entry.offset % 64 == 0 for entry in bucket.entries)
        endpoints = [
            entry.offset + entry.parameter.numel * 2 for entry in bucket.entries
        ]
        assert all(
            end <= after.offset
            for end, after in zip(endpoints, bucket.entries[1:], strict=False)
        )
        assert endpoints[-1] <= bucket.nbytes


def test_an_expert_travels_in_buckets_of_the_receivers_that_hold_it() -> None:
    names = [
        f"layers.{i}.mlp.experts.{j}.up.weight" for i in range(2) for j in range(4)
    ]
    common = ["layers.0.mlp.shared_experts.up.weight", "layers.0.mlp.experts.up"]
    manifest = Manifest(
        tuple(Parameter(name, (16,), "float32") for name in (*common, *names))
    )
    halves = [frozenset({0, 1}), frozenset({2, 3})]
    plan = plan_buckets(manifest, 128, halves * 2)
    assert (
        [(bucket.receivers, bucket.names) for bucket in plan]
        == [
            (None, common),  # one of every rank, one of all experts
            ((0, 2), names[0:2]),
            ((1, 3), names[2:4]),
            ((0, 2), names[4:6]),
            ((1, 3), names[6:8]),
        ]
    )
    assert [bucket.index for bucket in plan] == [0, 1, 2, 3, 4]
    # A replica that starts again alone gets the same buckets.
    again = plan_buckets(manifest, 128, halves)
    assert [bucket.entries for bucket in again] == [bucket.entries for bucket in plan]

    # A rank that takes all of them, and ranks of which none lacks any.
    third = plan_buckets(manifest, 128, [*halves, None])[1:3]
    assert [bucket.receivers for bucket in third] == [(0, 2), (1, 2)]
    assert plan_buckets(manifest, 128, [None]) == plan_buckets(manifest, 128)
    with pytest.raises(
        WeightSyncError,
        match=r"experts.2.up.weight: none of the 1 ranks .* holds expert 2; set rollout",
    ):
        plan_buckets(manifest, 128, halves[:1])


def test_the_last_bucket_is_no_remainder() -> None:
    manifest = Manifest(
        tuple(Parameter(f"p{i}", (16,), "float32") for i in range(11))
    )  # 64 bytes each
    assert [bucket.nbytes for bucket in plan_buckets(manifest, 640)] == [384, 320]
