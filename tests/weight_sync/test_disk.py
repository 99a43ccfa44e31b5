"""Faults that only files can have."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.weight_sync.endpoints import BUCKETS, CPU, joined, made, shards
from verl_ray.errors import WeightSyncError
from verl_ray.weight_sync.disk import DiskAddress, DiskSender
from verl_ray.weight_sync.transport import WireEndpoint, WireSpec


def test_two_files_at_most_and_none_when_it_is_over(tmp_path: Path) -> None:
    endpoints = joined("disk", tmp_path)
    endpoints.begin(1)
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    seen = []
    for bucket in BUCKETS:
        endpoints.sender.send(bucket, shards(bucket, made(0)), whole=True)
        seen.append(sorted(path.name for path in tmp_path.glob("*/*")))
        for engine in endpoints.engines:
            engine.receive(bucket)
    assert seen == [
        ["00000.safetensors"],
        ["00000.safetensors", "00001.safetensors"],
        ["00001.safetensors", "00002.safetensors"],
    ]
    endpoints.sender.finish()
    assert list(tmp_path.glob("*/*")) == []
    endpoints.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_shared_or_not_writable_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        WeightSyncError, match=r"Set rollout.sync.folder to one that all nodes share"
    ):
        DiskAddress(str(tmp_path / "elsewhere")).open(
            WireEndpoint(WireSpec(BUCKETS, 1, 0.1), 0, CPU)
        )
    (tmp_path / "file").write_text("")
    with pytest.raises(
        WeightSyncError, match=r"rollout.sync.folder: .* cannot be made"
    ):
        DiskSender(WireSpec(BUCKETS, 1, 1.0, folder=str(tmp_path / "file")), 0, CPU)


def test_a_bucket_that_does_not_come_is_named(tmp_path: Path) -> None:
    endpoints = joined("disk", tmp_path, receivers=1, patience_s=0.2)
    endpoints.begin(1)
    with pytest.raises(
        WeightSyncError, match=r"waited for 0 s: bucket 0 did not arrive"
    ):
        endpoints.engines[0].receive(BUCKETS[0])
    endpoints.close()


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    endpoints = joined("disk", tmp_path, receivers=1)
    endpoints.begin(1)
    endpoints.sender.send(BUCKETS[0], shards(BUCKETS[0], made(0)), whole=True)
    (path,) = tmp_path.glob("*/*")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightSyncError, match=r"00000.safetensors cannot be read"):
        endpoints.engines[0].receive(BUCKETS[0])
    endpoints.close()
