"""Sharded states of one process; those of engines on several ranks are part of the
engines' contract test.
"""

import hashlib
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from controllers.run.missed_checkpoints import SaveFailures
from tests.foreign_files import Planted
from verl_ray.checkpoint import sharded
from verl_ray.checkpoint.manifest import file_record
from verl_ray.errors import CheckpointError
from verl_ray.profiling.progress import begin, progress

_OS_IN_TORCH = (
    b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08os.mkdir\x93."
)
"""A pickle of a name with dots: the module `os` that a module of torch imports."""


def state(value: float, **more: Any) -> dict[str, Any]:
    return {
        "steps": int(value),
        "rng_0_cpu": torch.full((4,), int(value), dtype=torch.uint8),
    } | {
        "model": {"weight": torch.full((3, 2), float(value))},
        **more,
    }


def test_a_state_is_filled_in_place_and_bit_for_bit(tmp_path: Path) -> None:
    weight = torch.rand(3, 2)
    begin()
    sharded.save(state(7) | {"model": {"weight": weight}}, str(tmp_path / "actor"))
    written = progress()
    assert written.unit == "bytes" and written.done >= 4 + weight.nbytes
    assert written.done == written.total
    held = state(0)
    target = held["model"]["weight"]
    begin()
    sharded.load(held, str(tmp_path / "actor"))
    # The random stream, and the weight.
    assert str(progress()) == "28 of 28 bytes"
    assert held["steps"] == 7 and held["rng_0_cpu"].tolist() == [7] * 4
    assert torch.equal(target, weight)


def test_files_are_hashed_as_they_are_written(tmp_path: Path) -> None:
    large = {"model": {"weight": torch.rand(300, 1000)}}
    at_once = sharded.save(state(7) | large, str(tmp_path / "actor"))
    behind = sharded.BackgroundSave(state(7) | large, str(tmp_path / "critic"), None)
    for folder, records in (("actor", at_once), ("critic", behind.wait())):
        files = list((tmp_path / folder).iterdir())
        assert {path.name for path in files} == records.keys() > {".metadata"}
        for path in files:
            content = path.read_bytes()
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            assert records[path.name] == file_record(path) == (len(content), digest)


def test_a_rank_that_the_checkpoint_does_not_know_keeps_its_random_stream(
    tmp_path: Path,
) -> None:
    sharded.save(state(7), str(tmp_path))
    held = state(0, rng_1_cpu=torch.tensor([5], dtype=torch.uint8))
    sharded.load(held, str(tmp_path))
    assert held["rng_1_cpu"].tolist() == [5] and held["rng_0_cpu"].tolist() == [7] * 4


def test_a_stream_of_another_device_is_not_taken(tmp_path: Path) -> None:
    """A generator of CUDA has 16 bytes of state, and one of a CPU 5056: torch refuses
    to fill one from the other.
    """
    gpu_state = {
        "steps": 7,
        "rng_0_cuda": torch.arange(16, dtype=torch.uint8),
        "rng_0_cuda_experts": torch.zeros(16),
    }
    sharded.save(gpu_state, str(tmp_path))
    cpu = torch.get_rng_state()
    held: dict[str, Any] = {
        "steps": 0,
        "rng_0_cpu": cpu,
        "rng_0_cpu_dense": cpu,
        "rng_1_cpu": cpu,
    }
    (note,) = sharded.load(held, str(tmp_path))
    assert (
        "has the random stream rng_0_cuda, and this rank's is rng_0_cpu: it is seeded anew"
        in note
    )
    assert held["steps"] == 7 and held["rng_0_cpu"] is None
    assert (
        held["rng_0_cpu_dense"] is cpu and held["rng_1_cpu"] is cpu
    )  # nobody wrote these: they go on


def test_another_model_is_refused(tmp_path: Path) -> None:
    sharded.save(state(7), str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"cannot be read; rank 0: .*model\.other"
    ):
        sharded.load(state(0, model={"other": torch.zeros(1)}), str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"cannot be read; rank 0: .*model\.weight"
    ):
        sharded.load(state(0, model={"weight": torch.zeros(4, 2)}), str(tmp_path))


def test_what_is_no_description_is_not_unpickled(tmp_path: Path) -> None:
    sharded.save(state(7), str(tmp_path / "state"))
    metadata = tmp_path / "state" / ".metadata"
    described = metadata.read_bytes()
    for content, fault in (
        (pickle.dumps(Planted(tmp_path / "made")), "it refers to posix.mkdir"),
        # What a module of torch imports is no part of it, either.
        (
            _OS_IN_TORCH,
            r"it refers to torch\.distributed\.checkpoint\.metadata\.os\.mkdir",
        ),
        (b"", "Ran out of input"),
        (described[:-9], "pickle data was truncated|ran out of input"),
    ):
        metadata.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"is no description: {fault}"):
            sharded.load(state(0), str(tmp_path / "state"))
    assert not (tmp_path / "made").exists()


def test_a_value_that_is_not_plain_is_not_unpickled(tmp_path: Path) -> None:
    planted = state(7) | {"steps": Planted(tmp_path / "made")}
    sharded.save(planted, str(tmp_path / "state"))
    with pytest.raises(CheckpointError, match="steps is no plain value"):
        sharded.load(state(0), str(tmp_path / "state"))
    assert not (tmp_path / "made").exists()


def test_a_path_without_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere cannot be read"):
        sharded.load(state(0), str(tmp_path / "nowhere"))


def test_a_node_that_does_not_share_the_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"must exist on every node \(run\.dir\)"
    ) as caught:
        sharded.save(state(7), str(tmp_path / "nowhere" / "actor"))
    # The other ranks wait for this one, so that none of them can be called again.
    assert not pickle.loads(pickle.dumps(caught.value)).spares_worker
    with pytest.raises(CheckpointError):
        SaveFailures(3).note(7, caught.value)


@pytest.mark.processes
def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    child = textwrap.dedent(f"""
        import resource, signal, torch
        from verl_ray.checkpoint import sharded
        from verl_ray.errors import CheckpointError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            sharded.save({{"model": torch.zeros(10_000)}}, {str(tmp_path / "actor")!r})
        except CheckpointError as error:
            print(error)
    """)
    done = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, timeout=120
    )
    assert "actor cannot be written (" in done.stdout, done.stderr
    assert " GiB are free there); rank 0: " in done.stdout
