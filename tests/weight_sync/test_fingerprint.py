import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weight_sync.fingerprints import EMPTY, fingerprint
from verl_ray.weight_sync.fingerprint import Fingerprint, FingerprintAccumulator
from verl_ray.weight_sync.manifest import Slice

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def _splitmix(x: int) -> int:
    m = (1 << 64) - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & m
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & m
    return x ^ (x >> 31)


def test_a_small_one_by_hand() -> None:
    # Two int64 lanes along the only dim: values 3 and 5.
    hashes = [_splitmix((i + 0x9E3779B97F4A7C15) % 2**64) | 1 for i in range(2)]
    sums = [3 * (hashes[0] >> k) + 5 * (hashes[1] >> k) for k in range(0, 64, 4)]

    def expected(dtype: str, numel: int) -> Fingerprint:
        per_element = int.from_bytes(
            hashlib.blake2b(dtype.encode(), digest_size=8).digest(), "little"
        )
        totals = ((summed + numel * per_element) % 2**64 for summed in sums)
        return Fingerprint(tuple(totals), numel)

    assert fingerprint(torch.tensor([3, 5])) == expected("torch.int64", 2)
    # Lanes are little-endian: eight bytes (3, 0, ...) are the integer 3.
    assert fingerprint(
        torch.tensor([3] + [0] * 7 + [5], dtype=torch.uint8)
    ) == expected("torch.uint8", 9)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    cuts=st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_boxes_that_tile_a_tensor_add_up(
    shape: list[int], dtype: torch.dtype, cuts: list[float]
) -> None:
    tensor = _random(tuple(shape), dtype)
    at = [round(cut * size) for cut, size in zip(cuts, shape, strict=False)]
    total = EMPTY
    for corner in np.ndindex(*[2] * len(shape)):
        start = tuple(a if side else 0 for side, a in zip(corner, at, strict=True))
        stop = tuple(
            size if side else a for side, a, size in zip(corner, at, shape, strict=True)
        )
        box = tensor[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))]
        total += fingerprint(box, Slice("w", start, tuple(box.shape)))
    assert total == fingerprint(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_it_sees(dtype: torch.dtype) -> None:
    tensor = _random((12, 16), dtype)
    changed = tensor.clone()
    changed.view(torch.uint8)[7, 9] ^= 1  # one bit
    others = {
        "one bit": changed,
        "two rows": tensor[[1, 0, *range(2, 12)]],
        "two columns": tensor[:, [1, 0, *range(2, 16)]],
        "two distant columns": tensor[:, [15, *range(1, 15), 0]],
        "blocks of rows": torch.cat([tensor[6:], tensor[:6]]),
        "blocks of columns": torch.cat([tensor[:, 8:], tensor[:, :8]], dim=1),
        "shifted": tensor.roll(1),
    }
    fingerprints = {name: fingerprint(other) for name, other in others.items()}
    assert [
        name for name, found in fingerprints.items() if found == fingerprint(tensor)
    ] == []
    assert len(set(fingerprints.values())) == len(fingerprints)


def test_signs_that_changed_are_seen_wherever_they_are() -> None:
    # The sign of an odd column is the highest bit of its lane.
    tensor = torch.ones(8, 12)
    before = fingerprint(tensor).totals
    places = list(np.ndindex(8, 12))
    for row, column in places:
        changed = tensor.clone()
        changed[row, column] = -1
        # The factor of total 0 is odd, so 2^63 remains of the highest bit.
        difference = (fingerprint(changed).totals[0] - before[0]) % 2**64
        assert difference != 0
        assert (difference == 2**63) == (column % 2 == 1)

    # In pairs they cancel there, and not in all of the other fifteen.
    pairs = itertools.combinations([place for place in places if place[1] % 2], 2)
    for pair in pairs:
        changed = tensor.clone()
        for place in pair:
            changed[place] = -1
        totals = fingerprint(changed).totals
        assert totals[0] == before[0] and totals != before


@pytest.mark.parametrize("offset", range(9))
def test_where_a_tensor_lies_in_memory_does_not_matter(offset: int) -> None:
    flat = _random((9 + 24,), torch.bfloat16)
    view = flat[offset : offset + 24]
    for tensor in (
        view,
        view.view(3, 8),
        view.view(8, 3),
        view.view(8, 3).T,
        view.view(3, 8)[:, :1],
    ):
        assert fingerprint(tensor) == fingerprint(
            tensor.clone(memory_format=torch.contiguous_format)
        )


def test_the_same_bits_of_another_dtype_differ() -> None:
    tensor = _random((4, 16), torch.bfloat16)
    assert fingerprint(tensor) != fingerprint(tensor.view(torch.float16))


def test_offloaded_weights_go_from_the_host_to_slots_elsewhere() -> None:
    weights, slot = torch.randn(6, 10), torch.empty(6, 10, device="meta")  # as a GPU
    accumulator = FingerprintAccumulator()
    accumulator.add("w", weights, copy=slot)
    assert accumulator.take().by_name == {"w": fingerprint(weights)}


def test_a_transposed_square_differs() -> None:
    tensor = _random((16, 16), torch.float32)
    assert fingerprint(tensor) != fingerprint(tensor.T)


def test_numel_counts_coverage_and_scalars_work() -> None:
    assert fingerprint(torch.zeros(3, 5)).numel == 15
    assert fingerprint(torch.zeros(0, 5)) == EMPTY
    assert fingerprint(torch.tensor(2.0)).numel == 1
    first, second = (2**64 - 1,) * 16, (2,) * 16
    assert Fingerprint(first, 1) + Fingerprint(second, 3) == Fingerprint((1,) * 16, 4)


def test_a_matrix_that_is_read_in_blocks_is_the_sum_of_slices_that_are_not() -> None:
    tensor = torch.randn(1001, 700)  # 2.8 MB, where blocks have 1 MiB
    slices = [
        Slice("", (start, 0), (min(start + 91, 1001) - start, 700))
        for start in range(0, 1001, 91)
    ]
    parts = [
        fingerprint(tensor[one.start[0] : one.start[0] + one.shape[0]], one)
        for one in slices
    ]
    assert len(parts) == 11 and sum(parts[1:], parts[0]) == fingerprint(tensor)
    tensor[1000, 699] += 1
    assert sum(parts[1:], parts[0]) != fingerprint(tensor)
