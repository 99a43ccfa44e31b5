"""A run that the disk has room for once has it at each later start, and never fills it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from scripts.configuration import compose
from tests.preflight.configs import distilling, settled
from verl_ray.checkpoint.store import CheckpointStore
from verl_ray.config.load import to_tree
from verl_ray.config.schema import Config
from verl_ray.preflight.device_defaults import BYTES_PER_TOKEN_OF_A_ROW
from verl_ray.preflight.disk_space import (
    LOG_BYTES,
    checkpoint_bytes_to_come,
    disk_problems,
)
from verl_ray.preflight.machine import MIB
from verl_ray.tracking.rollouts import BYTES_PER_MB, FOLDER

STEPS = 9


def config_of(folder: Path, *overrides: str) -> Config:
    length = (f"run.total_steps={STEPS}", "run.checkpoint_every=1")
    return settled(compose("quickstart", [f"run.dir={folder}", *length, *overrides]))


def used_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def is_refused(config: Config, free: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    return bool(list(disk_problems(config, learns=True)))


def write(
    config: Config, step: int, best: int, size: int, most: int, *, dies: str
) -> None:
    """Write a checkpoint as a run does that may take so many bytes, or die in it."""
    run = config.run
    store = CheckpointStore(Path(run.dir) / "checkpoints", run.keep_checkpoints)
    record = {"actor/shard": (size, "0" * 32)}
    state = {"unrecorded": None, "best": {"step": best}}
    before = [path.name for path in store.paths()]
    with store.writing(
        step, state, to_tree(config), ["actor"], best=best, hashed=record
    ) as folder:
        (folder / "actor").mkdir()
        with (folder / "actor" / "shard").open("wb") as shard:
            shard.truncate(size)
        assert used_bytes(Path(run.dir)) <= most
        copy = shutil.copytree(store.root, Path(run.dir).with_suffix(f".{step}"))
    if dies == "before it is whole":
        shutil.rmtree(store.root)
        shutil.copytree(copy, store.root)
    elif dies == "before others are removed":
        for name in before:
            if not (store.root / name).exists():
                shutil.copytree(copy / name, store.root / name)
    shutil.rmtree(copy)


@pytest.mark.parametrize(
    ("seed", "keep"),
    [
        (0, 1),
        (1, 2),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
    ],
)
def test_no_driver_is_refused_that_follows_killed_ones(
    seed: int, keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    folder = tmp_path / "run"
    config = config_of(folder, f"run.keep_checkpoints={keep}", "tracking.rollouts=none")
    checkpoints = checkpoint_bytes_to_come(config)
    # The newest ones, that of the best step, and the one that is written.
    size = checkpoints // (keep + 2) - 2 * MIB
    most = LOG_BYTES + checkpoints
    assert is_refused(config, most - 1, monkeypatch)

    deaths = ["", "before it is whole", "before others are removed"]
    store = CheckpointStore(folder / "checkpoints", keep)
    newest = None
    while newest is None or newest.step < STEPS:
        assert not is_refused(config, most - used_bytes(folder), monkeypatch)
        step = best = 0
        newest = store.latest(verify=False).checkpoint
        if newest is not None:
            step, best = newest.step, newest.state["best"]["step"]
            store.remove_surplus(step, best)
        dies = ""
        while step < STEPS and not dies:
            step += 1
            best = step if rng.random() < 0.4 else best
            dies = rng.choice(deaths)
            write(config, step, best, size, checkpoints, dies=dies)
    assert checkpoint_bytes_to_come(config) == 0


def test_what_is_written_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        tmp_path,
        "run.checkpoint_every=0",
        "run.save_at_end=false",
        "tracking.rollouts_max_mb=300",
    )
    needed = LOG_BYTES + 300 * BYTES_PER_MB
    assert is_refused(config, needed - 1, monkeypatch)
    assert not is_refused(config, needed, monkeypatch)
    for path, size in ((tmp_path / "logs", MIB), (tmp_path / FOLDER, 400 * MIB)):
        path.mkdir()
        with (path / "file").open("wb") as file:
            file.truncate(size)
    assert is_refused(config, LOG_BYTES - MIB - 1, monkeypatch)
    assert not is_refused(config, LOG_BYTES - MIB, monkeypatch)


def test_an_evaluation_writes_no_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, "tracking.rollouts=none")
    usage = shutil.disk_usage("/")._replace(free=LOG_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert not list(disk_problems(config, learns=False))
    assert list(disk_problems(config, learns=True))


def test_a_checkpoint_has_room_for_the_rows_that_wait(tmp_path: Path) -> None:
    def needed(ahead: int) -> int:
        changes = ("schedule=carry_over", f"rollout.staleness={ahead}")
        batch = ("data.prompts_per_step=8", "rollout.group_size=4")
        config = config_of(tmp_path, *changes, *batch)
        assert config.run.keep_checkpoints == 2
        return checkpoint_bytes_to_come(config)

    # Four checkpoints at a time, and 32 rows of up to 24 tokens in a batch.
    assert needed(2) - needed(1) == 4 * 32 * 24 * BYTES_PER_TOKEN_OF_A_ROW


def test_a_checkpoint_has_the_average_of_the_policy(tmp_path: Path) -> None:
    with_average, without = (
        checkpoint_bytes_to_come(config_of(tmp_path, *distilling(*teacher)))
        for teacher in (("average", "0.9"), ("actor",))
    )
    # Four checkpoints at a time, of 789,632 float32 numbers and their share of names.
    more = with_average - without
    assert more == pytest.approx(4 * 4 * 789_632 * 1.02, abs=8)
