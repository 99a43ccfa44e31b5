"""Views of a storage that moves stay views of it. test_place_gpu.py moves it off a GPU."""

from __future__ import annotations

import torch

from verl_ray.engine.offload import Offload
from verl_ray.engine.shared_storages import (
    offloadable_storages,
    release_memory,
    renew_memory,
)


def test_views_of_what_is_moved_look_where_it_is_now() -> None:
    buffer, alone = torch.arange(12.0), torch.ones(3, dtype=torch.bfloat16)
    rows, rest = buffer[2:8].view(2, 3), buffer[8:]
    before = buffer.data_ptr()
    held = offloadable_storages(
        [("rows", rows), ("", buffer), ("", rest), ("alone", alone)]
    )
    assert [one.name for one in held] == ["rows", "alone"]
    assert [one.memory().numel() for one in held] == [
        48,
        6,
    ]  # bytes, of a whole storage each
    Offload(torch.device("cpu")).to_host(held)
    assert buffer.data_ptr() != before and buffer.tolist() == list(range(12))
    rows[1, 2] = 70.0
    rest.zero_()
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5, 6, 70, 0, 0, 0, 0]
    assert alone.dtype == torch.bfloat16 and alone.tolist() == [1, 1, 1]


def test_what_is_released_comes_back_as_zeros_under_its_views() -> None:
    buffer = torch.ones(6)
    part = buffer[2:4]
    release_memory([buffer])
    assert buffer.untyped_storage().nbytes() == 0
    for _ in range(2):
        renew_memory([buffer])
        part += 1
    assert buffer.tolist() == [0, 0, 2, 2, 0, 0]
